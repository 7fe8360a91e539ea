"""Whether a contribution can be averaged by those who will read it: sizes first, then the headers of its parts.

For whoever is about to propose it. Never reads a body: its blocks are verified when they are used. A damaged transfer
is no fault of the contribution: what arrives damaged is read again. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from skerry.runtime import keys
from skerry.runtime.codec.container import check_header_size, check_parts, index_of, read_header
from skerry.runtime.codec.layout import Codec, Index
from skerry.runtime.codec.reading import REPEATS
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.exchange import in_streams
from skerry.runtime.store import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.codec.container import Header
    from skerry.runtime.records import Contribution, Part
    from skerry.runtime.store import Store


def fault_in(store: Store, contribution: Contribution, parts: Sequence[Part], index: Index) -> str | None:
    """Why nobody can average these parts of a contribution, of tensors like `index`; None if they begin as they must.

    One small read for each part, none if the record alone tells, REPEATS more where a header is damaged. Raises what
    the store raises.
    """
    try:
        check_parts(parts, index, f"slot={contribution.slot}")
    except Invalid as error:
        return str(error)

    def fault(number: int) -> str | None:
        damage: str | None = None
        for _ in range(1 + REPEATS):
            try:
                damage = _look(store, contribution, parts[number], index, number)
            except Invalid as error:
                return str(error)
            if damage is None:
                return None
        return damage

    faults = in_streams(store, len(parts), fault)
    return next((one for one in faults if one is not None), None)


def fault_in_unseen(store: Store, contribution: Contribution, parts: Sequence[Part], index: str) -> str | None:
    """As `fault_in` for the parts of another rank, of whose tensors only the digest of the index is known.

    One small read for each part, REPEATS more where a header is damaged; none after a part that cannot be of these
    tensors. Raises what the store raises.
    """
    headers: list[Header] = []
    key_of = [keys.payload(contribution.round, contribution.slot, part.digest) for part in parts]
    try:
        for number, (part, key) in enumerate(zip(parts, key_of, strict=True)):
            header = _unseen(store, part, key, number)
            if header.index != index or header.parts != len(parts):
                return f"payload is of other tensors: key={key} index={header.index} expected={index}"
            headers.append(header)
        if not headers:
            nothing = {Index((), codec).digest for codec in get_args(Codec)}
            return None if index in nothing else f"no payload for a rank: slot={contribution.slot}"
        check_parts(parts, index_of(headers, key_of), f"slot={contribution.slot}")
    except (Corrupt, Invalid) as error:
        return str(error)
    return None


def _unseen(store: Store, part: Part, key: str, number: int) -> Header:
    """The header of a part of tensors that are not known. Raises Corrupt if it is damaged at every read, or Invalid."""
    check_header_size(part, key)
    for left in range(REPEATS, -1, -1):
        head = store.read(key, Span(0, part.header_bytes))
        if head is None:
            raise Invalid(f"payload is absent: key={key}")
        try:
            return read_header(head, part, key, number=number)
        except Corrupt:
            if left == 0:
                raise
    raise AssertionError


def _look(store: Store, contribution: Contribution, part: Part, index: Index, number: int) -> str | None:
    """How a header has arrived damaged, if it has. Raises Invalid for an absent object, or a sound one of others."""
    key = keys.payload(contribution.round, contribution.slot, part.digest)
    head = store.read(key, Span(0, part.header_bytes))
    if head is None:
        raise Invalid(f"payload is absent: key={key}")
    try:
        read_header(head, part, key, index=index, number=number)
    except Corrupt as error:
        return str(error)
    return None
