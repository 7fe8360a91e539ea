"""What was made for a run, as a document: one entry for each generation of each resource, and who is at it.

Holds no secret: settings and outputs are names, numbers and policies. A newer version's document is refused, an older
one's is upgraded. Does no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from skerry.infra.handler import Condition, Made
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

VERSION: Final = 1
"""Of the document. A change that an older skerry would misread needs a new one, and a line in `_UPGRADES`."""

# From each older version to the next.
_UPGRADES: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}


class Id(NamedTuple):
    """One generation of a resource."""

    address: str
    generation: int

    def __str__(self) -> str:
        return f"{self.address}#{self.generation}" if self.generation else self.address


class Phase(enum.Enum):
    """What was last begun with an entry. Anything but READY was written before a call whose end is not known."""

    READY = "ready"
    CREATING = "creating"
    UPDATING = "updating"
    DELETING = "deleting"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is known of one generation of a resource. condition: as last seen; a cloud forgets how a job ended.

    stopped: somebody has stopped this job, or what would start it again: only an apply does.
    """

    made: Made
    phase: Phase = Phase.READY
    condition: Condition = Condition.READY
    stopped: bool = False

    @property
    def id(self) -> Id:
        """Which generation of which resource."""
        return Id(self.made.address, self.made.generation)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who is changing things: for people, and for finding out whether it still lives.

    token: of this one hold. pid, started, boot: its process, as the kernel of `host` tells it.
    """

    token: str
    who: str
    host: str
    doing: str
    since: str
    pid: int
    started: int
    boot: str

    def __str__(self) -> str:
        return f"{self.doing} by {self.who} (pid {self.pid}) since {self.since}"


@dataclass(frozen=True, kw_only=True)
class Note:
    """One line of the journal: this entry is now so; or gone, if there is none."""

    address: str
    generation: int
    entry: Entry | None


@dataclass(frozen=True, kw_only=True)
class State:
    """The document. lineage: of the first apply of this run. folded: notes of the serial before that are in here."""

    lineage: str
    serial: int
    run: str
    entries: tuple[Entry, ...] = ()
    holder: Holder | None = None
    written: str = ""
    folded: int = 0
    version: int = VERSION

    def by_id(self) -> dict[Id, Entry]:
        """The entries by what they are of."""
        return {entry.id: entry for entry in self.entries}

    def with_notes(self, notes: Iterable[Note]) -> State:
        """The state after these, in this order."""
        entries = self.by_id()
        for note in notes:
            key = Id(note.address, note.generation)
            if note.entry is None:
                entries.pop(key, None)
            else:
                entries[key] = note.entry
        return dataclasses.replace(self, entries=tuple(entries[key] for key in sorted(entries)))

    def to_bytes(self) -> bytes:
        """The document, one entry a line: a person may have to read it."""
        return _STATE.dump_json(self, indent=1) + b"\n"

    @staticmethod
    def parse(data: bytes | memoryview, key: str) -> State:
        """The document in `data`. Raises Corrupt if it is none, Invalid if a newer skerry wrote it."""
        try:
            tree = json.loads(bytes(data))
            version = int(tree["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"not a state: {key}: {error}") from error
        if version > VERSION:
            raise Invalid(f"{key} is of version {version}, and this skerry knows up to {VERSION}; upgrade skerry")
        try:
            for old in range(version, VERSION):
                tree = _UPGRADES[old](tree)
            return _STATE.validate_python(tree)
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"not a state: {key}: {error}") from error


def note_bytes(note: Note) -> bytes:
    """A note for the journal."""
    return _NOTE.dump_json(note)


def parse_note(data: bytes | memoryview, key: str) -> Note:
    """The note in `data`. Raises Corrupt if it is none."""
    try:
        return _NOTE.validate_json(bytes(data))
    except ValidationError as error:
        raise Corrupt(f"not a note of the state's journal: {key}: {error}") from error


_STATE: Final = TypeAdapter(State)
_NOTE: Final = TypeAdapter(Note)
