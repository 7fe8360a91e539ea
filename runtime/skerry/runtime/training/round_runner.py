"""The rounds of one replica, as its caller takes it through them: bursts go out in the background, errors are kept, and
a round is closed or has failed, the same on all ranks.

What travels is `bursts`, how is `averaging`; when a round begins and when its state is stable, the manager says.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from torchft.manager import ExceptionWithTraceback

from skerry.runtime.bringing import Bringing
from skerry.runtime.bursts import OpenBurst, OpenRound
from skerry.runtime.errors import Diverged, Fenced, Invalid, Retryable, RunFinished, Unauthorized
from skerry.runtime.events import emit
from skerry.runtime.exchange import Place
from skerry.runtime.ranks import Nothing, RankLost
from skerry.runtime.recording import RoundFacts, Standing
from skerry.runtime.records import Count, Record, Sha256, Work
from skerry.runtime.work import ExchangeWork

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    import torch

    from skerry.runtime.averaging import Average
    from skerry.runtime.carry import Carry
    from skerry.runtime.codec.layout import Codec, Op
    from skerry.runtime.course import Course
    from skerry.runtime.seat import Seat
    from skerry.runtime.unfinished import Begun


class _Issued(Record):
    """How many bursts a rank has issued in this round, and what was reported."""

    bursts: Count
    error: str | None


class _Ready(Record):
    """Whether a rank can take part in a burst, and why it must not contribute; or all together."""

    failed: bool
    veto: str | None


class _Closed(Record):
    """What closed the round; None: it cannot be closed here."""

    commit: Sha256 | None
    participants: Count
    work: Work


class Conduct:
    """The round at hand, and what is counted over rounds. For the thread that trains; bursts run in one of its own.

    round: its bursts, steps and tokens so far. errored: the last error reported in it. failed: attempts at rounds that
    have failed; failures: those in a row that max_retries counts. round_seconds: how long the last round took that was
    trained for; None before the first.
    """

    def __init__(self, seat: Seat, course: Course, carry: Carry | None, max_retries: int | None) -> None:
        """carry: what late replicas keep; None drops it. max_retries: None fails for ever."""
        self._tally = course.unfinished.tally
        self.round = OpenRound(since=seat.clock.now(), usage=seat.store.usage, tally=self._tally)
        self.errored: ExceptionWithTraceback | None = None
        self.failed = 0
        self.failures = 0
        self.round_seconds: float | None = None
        self._seat = seat
        self._course = course
        self._train = seat.group.line("train")
        self._exchange = seat.group.line("exchange")
        self._max_retries = max_retries
        self._facts: RoundFacts | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._bringing = Bringing(seat, course, carry, self._pool)

    def wait(self) -> None:
        """Until all bursts that have ended are exchanged."""
        wait([burst.job for burst in self.round.bursts if burst.job is not None])

    def restart(self) -> None:
        """Begin the round's exchange, or another attempt at it, which may have something good to offer."""
        self.errored = None
        self._seat.presence.withdraw_abstention()
        self.round.restart()

    def allreduce(self, tensor: torch.Tensor, op: Op) -> ExchangeWork:
        """Take `tensor` along with the open burst. Raises Invalid if DiLoCo's one exchange is under way."""
        if self._course.state.has_fragments and any(burst.job is not None for burst in self.round.bursts):
            raise Invalid(
                "DiLoCo has one exchange in a round, and it is under way; use ObjectStoreAllReduce for metrics"
            )
        burst = self._open_burst()
        burst.tensors.add(tensor.detach(), op)
        return ExchangeWork(tensor, lambda: self._finish(burst) is not None, lambda error: self._fail(burst, error))

    def _open_burst(self) -> OpenBurst:
        return self.round.current(self._course.standing, self._course.state.fragments)

    def report_error(self, e: Exception) -> None:
        """Remember an error of this round."""
        self.errored = ExceptionWithTraceback(e)
        emit(
            "round_failed",
            {"round": self._course.standing.round, "slot": self._seat.presence.slot, "error": repr(e)},
            level=logging.WARNING,
        )

    def close(self, timeout: timedelta | None) -> bool:
        """Close the round, and say whether that went well. Raises what must stop a replica.

        timeout: for the other ranks to come.
        """
        self._share_error(timeout)
        if self.errored is not None and not self.round.bursts:
            return self._failed_round()
        if not self.round.bursts:
            self._open_burst()  # a round of nothing is still a round
        averages = [self._finish(burst) for burst in self.round.bursts]
        held = [average for average in averages if average is not None]

        def hold() -> Nothing:
            if len(held) < len(averages):
                raise self.round.first_error() or Retryable("an average is missing on another rank")
            return Nothing()

        try:
            closed = self._train.consult("close", hold, lambda _: self._close_log(held), _Closed)
        except Exception as error:  # noqa: BLE001  the fault funnel: an unreachable store is a failed round, not a crash
            if self.round.first_error() is None:
                self.report_error(error)
            return self._failed_round()
        if closed.commit is None:
            return self._failed_round()
        self._advance(held, closed.commit, closed.participants, closed.work)
        return True

    def take_facts(self) -> RoundFacts | None:
        """What is known of the round just closed, once."""
        facts, self._facts = self._facts, None
        return facts

    def shutdown(self, *, wait: bool) -> None:
        """No more bursts. wait: until the last one is over."""
        self._pool.shutdown(wait=wait)
        if wait:  # else a burst may still use them; they go with the process
            self._seat.averager.close()

    def settled(self, *, healed: bool, sick: bool) -> None:
        """At a boundary. healed: what was trained before was trained on a state that was not the others'.

        sick: every fragment was made as it is shared.
        """
        self._tally.stands(self._course.standing)
        if sick:
            self._tally.clear()
        if healed:
            self._bringing.forget()

    def take_up(self, begun: Begun, late: Sequence[int], codec: Codec, *, at_hand: bool) -> None:
        """Count what an earlier incarnation had begun. late: fragments whose exchange has passed since; they are kept.

        at_hand: it is of the round at hand.
        """
        if at_hand:
            self.round.inner_steps, self.round.tokens = begun.inner_steps, begun.tokens
            self.round.since = self._seat.clock.now() - begun.seconds
            self.round.resumed = True
        for fragment, amount in enumerate(begun.trained):
            if begun.next_of(fragment, len(begun.deltas)) >= self._course.standing.round:
                self._tally.take_up(fragment, amount)
        self._bringing.keep_begun(begun, late, codec)

    def bring_kept(self) -> None:
        """In the exchange thread, before the round is trained for."""
        if not self._course.following:
            self._bringing.start()

    def flush(self) -> None:
        """End the open burst: from here on it is uploaded, decided and averaged in the background."""
        if self.round.bursts and self.round.bursts[-1].job is None:
            burst = self.round.bursts[-1]
            burst.job = self._pool.submit(self._run_burst, burst)

    def _finish(self, burst: OpenBurst) -> Average | None:
        """Wait for a burst's average; None after an error."""
        if burst.job is None:
            self.flush()
        while burst.job is not None and wait([burst.job], self._seat.look_every_s).not_done:
            self._course.guide.help_who_asks(self._course.standing)
        self._course.guide.help_who_asks(self._course.standing)
        average = None if burst.job is None else burst.job.result()
        return None if burst.error is not None else average

    def _fail(self, burst: OpenBurst, error: Exception) -> None:
        """The average is not where it belongs: the round cannot be closed by this replica."""
        burst.error = error
        self.report_error(error)

    def _run_burst(self, burst: OpenBurst) -> Average | None:
        """In the exchange thread. Returns None after an error, which is reported."""
        current = self.round
        try:
            ready = self._exchange.consult("burst", lambda: self._is_ready(current), _all_ready, _Ready)
            if ready.failed:
                return None
            current.veto = ready.veto
            average = self._seat.averager.run(
                Place(burst.round, burst.number, burst.base),
                burst.tensors,
                trained=burst.trained,
                veto=current.veto,
                round_seconds=self.round_seconds,
                carry=self._bringing.carry,
            )
        except Exception as error:  # noqa: BLE001  the fault funnel: kept with its type, surfaces in should_commit
            self._fail(burst, error)
            return None
        abstention = self._seat.presence.progress.abstains
        if current.veto is None and abstention is not None and abstention.round == burst.round:
            current.veto = abstention.reason  # what came from the same bad batch is not offered either
            self._course.sick = True
        return average

    def _is_ready(self, current: OpenRound) -> _Ready:
        """One thread runs bursts in order, so earlier ones are over; without them the round cannot close."""
        veto = current.veto
        if veto is None and self.errored is not None:
            veto = repr(self.errored.original_exception)
        return _Ready(failed=current.first_error() is not None, veto=veto or self._course.quarantine)

    def _share_error(self, timeout: timedelta | None) -> None:
        """What one rank has reported is an error of all; and all have issued the same bursts."""
        mine = None if self.errored is None else repr(self.errored.original_exception)
        issued = self._train.consult(
            "should_commit",
            lambda: _Issued(bursts=len(self.round.bursts), error=mine),
            _alike,
            _Issued,
            timeout_s=seconds_of(timeout),
        )
        if issued.error is not None and self.errored is None:
            self.report_error(Retryable(f"reported by another rank: {issued.error}"))

    def _may_close(self, averages: list[Average]) -> bool:
        """Every exchange of the round is held. After an error, bursts that others have may never have been issued here;
        DiLoCo has one burst in a round, so there nothing can be missing.
        """
        if self.errored is None or self._course.state.has_fragments:
            return True
        place = Place(self._course.standing.round, 0, self._course.standing.previous)
        return self._seat.exchange.is_closed_with(place, [average.decision for average in averages])

    def _close_log(self, averages: list[Average]) -> _Closed:
        """On rank 0."""
        if not self._may_close(averages):
            return _Closed(commit=None, participants=0, work=0.0)
        place = Place(self._course.standing.round, 0, self._course.standing.previous)
        work = self._course.standing.work + min(average.work for average in averages)
        commit = self._seat.exchange.close(place, [average.decision for average in averages], work=work)
        return _Closed(commit=commit.digest, participants=commit.record.participants, work=commit.record.work)

    def _advance(self, averages: list[Average], commit: str, participants: int, work: float) -> None:
        """The round is closed."""
        standing, usage, now = self._course.standing, self._seat.store.usage, self._seat.clock.now()
        self._facts = RoundFacts(
            averages=tuple(average.digest for average in averages),
            contributed=all(average.contributed for average in averages),
            norm=_norm_of(averages),
            uploaded_bytes=usage.uploaded_bytes - self.round.usage.uploaded_bytes,
            downloaded_bytes=usage.downloaded_bytes - self.round.usage.downloaded_bytes,
            requests=usage.requests - self.round.usage.requests,
            seconds=_total([average.seconds for average in averages]),
        )
        smallest = min((average.decision.record for average in averages), key=lambda decision: len(decision.members))
        self._course.stand(
            Standing(
                round=standing.round + 1,
                previous=commit,
                members=tuple(share.slot for share in smallest.members),
                batches=standing.batches + participants,
                work=work,
            )
        )
        self._tally.exchanged(standing.round % max(1, self._course.state.fragments))
        self._tally.moved(self._course.standing, self.round.ticks)
        if self._train.rank == 0:
            emit("round_closed", {"round": standing.round, "slot": self._seat.presence.slot, "members": participants})
        self.failures = 0
        is_part = self.round.resumed and self.round.share is not None
        if not self._course.following and not is_part:
            self.round_seconds = now - self.round.since
        self.round = OpenRound(since=now, usage=usage, tally=self._tally)
        self._seat.presence.moved(uploaded_bytes=usage.uploaded_bytes, downloaded_bytes=usage.downloaded_bytes)

    def _failed_round(self) -> bool:
        error = self.round.first_error()
        if error is None and self.errored is not None:
            error = self.errored.original_exception
            # Nobody should wait for what will not come.
            self._seat.presence.abstain(self._course.standing.round, repr(error))
        self.round.restart()
        self.round.share = None
        if self._course.state.has_fragments:  # DiLoCo has thrown away what was trained
            self.round.throw_away(self._course.standing.round % self._course.state.fragments)
        if isinstance(error, (Fenced, Diverged, Invalid, RunFinished, Unauthorized, RankLost)):
            raise error
        self.failed += 1
        if self._course.failed(error):
            return False
        self.failures += 1
        if self._max_retries is not None and self.failures > self._max_retries:
            raise RuntimeError(
                f"should_commit failed {self.failures} times consecutively, "
                f"exceeding max_retries={self._max_retries}; last: {error!r}"
            ) from error
        return False


def _total(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def seconds_of(timeout: timedelta | None) -> float | None:
    """Torchft's timeouts as ours."""
    return None if timeout is None else timeout.total_seconds()


def _alike(all_ranks: Sequence[_Issued]) -> _Issued:
    """One error for all. Raises RankLost if ranks have issued different bursts: they are in different places."""
    bursts = [one.bursts for one in all_ranks]
    error = next((one.error for one in all_ranks if one.error is not None), None)
    if len(set(bursts)) > 1:
        raise RankLost(f"ranks of one replica issue different allreduce calls: bursts by rank {bursts}")
    return _Issued(bursts=max(bursts), error=error)


def _all_ready(all_ranks: Sequence[_Ready]) -> _Ready:
    veto = next((one.veto for one in all_ranks if one.veto is not None), None)
    return _Ready(failed=any(one.failed for one in all_ranks), veto=veto)


def _norm_of(averages: list[Average]) -> float | None:
    """Of what this replica offered to all exchanges of the round; None if it offered nothing."""
    norms = [average.norm for average in averages if average.norm is not None]
    return math.hypot(*norms) if norms else None
