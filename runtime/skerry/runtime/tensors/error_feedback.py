"""Keeps what sparse contributions have left out, and adds it to the next one of the same fragment.

What a contribution leaves out is the replica's own once the exchange's decision lists that very contribution. If it
does not, the fragment keeps what it had before, and what was trained for the contribution is dropped, as late work is.
What cannot be settled is dropped, too: after a restart a contribution of the earlier incarnation, and rounds that this
one has not seen. So nothing is ever contributed twice.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch does not type split.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import BLOCKS
from skerry.runtime.tensors.codecs import BLOCK_FORMATS
from skerry.runtime.tensors.codecs.elements import CALL_ELEMENTS
from skerry.runtime.tensors.payload_encoder import flat_view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.log.records import Part
    from skerry.runtime.tensors.byte_layout import Index
    from skerry.runtime.tensors.payload_encoder import Encoded

DECAY: Final = 0.95
"""Of what is left out, so much is kept for the next contribution: older pseudo-gradients fit the parameters less."""
STATE: Final = "skerry.error_feedback"
"""Its name in the private state of a replica."""


@dataclass(frozen=True)
class _Left:
    """The rest of a fragment's contributions. index: its digest. tensors: [N] float32, of the sparse ones."""

    index: str
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class _Pending:
    """The rest of a contribution of this round, with these parts, for the case that it counts."""

    round: int
    parts: Sequence[Part]
    left: _Left


@dataclass(frozen=True)
class _Settled:
    """The rests of all fragments before this round."""

    round: int = 0
    left: Mapping[int, _Left] = field(default_factory=dict[int, _Left])


class ErrorFeedback:
    """The feedback of one rank. For the exchange thread; `state_dict` may be called from another one."""

    def __init__(self) -> None:
        self._settled = _Settled()
        self._round = self._fragment = 0
        self._pending: _Pending | None = None

    def begin(self, round_number: int, fragment: int) -> None:
        """Begin a contribution to this round."""
        self._round, self._fragment = round_number, fragment

    def add(self, tensors: Sequence[torch.Tensor], index: Index) -> None:
        """Add the rest of the fragment to its tensors, in place, before they are encoded."""
        left = self._before(self._round).get(self._fragment)
        if left is None or left.index != index.digest:
            return
        for number, kept in zip(_sparse(index), left.tensors, strict=True):
            flat = flat_view(tensors[number])
            for into, part in zip(flat.split(CALL_ELEMENTS), kept.split(CALL_ELEMENTS), strict=True):
                into.add_(part)

    def keep(self, tensors: Sequence[torch.Tensor], encoded: Encoded) -> None:
        """Keep the part of these tensors that a contribution, uploaded now, has left out until its round is settled."""
        index = encoded.index
        if not (numbers := _sparse(index)):
            return
        left = tuple(_left_out(flat_view(tensors[number]), encoded, number) for number in numbers)
        self._pending = _Pending(self._round, encoded.parts, _Left(index.digest, left))

    def settle(self, round_number: int, fragment: int, counted: Sequence[Sequence[Part]]) -> None:
        """Settle the feedback by the decision of a round. counted: the parts that it lists of this replica, if any."""
        if round_number < self._settled.round:
            return
        pending, self._pending = self._pending, None
        left = dict(self._before(round_number))
        for parts in counted:
            left.pop(fragment, None)
            if pending is not None and (pending.round, tuple(pending.parts)) == (round_number, tuple(parts)):
                left[fragment] = pending.left
        self._settled = _Settled(round_number + 1, left)

    def _before(self, round_number: int) -> Mapping[int, _Left]:
        """The rests before this round: none if there were rounds in between that this replica has not seen."""
        return self._settled.left if round_number == self._settled.round else {}

    def state_dict(self) -> dict[str, Any]:
        """The settled rests, for the private state of the replica."""
        settled = self._settled
        left = [[fragment, left.index, list(left.tensors)] for fragment, left in settled.left.items()]
        return {"round": settled.round, "left": left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`. The decisions since then must be settled one after the other."""
        left = {fragment: _Left(index, tuple(tensors)) for fragment, index, tensors in state["left"]}
        self._settled = _Settled(state["round"], left)


def _sparse(index: Index) -> list[int]:
    """The tensors that are not transmitted whole."""
    return [number for number, wire in enumerate(index.wire) if wire == BLOCKS["sparse"]]


def _left_out(flat: torch.Tensor, encoded: Encoded, number: int) -> torch.Tensor:
    """[N] float32: the part of a tensor that its encoding does not have, times DECAY."""
    blocks = BLOCK_FORMATS[encoded.index.wire[number]]
    sent = np.empty(encoded.index.items[number] * blocks.wire.elements, dtype=np.float32)
    blocks.add(encoded.wire_bytes[number], sent, None, first=True)
    left = torch.from_numpy(sent[: flat.numel()])
    for part, of in zip(left.split(CALL_ELEMENTS), flat.split(CALL_ELEMENTS), strict=True):
        torch.sub(of, part, out=part).mul_(DECAY)
    return left
