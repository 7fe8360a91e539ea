"""Drives torchft's DiLoCo over a fixed set of ranks (`MockManager`), without membership, healing or checkpoints.

All `allreduce` calls up to the first wait travel in one exchange. An exchange that fails ends the replica:
`should_commit` raises its error, and never returns False. A replica that starts again repeats its calls, or passes the
saved number of its next exchange to ObjectStoreAllReduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import ReduceOp

from skerry.runtime.training.allreduce_future import ExchangeWork, op_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    import torch
    from torch.distributed.distributed_c10d import Work

    from skerry.runtime.allreduce import ObjectStoreAllReduce
    from skerry.runtime.tensors.tensors_sent_together import TensorBatch


class Count(int):
    """A number that may also be called, because torchft has it as a method."""

    def __call__(self) -> int:
        """The number itself."""
        return int(self)


@dataclass(kw_only=True)
class _Exchange:
    """batch: None if it cannot begin; it has ended then."""

    batch: TensorBatch | None = None
    error: Exception | None = None
    ended: bool = False


class MockManager:
    """The part of torchft's Manager that its DiLoCo, LocalSGD and OptimizerWrapper call, over a fixed set of ranks.

    allreduce: joins when it is first used, and is closed by its owner. step: the committed steps of a process that
    continues; DiLoCo's fragments take turns by it.
    """

    # torchft reads it: DiLoCo refuses a manager with an asynchronous quorum.
    _use_async_quorum = False

    def __init__(self, allreduce: ObjectStoreAllReduce, *, step: int = 0) -> None:
        self._allreduce = allreduce
        self._step = step
        self._open = _Exchange(ended=True)
        self._error: Exception | None = None

    @property
    def num_participants(self) -> Count:
        """The number of ranks; all of them take part in every exchange."""
        return Count(self._allreduce.world_size)

    @property
    def rank(self) -> int:
        """This replica's number, from 0."""
        return self._allreduce.rank

    def is_leader(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    def start_quorum(
        self,
        allow_heal: bool = True,  # noqa: FBT001, FBT002  torchft's signature
        shrink_only: bool = False,  # noqa: FBT001, FBT002
        timeout: timedelta | None = None,
    ) -> None:
        """Begin a step. The quorum is all ranks, so nothing is asked."""
        del allow_heal, shrink_only, timeout

    def wait_quorum(self) -> int:
        """The number of ranks, at once."""
        return self._allreduce.world_size

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,  # noqa: FBT001, FBT002  torchft's signature
        reduce_op: Any = ReduceOp.AVG,  # torch gives ReduceOp members no usable type
    ) -> Work:
        """Average `tensor` in place over all ranks. All calls until the first wait travel together.

        tensor: any shape; must not change until the work is waited for. should_quantize: send int8, if all tensors of
        the exchange ask for it. Raises Invalid for an average of integers, an expanded tensor, an operation that is not
        AVG, SUM, MAX or MIN, and a tensor that shares memory with another one of the exchange.
        """
        op = op_of(tensor, reduce_op)
        if self._open.ended:
            self._open = self._begin()
        exchange = self._open
        if exchange.batch is not None:
            exchange.batch.add(tensor, op, quantize=should_quantize)
        return ExchangeWork(tensor, lambda: self._end(exchange), self._fail)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step: True. Raises the error of an exchange of this step, as ObjectStoreAllReduce raises it."""
        del timeout
        self._end(self._open)
        if self._error is not None:
            raise self._error
        self._step += 1
        return True

    def current_step(self) -> int:
        """The number of committed steps."""
        return self._step

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Accepted for DiLoCo: a fixed set of ranks heals no replica, so the state is not read."""

    def disallow_state_dict_read(self) -> None:
        """Accepted for torchft's hooks: no other thread reads the state."""

    def allow_state_dict_read(self) -> None:
        """Accepted for torchft's hooks."""

    def _begin(self) -> _Exchange:
        if self._error is None:
            try:
                return _Exchange(batch=self._allreduce.batch())
            except Exception as error:  # noqa: BLE001  no rank can be reached: should_commit raises it, as in torchft
                self._fail(error)
        return _Exchange(error=self._error, ended=True)

    def _end(self, exchange: _Exchange) -> bool:
        """True if the tensors of the exchange hold their results. After an error, no other exchange is tried."""
        if not exchange.ended:
            exchange.ended = True
            exchange.error = self._error
            if self._error is None and exchange.batch is not None:
                try:
                    self._allreduce.exchange(exchange.batch)
                except Exception as error:  # noqa: BLE001  torch's Work.wait never raises; should_commit does
                    exchange.error = error
                    self._fail(error)
        return exchange.error is None

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
