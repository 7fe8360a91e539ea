"""Reads the log of a run repeatedly, immutable records only once, and returns its current view. Never writes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from skerry.infra.observe.build_view import SILENT_S, LogSnapshot, build_view
from skerry.infra.observe.run_settings import RunSettings
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Commit, Heartbeat, Outcome, Receipt, Record, Run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

R = TypeVar("R", bound=Record)

# Rounds to search for a common receipt: receipts trail the head by a round or two, after a restart by more.
RECEIPT_WINDOW = 8


class Observer:
    """Reads one run repeatedly. Not thread-safe."""

    def __init__(self, store: Store, run: Run, clock: Clock) -> None:
        self._store = store
        self._run = run
        self._settings = RunSettings(first=run)
        self._clock = clock
        self._changed: dict[str, tuple[Heartbeat, float]] = {}
        self._closed = 0
        self._last_commit: Commit | None = None
        self._receipts: dict[str, Receipt] = {}
        self._outcomes: dict[str, Outcome] = {}

    def view(self, patience_s: float = SILENT_S) -> RunView:
        """The current view. Replicas silent for `patience_s` and more are marked from the second call on.

        Makes a few listings and one read per replica. Raises what the store raises, and Corrupt for a damaged commit;
        other damaged records are skipped, because a view must not fail while the run continues.
        """
        self._follow_commits()
        self._settings = self._settings.read_newer(self._store)
        heartbeats = self._heartbeats()
        snapshot = LogSnapshot(
            closed=self._closed,
            last_commit=self._last_commit,
            heartbeats=heartbeats,
            outcomes=self._latest_outcomes(),
            receipts=self._recent_receipts(),
            silent_s=self._silence(heartbeats),
            patience_s=patience_s,
        )
        return build_view(self._settings.now, self._store.uri, snapshot)

    def _silence(self, heartbeats: Mapping[str, Heartbeat]) -> dict[str, float]:
        now = self._clock.now()
        silence: dict[str, float] = {}
        for slot, beat in heartbeats.items():
            before = self._changed.get(slot)
            if before is None or before[0] != beat:
                self._changed[slot] = beat, now
            if before is not None:
                silence[slot] = now - self._changed[slot][1]
        return silence

    def _follow_commits(self) -> None:
        after = keys.commit(self._closed - 1) if self._closed else None
        listed = [entry.key for entry in self._store.list(keys.COMMITS, after=after) if _is_commit(entry.key)]
        if not listed:
            return
        key = listed[-1]
        data = self._store.read(key)
        if data is not None:
            self._last_commit = Commit.parse(data, key)
            self._closed = self._last_commit.round + 1

    def _heartbeats(self) -> dict[str, Heartbeat]:
        heartbeats = (self._read(Heartbeat, entry.key) for entry in self._store.list(keys.HEARTBEATS))
        return {beat.slot: beat for beat in heartbeats if beat is not None and beat.run == self._run.nonce}

    def _latest_outcomes(self) -> dict[str, Outcome]:
        last: dict[str, str] = {}
        for entry in self._store.list(keys.OUTCOMES):  # sorted: a slot's highest incarnation comes last
            with suppress(Invalid):  # a foreign object
                last[keys.slot_of(entry.key)] = entry.key
        for key in last.values():
            if key not in self._outcomes and (outcome := self._read(Outcome, key)) is not None:
                self._outcomes[key] = outcome
        return {slot: self._outcomes[key] for slot, key in last.items() if key in self._outcomes}

    def _recent_receipts(self) -> list[Receipt]:
        oldest = keys.receipts_prefix(max(0, self._closed - RECEIPT_WINDOW))
        self._receipts = {key: receipt for key, receipt in self._receipts.items() if key > oldest}
        for entry in self._store.list(keys.RECEIPTS, after=oldest):
            if entry.key not in self._receipts and (receipt := self._read(Receipt, entry.key)) is not None:
                self._receipts[entry.key] = receipt
        return list(self._receipts.values())

    def _read(self, kind: type[R], key: str) -> R | None:
        data = self._store.read(key)
        try:
            return None if data is None else kind.parse(data, key)
        except Corrupt:
            return None


def _is_commit(key: str) -> bool:
    with suppress(Invalid):
        return key == keys.commit(keys.round_of(key))
    return False
