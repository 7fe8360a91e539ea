"""What the commands tell while they work and when they are done, as values; printing is `render`'s. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.executor import Ending, ReplicaHandle
    from skerry.infra.policy import Fate
    from skerry.infra.view import RunView


@dataclass(frozen=True, kw_only=True)
class Started:
    """A replica was started."""

    handle: ReplicaHandle


@dataclass(frozen=True, kw_only=True)
class Lines:
    """What a replica has written."""

    slot: str
    lines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Restarting:
    """A replica crashed and is started again after `delay_s` seconds."""

    slot: str
    ending: Ending
    delay_s: float


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A replica ended and stays so."""

    slot: str
    fate: Fate
    reason: str


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """Every replica was asked to stop; those left are killed after `budget_s` seconds."""

    reason: str
    budget_s: float


@dataclass(frozen=True, kw_only=True)
class Killing:
    """Every replica that was left is being killed."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LostSight:
    """The store could not be read; the replicas go on, and the next look is tried."""

    error: str


@dataclass(frozen=True, kw_only=True)
class Untracked:
    """Which processes run could not be written down; the replicas go on. Told once."""

    error: str


Report: TypeAlias = Started | Lines | Restarting | Ended | Stopping | Killing | LostSight | Untracked


@dataclass(frozen=True, kw_only=True)
class ReplicaResult:
    """What became of one replica. restarts: how often it was started again. last_line: of its log, if it wrote one."""

    slot: str
    fate: Fate
    reason: str
    restarts: int
    last_line: str | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """How an `up` ended.

    ok: every round is closed, or every replica ended as done in a run without an end; with no results the run was
    finished before. view: the run at the end, or, with `unseen`, as it was last seen. wall_s: from the first start to
    the last end. unseen: why the store could not be read at the end. digests_equal: whether at least two replicas have
    told what they held after each round, and all of each round said the same; None if it was not looked at.
    """

    ok: bool
    view: RunView
    results: tuple[ReplicaResult, ...]
    wall_s: float
    unseen: str | None = None
    digests_equal: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Remains:
    """What there is of a run. folder: its work folder on this machine, if there is one."""

    uri: str
    objects: int
    size_bytes: int
    processes: int
    folder: Path | None

    def __bool__(self) -> bool:
        return self.objects > 0 or self.folder is not None
