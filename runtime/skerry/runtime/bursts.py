"""The tensors of the round being trained: which travel together, and where their bytes are in host memory.

A burst is every allreduce call until somebody waits; it is ONE contribution to ONE exchange. CPU tensors are used in
place; tensors of a device, and non-contiguous ones, go through a host buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from skerry.runtime.codec.layout import Codec, Index, Op, TensorSpec
from skerry.runtime.codec.tensors import spec_of
from skerry.runtime.sharded import local_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from skerry.runtime.averaging import Average
    from skerry.runtime.recording import Standing
    from skerry.runtime.store.retrying import Usage


@dataclass(frozen=True, kw_only=True)
class _Item:
    name: str
    tensor: torch.Tensor
    host: torch.Tensor
    copied: torch.Event | None
    op: Op


class Burst:
    """Tensors that travel together, in the order of their allreduce calls."""

    def __init__(self) -> None:
        self._items: list[_Item] = []

    def add(self, tensor: torch.Tensor, op: Op, *, name: str | None = None) -> None:
        """Take `tensor` along. It must not change until the exchange is over; then it holds the result.

        name: of the tensor in the log; None means its place in the burst. Of a sharded one, this rank's shard travels.
        """
        tensor = local_of(tensor.detach())
        host, copied = _to_host(tensor)
        self._items.append(
            _Item(name=name or f"{len(self._items):05d}", tensor=tensor, host=host, copied=copied, op=op)
        )

    def index(self, codec: Codec) -> Index:
        """The tensor index: what must be equal for two contributions to be averaged."""
        return _index(tuple(spec_of(item.name, item.host, item.op) for item in self._items), codec)

    def hosts(self) -> list[torch.Tensor]:
        """The tensors in host memory, once a device's copies have arrived."""
        for item in self._items:
            if item.copied is not None:
                item.copied.synchronize()
        return [item.host for item in self._items]

    def land(self) -> None:
        """Bring results from host buffers to where the caller's tensors are; complete when this returns."""
        staged = [item for item in self._items if item.host is not item.tensor]
        for item in staged:
            item.tensor.copy_(item.host)
        for device in {item.tensor.device for item in staged if item.copied is not None}:
            torch.accelerator.synchronize(device)


@dataclass(kw_only=True)
class OpenBurst:
    """A burst on its way: job is set once it has ended and is exchanged in the background.

    tokens, inner_steps: what was trained since the round began, when the burst was opened.
    """

    round: int
    number: int
    base: str
    tokens: int
    inner_steps: int
    tensors: Burst = field(default_factory=Burst)
    job: Future[Average | None] | None = None
    error: Exception | None = None


@dataclass(kw_only=True)
class OpenRound:
    """The round being trained: its bursts so far and what it counts. since: monotonic; usage: at its start.

    veto: why this replica contributes nothing more to this attempt at the round. share: of a round's inner steps, once
    it is ended early.
    """

    since: float
    usage: Usage
    bursts: list[OpenBurst] = field(default_factory=list[OpenBurst])
    inner_steps: int = 0
    tokens: int = 0
    veto: str | None = None
    share: float = 1.0

    def restart(self) -> None:
        """Begin another attempt at the round."""
        self.bursts, self.veto = [], None

    def current(self, standing: Standing) -> OpenBurst:
        """The burst that still takes tensors; a new one if the last has ended."""
        if not self.bursts or self.bursts[-1].job is not None:
            burst = OpenBurst(
                round=standing.round,
                number=len(self.bursts),
                base=standing.previous,
                tokens=self.tokens,
                inner_steps=self.inner_steps,
            )
            self.bursts.append(burst)
        return self.bursts[-1]

    def first_error(self) -> Exception | None:
        """What failed first, if anything did."""
        return next((burst.error for burst in self.bursts if burst.error is not None), None)


@lru_cache(maxsize=64)
def _index(specs: tuple[TensorSpec, ...], codec: Codec) -> Index:
    """One object for equal tensors: its layout and digest are computed once for all rounds."""
    return Index(tensors=specs, codec=codec)


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """The tensor itself where it can be used in place, else a host copy and the event after which that is complete."""
    if tensor.device.type == "cpu":
        return tensor.contiguous(), None  # the tensor itself if it is contiguous
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.Event(device=tensor.device)
    copied.record()
    return host, copied
