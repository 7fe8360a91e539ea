"""Chooses the reduction of an exchange: the one that takes less time for the bytes and links of its members. Pure.

A function of what the log has: the members' contributions, which the decision names, and the tensors' index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime.log.records import Link
from skerry.runtime.tensors.byte_layout import BLOCKS, ITEM_BYTES, WIRE_TYPES, Index, TensorSpec, item_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Reduction

USUAL_LINK: Final = Link(bytes_per_s=125e6, request_s=0.03)
"""1 Gbit/s to a bucket in the same region: of a replica that has not measured its own."""
_MORE_REQUESTS: Final = 4
"""One after the other: an owner reads a unit and publishes its own; others look for that, and read it."""
_POLL_S: Final = 0.05
_REDUCED: Final = "int8x254"
"""Averages of blocks are published in these."""


class ExchangeBytes(NamedTuple):
    """Of one exchange: the bytes of a contribution, those of the average as published, and its units."""

    contribution: float
    average: float
    units: int


def bytes_of(index: Index) -> ExchangeBytes:
    """The bytes of an exchange of these tensors."""
    averages = (_published_bytes(spec, wire) for spec, wire in zip(index.tensors, index.wire, strict=True))
    units = sum(max(1, -(-part.body_bytes // index.unit_bytes)) for part in index.parts)
    return ExchangeBytes(sum(index.wire_bytes), sum(averages), units)


def cheaper_reduction(moved: ExchangeBytes, links: Sequence[Link | None]) -> Reduction:
    """The reduction with which the slowest member is done first. links: of the members; None if one is not known.

    By all-gather a member reads the contributions of all others; by reduce-scatter its share of each, and then the
    other members' shares of the average, after some more round trips.
    """
    members = len(links)
    if members < 2 or not moved.units:
        return "all_gather"
    share = -(-moved.units // members) / moved.units  # of the member that makes the most units
    others = (members - 1) * moved.contribution
    shares = share * others + (1 - share) * moved.average
    known = [link or USUAL_LINK for link in links]
    gathered_s = max(others / link.bytes_per_s for link in known)
    scattered_s = max(shares / link.bytes_per_s + _MORE_REQUESTS * link.request_s + _POLL_S for link in known)
    return "reduce_scatter" if scattered_s < gathered_s else "all_gather"


def _published_bytes(spec: TensorSpec, wire: str) -> int:
    if wire in BLOCKS.values():
        return item_count(spec, _REDUCED) * WIRE_TYPES[_REDUCED].item_bytes
    return spec.count * ITEM_BYTES[spec.dtype]
