"""Where state lies: numbered serials and a journal, in a store; one holder at a time.

A serial is taken with `Store.create`: whoever makes it holds it, and everybody else hears who that is. What the holder
does is noted in a journal under that serial, before and after each call to a cloud, and folded into the next one. What
was noted is never lost: a reader folds the journals of the newest serial and of the one before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Self

from skerry.infra.state import Note, State, note_bytes, parse_note
from skerry.runtime import keys
from skerry.runtime.errors import Conflict, Corrupt, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.state import Entry, Holder, Id
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# Old serials are of use to people only; so many stay.
_KEEP: Final = 10
# A holder that was unlocked while it lived is told so within this time; its calls are idempotent by name until then.
_CHECK_S: Final = 1.0
_UNLOCKED: Final = "the state was unlocked while this was at work; see `skerry plan` for what is left to do"


class StateFile:
    """The state of one run. abandoned: whether a holder is certainly gone, so that its hold may be taken over."""

    def __init__(self, store: Store, clock: Clock, abandoned: Callable[[Holder], bool]) -> None:
        self._store = store
        self._clock = clock
        self._abandoned = abandoned

    def load(self) -> State | None:
        """The state as it is, with everything noted; None if there is none. Raises Corrupt if it cannot be read."""
        serials = self._serials()
        while serials:
            state = self._at(serials[-1])
            # One that was closed while it was read has given its notes to the next.
            if (now := self._serials())[-1:] == serials[-1:]:
                return state
            serials = now
        return None

    def hold(self, holder: Holder, base: State | None, run: str) -> Hold:
        """Take the serial after `base`, the state as loaded. Raises Conflict if somebody holds it, or it moved on."""
        now = self.load()
        if now is not None and now.holder is not None and not self._abandoned(now.holder):
            raise Conflict(
                f"the state is held: {now.holder}; wait for it, or, if it is gone for good, run `skerry unlock` first"
            )
        found, known = (0 if state is None else state.serial for state in (now, base))
        if found != known or (now is not None and base is not None and now.lineage != base.lineage):
            raise Conflict(f"the state moved on meanwhile: read={known} found={found}; run it again")
        if now is None:
            now = State(lineage=self._clock.nonce(), serial=0, run=run)
        held = dataclasses.replace(now, serial=now.serial + 1, holder=holder, written=self._clock.utc_text())
        self._create(held)
        return Hold(self, self._store, self._clock, held)

    def unlock(self) -> Holder | None:
        """End a hold whose holder is gone; returns it, or None if nobody held. What it noted is kept."""
        now = self.load()
        if now is None or now.holder is None:
            return None
        self._create(dataclasses.replace(now, serial=now.serial + 1, holder=None, written=self._clock.utc_text()))
        return now.holder

    def remove(self) -> None:
        """Delete all of it, the newest serial last."""
        entries = [entry.key for entry in self._store.list(keys.STATE)]
        newest = keys.state(max((keys.serial_of(key) or 0 for key in entries), default=0))
        self._delete([key for key in entries if key != newest])
        self._delete([key for key in entries if key == newest])

    def moved_past(self, serial: int) -> bool:
        """Whether this is not the newest serial any more, or not at all."""
        return self._serials()[-1:] != [serial]

    def close(self, held: State) -> State:
        """The serial after a hold, with all that its holder noted. Old serials and folded notes are deleted."""
        free = dataclasses.replace(held, serial=held.serial + 1, holder=None, written=self._clock.utc_text())
        self._create(free)
        # Under an older serial nobody reads any more, and in this one everything is folded.
        listed = [entry.key for entry in self._store.list(keys.STATE)]
        docs = [key for key in listed if keys.serial_of(key) is not None]
        self._delete([key for key in listed if keys.serial_of(key) is None and key < keys.state(free.serial)])
        self._delete(docs[:-_KEEP])
        return free

    def _at(self, serial: int) -> State:
        data = self._store.read(keys.state(serial))
        if data is None:
            raise Corrupt(f"the state went away while it was read: {keys.state(serial)}")
        state = State.parse(data, keys.state(serial))
        return state.with_notes([*self._notes(serial - 1), *self._notes(serial)])

    def _notes(self, serial: int) -> Sequence[Note]:
        if serial < 1:
            return ()
        listed = [entry.key for entry in self._store.list(keys.state_notes(serial))]
        with ThreadPoolExecutor(max(1, self._store.profile.streams)) as pool:
            found = list(pool.map(self._store.read, listed))
        return [parse_note(data, key) for key, data in zip(listed, found, strict=True) if data is not None]

    def _serials(self) -> list[int]:
        found = (keys.serial_of(entry.key) for entry in self._store.list(keys.STATE))
        return [serial for serial in found if serial is not None]

    def _create(self, state: State) -> None:
        if not self._store.create(keys.state(state.serial), state.to_bytes()):
            data = self._store.read(keys.state(state.serial))
            other = None if data is None else State.parse(data, keys.state(state.serial)).holder
            raise Conflict(f"somebody else was first: {other or 'the state moved on'}; run it again")
        # One that was away for very long may have made a serial again that is past and deleted.
        if self._serials()[-1] != state.serial:
            raise Conflict("the state moved on meanwhile; run it again")

    def _delete(self, found: Sequence[str]) -> None:
        with ThreadPoolExecutor(max(1, self._store.profile.streams)) as pool:
            for _ in pool.map(self._store.delete, found):
                pass


class Hold:
    """The state while it is ours. Thread-safe. A context manager that ends in `release`; a crash leaves the journal."""

    def __init__(self, file: StateFile, store: Store, clock: Clock, held: State) -> None:
        self._file = file
        self._store = store
        self._clock = clock
        self._held = held
        self._guard = threading.Lock()
        self._entries: dict[str, dict[int, Entry]] = {}
        for entry in held.entries:
            self._entries.setdefault(entry.made.address, {})[entry.made.generation] = entry
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
        # What went wrong is what is told; the journal is as good as its fold.
        with contextlib.suppress(SkerryError):
            self.release()

    @property
    def lost(self) -> bool:
        """Whether it was taken away: nothing more may be begun."""
        return self._lost

    def end_of_state(self) -> None:
        """The state itself is deleted, this hold with it."""
        self._closed = True
        self._file.remove()

    @property
    def run(self) -> str:
        """The URI of the run whose state this is."""
        return self._held.run

    @property
    def entries(self) -> list[Entry]:
        """Everything that is remembered, with what was noted so far."""
        with self._guard:
            return [entry for of_one in self._entries.values() for entry in of_one.values()]

    def entry(self, key: Id) -> Entry | None:
        """What is known of one generation of a resource."""
        with self._guard:
            return self._entries.get(key.address, {}).get(key.generation)

    def generations(self, address: str) -> list[Entry]:
        """What is known of every generation of a resource, oldest first."""
        with self._guard:
            known = self._entries.get(address, {})
            return [known[generation] for generation in sorted(known)]

    def note(self, key: Id, entry: Entry | None) -> None:
        """Write down that this entry is now so, or gone. Raises Conflict if the hold was taken away."""
        with self._guard:
            if self._lost:
                raise Conflict(_UNLOCKED)
            self._number += 1
            number = self._number
            due = self._clock.now() - self._checked >= _CHECK_S
            if due:
                self._checked = self._clock.now()
        if due and self._file.moved_past(self._held.serial):
            self._lost = True
            raise Conflict(_UNLOCKED)
        note = Note(address=key.address, generation=key.generation, entry=entry)
        if not self._store.create(keys.state_note(self._held.serial, number), note_bytes(note)):
            raise Conflict("somebody else writes to the journal of this hold; see `skerry plan`")
        with self._guard:
            known = self._entries.setdefault(key.address, {})
            if entry is None:
                known.pop(key.generation, None)
            else:
                known[key.generation] = entry

    def release(self) -> State:
        """Fold the journal into the next serial, which nobody holds."""
        entries = tuple(sorted(self.entries, key=lambda entry: entry.id))
        return self._file.close(dataclasses.replace(self._held, entries=entries))
