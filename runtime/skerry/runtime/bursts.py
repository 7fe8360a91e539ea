"""The tensors of the round being trained: which travel together, and where their bytes are in host memory.

A burst is every allreduce call until somebody waits; it is ONE contribution to ONE exchange. CPU tensors are used in
place; tensors of a device, and non-contiguous ones, go through a host buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from skerry.runtime.carry import Trained
from skerry.runtime.codec.layout import Codec, Index, Op, TensorSpec
from skerry.runtime.codec.tensors import spec_of
from skerry.runtime.pace import Earlier
from skerry.runtime.sharded import local_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from skerry.runtime.averaging import Average
    from skerry.runtime.recording import Standing
    from skerry.runtime.store.retrying import Usage
    from skerry.runtime.tally import Tally


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

    trained: what it is made of, from when it was opened.
    """

    round: int
    number: int
    base: str
    trained: Trained
    tensors: Burst = field(default_factory=Burst)
    job: Future[Average | None] | None = None
    error: Exception | None = None


@dataclass(kw_only=True)
class OpenRound:
    """The round being trained: its bursts so far and what it counts. since: monotonic; usage: at its start.

    tally: outlives the round. ticks: steps of the inner optimizer, empty ones too. inner_steps, tokens: of this round
    alone. veto: why this replica contributes nothing more to this attempt at the round. share: of the others' inner
    steps, once it is ended early. resumed: an earlier incarnation has begun it, and nobody knows how long ago.
    """

    since: float
    usage: Usage
    tally: Tally
    bursts: list[OpenBurst] = field(default_factory=list[OpenBurst])
    ticks: int = 0
    inner_steps: int = 0
    tokens: int = 0
    veto: str | None = None
    share: float | None = None
    resumed: bool = False

    def restart(self) -> None:
        """Begin another attempt at the round."""
        self.bursts, self.veto = [], None

    def throw_away(self, fragment: int) -> None:
        """What was trained on the fragment is of no use; all others keep theirs."""
        self.ticks = self.inner_steps = self.tokens = 0
        self.tally.exchanged(fragment)

    def count_step(self, *, idle: bool) -> None:
        """The inner optimizer takes a step; an idle one trains nothing."""
        self.ticks += 1
        if not idle:
            self.inner_steps += 1
            self.tally.count_step()

    def count_tokens(self, tokens: int) -> None:
        """They are taken by the next inner step."""
        self.tokens += tokens
        self.tally.count_tokens(tokens)

    def earlier(self, round_number: int, fragments: int) -> Earlier:
        """What the pseudo-gradient of this round holds beside the round's own."""
        steps = self.tally.since(round_number % fragments).steps
        return Earlier(rounds=min(round_number, fragments - 1), steps=steps - self.inner_steps, plan=self.tally.plan)

    def current(self, standing: Standing, fragments: int) -> OpenBurst:
        """The burst that still takes tensors; a new one if the last has ended. fragments: of the model; 0: has none."""
        if not self.bursts or self.bursts[-1].job is not None:
            burst = OpenBurst(
                round=standing.round,
                number=len(self.bursts),
                base=standing.previous,
                trained=self._trained(standing.round, fragments),
            )
            self.bursts.append(burst)
        return self.bursts[-1]

    def _trained(self, round_number: int, fragments: int) -> Trained:
        """What a burst that is opened now is made of."""
        if fragments == 0:
            return Trained(tokens=self.tokens, inner_steps=self.inner_steps)
        fragment = round_number % fragments
        steps, tokens = self.tally.since(fragment)
        share = self.share
        if share is None:
            # Of this replica's own: what the others take is not known here, and may well be more.
            earlier = self.earlier(round_number, fragments).rounds * (self.tally.per_round or self.ticks)
            share = min(1.0, max(1, steps) / max(1, earlier + self.ticks))
        self.tally.plan = self.ticks
        return Trained(tokens=tokens, inner_steps=steps, fragment=fragment, share=share)

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
