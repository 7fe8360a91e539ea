"""Averages tensors over a fixed set of ranks through a bucket (`ObjectStoreAllReduce`), without torchft.

Every call is one round of the log: each rank contributes its tensor and waits for all others, and all get the same
bits. One prefix is one run: a restarted process that repeats its calls reads the results of the first time, and a
rank's first contribution to a call remains valid even if that call timed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.tensors.contribution_tensors import TensorBatch
from skerry.runtime.training.open_session import SessionOptions, join_run
from skerry.runtime.training.work_counter import Trained

if TYPE_CHECKING:
    from types import TracebackType

    import torch


class ObjectStoreAllReduce:
    """Averages over `world_size` ranks that share only `uri`.

    uri: a prefix for this job alone. round_id: identifies one exchange by name instead of by the order of the calls
    (the prefix is then uri/round_id). timeout_s: how long to wait for the other ranks; poll_interval_s: how often to
    read heartbeats while waiting. Raises Invalid if rank is not in [0, world_size).
    """

    def __init__(
        self,
        uri: str,
        rank: int,
        world_size: int,
        *,
        round_id: str | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise Invalid(f"rank out of range: rank={rank} world_size={world_size}")
        # The quorum is the whole world, so the grace window has no effect.
        options = SessionOptions(
            min_replicas=world_size,
            deadline_s=timeout_s,
            heartbeat_s=poll_interval_s,
            grace=Grace(floor_s=0.0, cap_s=0.0),
        )
        prefix = uri if round_id is None else f"{uri.rstrip('/')}/{round_id}"
        self._session = join_run(prefix, f"rank-{rank}", options, clock or SystemClock())
        self._previous = GENESIS
        self._work = 0.0
        self._round = 0
        self._session.presence.start()
        self._session.presence.enter("train", round_number=0)

    def allreduce(self, tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor:
        """Replaces the tensor's values by their average over all ranks, in the same bits on each, and returns it.

        name: of the tensor in the log, the same on every rank. Raises TimeoutError if a rank does not contribute, or
        contributes another shape, dtype or name; Undecided at once if this rank's values are not finite; Corrupt for
        damage.
        """
        batch = TensorBatch()
        batch.add(tensor, "avg", name=name)
        exchange_id = ExchangeId(self._round, 0, self._previous)
        average = self._session.averager.run(exchange_id, batch, trained=Trained())
        closed = self._session.exchange.close(exchange_id, [average.decision], work=self._work + average.work)
        self._previous, self._work = closed.digest, closed.record.work
        self._round += 1
        self._session.presence.enter("train", round_number=self._round)
        return tensor

    def close(self, *, failed: bool = False) -> None:
        """Ends this rank's part; results stay readable. failed: the rank may restart, so the others wait for it."""
        self._session.stop.set()
        self._session.presence.stop("left" if failed else "finished")
        self._session.averager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)
