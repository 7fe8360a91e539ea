"""The operator of a simulated run: changes its settings while it runs or after its end, as `skerry extend` does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.training import Document
    from tests.simulation.world import Process

    from skerry.runtime.store.memory import MemoryStore


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of settings at a time. more: rounds that are added. ahead: from so many rounds after the head on.

    slots: all from now on; then nothing else changes.
    """

    at_s: float
    more: int = 0
    ahead: int = 0
    lr: float = 0.7
    slots: tuple[str, ...] | None = None


class ChangedSettings:
    """Every change so far, in order, and the checks of the decisions that name them. broken: takes a violation."""

    def __init__(
        self, slots: tuple[str, ...], rounds: int, work: float | None, broken: Callable[[str, str], None]
    ) -> None:
        self.slots = [slots]  # of run.json, and of each record
        self.rounds = rounds
        self.work = work
        self.ends = [(rounds, work)]  # of run.json, and of each record
        self._broken = broken
        self._records: list[tuple[str, Document]] = []
        self._named = 0
        self._of_round: dict[int, int] = {}

    def write(self, engine: MemoryStore, change: Change, head: int, slots: int) -> bool:
        """Store the next record. Returns False if there is no run yet."""
        run = engine.read(keys.RUN)
        if run is None:
            return False
        self.rounds += change.more
        if change.slots is None:
            self.work = None if self.work is None else float(self.rounds * slots)
        self.ends.append((self.rounds, self.work))
        first = {"from_round": 0, "outer_lr": 0.7, "slots": None}
        before = self._records[-1] if self._records else (GENESIS, first)
        settings = Settings(
            run=json.loads(bytes(run))["nonce"],
            number=len(self._records) + 1,
            previous=before[0],
            from_round=max(before[1]["from_round"], head + change.ahead),
            rounds=self.rounds,
            work=self.work,
            outer_lr=change.lr if change.slots is None else before[1]["outer_lr"],
            outer_momentum=0.9,
            by="operator",
            created="",
            slots=change.slots or (self.slots[-1] if before[1].get("slots") else None),
        )
        self.slots.append(change.slots or self.slots[-1])
        body = settings.to_bytes()
        assert engine.create(keys.settings(settings.number), body)
        self._records.append((hashlib.sha256(body).hexdigest(), json.loads(body)))
        return True

    def decided(self, round_number: int, digest: str | None) -> None:
        """Check that a decision names no change before its time, and none older than an earlier decision's."""
        number = self.number_of(digest)
        if number < self._named:
            self._broken("settings", f"round {round_number} is decided with settings {number} after {self._named}")
        if number > 0 and self._records[number - 1][1]["from_round"] > round_number:
            self._broken("settings", f"round {round_number} is decided with settings {number}, which are of later")
        self._named = max(number, self._named)
        self._of_round[round_number] = number

    def outer(self, digest: str | None) -> bytes:
        """The outer step of a round whose decision names this, as a part of what is folded; empty for run.json's."""
        number = self.number_of(digest)
        if all(before != after for before, after in pairwise(self.slots[: number + 1])):
            return b""
        named = self._records[number - 1][1]
        return outer_step(named["outer_lr"], named["outer_momentum"])

    def number_of(self, digest: str | None) -> int:
        """The number of the record with this digest; 0 for run.json, -1 if there is none."""
        known = [known for known, _ in self._records]
        return 0 if digest is None else known.index(digest) + 1 if digest in known else -1

    def trains_with(self, process: Process, taken: tuple[str, ...] | None, round_number: int) -> None:
        """Check the slots by which a process numbers itself in a round.

        A slot that is not among those of the round is new, or was removed: it is numbered by others.
        """
        slots = self.slots[self._of_round.get(round_number - 1, 0)]
        if process.slot in slots and (self.slots[0] if taken is None else taken) != slots:
            self._broken("slots", f"{process.name} trains round {round_number} as one of {taken}, not of {slots}")
        elif process.slot not in slots and taken is not None and taken not in self.slots:
            self._broken("slots", f"{process.name} trains as one of {taken}, which were never expected")


def outer_step(lr: float, momentum: float) -> bytes:
    """An outer step with other values than run.json's, as a part of what is folded."""
    return f"{lr} {momentum}".encode()
