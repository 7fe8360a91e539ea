"""The round being trained: its exchanges so far, its inner steps and tokens.

All allreduce calls up to the next wait belong to one exchange and travel as one contribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.runtime.training.early_round_end_policy import EarlierSteps
from skerry.runtime.training.round_telemetry import RoundTelemetry
from skerry.runtime.training.work_counter import Trained

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from skerry.runtime.checkpointing.replica_position_in_log import LogPosition
    from skerry.runtime.log.records import Telemetry
    from skerry.runtime.store.retrying import Usage
    from skerry.runtime.tensors.tensors_sent_together import TensorBatch
    from skerry.runtime.training.contribute_and_average import Average
    from skerry.runtime.training.work_counter import WorkCounter


@dataclass(kw_only=True)
class OpenExchange:
    """An exchange of the round: `job` is set once it runs in the background.

    trained: what it is made of, from when it was opened. exposed_s: seconds in which the training waited for it.
    """

    round: int
    number: int
    base: str
    trained: Trained
    tensors: TensorBatch
    job: Future[Average | None] | None = None
    error: Exception | None = None
    exposed_s: float = 0.0


@dataclass(kw_only=True)
class CurrentRound:
    """The round being trained: its exchanges so far and its counts. since: monotonic; usage: at its start.

    counter: outlives the round. ticks: steps of the inner optimizer, empty ones too. inner_steps, tokens: of this round
    alone. veto: why this replica contributes nothing more to this attempt at the round. share: of the others' inner
    steps, once it is ended early. is_contributed: it was contributed while the script evaluates, before its end.
    resumed: an earlier incarnation has begun it, at a time that is not known. telemetry: what is measured in it, over
    all attempts.
    """

    since: float
    usage: Usage
    counter: WorkCounter
    exchanges: list[OpenExchange] = field(default_factory=list[OpenExchange])
    ticks: int = 0
    inner_steps: int = 0
    tokens: int = 0
    veto: str | None = None
    share: float | None = None
    is_contributed: bool = False
    resumed: bool = False
    telemetry: RoundTelemetry = field(default_factory=RoundTelemetry)

    def restart(self) -> None:
        """Begin another attempt at the round."""
        self.exchanges, self.veto = [], None

    def throw_away(self, fragment: int) -> None:
        """Drop the progress of one fragment; all others keep theirs."""
        self.ticks = self.inner_steps = self.tokens = 0
        self.counter.exchanged(fragment)

    def throw_away_gradients(self) -> None:
        """Drop the tokens of a failed round without inner steps: DDP computes its gradients anew."""
        if self.ticks == 0:
            self.tokens = 0

    def throw_away_all(self) -> None:
        """Drop the progress of every fragment, or of the model; tokens counted for the next inner step remain."""
        self.counter.clear()
        if self.ticks:
            self.tokens = self.counter.since(0).tokens
        self.ticks = self.inner_steps = 0

    def count_step(self, *, idle: bool) -> None:
        """Count a step of the inner optimizer; an idle one trains nothing."""
        self.ticks += 1
        if not idle:
            self.inner_steps += 1
            self.counter.count_step()

    def count_tokens(self, tokens: int) -> None:
        """Count tokens that the next inner step trains on."""
        self.tokens += tokens
        self.counter.count_tokens(tokens)

    def earlier(self, round_number: int, fragments: int) -> EarlierSteps:
        """Steps in this round's pseudo-gradient that earlier rounds trained."""
        steps = self.counter.since(round_number % fragments).steps
        return EarlierSteps(
            rounds=min(round_number, fragments - 1), steps=steps - self.inner_steps, plan=self.counter.plan
        )

    def measured(self, now: float, per_round: int) -> Telemetry:
        """Return what was measured in the round until now. per_round: its inner steps, if it is taken to its end."""
        possible = max(per_round, self.ticks)
        return self.telemetry.record(
            steps=self.inner_steps,
            possible=possible,
            tokens=self.tokens,
            seconds=now - self.since,
            evaluate_s=self.telemetry.evaluated_s(now),
        )

    def current(
        self, position: LogPosition, fragments: int, now: float, new_batch: Callable[[], TensorBatch]
    ) -> OpenExchange:
        """The exchange that still takes tensors; a new one if the last has begun. fragments: 0 for LocalSGD and DDP."""
        if not self.exchanges or self.exchanges[-1].job is not None:
            trained = self.trained(position.round, fragments, now)
            if fragments:
                self.counter.plan = self.ticks
            exchange = OpenExchange(
                round=position.round,
                number=len(self.exchanges),
                base=position.previous,
                trained=trained,
                tensors=new_batch(),
            )
            self.exchanges.append(exchange)
        return self.exchanges[-1]

    def trained(self, round_number: int, fragments: int, now: float) -> Trained:
        """The work in an exchange that is opened now; the round's first one has its telemetry."""
        telemetry = None if self.exchanges else self.measured(now, self.counter.per_round or self.ticks)
        if fragments == 0:
            return Trained(tokens=self.tokens, inner_steps=self.inner_steps, telemetry=telemetry)
        fragment = round_number % fragments
        steps, tokens = self.counter.since(fragment)
        share = self.share
        if share is None:
            # Of this replica's own: what the others take is not known here, and may well be more.
            earlier = self.earlier(round_number, fragments).rounds * (self.counter.per_round or self.ticks)
            share = min(1.0, max(1, steps) / max(1, earlier + self.ticks))
        return Trained(tokens=tokens, inner_steps=steps, fragment=fragment, share=share, telemetry=telemetry)

    def first_error(self) -> Exception | None:
        """The first error, or None."""
        return next((exchange.error for exchange in self.exchanges if exchange.error is not None), None)
