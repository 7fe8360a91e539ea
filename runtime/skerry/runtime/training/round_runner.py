"""Runs the rounds of one replica: exchanges run in the background, errors are kept, and
a round is closed or has failed, the same on all ranks.

`current_round` holds the exchanges, `contribute_and_average` runs one. `lifecycle` decides when a round begins, and
when its state is stable.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from skerry.runtime.checkpointing.replica_position_in_log import LogPosition, RoundFacts
from skerry.runtime.errors import Diverged, Fenced, Invalid, Moved, Retryable, RunFinished, Unauthorized
from skerry.runtime.log.summarize_round import EXPOSED
from skerry.runtime.protocol.exchange_view import ExchangeId
from skerry.runtime.ranks.interface import RankLost
from skerry.runtime.structured_logging import emit
from skerry.runtime.training.current_round import CurrentRound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor, Future
    from datetime import timedelta

    import torch

    from skerry.runtime.log.records import Decision
    from skerry.runtime.tensors.byte_layout import Op
    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.catch_up_with_log import LogFollower
    from skerry.runtime.training.contribute_and_average import Average
    from skerry.runtime.training.current_round import OpenExchange
    from skerry.runtime.training.open_session import Session
    from skerry.runtime.training.resumable_round import PartialRound

_MISSED_ROUNDS = 3
_ALWAYS_LATE = (
    "late for {} rounds in a row: no average has its work; raise faults.grace by the time that it comes after the "
    "others; encoding and upload take {:.1f} s of it: if that is most, choose a codec of fewer bits"
)


class AppliedSettings(NamedTuple):
    """The outer loop of one round, and the end of the run. number: 0 if both are run.json's.

    slots: of the next round; None if no settings have any.
    """

    number: int
    outer_lr: float
    outer_momentum: float
    rounds: int | None
    work: float | None
    slots: tuple[str, ...] | None


class RoundSettings:
    """Reads the settings that a round's decision names, and applies the outer step that follows with them.

    The slots of a round are those that the decision of the round before it names (decision 0046).
    """

    def __init__(self, session: Session, log_follower: LogFollower) -> None:
        self._session = session
        self._log_follower = log_follower
        self._train = session.group.channel("train")
        self._number = 0
        self._slots_round = -1  # for which the log's slots are known

    def named(self, decision: Decision) -> AppliedSettings:
        """The settings that the decision names, and the end of the run by all that were read. On rank 0."""
        settings = self._session.exchange.settings
        named = None if decision.settings is None else settings.named(decision.settings, decision.round)
        slots = settings.slots_of(decision.settings, self._session.presence.slot)
        if named is None or decision.settings is None or not settings.sets_outer(decision.settings):
            return AppliedSettings(0, 0.0, 0.0, *settings.end, slots)
        return AppliedSettings(named.number, named.outer_lr, named.outer_momentum, *settings.end, slots)

    def apply(self, settings: AppliedSettings) -> None:
        """Apply the outer step that follows with the settings of its round. The same on all ranks."""
        self._session.log.set_end(settings.rounds, settings.work)
        self._take_slots(settings.slots, self._log_follower.position.round + 1)
        if settings.number == 0:
            return
        self._log_follower.trainer.set_outer(settings.outer_lr, settings.outer_momentum)
        if settings.number != self._number and self._session.group.rank == 0:
            outer = {"outer_lr": settings.outer_lr, "outer_momentum": settings.outer_momentum}
            place = {"round": self._log_follower.position.round, "slot": self._session.presence.slot}
            emit("settings_applied", {**place, "number": settings.number, **outer})
        self._number = settings.number

    def look_for_slots(self) -> None:
        """At a boundary, after the join or a checkpoint: take the slots of this round as the log names them.

        Those of a run without a spec never change.
        """
        round_number = self._log_follower.position.round
        if self._slots_round == round_number or self._session.log.run.spec is None:
            return
        settings = self._session.exchange.settings

        def look() -> tuple[str, ...] | None:
            settings.read()
            if settings.slots is None:
                return None
            before = self._session.log.read_decision(round_number - 1, 0) if round_number else None
            digest = None if before is None else before.record.settings
            if digest is not None:
                settings.named(digest, round_number - 1)
            return settings.slots_of(digest, self._session.presence.slot)

        self._take_slots(self._train.broadcast_from_rank0("look for slots", look), round_number)

    def _take_slots(self, slots: tuple[str, ...] | None, round_number: int) -> None:
        self._slots_round = round_number
        taken = None if slots is None else tuple(slots)  # of other ranks it is a list
        if taken is not None and taken != self._session.log.slots and self._session.group.rank == 0:
            fields = {"round": round_number, "slot": self._session.presence.slot, "replicas": len(taken)}
            emit("slots_changed", fields)
        self._session.log.slots = taken


class RoundRunner:
    """The current round, and what is counted over rounds. For the thread that trains; exchanges run in one of its own.

    round: its exchanges, steps and tokens so far. errored: the last error reported in it. failed: attempts at rounds
    that have failed; failures: those in a row that max_retries counts. round_seconds: how long the last round took
    that was trained for; None before the first. upload_s: how long the last contribution took to upload.
    """

    def __init__(
        self,
        session: Session,
        log_follower: LogFollower,
        pool: Executor,
        *,
        new_batch: Callable[[], TensorBatch],
        max_retries: int | None,
    ) -> None:
        """pool: the exchange thread. max_retries: None fails without limit."""
        self._counter = log_follower.unfinished.counter
        self.round = CurrentRound(since=session.clock.now(), usage=session.store.usage, counter=self._counter)
        self.errored: Exception | None = None
        self.failed = 0
        self.failures = 0
        self.round_seconds: float | None = None
        self.upload_s = 0.0
        self._missed = 0
        self.settings = RoundSettings(session, log_follower)
        self._session = session
        self._log_follower = log_follower
        self._train = session.group.channel("train")
        self._exchange = session.group.channel("exchange")
        self._max_retries = max_retries
        self._facts: RoundFacts | None = None
        self._pool = pool
        self._new_batch = new_batch

    def wait(self) -> None:
        """Wait until every exchange that has begun is over."""
        for exchange in self.round.exchanges:
            if exchange.job is not None:
                exchange.job.exception()

    def restart(self) -> None:
        """Begin the round's exchange, or another attempt at it; an earlier abstention is withdrawn."""
        self.errored = None
        self._session.presence.withdraw_abstention()
        self.round.restart()

    def add(self, tensor: torch.Tensor, op: Op, *, quantize: bool = False) -> OpenExchange:
        """Add `tensor` to the open exchange. Raises Invalid after DiLoCo's one exchange, for sparse without DiLoCo."""
        if self._session.codec == "sparse" and not self._log_follower.trainer.fragments:
            raise Invalid("codec sparse is for the pseudo-gradients of DiLoCo; choose another codec for this wrapper")
        if self._log_follower.trainer.fragments and any(exchange.job is not None for exchange in self.round.exchanges):
            raise Invalid(
                "DiLoCo has one exchange in a round, and it is under way; use ObjectStoreAllReduce for metrics"
            )
        exchange = self._open_exchange()
        exchange.tensors.add(tensor.detach(), op, quantize=quantize)
        return exchange

    def _open_exchange(self) -> OpenExchange:
        follower, fragments = self._log_follower, self._log_follower.trainer.fragments
        exchange = self.round.current(follower.position, fragments, self._session.clock.now(), self._new_batch)
        if fragments and not exchange.tensors.parameters:
            exchange.tensors.parameters = follower.trainer.parameters_of(follower.position.round % fragments)
        return exchange

    def report_error(self, e: Exception) -> None:
        """Keep and log an error of this round."""
        self.errored = e
        emit(
            "round_failed",
            {"round": self._log_follower.position.round, "slot": self._session.presence.slot, "error": repr(e)},
            level=logging.WARNING,
        )

    def close(self, timeout: timedelta | None) -> bool:
        """Close the round; returns whether it is closed. Raises errors that must stop the replica.

        timeout: for the other ranks to come.
        """
        self._share_error(timeout)
        if self.errored is not None and not self.round.exchanges:
            return self._failed_round()
        if not self.round.exchanges:
            self._open_exchange()  # a round of nothing is still a round
        averages = [self.finish(exchange) for exchange in self.round.exchanges]
        held = [average for average in averages if average is not None]

        def hold() -> None:
            if len(held) < len(averages):
                raise self.round.first_error() or Retryable("an average is missing on another rank")

        try:
            closed = self._train.reduce_on_rank0("close", hold, lambda _: self._close_log(held))
        except Exception as error:  # noqa: BLE001  the fault funnel: an unreachable store is a failed round, not a crash
            if self.round.first_error() is None:
                self.report_error(error)
            return self._failed_round()
        if closed is None:
            return self._failed_round()
        commit, participants, work, settings = closed
        self.settings.apply(AppliedSettings(*settings))  # of other ranks it is a list
        self._advance(held, commit, participants, work)
        return True

    def take_facts(self) -> RoundFacts | None:
        """Return the facts of the round just closed, once."""
        facts, self._facts = self._facts, None
        return facts

    def shutdown(self, *, wait: bool) -> None:
        """Accept no more exchanges. wait: until the last one is over."""
        self._pool.shutdown(wait=wait)
        if wait:  # else an exchange may still use them; they go with the process
            self._session.averager.close()

    def update_counts(self, *, dropped: bool) -> None:
        """Update the counts at a boundary. dropped: every fragment was set to its shared parameters."""
        if self._counter.set_position(self._log_follower.position) or dropped:
            self.round.throw_away_all()

    def resume(self, partial: PartialRound, *, is_current: bool) -> None:
        """Count the work that an earlier incarnation saved. is_current: it belongs to the current round."""
        if is_current:
            self.round.inner_steps, self.round.tokens = partial.inner_steps, partial.tokens
            self.round.since = self._session.clock.now() - partial.seconds
            self.round.resumed = True
        for fragment, amount in enumerate(partial.trained):
            if partial.is_open(fragment, self._log_follower.position.round):
                self._counter.resume(fragment, amount)

    def flush(self) -> None:
        """Begin the open exchange: it is uploaded, decided and averaged in the background."""
        if self.round.exchanges and self.round.exchanges[-1].job is None:
            exchange = self.round.exchanges[-1]
            exchange.job = self._pool.submit(self._run_exchange, exchange)

    def finish(self, exchange: OpenExchange) -> Average | None:
        """Wait for an exchange's average; None after an error."""
        if exchange.job is None:
            self.flush()
        began = self._session.clock.now()
        while exchange.job is not None and not _is_done(exchange.job, self._session.poll_every_s):
            self._log_follower.rescue.help_blocked_peers(self._log_follower.position)
        self._log_follower.rescue.help_blocked_peers(self._log_follower.position)
        average = None if exchange.job is None else exchange.job.result()
        exchange.exposed_s += self._session.clock.now() - began
        return None if exchange.error is not None else average

    def fail(self, exchange: OpenExchange, error: Exception) -> None:
        """Record that the average is missing: this replica cannot close the round."""
        exchange.error = error
        self.report_error(error)

    def _run_exchange(self, exchange: OpenExchange) -> Average | None:
        """Run one exchange in the exchange thread. Returns None after an error, which is reported."""
        current = self.round
        try:
            failed, veto = self._exchange.reduce_on_rank0("burst", lambda: self._is_ready(current), _all_ready)
            if failed:
                return None
            current.veto = veto
            average = self._session.averager.run(
                ExchangeId(exchange.round, exchange.number, exchange.base),
                exchange.tensors,
                trained=exchange.trained,
                veto=current.veto,
                round_seconds=self.round_seconds,
            )
        except Exception as error:  # noqa: BLE001  the fault funnel: kept with its type, surfaces in should_commit
            self.fail(exchange, error)
            return None
        abstention = self._session.presence.progress.abstains
        if current.veto is None and abstention is not None and abstention.round == exchange.round:
            current.veto = abstention.reason  # what came from the same bad batch is not contributed either
            self._log_follower.nonfinite = True
        return average

    def _is_ready(self, current: CurrentRound) -> tuple[bool, str | None]:
        """Return if an earlier exchange failed, so that the round cannot close; and why not to contribute, or None.

        One thread runs exchanges in order, so earlier ones are over.
        """
        veto = current.veto
        if veto is None and self.errored is not None:
            veto = repr(self.errored)
        return current.first_error() is not None, veto or self._log_follower.quarantine

    def _share_error(self, timeout: timedelta | None) -> None:
        """Agree on the error that any rank reported, and check that all ranks opened the same exchanges."""
        mine = None if self.errored is None else repr(self.errored)
        error = self._train.reduce_on_rank0(
            "should_commit", lambda: (len(self.round.exchanges), mine), _alike, timeout_s=seconds_of(timeout)
        )
        if error is not None and self.errored is None:
            self.report_error(Retryable(f"reported by another rank: {error}"))

    def _may_close(self, averages: list[Average]) -> bool:
        """Every exchange is held. After an error, one may never have been opened here; DiLoCo has one in a round."""
        if self.errored is None or self._log_follower.trainer.fragments:
            return True
        place = ExchangeId(self._log_follower.position.round, 0, self._log_follower.position.previous)
        return self._session.exchange.is_closed_by(place, [average.decision for average in averages])

    def _close_log(self, averages: list[Average]) -> tuple[str, int, float, AppliedSettings] | None:
        """Close the round in the log, on rank 0. Returns the commit's digest, participants, work and settings."""
        if not self._may_close(averages):
            return None
        settings = self.settings.named(averages[0].decision.record)
        place = ExchangeId(self._log_follower.position.round, 0, self._log_follower.position.previous)
        work = self._log_follower.position.work + min(average.work for average in averages)
        decisions, digests = [average.decision for average in averages], [average.digest for average in averages]
        commit = self._session.exchange.close(place, decisions, work=work, averages=digests)
        return commit.digest, commit.record.participants, commit.record.work, settings

    def _advance(self, averages: list[Average], commit: str, participants: int, work: float) -> None:
        """Move to the next round after a commit."""
        position, usage, now = self._log_follower.position, self._session.store.usage, self._session.clock.now()
        self._facts = RoundFacts(
            averages=tuple(average.digest for average in averages),
            contributed=all(average.contributed for average in averages),
            norm=_norm_of(averages),
            uploaded_bytes=usage.uploaded_bytes - self.round.usage.uploaded_bytes,
            downloaded_bytes=usage.downloaded_bytes - self.round.usage.downloaded_bytes,
            requests=usage.requests - self.round.usage.requests,
            seconds=_seconds(averages, self.round.exchanges),
            telemetry=self.round.exchanges[0].trained.telemetry,
            abstained=self.round.veto,
            checks=tuple(average.check for average in averages if average.check is not None),
        )
        smallest = min((average.decision.record for average in averages), key=lambda decision: len(decision.members))
        self._log_follower.move_to(
            LogPosition(
                round=position.round + 1,
                previous=commit,
                members=tuple(share.slot for share in smallest.members),
                batches=position.batches + participants,
                work=work,
            )
        )
        self._counter.exchanged(position.round % max(1, self._log_follower.trainer.fragments))
        self._counter.close_round(self._log_follower.position, self.round.ticks)
        if self._train.rank == 0:
            emit(
                "round_closed", {"round": position.round, "slot": self._session.presence.slot, "members": participants}
            )
        self.failures = 0
        self._count_missed(averages)
        evaluated_s = self.round.telemetry.evaluated_s(now)
        is_part = self.round.share is not None and (self.round.resumed or evaluated_s > 0)
        if not self._log_follower.following and not is_part:
            self.round_seconds = now - self.round.since - evaluated_s
        self.round = CurrentRound(since=now, usage=usage, counter=self._counter)
        self._session.presence.report_transfers(
            uploaded_bytes=usage.uploaded_bytes, downloaded_bytes=usage.downloaded_bytes
        )

    def _count_missed(self, averages: list[Average]) -> None:
        """Count rounds that closed without this replica's work, and warn after several in a row."""
        offered = [average for average in averages if average.norm is not None]
        if offered and not self.round.is_contributed:  # also after a late upload, because the next one needs as long
            self.upload_s = sum(average.seconds["encode"] + average.seconds["upload"] for average in offered)
        if all(average.contributed for average in averages):
            self._missed = 0
        elif self.round.inner_steps and self.round.veto is None and self._may_be_late():
            self._missed += 1
            if self._missed == _MISSED_ROUNDS and self._train.rank == 0:
                fields = {"round": self._log_follower.position.round - 1, "slot": self._session.presence.slot}
                fields["why"] = _ALWAYS_LATE.format(_MISSED_ROUNDS, self.upload_s)
                emit("always_late", fields, level=logging.WARNING)

    def _may_be_late(self) -> bool:
        """False where a replica is left out for another reason, or cannot end its rounds early."""
        return self._log_follower.trainer.fragments > 0 and not self._session.policy.spares

    def _failed_round(self) -> bool:
        error = self.round.first_error()
        if error is None and self.errored is not None:
            error = self.errored
            # The others need not wait for a contribution that will not come.
            self._session.presence.abstain(self._log_follower.position.round, repr(error))
        self.round.restart()
        self.round.share, self.round.is_contributed = None, False
        if self._log_follower.trainer.fragments:  # DiLoCo has thrown away what was trained
            self.round.throw_away(self._log_follower.position.round % self._log_follower.trainer.fragments)
        else:
            self.round.throw_away_gradients()
        if isinstance(error, (Fenced, Diverged, Invalid, Moved, RunFinished, Unauthorized, RankLost)):
            raise error
        self.failed += 1
        if self._log_follower.failed(error):
            return False
        self.failures += 1
        if self._max_retries is not None and self.failures > self._max_retries:
            raise RuntimeError(
                f"should_commit failed {self.failures} times consecutively, "
                f"exceeding max_retries={self._max_retries}; last: {error!r}"
            ) from error
        return False


def _is_done(job: Future[Average | None], seconds: float) -> bool:
    """Wait for the job, at most so long; whether it is over."""
    try:
        job.exception(seconds)
    except TimeoutError:
        return False
    return True


def _seconds(averages: list[Average], exchanges: list[OpenExchange]) -> dict[str, float]:
    """Of all exchanges of a round, by phase."""
    phases = {name: sum(average.seconds[name] for average in averages) for name in averages[0].seconds}
    return phases | {EXPOSED: sum(exchange.exposed_s for exchange in exchanges)}


def seconds_of(timeout: timedelta | None) -> float | None:
    """A timedelta in seconds."""
    return None if timeout is None else timeout.total_seconds()


def _alike(all_ranks: Sequence[tuple[int, str | None]]) -> str | None:
    """Return the first error. Raises RankLost if ranks opened different exchanges."""
    exchanges = [count for count, _ in all_ranks]
    if len(set(exchanges)) > 1:
        raise RankLost(f"ranks of one replica issue different allreduce calls: bursts by rank {exchanges}")
    return next((error for _, error in all_ranks if error is not None), None)


def _all_ready(all_ranks: Sequence[tuple[bool, str | None]]) -> tuple[bool, str | None]:
    veto = next((veto for _, veto in all_ranks if veto is not None), None)
    return any(failed for failed, _ in all_ranks), veto


def _norm_of(averages: list[Average]) -> float | None:
    """L2 norm of all contributions of this replica to the round; None if it contributed nothing."""
    norms = [average.norm for average in averages if average.norm is not None]
    return math.hypot(*norms) if norms else None
