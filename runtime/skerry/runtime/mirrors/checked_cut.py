"""Finds a cut of which every byte has been read, so that no restore and no verdict is begun that damage would end.

`find_cut` compares lengths; a fork reads everything, and comes after a verdict, which is created once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.mirrors.mirror import complete_checkpoints
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import check_fork

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.mirrors.restorable import Cut
    from skerry.runtime.store import Store

# After this time, and then twice as long up to an hour, what was damaged is read again: it may have been mended.
_REMEMBERED_S: Final = 300.0
_LONGEST_S: Final = 3600.0
# A mirror of a run that goes on keeps two checkpoints, and one of them may take long to be read.
_TRIES: Final = 3


class _Reading(NamedTuple):
    """The result of reading a whole cut. rounds: whole ones, before the damage. damage: None if there is none.

    left_out: damaged records that a run does without.
    """

    rounds: int
    damage: str | None
    left_out: tuple[str, ...] = ()


class CheckedCuts:
    """Finds cuts for one process, which may look every few seconds, and reads damaged ones seldom."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._readings: dict[tuple[str, int, int, str], _Reading] = {}
        self._remembered_s, self._forget_at = _REMEMBERED_S, 0.0

    def find(self, store: Store, at: int | None = None) -> Cut:
        """The newest cut of which a run can be made, or one of `at` rounds, without what is damaged.

        Raises Invalid if there is none, Corrupt with the damage if that is why, and what the store raises.
        """
        if self._readings and self._clock.now() >= self._forget_at:
            self._readings.clear()
            self._remembered_s = min(2 * self._remembered_s, _LONGEST_S)
        passed: list[str] = []
        for _ in range(_TRIES):
            listed = complete_checkpoints(store)
            passed.clear()
            if (cut := self._find(store, at, listed, passed)) is not None:
                return cut
            if complete_checkpoints(store) <= listed:
                break
            # Replicas go on: they have copied newer ones, and deleted those that were read.
        if not passed:
            find_cut(store, at)  # raises Invalid, with the reason
        why = "; ".join(dict.fromkeys(passed))
        raise Corrupt(
            f"nothing at {store.uri} can be restored: {why}; `skerry doctor {store.uri} --repair --from COPY` mends "
            "what another copy has, and `skerry restore OTHER-MIRROR` needs none"
        )

    def _find(self, store: Store, at: int | None, listed: set[int], passed: list[str]) -> Cut | None:
        """passed: gets the reasons for what is left out."""
        for newest in sorted(listed, reverse=True):
            wanted = at
            while True:
                try:
                    cut = find_cut(store, wanted, newest, needs_proof=at is None)
                except Invalid:
                    break
                reading = self._read(store, cut)
                passed += cut.skipped
                if reading.damage is None:
                    return replace(cut, skipped=tuple(dict.fromkeys((*passed, *reading.left_out))))
                passed.append(reading.damage)
                if at is not None or not cut.checkpoint <= reading.rounds < cut.round:
                    break
                wanted = reading.rounds  # those before the damaged one
        return None

    def _read(self, store: Store, cut: Cut) -> _Reading:
        key, whole = (store.uri, cut.round, cut.checkpoint, cut.commit), [0]
        if key not in self._readings:
            try:
                self._readings[key] = _Reading(cut.round, None, check_fork(store, cut, whole.append))
            except Corrupt as error:
                self._readings[key] = _Reading(whole[-1], str(error))
            self._forget_at = self._clock.now() + self._remembered_s  # from the end of a read, which may be long
        return self._readings[key]


def check_free(target: Store) -> None:
    """Raise Conflict if a run that leaves its store cannot be made in `target`."""
    run = read_run(target)
    if run is not None or target.list(keys.MEMBERS):
        has = "objects of another run" if run is None else f"run {run.name}"
        raise Conflict(f"{target.uri}, where the run would go on by itself, has {has}: empty that prefix")
