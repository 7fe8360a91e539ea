"""The interface between the plan engine and a cloud: one handler for each kind of resource.

A handler decides nothing: it reads, creates, updates and deletes what the engine names. Every verb is idempotent by
physical name and tag, because the engine repeats it after a crash. Does no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping  # noqa: TC003  a parser reads the annotations of StateRecord
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from skerry.infra.provision.graph import Json, Life, Resource, Value, as_json, generation_name
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from datetime import datetime

RUN_TAG: Final = contract.RUN_TAG
ADDRESS_TAG: Final = "skerry:address"
GENERATION_TAG: Final = contract.GENERATION_TAG


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The desired state of one generation of a resource.

    settings: the resource's, with references replaced where the referenced resource exists. outputs: from the last
    create or read; empty if the resource is not known to exist. run: the run's URI. extra: the user's own tags.
    """

    resource: Resource
    generation: int
    run: str
    settings: Mapping[str, Value]
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """The physical name in the cloud."""
        fixed = self.resource.brought or self.resource.SINGLE
        return self.resource.name if fixed else generation_name(self.resource.name, self.generation)

    @property
    def tags(self) -> dict[str, str]:
        """The tags that mark it as this run's, and the user's own."""
        return {
            **self.extra,
            RUN_TAG: self.run,
            ADDRESS_TAG: self.resource.address,
            GENERATION_TAG: str(self.generation),
        }

    def to_record(self, outputs: Mapping[str, str]) -> StateRecord:
        """The record that state keeps of it once it is created."""
        return StateRecord(
            address=self.resource.address,
            kind=self.resource.KIND,
            name=self.name,
            generation=self.generation,
            region=self.resource.region,
            life=self.resource.LIFE,
            brought=self.resource.brought,
            settings={name: as_json(value) for name, value in self.settings.items()},
            outputs=dict(outputs),
            needs=tuple(sorted(self.resource.needs())),
        )


class Condition(enum.Enum):
    """The usability of an observed resource."""

    READY = "ready"
    """Exists and is usable; a job: queued, running, or to be retried by its cloud."""
    DONE = "done"
    """A job that succeeded."""
    LOST = "lost"
    """A job that failed and will not be retried."""
    BROKEN = "broken"
    """Exists and is unusable; only a replacement helps."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """A resource as its cloud reports it.

    outputs: the values that references to it resolve to. settings: those that can be read back, by name; a setting that
    is absent here cannot be compared. owner: the run in its tags; None if untagged. detail: the cause of `condition`.
    kept: what was changed outside of skerry and is not reverted, with the reason. changed_by: the manager that set
    a setting last, by the setting's name, where the cloud knows it.
    """

    outputs: Mapping[str, str]
    settings: Mapping[str, Json]
    owner: str | None
    condition: Condition = Condition.READY
    detail: str = ""
    kept: tuple[str, ...] = ()
    changed_by: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """One generation of a resource as state stores it: enough to compare it, to reference it and to delete it."""

    address: str
    kind: str
    name: str
    generation: int
    region: str
    life: Life
    brought: bool
    settings: Mapping[str, Json]
    outputs: Mapping[str, str]
    needs: tuple[str, ...]


class Handler(Protocol):
    """One kind of resource. Thread-safe. Every verb may raise Retryable, Unauthorized, Conflict or Invalid."""

    def read(self, desired: Sequence[Desired], /) -> Sequence[Observed | None]:
        """The resource under each name, in the order given; None if it does not exist. As few calls as possible."""
        ...

    def create(self, desired: Desired, /) -> Mapping[str, str]:
        """Create it, wait until it is usable, and return its outputs. If it exists and is this run's, the same.

        Raises Conflict if the name exists and is not this run's.
        """
        ...

    def update(self, desired: Desired, changed: Collection[str], /) -> Mapping[str, str]:
        """Change these settings in place, and return its outputs. Never called for a setting in FIXED.

        An update must not change outputs, because references were planned with them; the engine refuses one that does.
        If a setting would (a version number, say), list it in FIXED so that it forces replacement, or do not expose
        that output.
        """
        ...

    def delete(self, record: StateRecord, /) -> None:
        """Delete it and wait until it is deleted; absent is success. A job is stopped; the cloud keeps its record."""
        ...

    def list_owned(self, run: str, regions: Collection[str], /) -> Iterable[StateRecord]:
        """All resources of this kind tagged with the run, in state or not.

        Of jobs at least those queued or running, also those of the run's names that have lost their tags.
        """
        ...


class NamedJob(NamedTuple):
    """A job as a listing has it. over: it has ended, and nothing of it runs."""

    name: str
    over: bool


class JobHandler(Handler, Protocol):
    """The handler of the jobs of a target: it also stops a job whose record stays, and lists those that ended."""

    def stop(self, record: StateRecord, /) -> None:
        """Ask a job to stop, and do not wait. One that has ended counts as stopped.

        Raises Absent if the cloud does not know it, or not yet.
        """
        ...

    def names(self, like: StateRecord, run: str, /) -> Iterable[NamedJob]:
        """All jobs of the run where `like` is, ended ones too, as long as the cloud lists them."""
        ...


class RevivableJobHandler(JobHandler, Protocol):
    """The handler of jobs that the replicas of a run may start again themselves."""

    def list_revived(self, run: str, records: Sequence[StateRecord], /) -> Mapping[str, StateRecord]:
        """The newest job that replicas have started after each of these, by address; only where there is one."""
        ...

    def forbid_revival(self, record: StateRecord, /) -> None:
        """Mark a job so that no replica starts it again. A job without a record needs no mark."""
        ...


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of a data resource. more: counting stopped early. size_bytes: None if unknown."""

    objects: int
    size_bytes: int | None = None
    more: bool = False
    noun: str = "object"

    def __str__(self) -> str:
        count = f"{'more than ' if self.more else ''}{self.objects} {self.noun}{'' if self.objects == 1 else 's'}"
        if self.size_bytes is None:
            return count
        unit, factor = next(
            ((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6)) if self.size_bytes >= size), ("kB", 1e3)
        )
        return f"{count} ({self.size_bytes / factor:.1f} {unit})"


class DataHandler(Handler, Protocol):
    """The handler of a kind that holds data: it also counts the contents, and deletes only what is empty."""

    def contents(self, record: StateRecord, prefix: str = "", /) -> Contents:
        """The contents under `prefix`; counting stops at a limit. Empty if the resource does not exist."""
        ...


class BucketHandler(DataHandler, Protocol):
    """The handler of buckets: it also deletes the objects of one run."""

    def region_of(self, name: str, region: str, /) -> str | None:
        """The region of a bucket by one request; None if it does not exist. region: where it is expected."""
        ...

    def key(self, record: StateRecord, /) -> str:
        """The key that encrypts its objects and that replicas must be allowed to use; "" without one."""
        ...

    def empty(self, record: StateRecord, prefix: str = "", /) -> Contents:
        """Delete everything under `prefix`, old versions and unfinished uploads included; return what was deleted."""
        ...

    def undelete(self, record: StateRecord, prefix: str, since: datetime, /) -> Contents:
        """Bring back the objects under `prefix` that were deleted or replaced since then, as they were; return them.

        Needs a bucket that keeps old versions. Objects that are new since then stay.
        """
        ...
