"""Collects what one replica measures in a round: losses and metrics of its inner steps, and where its time goes.

Does no I/O; needs no torch. Of a round that an earlier incarnation began, only what this one trained is in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import MAX_FIGURE, MAX_METRIC_NAME, MAX_METRICS, Telemetry

if TYPE_CHECKING:
    from collections.abc import Mapping

LOSS: Final = "loss"


@dataclass
class _Mean:
    """A mean over finite values, and how many there were."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        """Take in one more value."""
        self.count += 1
        self.value += (value - self.value) / self.count


@dataclass
class RoundTelemetry:
    """The measurements of the current round. For the thread that trains; another one may read them.

    evaluate_s: seconds of evaluations that are over. evaluating_since: begin of the current one; None outside of it.
    learning_rate, gradient_norm: None until a step was seen.
    """

    evaluate_s: float = 0.0
    evaluating_since: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    _means: dict[str, _Mean] = field(default_factory=dict[str, _Mean])

    def report(self, values: Mapping[str, float]) -> None:
        """Take in values of one inner step. What is not finite is left out. Raises Invalid for too many names."""
        for name, value in values.items():
            is_name = 0 < len(name) <= MAX_METRIC_NAME and name.isprintable()
            is_new = name not in self._means
            if is_new and not (is_name and len((self._means.keys() | {name}) - {LOSS}) <= MAX_METRICS):
                raise Invalid(
                    f"metric {name[:MAX_METRIC_NAME]!r}: at most {MAX_METRICS} metrics a round, with names of 1 to "
                    f"{MAX_METRIC_NAME} characters"
                )
            if _finite(value) is not None:
                self._means.setdefault(name, _Mean()).add(value)

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics that are finite, without the loss."""
        return {name: value for name, value in self._finite_means().items() if name != LOSS}

    def _finite_means(self) -> dict[str, float]:
        return {name: mean.value for name, mean in self._means.items() if _finite(mean.value) is not None}

    def evaluated_s(self, now: float) -> float:
        """Seconds of evaluations in the round until now."""
        return self.evaluate_s + (0.0 if self.evaluating_since is None else now - self.evaluating_since)

    def end_evaluation(self, now: float) -> None:
        """The current evaluation is over."""
        self.evaluate_s, self.evaluating_since = self.evaluated_s(now), None

    def record(self, *, steps: int, possible: int, tokens: int, seconds: float, evaluate_s: float) -> Telemetry:
        """The record of the round. seconds: since its begin; evaluate_s: those of them in evaluations."""
        return Telemetry(
            loss=self._finite_means().get(LOSS),
            steps=steps,
            possible=possible,
            tokens=tokens,
            train_s=max(0.0, seconds - evaluate_s),
            evaluate_s=evaluate_s,
            learning_rate=_finite(self.learning_rate),
            gradient_norm=_finite(self.gradient_norm),
            metrics=self.metrics,
        )


def _finite(value: float | None) -> float | None:
    """None for what no record can have, too."""
    return value if value is not None and abs(value) <= MAX_FIGURE else None
