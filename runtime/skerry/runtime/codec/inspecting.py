"""Whether a contribution can be averaged by those who will read it: sizes first, then the headers of its parts.

For whoever is about to propose it. Never reads a body: its blocks are verified when they are used. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime import keys
from skerry.runtime.codec.container import check_parts, read_header
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.exchange import in_streams
from skerry.runtime.store import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.codec.layout import Index
    from skerry.runtime.records import Contribution, Part
    from skerry.runtime.store import Store


def fault_in(store: Store, contribution: Contribution, parts: Sequence[Part], index: Index) -> str | None:
    """Why nobody can average these parts of a contribution, of tensors like `index`; None if they begin as they must.

    One small read for each part, none if the record alone tells. Raises what the store raises.
    """
    try:
        check_parts(parts, index, f"slot={contribution.slot}")
    except Invalid as error:
        return str(error)

    def fault(number: int) -> str | None:
        part = parts[number]
        key = keys.payload(contribution.round, contribution.slot, part.digest)
        head = store.read(key, Span(0, part.header_bytes))
        if head is None:
            return f"payload is absent: key={key}"
        try:
            read_header(head, part, key, index=index, number=number)
        except (Corrupt, Invalid) as error:
            return str(error)
        return None

    faults = in_streams(store, len(parts), fault)
    return next((one for one in faults if one is not None), None)
