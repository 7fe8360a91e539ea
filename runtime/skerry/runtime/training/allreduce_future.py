"""The torch Work that `allreduce` returns, and the check of its arguments.

The Work's future is completed when the exchange is over, after a failure too.

torchft's consumers use it in three ways, all kept: DiLoCo and LocalSGD wait for a bool; bucketized DiLoCo chains
callbacks with `then` that must run only when the work is waited for; torchft 0.2.0's DDP reads `_fut`, newer ones
hand the future itself to the reducer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.distributed_c10d import ReduceOp, Work

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from skerry.runtime.tensors.byte_layout import Op

_OPS: dict[Any, Op] = {
    ReduceOp.AVG: "avg",
    ReduceOp.SUM: "sum",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}

# torch.futures.Future is generic at type-checking time only.
_Tensors = torch.futures.Future[Any] if TYPE_CHECKING else torch.futures.Future


def op_of(tensor: torch.Tensor, reduce_op: Any) -> Op:
    """The operation of an allreduce of `tensor`.

    Raises Invalid for an average of integers, an expanded tensor, and an operation that is not AVG, SUM, MAX or MIN.
    """
    op = _OPS.get(reduce_op)
    if op is None:
        raise Invalid(f"cannot reduce with {reduce_op}; use AVG, SUM, MAX or MIN")
    if op == "avg" and not tensor.is_floating_point():
        raise Invalid(f"average of {tensor.dtype}: only floating point tensors have one; use SUM")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise Invalid(
            f"cannot average in place: elements share memory: shape={tuple(tensor.shape)} "
            f"strides={tensor.stride()}; pass a copy, tensor.contiguous()"
        )
    return op


class ExchangeFuture(_Tensors):
    """A future whose callbacks run, in order, when the work is waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor = tensor
        self._callbacks: list[Callable[[Any], Any]] = []
        self._fut: torch.futures.Future[Any] | None = None

    def then(self, callback: Callable[[Any], Any]) -> ExchangeFuture:  # pyright: ignore[reportIncompatibleMethodOverride]  one object represents the whole chain
        """Run `callback` with a completed future of the value so far, when the work is waited for."""
        self._callbacks.append(callback)
        return self

    def finish(self) -> None:
        """Run the callbacks and complete. Idempotent; completes with the tensor even if a callback raises."""
        if self._fut is not None:
            return
        self._fut = torch.futures.Future()
        value: object = self._tensor
        try:
            for callback in self._callbacks:
                done: torch.futures.Future[Any] = torch.futures.Future()
                done.set_result(value)
                value = callback(done)
        finally:
            self._fut.set_result(value)
            self.set_result(value)


class ExchangeWork(Work):
    """One tensor's share in one exchange. `wait` ends the batch that it belongs to."""

    def __init__(self, tensor: torch.Tensor, wait: Callable[[], bool], fail: Callable[[Exception], None]) -> None:
        """wait: is the average in the tensor; fail: receives what a callback raised; the average is not used then."""
        super().__init__()
        self._wait = wait
        self._fail = fail
        self._future = ExchangeFuture(tensor)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the average (or an error) is there; True if the tensor now holds it. Never raises.

        timeout: accepted for torch's signature; the manager's own deadline holds.
        """
        del timeout
        averaged = self._wait()
        try:
            self._future.finish()
        except Exception as error:  # noqa: BLE001  a user's callback: the error surfaces in should_commit, as in torchft
            self._fail(error)
            return False
        return averaged

    def get_future(self) -> torch.futures.Future[Any]:
        """The future; completed by `wait`."""
        return cast("torch.futures.Future[Any]", self._future)

    def synchronize(self) -> None:
        """Same as `wait`: the result is in place when this returns, whatever the stream."""
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """Same as `wait`: the host waits, so every stream has."""
        self.wait(timeout)
