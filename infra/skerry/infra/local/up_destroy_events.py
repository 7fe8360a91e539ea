"""Events and results of `up` and `destroy` as plain values, for `supervisor_output_text` and `run_text` of the cli."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from skerry.infra.run.restart_policy import ReplicaFate

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.observe.participation import Participation
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.run.executor import Ending, ReplicaHandle


@dataclass(frozen=True, kw_only=True)
class ReplicaStarted:
    """A replica was started."""

    handle: ReplicaHandle


@dataclass(frozen=True, kw_only=True)
class LogLines:
    """Lines of a replica's log."""

    slot: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ReplicaRestarting:
    """A replica crashed and will be restarted after `delay_s` seconds. last_line: of its log, if not empty."""

    slot: str
    ending: Ending
    delay_s: float
    last_line: str | None = None


@dataclass(frozen=True, kw_only=True)
class ReplicaResult:
    """A replica ended and will not be restarted. restarts: how often it was. last_line: of its log, if not empty.

    ending: None if it was stopped before a restart.
    """

    slot: str
    fate: ReplicaFate
    reason: str
    restarts: int
    last_line: str | None = None
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class RoundsMissed:
    """A replica began to be missing in rounds, takes part again, or was cut short again and again."""

    text: str


@dataclass(frozen=True, kw_only=True)
class StoppingReplicas:
    """Every replica was asked to stop; those that still run after `budget_s` seconds are killed."""

    reason: str
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class KillingReplicas:
    """Every remaining replica is being killed, or the one of `slot`."""

    reason: str
    slot: str | None = None


@dataclass(frozen=True, kw_only=True)
class StoreUnreadable:
    """The store could not be read; the replicas continue, and the next read is tried."""

    error: str


@dataclass(frozen=True, kw_only=True)
class UntrackedProcess:
    """The file of running processes could not be updated; the replicas continue. Reported once."""

    error: str


Event: TypeAlias = (
    ReplicaStarted
    | LogLines
    | ReplicaRestarting
    | ReplicaResult
    | RoundsMissed
    | StoppingReplicas
    | KillingReplicas
    | StoreUnreadable
    | UntrackedProcess
)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of an `up`.

    ok: every round is closed, or every replica of an endless run is done; without results the run was finished before.
    view: the run at the end, or, with `unseen`, the last view. wall_s: from the first start to the last end. unseen:
    why the store could not be read at the end. digests_equal: whether the receipts of each round are equal and the
    last round has those of at least two replicas; None if not checked. participation: the replicas in each round; None
    if the log could not be read.
    """

    ok: bool
    view: RunView
    results: tuple[ReplicaResult, ...]
    wall_s: float
    unseen: str | None = None
    digests_equal: bool | None = None
    participation: Participation | None = None

    @property
    def by_all(self) -> bool:
        """True unless a replica failed in this `up`, or took no part in half or more of the run's rounds."""
        failed = any(result.fate is ReplicaFate.FAILED for result in self.results)
        return not failed and (self.participation is None or self.participation.by_all)


@dataclass(frozen=True, kw_only=True)
class Leftovers:
    """The remains of a run. folder: its work folder on this machine; None if it does not exist.

    mirrors: URIs of its mirrors that are removed too. left: of those that stay.
    """

    uri: str
    objects: int
    size_bytes: int
    processes: int
    folder: Path | None
    mirrors: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.objects > 0 or self.folder is not None or bool(self.mirrors)
