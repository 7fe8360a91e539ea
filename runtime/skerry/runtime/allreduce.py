"""`ObjectStoreAllReduce`: average a tensor over a fixed set of ranks through a bucket. No membership, no torchft.

Every call is one round of the log: the call's tensors are contributed, everybody is waited for, all get the same bits.
One prefix is one run: a process that starts again and repeats its calls reads the results of the first time, and what a
rank brought first to a call stands, also when that call timed out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from skerry.runtime.bursts import Burst
from skerry.runtime.carry import Trained
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.exchange import Place
from skerry.runtime.records import GENESIS
from skerry.runtime.rounds import Grace
from skerry.runtime.seat import Terms, take_seat

if TYPE_CHECKING:
    from types import TracebackType

    import torch


class ObjectStoreAllReduce:
    """Averages over `world_size` ranks that share nothing but `uri`.

    uri: a prefix of its own for this job. round_id: names one exchange when the caller, not the order of the calls,
    knows which it is (the prefix is then uri/round_id). timeout_s: how long to wait for the others; poll_interval_s:
    how often to look for heartbeats meanwhile. Raises Invalid if rank is not in [0, world_size).
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
            raise Invalid(f"rank={rank} is not in [0, world_size={world_size})")
        # A fixed set waits for everybody: the quorum is the world, so the grace window never matters.
        terms = Terms(
            min_replicas=world_size,
            deadline_s=timeout_s,
            heartbeat_s=poll_interval_s,
            grace=Grace(floor_s=0.0, cap_s=0.0),
        )
        prefix = uri if round_id is None else f"{uri.rstrip('/')}/{round_id}"
        self._seat = take_seat(prefix, f"rank-{rank}", terms, clock or SystemClock())
        self._previous = GENESIS
        self._work = 0.0
        self._round = 0
        self._seat.presence.start()
        self._seat.presence.enter("train", round_number=0)

    def allreduce(self, tensor: torch.Tensor, *, name: str | None = None) -> torch.Tensor:
        """The same tensor, now holding the average over all ranks, in the same bits on each.

        name: of the tensor in the log; the same on every rank. Raises TimeoutError if a rank does not come, or comes
        with another shape, dtype or name; Unreachable at once if this rank's values are not finite; Corrupt for damage.
        """
        burst = Burst()
        burst.add(tensor, "avg", name=name)
        place = Place(self._round, 0, self._previous)
        average = self._seat.averager.run(place, burst, trained=Trained())
        closed = self._seat.exchange.close(place, [average.decision], work=self._work + average.work)
        self._previous, self._work = closed.digest, closed.record.work
        self._round += 1
        self._seat.presence.enter("train", round_number=self._round)
        return tensor

    def close(self, *, failed: bool = False) -> None:
        """Say good-bye. Results stay readable. failed: this rank may be back, so the others wait for it."""
        self._seat.stop.set()
        self._seat.presence.stop("left" if failed else "finished")
        self._seat.averager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)
