"""Finds a cut of which every byte has been read, so that no verdict names a round from which no run can be made.

`find_cut` compares lengths; a fork reads everything, and comes after the verdict, which is created once.
"""

from __future__ import annotations

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


class _Damage(NamedTuple):
    """The first damage of a cut, after so many whole rounds; all rounds of the cut if its checkpoint is damaged."""

    rounds: int
    text: str


class CheckedCuts:
    """Finds cuts for one process, which looks every few seconds and reads damaged ones seldom."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._damaged: dict[tuple[int, int, str], _Damage] = {}
        self._remembered_s, self._forget_at = _REMEMBERED_S, 0.0

    def find(self, store: Store) -> Cut:
        """The newest cut of which a run can be made; damaged rounds and checkpoints are left out.

        Raises Invalid, with the damage, if there is none, and what the store raises.
        """
        if self._damaged and self._clock.now() >= self._forget_at:
            self._damaged.clear()
            self._remembered_s = min(2 * self._remembered_s, _LONGEST_S)
        for newest in sorted(complete_checkpoints(store), reverse=True):
            at: int | None = None
            while True:
                try:
                    cut = find_cut(store, at, newest)
                except Invalid:
                    break
                damage = self._damage_of(store, cut)
                if damage is None:
                    return cut
                if not cut.checkpoint <= damage.rounds < cut.round:
                    break
                at = damage.rounds  # those before the damaged one
        why = "; ".join(damage.text for damage in self._damaged.values()) or "no checkpoint is complete"
        raise Invalid(f"nothing at {store.uri} can be restored: {why}")

    def _damage_of(self, store: Store, cut: Cut) -> _Damage | None:
        key, whole = (cut.round, cut.checkpoint, cut.commit), [0]
        if key not in self._damaged:
            try:
                check_fork(store, cut, whole.append)
            except Corrupt as error:
                self._damaged[key] = _Damage(whole[-1], str(error))
                self._forget_at = self._clock.now() + self._remembered_s  # from the end of a read, which may be long
        return self._damaged.get(key)


def check_free(target: Store) -> None:
    """Raise Conflict if a run that leaves its store cannot be made in `target`."""
    run = read_run(target)
    if run is not None or target.list(keys.MEMBERS):
        has = "objects of another run" if run is None else f"run {run.name}"
        raise Conflict(f"{target.uri}, where the run would go on by itself, has {has}: empty that prefix")
