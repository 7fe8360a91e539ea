"""The changes of a run's settings after its start, read in order. Not thread-safe; holds what it has read.

Records are numbered without gaps, so one GET of the next number is enough to see a new one. Each names its predecessor.
Which one a round uses is in the round's decision: what a replica has read decides nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.errors import Corrupt, Diverged
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import slot_lists

if TYPE_CHECKING:
    from skerry.runtime.log.log import RunLog, Stored
    from skerry.runtime.log.run_record import Settings


class RunSettings:
    """The changed settings of one run, as far as they were read."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._first = log.run  # as run.json says; the log's own follows the newest settings
        self._known: list[Stored[Settings]] = []

    @property
    def end(self) -> tuple[int | None, float | None]:
        """The rounds and the work of the run, by the newest record that was read, or else by run.json."""
        last = self._known[-1].record if self._known else self._first
        return last.rounds, last.work

    @property
    def slots(self) -> tuple[str, ...] | None:
        """The expected slots, by the newest record that was read; None if no record has any."""
        return self._slot_lists()[-1] if any(stored.record.slots for stored in self._known) else None

    @property
    def removed(self) -> frozenset[str]:
        """The slots that were expected once, and are not by the newest record that was read."""
        lists = self._slot_lists()
        return frozenset(slot for slots in lists for slot in slots).difference(lists[-1])

    def slots_of(self, digest: str | None, slot: str) -> tuple[str, ...] | None:
        """The slots by which `slot` is numbered in the round after one whose decision names this record, or none.

        A new slot is in none of these: it takes the first later ones that have it. None if no record has slots.
        """
        if self.slots is None:
            return None
        lists = self._slot_lists()
        lists = lists[0 if digest is None else 1 + [stored.digest for stored in self._known].index(digest) :]
        return next((slots for slots in lists if slot in slots), lists[0])

    def sets_outer(self, digest: str) -> bool:
        """True if this record or one before it sets the outer loop, and does not change slots alone."""
        lists = self._slot_lists()
        last = [stored.digest for stored in self._known].index(digest)
        return any(lists[number] == lists[number + 1] for number in range(last + 1))

    def read(self) -> None:
        """Read every new record. One GET, and one for each. Raises Diverged if a record does not follow the last."""
        while self._read_next():
            pass

    def of_round(self, round_number: int) -> str | None:
        """The digest of the newest record that was read and may be used in a round; None if there is none."""
        return next((s.digest for s in reversed(self._known) if s.record.from_round <= round_number), None)

    def reopens(self, round_number: int) -> bool:
        """True if the run was over before this round, and a record that was read has added rounds to it."""
        earlier = [self._first, *(stored.record for stored in self._known)]
        return any(
            before.rounds is not None
            and stored.record.rounds != before.rounds
            and stored.record.from_round == round_number
            # A run that makes up for lost work ends later than `rounds`.
            and (round_number == before.rounds or (before.work is not None and round_number > before.rounds))
            for before, stored in zip(earlier, self._known, strict=False)
        )

    def named(self, digest: str, round_number: int) -> Settings:
        """The record that the decision of a round names.

        Raises Corrupt if it is not stored, Diverged if it must not be used in that round yet.
        """
        while (settings := next((s.record for s in self._known if s.digest == digest), None)) is None:
            if not self._read_next(exists=True):
                raise Corrupt(
                    f"settings are missing: digest={digest} known={len(self._known)}; the decision of round "
                    f"{round_number} names them, and they must never be deleted; run `skerry doctor RUN`"
                )
        if settings.from_round > round_number:
            raise Diverged(
                f"the decision of round {round_number} names settings before their time: number={settings.number} "
                f"from_round={settings.from_round}"
            )
        return settings

    def _slot_lists(self) -> list[tuple[str, ...]]:
        return slot_lists(self._first, [stored.record for stored in self._known])

    def _read_next(self, *, exists: bool = False) -> bool:
        number = len(self._known) + 1
        stored = self._log.read_settings(number, exists=exists)
        if stored is None:
            return False
        previous = self._known[-1].digest if self._known else GENESIS
        if (stored.record.number, stored.record.previous) != (number, previous):
            raise Diverged(f"settings do not follow their predecessor: key={keys.settings(number)}")
        self._known.append(stored)
        return True
