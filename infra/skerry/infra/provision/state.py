"""The state document of a run: one entry for each generation of each resource, and the holder of the lock.

Contains no secrets: settings and outputs are names, numbers and policies. A newer version's document is refused, an
older one's is upgraded. Does no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping  # noqa: TC003  a parser reads the annotations of State
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from skerry.infra.provision.handler import Condition, StateRecord
from skerry.runtime.errors import Corrupt, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

VERSION: Final = 1
"""The format version. A change that an older skerry would misread needs a new one, and a line in `UPGRADES`."""

# From each older version to the next.
UPGRADES: Final[Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}


class Id(NamedTuple):
    """One generation of a resource."""

    address: str
    generation: int

    def __str__(self) -> str:
        return f"{self.address}#{self.generation}" if self.generation else self.address


class StatePhase(enum.Enum):
    """The last operation on an entry. All but READY are written before a call, so its result may be unknown."""

    READY = "ready"
    CREATING = "creating"
    UPDATING = "updating"
    DELETING = "deleting"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One generation of a resource. condition: as last observed, because a cloud forgets how a job ended.

    stopped: `skerry cancel` has stopped this job; only an apply starts it again.
    """

    record: Annotated[StateRecord, Field(alias="made")]  # stored under its first name
    phase: StatePhase = StatePhase.READY
    condition: Condition = Condition.READY
    stopped: bool = False

    @property
    def id(self) -> Id:
        """The generation of the resource."""
        return Id(self.record.address, self.record.generation)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds the state's lock: for people, and to check whether it still runs.

    token: unique for this lock. pid, started, boot: its process, as the kernel of `host` identifies it.
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
class JournalEntry:
    """One line of the journal: the new entry, or None for a removed one."""

    address: str
    generation: int
    entry: Entry | None


@dataclass(frozen=True, kw_only=True)
class State:
    """The document. lineage: of the first apply of this run. folded: journal entries of the previous serial in here.

    accounts: where the entries are, see Target.identity; empty if an older skerry wrote the state.
    """

    lineage: str
    serial: int
    run: str
    entries: tuple[Entry, ...] = ()
    holder: Holder | None = None
    written: str = ""
    folded: int = 0
    version: int = VERSION
    accounts: Mapping[str, str] = field(default_factory=dict[str, str])

    def by_id(self) -> dict[Id, Entry]:
        """The entries by generation."""
        return {entry.id: entry for entry in self.entries}

    def with_journal(self, journal: Iterable[JournalEntry]) -> State:
        """The state after these journal entries, in this order."""
        entries = self.by_id()
        for line in journal:
            key = Id(line.address, line.generation)
            if line.entry is None:
                entries.pop(key, None)
            else:
                entries[key] = line.entry
        return dataclasses.replace(self, entries=tuple(entries[key] for key in sorted(entries)))

    def to_bytes(self) -> bytes:
        """The document, indented, because people read it."""
        return _STATE.dump_json(self, indent=1, by_alias=True) + b"\n"

    @staticmethod
    def parse(data: bytes | memoryview, key: str) -> State:
        """Parse a document. Raises Corrupt if it is damaged, Invalid if a newer skerry wrote it."""
        try:
            tree = json.loads(bytes(data))
            version = int(tree["version"])
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"not a state: {key}: {error}") from error
        if version > VERSION:
            raise Invalid(f"unknown state version: key={key} version={version} supported={VERSION}; upgrade skerry")
        try:
            for old in range(version, VERSION):
                tree = UPGRADES[old](tree)
            return _STATE.validate_python(tree)
        except (ValueError, KeyError, TypeError) as error:
            raise Corrupt(f"not a state: {key}: {error}") from error


def journal_entry_bytes(line: JournalEntry) -> bytes:
    """A journal entry as JSON."""
    return _JOURNAL_ENTRY.dump_json(line, by_alias=True)


def parse_journal_entry(data: bytes | memoryview, key: str) -> JournalEntry:
    """Parse a journal entry. Raises Corrupt if it is damaged."""
    try:
        return _JOURNAL_ENTRY.validate_json(bytes(data))
    except ValidationError as error:
        raise Corrupt(f"not a journal entry of the state: {key}: {error}") from error


_STATE: Final = TypeAdapter(State)
_JOURNAL_ENTRY: Final = TypeAdapter(JournalEntry)
