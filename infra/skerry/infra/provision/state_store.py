"""Stores the state of a run as numbered serials and a journal; at most one process holds its lock.

A serial is created with `Store.create`: the process that creates it holds the lock, and every other one gets Conflict.
The holder journals under its serial before and after each cloud call; releasing the lock folds the journal into the
next serial. No journaled change is lost: a reader folds the journals of the newest serial and of the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote

from skerry.infra.provision.state import JournalEntry, State, journal_entry_bytes, parse_journal_entry
from skerry.runtime.errors import Conflict, Corrupt, SkerryError
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from skerry.infra.provision.state import Entry, Holder, Id
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# The commands that remove an object, and a folder, by the scheme of the store.
_REMOVERS: Final = {
    "s3": ("aws s3 rm {uri}", "aws s3 rm --recursive {uri}"),
    "gs": ("gcloud storage rm {uri}", "gcloud storage rm -r {uri}"),
    "az": (
        "az storage blob delete --container-name {bucket} --name {key}",
        "az storage blob delete-batch --source {bucket} --pattern {all}",
    ),
    "hf": ("hf buckets rm hf://buckets/{path}", "hf buckets rm --recursive hf://buckets/{path}"),
    "file": ("rm {path}", "rm -r {path}"),
}
# Old serials are kept for people only.
_KEEP: Final = 10
# A live holder that was unlocked learns it within this time; until then its calls are idempotent by name.
_CHECK_S: Final = 1.0
_UNLOCKED: Final = "the state was unlocked during this operation; run `skerry plan` to see what is left to do"


class StateStore:
    """The state of one run. abandoned: whether a lock holder is certainly dead, so that its lock may be taken over."""

    def __init__(self, store: Store, clock: Clock, abandoned: Callable[[Holder], bool]) -> None:
        self._store = store
        self._clock = clock
        self._abandoned = abandoned

    def load(self) -> State | None:
        """The current state with its journal; None if none exists. Raises Corrupt if it cannot be read."""
        serials = self._serials()
        while serials:
            state = self._at(serials[-1])
            # A serial that was closed during the read has passed its journal on to the next one.
            if (current := self._serials())[-1:] == serials[-1:]:
                return state
            serials = current
        return None

    def hold(
        self, holder: Holder, base: State | None, run: str, accounts: Mapping[str, str] | None = None
    ) -> LockedState:
        """Lock the state by creating the serial after `base`, the state as loaded. accounts: None keeps those of it.

        Raises Conflict if another process holds the lock, or the state has changed since it was loaded.
        """
        current = self.load()
        if current is not None and current.holder is not None and not self._abandoned(current.holder):
            raise Conflict(
                f"the state is locked: {current.holder}; wait for it, or, if that process is dead, run `skerry unlock`"
            )
        newest, read = (0 if state is None else state.serial for state in (current, base))
        if newest != read or (current is not None and base is not None and current.lineage != base.lineage):
            raise Conflict(f"the state has changed: read={read} found={newest}; run the same command again")
        if current is None:
            current = State(lineage=self._clock.nonce(), serial=0, run=run)
        locked = dataclasses.replace(
            current,
            serial=current.serial + 1,
            holder=holder,
            written=self._clock.utc_text(),
            accounts=current.accounts if accounts is None else accounts,
        )
        self._create(locked)
        return LockedState(self, self._store, self._clock, locked)

    def unlock(self) -> Holder | None:
        """End the lock of a dead holder and return it; None if the state is not locked. Its journal is kept."""
        current = self.load()
        if current is None or current.holder is None:
            return None
        self._create(
            dataclasses.replace(current, serial=current.serial + 1, holder=None, written=self._clock.utc_text())
        )
        return current.holder

    def remove(self) -> None:
        """Delete all of it, the newest serial last."""
        listed = [entry.key for entry in self._store.list(keys.STATE)]
        newest = keys.state(max((keys.serial_of(key) or 0 for key in listed), default=0))
        self._delete([key for key in listed if key != newest])
        self._delete([key for key in listed if key == newest])

    def is_superseded(self, serial: int) -> bool:
        """True if another serial is the newest, or none exists.

        Lists nothing below this serial: an apply of a thousand jobs journals thousands of notes there.
        """
        later = self._store.list(keys.STATE, keys.state_note(serial, keys.MAX_NOTE))
        return any(keys.serial_of(entry.key) for entry in later) or not self._store.list(keys.state(serial))

    def close(self, locked: State) -> State:
        """Create the unlocked serial with all that the holder journaled; delete old serials and folded journals."""
        unlocked = dataclasses.replace(locked, serial=locked.serial + 1, holder=None, written=self._clock.utc_text())
        self._create(unlocked)
        # Journals under older serials are not read any more: everything is folded into this serial.
        listed = [entry.key for entry in self._store.list(keys.STATE)]
        serials = [key for key in listed if keys.serial_of(key) is not None]
        self._delete([key for key in listed if keys.serial_of(key) is None and key < keys.state(unlocked.serial)])
        self._delete(serials[:-_KEEP])
        return unlocked

    def _at(self, serial: int) -> State:
        data = self._store.read(keys.state(serial))
        if data is None:
            raise Corrupt(f"the state was deleted while it was read: {keys.state(serial)}")
        # Without this serial alone, its journal would be read as that of the next lock, which takes the same number.
        with self._naming_the_next_step(keys.STATE):
            state = State.parse(data, keys.state(serial))
        unlock = "" if state.holder is None else ", and end its lock with `skerry unlock`"
        return state.with_journal([*self._journal(serial - 1, unlock), *self._journal(serial, unlock)])

    def _journal(self, serial: int, unlock: str) -> Sequence[JournalEntry]:
        if serial < 1:
            return ()
        listed = [entry.key for entry in self._store.list(keys.state_notes_prefix(serial))]
        with ThreadPoolExecutor(max(1, self._store.profile.streams)) as pool:
            lines = list(pool.map(self._store.read, listed))
        entries: list[JournalEntry] = []
        for key, data in zip(listed, lines, strict=True):
            if data is not None:
                with self._naming_the_next_step(key, unlock):
                    entries.append(parse_journal_entry(data, key))
        return entries

    @contextlib.contextmanager
    def _naming_the_next_step(self, key: str, unlock: str = "") -> Generator[None]:
        """Add to the error of a damaged document how to continue without it. key: of the object or folder to remove."""
        try:
            yield
        except Corrupt as error:
            where, command = _how_to_remove(f"{self._store.uri}/{key}")
            raise Corrupt(
                f"{error}; when no other skerry command runs, keep a copy of {where}, then remove it with "
                f"`{command}`{unlock}; `skerry plan` finds what exists by names and tags, and `skerry apply` writes "
                "the state anew"
            ) from error

    def _serials(self) -> list[int]:
        numbers = (keys.serial_of(entry.key) for entry in self._store.list(keys.STATE))
        return [serial for serial in numbers if serial is not None]

    def _create(self, state: State) -> None:
        if not self._store.create(keys.state(state.serial), state.to_bytes()):
            data = self._store.read(keys.state(state.serial))
            other = None if data is None else State.parse(data, keys.state(state.serial)).holder
            raise Conflict(f"another process was first: {other or 'the state has changed'}; run the same command again")
        # After a very long pause this may have created again a serial that was passed and deleted.
        if self.is_superseded(state.serial):
            raise Conflict("the state has changed; run the same command again")

    def _delete(self, listed: Sequence[str]) -> None:
        with ThreadPoolExecutor(max(1, self._store.profile.streams)) as pool:
            for _ in pool.map(self._store.delete, listed):
                pass


def _how_to_remove(uri: str) -> tuple[str, str]:
    """The name of an object, or of a folder if it ends in "/", for a shell, and the command that removes it."""
    scheme, _, rest = uri.partition("://")
    path = unquote(rest) if scheme == "file" else rest
    bucket, _, key = path.partition("/")
    parts = {"uri": uri, "path": path, "bucket": bucket, "key": key, "all": f"{key}*"}
    quoted = {name: shlex.quote(part) for name, part in parts.items()}
    command = _REMOVERS.get(scheme, _REMOVERS["file"])[uri.endswith("/")]
    return quoted["path" if scheme == "file" else "uri"], command.format_map(quoted)


class LockedState:
    """The state while this process holds its lock. Thread-safe.

    A context manager that ends in `release`; after a crash the journal remains.
    """

    def __init__(self, file: StateStore, store: Store, clock: Clock, locked: State) -> None:
        self._file = file
        self._store = store
        self._clock = clock
        self._locked = locked
        self._guard = threading.Lock()
        self._entries: dict[str, dict[int, Entry]] = {}
        for entry in locked.entries:
            self._entries.setdefault(entry.record.address, {})[entry.record.generation] = entry
        self._number = 0
        self._closed = False
        self._lost = False
        self._checked = clock.now()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._closed:
            return
        if error is None:
            self.release()
            return
        # The first error is raised; the journal holds the same as its fold.
        with contextlib.suppress(SkerryError):
            self.release()

    @property
    def lost(self) -> bool:
        """True if the lock was taken away: no operation may be started any more."""
        return self._lost

    def delete_state(self) -> None:
        """Delete the state itself, and with it this lock."""
        self._closed = True
        self._file.remove()

    @property
    def run(self) -> str:
        """The URI of the run."""
        return self._locked.run

    @property
    def entries(self) -> list[Entry]:
        """All entries, with those journaled so far."""
        with self._guard:
            return [entry for generations in self._entries.values() for entry in generations.values()]

    def entry(self, key: Id) -> Entry | None:
        """The entry of one generation of a resource."""
        with self._guard:
            return self._entries.get(key.address, {}).get(key.generation)

    def generations(self, address: str) -> list[Entry]:
        """The entries of every generation of a resource, oldest first."""
        with self._guard:
            generations = self._entries.get(address, {})
            return [generations[number] for number in sorted(generations)]

    def note(self, key: Id, entry: Entry | None) -> None:
        """Journal the new entry, or its removal. Raises Conflict if the lock was taken away."""
        with self._guard:
            if self._lost:
                raise Conflict(_UNLOCKED)
            self._number += 1
            number = self._number
            due = self._clock.now() - self._checked >= _CHECK_S
            if due:
                self._checked = self._clock.now()
        if due and self._file.is_superseded(self._locked.serial):
            self._lost = True
            raise Conflict(_UNLOCKED)
        line = JournalEntry(address=key.address, generation=key.generation, entry=entry)
        if not self._store.create(keys.state_note(self._locked.serial, number), journal_entry_bytes(line)):
            raise Conflict("another process writes to the journal of this lock; run `skerry plan`")
        with self._guard:
            generations = self._entries.setdefault(key.address, {})
            if entry is None:
                generations.pop(key.generation, None)
            else:
                generations[key.generation] = entry

    def release(self) -> State:
        """Fold the journal into the next serial, which is unlocked."""
        entries = tuple(sorted(self.entries, key=lambda entry: entry.id))
        return self._file.close(dataclasses.replace(self._locked, entries=entries))
