"""Computes the average of a closed exchange from the contributions in the bucket. Only reads.

The recorded decision is followed exactly, so a sound processor gets the bits that the replicas got.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from skerry.runtime.log import keys
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.tensors.find_wrong_reduced_units import wrong_units
from skerry.runtime.tensors.payload_format import index_from_headers
from skerry.runtime.tensors.payload_reader import Reader, RemotePayload
from skerry.runtime.tensors.reduce import Source
from skerry.runtime.tensors.reduced_unit import UnitName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.runtime.log.records import Contribution, Decision
    from skerry.runtime.store import Store
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.find_wrong_reduced_units import WrongUnit


def recompute(
    store: Store,
    decision: Decision,
    digest: str,
    contributions: Mapping[str, Contribution],
    is_stored: Callable[[str], bool],
) -> tuple[str, list[WrongUnit]]:
    """The digest of an exchange's average over all ranks, and the published units of it that are wrong or damaged.

    digest: of the decision's record. contributions: of its members, by slot. is_stored: an object of this key exists.
    Needs memory for the average of one rank. Raises Corrupt or Invalid for contributions that are no longer whole, and
    what the store raises.
    """
    ranks = max(1, *(len(contribution.ranks) for contribution in contributions.values()))
    averages: list[str] = []
    wrong: list[WrongUnit] = []
    for rank in range(ranks):
        sources = [
            Source(
                slot=share.slot,
                weight=share.weight,
                round=decision.round,
                parts=contributions[share.slot].parts_of_rank(rank),
            )
            for share in decision.members
        ]
        name = None
        if decision.reduction != "all_gather":
            name = partial(UnitName, decision.round, decision.exchange, digest, rank)
        average, units = wrong_units(store, sources, _index(store, sources[0]), name, is_stored)
        averages.append(average)
        wrong += units
    return combine_digests(averages), wrong


def _index(store: Store, source: Source) -> Index:
    """The tensors of a contribution, from the headers of its parts."""
    names = [keys.payload(source.round, source.slot, part.digest) for part in source.parts]
    with closing(Reader()) as reader:
        headers = [
            reader.header(store, RemotePayload(key, part, None, number, f"slot={source.slot}"))
            for number, (key, part) in enumerate(zip(names, source.parts, strict=True))
        ]
    return index_from_headers(headers, names)
