"""Averages tensors over a fixed set of ranks through a bucket (`ObjectStoreAllReduce`), without torchft.

Every call is one round of the log: each rank contributes its tensor and waits for all others, and all get the same
bits. One prefix is one run: a restarted process that repeats its calls reads the results of the first time, and a
rank's first contribution to a call remains valid even if that call timed out. The import and the constructor need no
torch and send no request, so that a launcher can name the place where its replicas meet.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote

from skerry.runtime import contract
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import GENESIS
from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.training.work_counter import Trained

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.open_session import Session


class ObjectStoreAllReduce:
    """Averages over `world_size` ranks that share only `uri`.

    uri: a prefix for this job alone, or a folder's path. rank, world_size: None takes those of the replica that this
    process is (SKERRY_INDEX, SKERRY_REPLICAS) at the first use. timeout_s: how long to wait for the other ranks;
    poll_interval_s: how often to read heartbeats while waiting. Raises Invalid if rank is not in [0, world_size).
    round_id: the number of the first exchange, 0 if None. The attribute is the number of the next exchange: a process
    that saves it with its own state and passes it after a restart continues there, instead of repeating its calls.
    """

    def __init__(
        self,
        uri: str,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self.uri = uri if "://" in uri else Path(uri).absolute().as_uri()
        self.timeout_s = timeout_s
        self.round_id = round_id or 0
        if self.round_id < 0:
            raise Invalid(f"the first exchange cannot have a negative number: round_id={round_id}")
        self._poll_interval_s = poll_interval_s
        self._clock = clock or SystemClock()
        self._rank, self._world_size = rank, world_size
        if rank is not None and world_size is not None:
            _check_rank(rank, world_size)
        self._session: Session | None = None
        self._previous = GENESIS
        self._work = 0.0

    @property
    def rank(self) -> int:
        """This process's number, from 0. Raises Invalid if it was not given and this process is no replica."""
        return self._replica().index if self._rank is None else self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks. Raises Invalid if it was not given and this process is no replica."""
        return self._replica().replicas if self._world_size is None else self._world_size

    @property
    def slot(self) -> str:
        """This rank's name in the log: the one that a launcher gave it in this run, which its rights are made for."""
        # A launcher writes the URI of a folder with its characters quoted, a user maybe not.
        is_own_run = unquote(os.environ.get(contract.RUN_URI, "")) == unquote(self.uri.rstrip("/"))
        return self._replica().slot if is_own_run else f"rank-{self.rank}"

    def allreduce(self, tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor:
        """Replaces the tensor's values by their average over all ranks, in the same bits on each, and returns it.

        name: of the tensor in the log, the same on every rank. Raises TimeoutError if a rank does not contribute, or
        contributes another shape, dtype or name; Undecided at once if this rank's values are not finite; Corrupt for
        damage.
        """
        batch = self.batch()
        batch.add(tensor, "avg", name=name)
        self.exchange(batch)
        return tensor

    def batch(self) -> TensorBatch:
        """An empty batch for `exchange`."""
        return self._joined().batch()

    def exchange(self, batch: TensorBatch) -> None:
        """Reduces all tensors of the batch in one exchange, in place. Raises what `allreduce` raises."""
        session = self._joined()
        exchange_id = ExchangeId(self.round_id, 0, self._previous)
        average = session.averager.run(exchange_id, batch, trained=Trained())
        work = self._work + average.work
        closed = session.exchange.close(exchange_id, [average.decision], work=work, averages=[average.digest])
        self._previous, self._work = closed.digest, closed.record.work
        self.round_id += 1
        session.presence.enter("train", round_number=self.round_id)

    def close(self, *, failed: bool = False) -> None:
        """Ends this rank's part; results stay readable. failed: the rank may restart, so the others wait for it."""
        if self._session is not None:
            self._session.stop.set()
            self._session.presence.stop("left" if failed else "finished")
            self._session.averager.close()

    def __enter__(self) -> Self:
        """Takes this rank's place, so that the others see its heartbeat before its first exchange."""
        self._joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _joined(self) -> Session:
        if self._session is None:
            self._session = self._join()
        return self._session

    def _join(self) -> Session:
        from skerry.runtime.training.open_session import SessionOptions, join_run  # noqa: PLC0415  loads torch

        rank, world_size = self.rank, self.world_size
        _check_rank(rank, world_size)
        # The quorum is the whole world, so the grace window has no effect.
        options = SessionOptions(
            min_replicas=world_size,
            deadline_s=self.timeout_s,
            heartbeat_s=self._poll_interval_s,
            grace=Grace(floor_s=0.0, cap_s=0.0),
            is_watched=contract.FAILOVER in os.environ,
        )
        session = join_run(self.uri, self.slot, options, self._clock)
        # Without the commit of the exchange before, the count begins here.
        if self.round_id and (last := session.log.read_commit(self.round_id - 1)) is not None:
            self._previous, self._work = last.digest, last.record.work
        session.presence.start()
        session.presence.enter("train", round_number=self.round_id)
        return session

    def _replica(self) -> contract.Contract:
        try:
            return contract.read(os.environ)
        except Invalid as error:
            raise Invalid(f"rank and world_size of {self.uri} are not known; pass them: {error}") from error


def _check_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise Invalid(f"rank out of range: rank={rank} world_size={world_size}")
