"""The operator of a simulated run: changes its settings while it runs or after its end, as `skerry extend` does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.training import Document

    from skerry.runtime.store.memory import MemoryStore


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of settings at a time. more: rounds that are added. ahead: from so many rounds after the head on."""

    at_s: float
    more: int = 0
    ahead: int = 0
    lr: float = 0.7


class ChangedSettings:
    """Every change so far, in order, and the checks of the decisions that name them. broken: takes a violation."""

    def __init__(self, rounds: int, work: float | None, broken: Callable[[str, str], None]) -> None:
        self.rounds = rounds
        self.work = work
        self.ends = [(rounds, work)]  # of run.json, and of each record
        self._broken = broken
        self._records: list[tuple[str, Document]] = []
        self._named = 0

    def write(self, engine: MemoryStore, change: Change, head: int, slots: int) -> bool:
        """Store the next record. Returns False if there is no run yet."""
        run = engine.read(keys.RUN)
        if run is None:
            return False
        self.rounds += change.more
        self.work = None if self.work is None else float(self.rounds * slots)
        self.ends.append((self.rounds, self.work))
        before = self._records[-1] if self._records else (GENESIS, {"from_round": 0})
        settings = Settings(
            run=json.loads(bytes(run))["nonce"],
            number=len(self._records) + 1,
            previous=before[0],
            from_round=max(before[1]["from_round"], head + change.ahead),
            rounds=self.rounds,
            work=self.work,
            outer_lr=change.lr,
            outer_momentum=0.9,
            by="operator",
            created="",
        )
        body = settings.to_bytes()
        assert engine.create(keys.settings(settings.number), body)
        self._records.append((hashlib.sha256(body).hexdigest(), json.loads(body)))
        return True

    def decided(self, round_number: int, digest: str | None) -> None:
        """Check that a decision names no change before its time, and none older than an earlier decision's."""
        known = [known for known, _ in self._records]
        number = 0 if digest is None else known.index(digest) + 1 if digest in known else -1
        if number < self._named:
            self._broken("settings", f"round {round_number} is decided with settings {number} after {self._named}")
        if number > 0 and self._records[number - 1][1]["from_round"] > round_number:
            self._broken("settings", f"round {round_number} is decided with settings {number}, which are of later")
        self._named = max(number, self._named)

    def outer(self, digest: str | None) -> bytes:
        """The outer step of a round whose decision names this, as a part of what is folded; empty for run.json's."""
        named = [record for known, record in self._records if known == digest]
        return outer_step(named[0]["outer_lr"], named[0]["outer_momentum"]) if named else b""


def outer_step(lr: float, momentum: float) -> bytes:
    """An outer step with other values than run.json's, as a part of what is folded."""
    return f"{lr} {momentum}".encode()
