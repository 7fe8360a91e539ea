"""Decides whether an ended replica is restarted, and whether enough replicas are left for the run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.runtime.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.run.executor import Ending
    from skerry.infra.spec.model import Restarts


class ReplicaFate(Enum):
    """The final state of a replica."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class NotRestarted:
    """The replica is not restarted. reason: for people."""

    fate: ReplicaFate
    reason: str


@dataclass(frozen=True, kw_only=True)
class RestartAfter:
    """Restart the replica. recent: restarts in the window so far; the back-off grows with it."""

    recent: int


RestartDecision: TypeAlias = NotRestarted | RestartAfter

# A script with an import error fails at every start; a single failure may be the machine's.
MAX_STARTUP_FAILURES: Final = 2


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts of one replica within `window_s` seconds; None counts every restart of the run."""

    limit: int
    window_s: float | None


def policy_from_spec(restarts: Restarts) -> RestartPolicy:
    """The policy of a spec's `faults.restarts`."""
    window = restarts.window
    return RestartPolicy(limit=restarts.max, window_s=None if window is None else window.total_seconds())


def decide_restart(
    ending: Ending,
    restarts: Sequence[float],
    now: float,
    policy: RestartPolicy,
    *,
    startup_failures: int = 0,
    stopping: bool = False,
) -> RestartDecision:
    """Decide what follows from an ending. restarts: the times of earlier restarts, on the clock of `now`.

    A signal or an unknown exit code is a crash. stopping: the replica was asked to stop, so it is not restarted.
    startup_failures: starts in a row, this one included, that ended as `failed_at_startup` without a heartbeat.
    """
    match ending.exit_code:
        case ExitCode.DONE:
            return NotRestarted(fate=ReplicaFate.DONE, reason="done")
        case ExitCode.PERMANENT:
            return NotRestarted(fate=ReplicaFate.FAILED, reason=f"{ending}: a restart cannot help")
        case _ if stopping or ending.exit_code == ExitCode.STOPPED:
            cleanly = ending.exit_code in {ExitCode.RETRY, ExitCode.STOPPED}
            return NotRestarted(
                fate=ReplicaFate.STOPPED, reason="stopped on request" if cleanly else f"{ending}, while stopping"
            )
        case _:
            pass
    if startup_failures >= MAX_STARTUP_FAILURES:
        return NotRestarted(
            fate=ReplicaFate.FAILED, reason=f"{ending} before its first heartbeat, {startup_failures} starts in a row"
        )
    recent = len([when for when in restarts if policy.window_s is None or now - when < policy.window_s])
    if recent >= policy.limit:
        return NotRestarted(fate=ReplicaFate.FAILED, reason=f"{ending}; {recent} of {policy.limit} restarts used")
    return RestartAfter(recent=recent)


def failed_at_startup(ending: Ending) -> bool:
    """True if a replica without heartbeats exited with a code that is not the runtime's, because of its script."""
    return ending.exit_code is not None and ending.exit_code not in set(ExitCode)


def too_few_left(fates: Sequence[ReplicaFate | None], min_replicas: int) -> bool:
    """True if too few replicas are left to close a round, so that they would only wait.

    fates: None for a replica that runs or will be restarted. Once a replica is done the log is complete, and the others
    can follow it alone.
    """
    left = len([fate for fate in fates if fate is None])
    return ReplicaFate.FAILED in fates and ReplicaFate.DONE not in fates and 0 < left < min_replicas
