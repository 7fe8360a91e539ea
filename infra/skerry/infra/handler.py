"""The seam to a cloud: four verbs for one kind of resource, and what is said across it.

A handler decides nothing: it makes true what it is told, and tells what it sees. Every verb is idempotent by physical
name and tag; the engine repeats any of them after a crash. Does no I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping  # noqa: TC003  a parser reads the annotations of Made
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from skerry.infra.graph import Json, Life, Resource, Value, generation_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

RUN_TAG: Final = "skerry:run"
"""The run's URI: whose this is."""
ADDRESS_TAG: Final = "skerry:address"
GENERATION_TAG: Final = "skerry:generation"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One generation of a resource, as it shall be.

    settings: the resource's, references replaced as far as what they name exists. outputs: what is known of it from
    when it was made; empty if it is not known to exist. run: the run's URI. extra: the user's own tags.
    """

    resource: Resource
    generation: int
    run: str
    settings: Mapping[str, Value]
    outputs: Mapping[str, str] = field(default_factory=dict[str, str])
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def name(self) -> str:
        """What the cloud calls it."""
        return self.resource.name if self.resource.brought else generation_name(self.resource.name, self.generation)

    @property
    def tags(self) -> dict[str, str]:
        """What marks it as this run's, and what its user wants on it."""
        return {
            **self.extra,
            RUN_TAG: self.run,
            ADDRESS_TAG: self.resource.address,
            GENERATION_TAG: str(self.generation),
        }


class Condition(enum.Enum):
    """What a resource is fit for, as seen."""

    READY = "ready"
    """There, and usable; a job: waits, runs, or will be tried again."""
    DONE = "done"
    """A job that has ended well."""
    LOST = "lost"
    """A job that has ended otherwise and will not be tried again."""
    BROKEN = "broken"
    """There, and of no use; only a new one helps."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a cloud says of a resource.

    outputs: what references to it get. settings: those of its settings that can be read back, by their names; a setting
    that is absent here cannot be compared. owner: the run it is tagged with; None if it is nobody's. detail: why its
    condition is what it is, in words.
    """

    outputs: Mapping[str, str]
    settings: Mapping[str, Json]
    owner: str | None
    condition: Condition = Condition.READY
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What state remembers of one generation of a resource: enough to compare it, to refer to it, and to delete it."""

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

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """What there is under each name, in the order asked; None where there is nothing. As few calls as possible."""
        ...

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """Make it, wait until it can be used, and return its outputs. There already and of this run: as if just made.

        Raises Conflict if something of that name is there and is not of this run.
        """
        ...

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """Change these settings where it stands, and return its outputs. Never called for a setting in FIXED.

        The outputs are what they were: what refers to them is planned before. A setting that would change one (a number
        that counts versions) belongs into FIXED, or the output away; the engine refuses an update that does otherwise.
        """
        ...

    def delete(self, made: Made) -> None:
        """Take it away and wait until it is gone; gone already is success. A job is stopped and left in the records."""
        ...

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """Whatever of this kind is tagged with the run, whoever remembers it; jobs only while they wait or run."""
        ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """What something holds, or did. more: there is more than was counted. size_bytes: None if nobody says."""

    objects: int
    size_bytes: int | None = None
    more: bool = False
    noun: str = "object"

    def __str__(self) -> str:
        count = f"{'more than ' if self.more else ''}{self.objects} {self.noun}{'' if self.objects == 1 else 's'}"
        if self.size_bytes is None:
            return count
        unit, factor = next((one for one in (("GB", 1e9), ("MB", 1e6)) if self.size_bytes >= one[1]), ("kB", 1e3))
        return f"{count} ({self.size_bytes / factor:.1f} {unit})"


class DataHandler(Handler, Protocol):
    """Of a kind that holds data: what it holds can be told, and taken out."""

    def held(self, made: Made, prefix: str = "") -> Held:
        """What it holds under `prefix`; counting stops where there is much. Nothing, if it is not there."""
        ...

    def empty(self, made: Made, prefix: str = "") -> Held:
        """Delete all that it holds under `prefix`, older versions and cut-short uploads too; tell what that was."""
        ...
