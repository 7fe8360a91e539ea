"""Adds up the closed rounds of a run, so that a look at it needs only the new ones. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.runtime.log.summarize_round import RoundHistory


@dataclass(kw_only=True)
class RunTotals:
    """Totals over closed rounds, each with all replicas of the run.

    losses: rounds with a known mean loss. in_rounds, of_rounds: by slot, the rounds with its contribution and all that
    it could take part in. share: of each slot's last contribution. seen_at: when the last round with a record of this
    slot and incarnation was closed. uploaded, downloaded: their bytes.
    """

    losses: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    in_rounds: Counter[str] = field(default_factory=Counter[str])
    of_rounds: Counter[str] = field(default_factory=Counter[str])
    share: dict[str, float] = field(default_factory=dict[str, float])
    seen_at: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])
    uploaded: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    downloaded: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])

    def add(self, item: RoundHistory) -> None:
        """Count one more round."""
        if (loss := mean_loss(item)) is not None:
            self.losses.append((item.round, loss))
        for replica in item.replicas:
            self.of_rounds[replica.slot] += 1
            if replica.in_average:
                self.in_rounds[replica.slot] += 1
                self.share[replica.slot] = replica.share
            if replica.incarnation is None:
                continue
            start = replica.slot, replica.incarnation
            self.uploaded[start] += replica.uploaded_bytes
            self.downloaded[start] += replica.downloaded_bytes
            if item.closed_at is not None:
                self.seen_at[start] = item.closed_at

    def plus(self, rounds: Iterable[RoundHistory]) -> RunTotals:
        """These totals with further rounds; the original is unchanged."""
        copy = RunTotals(
            losses=list(self.losses),
            in_rounds=Counter(self.in_rounds),
            of_rounds=Counter(self.of_rounds),
            share=dict(self.share),
            seen_at=dict(self.seen_at),
            uploaded=Counter(self.uploaded),
            downloaded=Counter(self.downloaded),
        )
        for item in rounds:
            copy.add(item)
        return copy


def mean_loss(item: RoundHistory) -> float | None:
    """The mean over the replicas of their mean losses in a round; None if no replica reports one."""
    losses = [
        replica.telemetry.loss for replica in item.replicas if replica.telemetry and replica.telemetry.loss is not None
    ]
    return fmean(losses) if losses else None
