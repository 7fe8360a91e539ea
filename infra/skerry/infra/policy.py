"""Whether a replica that ended is started again, and whether the run can still go on without it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from skerry.runtime.contract import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.executor import Ending
    from skerry.infra.spec import Restarts


class Fate(Enum):
    """What became of a replica for good."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Over:
    """This replica is not started again. reason: for people."""

    fate: Fate
    reason: str


@dataclass(frozen=True, kw_only=True)
class Again:
    """Start it again. recent: how many restarts the window already holds; the back-off grows with it."""

    recent: int


Verdict: TypeAlias = Over | Again

# A script that cannot be imported fails the same way every time; one failure may be the machine's.
STILLBORN: Final = 2


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """At most `limit` restarts of one replica within `window_s` seconds; None counts every restart of the run."""

    limit: int
    window_s: float | None


def policy_of(restarts: Restarts) -> RestartPolicy:
    """As a spec's `faults.restarts` says it."""
    window = restarts.window
    return RestartPolicy(limit=restarts.max, window_s=None if window is None else window.total_seconds())


def judge(
    ending: Ending,
    restarts: Sequence[float],
    now: float,
    policy: RestartPolicy,
    *,
    stillborn: int = 0,
    stopping: bool = False,
) -> Verdict:
    """What follows from how a replica ended. restarts: when it was started again before, on the scale of `now`.
    stopping: it was asked to stop; it ends like one whose machine is taken back, and is not started again.

    A signal and an unknown exit code count as a crash: something outside broke, or the script raised.
    stillborn: starts up to this one, if none of them ever beat and each ended as `is_stillborn` says.
    """
    match ending.exit_code:
        case ExitCode.DONE:
            return Over(fate=Fate.DONE, reason="done")
        case ExitCode.PERMANENT:
            return Over(fate=Fate.FAILED, reason=f"{ending}: another start cannot help")
        case _ if stopping or ending.exit_code == ExitCode.STOPPED:
            cleanly = ending.exit_code in {ExitCode.RETRY, ExitCode.STOPPED}
            return Over(fate=Fate.STOPPED, reason="stopped on request" if cleanly else f"{ending}, while stopping")
        case _:
            pass
    if stillborn >= STILLBORN:
        return Over(fate=Fate.FAILED, reason=f"{ending} before its first heartbeat, {stillborn} starts in a row")
    recent = len([when for when in restarts if policy.window_s is None or now - when < policy.window_s])
    if recent >= policy.limit:
        return Over(fate=Fate.FAILED, reason=f"{ending}; {recent} of {policy.limit} restarts used")
    return Again(recent=recent)


def is_stillborn(ending: Ending) -> bool:
    """Whether a replica that never beat ended by itself, in a way that is not the runtime's: its script is wrong."""
    return ending.exit_code is not None and ending.exit_code not in set(ExitCode)


def hopeless(fates: Sequence[Fate | None], min_replicas: int) -> bool:
    """Whether no round can close any more, so that the replicas left would only wait.

    fates: None for a replica that runs or will be started again. Once one is done the log is complete, and those
    behind need nobody to follow it.
    """
    left = len([fate for fate in fates if fate is None])
    return Fate.FAILED in fates and Fate.DONE not in fates and 0 < left < min_replicas
