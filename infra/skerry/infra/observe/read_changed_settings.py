"""Reads the settings of a run that were changed after its start (decision 0024 of the runtime). Never writes."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, Decision
from skerry.runtime.log.run_record import Settings, slot_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

CHANGEABLE: Final = ("rounds", "work", "outer_lr", "outer_momentum")
"""The fields of run.json that a change may set, beside the slots."""

_NAMED: Final = 3


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A run with all changes of its settings, in order. first: run.json; last_digest: of the newest change.

    begins: the first round with the slots of each change, as far as known; sought: the next round whose decision may
    name another one.
    """

    first: Run
    changes: tuple[Settings, ...] = ()
    last_digest: str = GENESIS
    begins: tuple[int, ...] = ()
    sought: int = 0

    @property
    def now(self) -> Run:
        """The run with the settings of the newest change, whether its round has come or not."""
        if not self.changes:
            return self.first
        update = {name: getattr(self.changes[-1], name) for name in CHANGEABLE}
        return self.first.model_copy(update=update | {"slots": self._lists[-1]})

    @property
    def digests(self) -> list[str]:
        """Those of the changes, in order, after GENESIS for run.json."""
        return [*(change.previous for change in self.changes), self.last_digest]

    @property
    def differences(self) -> list[tuple[Settings, dict[str, str]]]:
        """Each change, and what is different since then, by field in words: outer_lr 0.7 to 0.5."""
        before: list[Run | Settings] = [self.first, *self.changes]
        return [
            (change, _values(before[number], change) | _slots(self._lists[number], self._lists[number + 1]))
            for number, change in enumerate(self.changes)
        ]

    @cached_property
    def named(self) -> frozenset[str]:
        """All slots that were ever expected."""
        return frozenset(slot for slots in self._lists for slot in slots)

    def slots_of(self, round_number: int) -> tuple[str, ...]:
        """The slots that the log names for a round, by what `read_begins` has read."""
        return self._lists[bisect_right(self.begins, round_number)]

    @cached_property
    def _lists(self) -> list[tuple[str, ...]]:
        return slot_lists(self.first, self.changes)

    def had(self, name: str, value: object) -> bool:
        """True if a field of the run has this value, or had it before a change."""
        return value in {getattr(self.first, name), *(getattr(each, name) for each in self.changes)}

    def read_newer(self, store: Store) -> RunSettings:
        """With the changes that were stored since. One read, and one for each. Raises Corrupt if one is damaged."""
        settings = self
        while (data := store.read(key := keys.settings(len(settings.changes) + 1))) is not None:
            change = Settings.parse(data, key)
            if (change.run, change.previous) != (self.first.nonce, settings.last_digest):
                raise Corrupt(f"settings do not follow their predecessor, or are of another run: key={key}")
            settings = replace(settings, changes=(*settings.changes, change), last_digest=digest_of(data))
        return settings

    def read_begins(self, store: Store) -> RunSettings:
        """With the rounds from which changed slots hold. Reads about one decision for each such change.

        A damaged decision names nothing.
        """
        digests = self.digests
        begins, sought = list(self.begins), self.sought
        while (known := len(begins)) < len(self.changes):
            if self._lists[known] == self._lists[known + 1]:  # no other slots: its round does not matter
                begins.append(begins[-1] if begins else 0)
                continue
            number = max(sought, self.changes[known].from_round)
            if (data := store.read(key := keys.decision(number, 0))) is None:
                break
            sought = number + 1
            with suppress(Corrupt):
                decision = Decision.parse(data, key)
                if decision.run != self.first.nonce or decision.settings is None:
                    continue
                if decision.settings not in digests:  # stored after these changes were read
                    sought = number
                    break
                begins += [sought] * (digests.index(decision.settings) - known)
        return replace(self, begins=tuple(begins), sought=sought)


def shortened_list(names: Sequence[str]) -> str:
    """The first few names, and how many more there are: a-0, a-1, a-2 and 5 more."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _values(before: Run | Settings, after: Settings) -> dict[str, str]:
    values = {name: (getattr(before, name), getattr(after, name)) for name in CHANGEABLE}
    return {name: f"{name} {_shown(old)} to {_shown(new)}" for name, (old, new) in values.items() if old != new}


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _slots(before: Sequence[str], after: Sequence[str]) -> dict[str, str]:
    parts = [
        f"{verb} {shortened_list(changed)}"
        for verb, slots, others in (("adds", after, before), ("removes", before, after))
        if (changed := [slot for slot in slots if slot not in others])
    ]
    return {"slots": ", ".join(parts)} if parts else {}
