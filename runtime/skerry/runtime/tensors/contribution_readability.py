"""Checks whether the members of a decision will be able to read a contribution: its sizes, then its parts' headers.

Called before a contribution is proposed. Never reads a body: its blocks are verified when they are used. A damaged
transfer is not the contribution's fault: a damaged header is read again. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.store import Span
from skerry.runtime.store.parallel import run_parallel
from skerry.runtime.store.retrying import read_existing
from skerry.runtime.tensors.byte_layout import Codec, Index, Layout
from skerry.runtime.tensors.payload_format import check_header_size, check_parts, index_from_headers, read_header
from skerry.runtime.tensors.payload_reader import REPEATS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Contribution, Part
    from skerry.runtime.store import Store
    from skerry.runtime.tensors.payload_format import Header


MAX_HEADERS: Final = 256
"""So many headers of all contributions are read before a proposal, and one of each: the others wait for it."""


def find_fault(
    store: Store, contribution: Contribution, parts: Sequence[Part], index: Index, most: int | None = None
) -> str | None:
    """The reason why no replica can average these parts of a contribution to tensors like `index`; None if valid.

    One small read for each part (none if the record alone shows the fault), REPEATS more where a header is damaged.
    most: read the headers of so many parts only, of others in the next round; a contribution of other tensors shows in
    each of them. Raises what the store raises.
    """
    try:
        check_parts(parts, index, f"slot={contribution.slot}")
    except Invalid as error:
        return str(error)

    every = 1 if most is None else max(1, -(-len(parts) // most))
    numbers = range(contribution.round % every, len(parts), every)

    def fault(place: int) -> str | None:
        number = numbers[place]
        damage: str | None = None
        for _ in range(1 + REPEATS):
            try:
                damage = _header_damage(store, contribution, parts[number], index, number)
            except Invalid as error:
                return str(error)
            if damage is None:
                return None
        return damage

    faults = run_parallel(store, len(numbers), fault, small=True)
    return next((fault for fault in faults if fault is not None), None)


def find_fault_without_index(store: Store, contribution: Contribution, parts: Sequence[Part], index: str) -> str | None:
    """As `find_fault`, for the parts of another rank: only the digest of their index is known.

    One small read for each part, REPEATS more where a header is damaged; none after a part of other tensors. Raises
    what the store raises.
    """
    headers: list[Header] = []
    part_keys = [keys.payload(contribution.round, contribution.slot, part.digest) for part in parts]
    try:
        for number, (part, key) in enumerate(zip(parts, part_keys, strict=True)):
            header = _read_header(store, part, key, number)
            if header.index != index or header.parts != len(parts):
                return f"payload has other tensors: key={key} index={header.index} expected={index}"
            headers.append(header)
        if not headers:
            empty = {Index((), codec, layout).digest for codec in get_args(Codec) for layout in get_args(Layout)}
            return None if index in empty else f"no payload for a rank: slot={contribution.slot}"
        check_parts(parts, index_from_headers(headers, part_keys), f"slot={contribution.slot}")
    except (Corrupt, Invalid) as error:
        return str(error)
    return None


def _read_header(store: Store, part: Part, key: str, number: int) -> Header:
    """Read a part's header without an expected index. Raises Corrupt if damaged at every read, Invalid if absent."""
    check_header_size(part, key)
    for left in range(REPEATS, -1, -1):
        head = read_existing(store, key, Span(0, part.header_bytes))
        if head is None:
            raise Invalid(f"payload is absent: key={key}")
        try:
            return read_header(head, part, key, number=number)
        except Corrupt:
            if left == 0:
                raise
    raise AssertionError


def _header_damage(store: Store, contribution: Contribution, part: Part, index: Index, number: int) -> str | None:
    """The damage of a header as it was read; None if it is sound. Raises Invalid if it is absent, or not of `index`."""
    key = keys.payload(contribution.round, contribution.slot, part.digest)
    head = read_existing(store, key, Span(0, part.header_bytes))
    if head is None:
        raise Invalid(f"payload is absent: key={key}")
    try:
        read_header(head, part, key, index=index, number=number)
    except Corrupt as error:
        return str(error)
    return None
