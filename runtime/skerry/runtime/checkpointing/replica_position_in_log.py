"""The position of a replica in the log, and the facts of the round that it closed last. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import Telemetry


@dataclass(frozen=True, kw_only=True)
class LogPosition:
    """A position between rounds: `round` rounds are closed, `previous` is the digest of the last commit.

    work: the work of all rounds up to that commit.
    """

    round: int
    previous: str
    members: tuple[str, ...]
    batches: int
    work: float


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """Facts of a closed round for its receipt. telemetry: of this rank, before the exchange. abstained: a reason.

    checks: of pieces of the averages that others have made, to be run in the background; each returns what is wrong.
    """

    averages: tuple[str, ...]
    contributed: bool
    uploaded_bytes: int
    downloaded_bytes: int
    requests: int
    seconds: dict[str, float]
    norm: float | None = None
    telemetry: Telemetry | None = None
    abstained: str | None = None
    checks: tuple[Callable[[], str | None], ...] = ()


def is_due(position: LogPosition, checkpoint_every: int | None, log: RunLog) -> bool:
    """Returns True if state is saved after this round. The last round of a run always is; None means not now."""
    if checkpoint_every is None:
        return False
    return position.round % checkpoint_every == 0 or log.is_end(position.round, position.work)
