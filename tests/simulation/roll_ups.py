"""Checks roll-ups against raw records: each has what its rounds give, and none is written before its receipts.

Knows nothing of the runtime's own reading but the format.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from typing import TYPE_CHECKING, Final

from tests.simulation.session import EXCHANGES

from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import read_closed_rounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.simulation.invariants import Checker
    from tests.simulation.scenario import Scenario
    from tests.simulation.training import Document
    from tests.simulation.world import Process, World

    from skerry.runtime.store.memory import MemoryStore

# At the end of a run the receipts of so many rounds are waited for; an older one that is missing never comes.
_TRAIL: Final = 4


class RollUpCheck:
    """Checks the roll-ups of one simulated run, when they are created and at the end."""

    def __init__(self, world: World, checker: Checker, store: MemoryStore, scenario: Scenario) -> None:
        self._world = world
        self._checker = checker
        self._store = store
        self._exchanges = EXCHANGES[scenario.settings[0].mode]
        self._patience = scenario.terms.roll_ups.looks[-1]
        checker.watch_records(keys.ROLL_UPS.rstrip("/"), self.created)

    def created(self, by: Process, began: int, key: str, body: bytes) -> None:
        """Check a roll-up that has just been created."""
        del began
        self._world.facts["roll-ups"] += 1
        for problem in self._problems(key, json.loads(gzip.decompress(body))):
            self._checker.broken("roll-up", f"{by.name}: {problem}")

    def read_history(self) -> None:
        """Read all rounds as a reader does, and compare the averages. Other records may be newer than a roll-up."""
        run = self._json(keys.RUN) or {}
        for item in read_closed_rounds(self._store, run.get("nonce", "")):
            shares = {replica.slot: replica.share for replica in item.replicas if replica.in_average}
            members = {
                slot: min(record["share"] for record in self._contributions(item.round, slot))
                for slot in self._members(item.round)
            }
            if shares != members:
                text = f"a reader takes round {item.round} to be {shares}, and it is {members}"
                self._checker.broken("roll-up", text)

    def _problems(self, key: str, rolled_up: Document) -> Iterator[str]:
        first, last, commits = rolled_up["first"], rolled_up["last"], self._checker.commits
        if keys.roll_up(first, last) != key or last not in commits or rolled_up["commit"] != commits[last]:
            yield f"{key} is of other rounds, or of rounds that are not closed"
            return
        may_lack = len(commits) - last - 1 >= self._patience
        for number, rows in zip(range(first, last + 1), _rows(rolled_up), strict=True):
            expected = self._expected(number, rows)
            if rows != expected:
                yield f"{key}: round {number} is {rows}, the records give {expected}"
            trails = self._checker.was_over and number <= last - _TRAIL
            waited = self._members(number)
            if self._checker.was_over:  # the writer does not wait for the receipt of a slot that is gone by then
                waited &= self._members(max(commits))
            missing = sorted(slot for slot in waited if not rows[slot]["receipt"])
            if missing and not may_lack and not trails:
                yield f"{key} was written before the receipts of {missing} in round {number}"

    def _expected(self, number: int, rows: Mapping[str, Document]) -> dict[str, Document]:
        """The rows of a round from its raw records, of those that they name."""
        members = self._members(number)
        expected: dict[str, Document] = {}
        for slot in sorted({*rows, *members}, key=keys.slot_order):
            row = rows.get(slot, {"contributions": self._exchanges, "receipt": False})
            contributions = self._contributions(number, slot)[: row["contributions"]]
            receipt = self._json(keys.receipt(number, slot)) if row["receipt"] else None
            records = [*contributions, *([] if receipt is None else [receipt])]
            share = min((record["share"] for record in contributions), default=1.0) if slot in members else 0.0
            telemetry = next((record["telemetry"] for record in records if record["telemetry"] is not None), None)
            expected[slot] = {
                "contributions": len(contributions),
                "receipt": receipt is not None,
                "share": share,
                "part": _part(share, receipt),
                "incarnation": records[0]["incarnation"] if records else None,
                "requests": 0 if receipt is None else receipt["requests"],
                "steps": None if telemetry is None else telemetry["steps"],
            }
        return expected

    def _members(self, number: int) -> set[str]:
        decisions = [self._json(keys.decision(number, exchange)) for exchange in range(self._exchanges)]
        members = Counter(
            str(share["slot"]) for decision in decisions if decision is not None for share in decision["members"]
        )
        return {slot for slot, count in members.items() if count == self._exchanges}

    def _contributions(self, number: int, slot: str) -> list[Document]:
        records = (self._json(keys.contribution(number, exchange, slot)) for exchange in range(self._exchanges))
        return [record for record in records if record is not None]

    def _json(self, key: str) -> Document | None:
        body = self._store.read(key)
        return None if body is None else json.loads(bytes(body))


def _rows(rolled_up: Document) -> Iterator[dict[str, Document]]:
    """The replicas of each round by slot."""
    columns, start = rolled_up["replicas"], 0
    names = ("contributions", "receipt", "share", "part", "incarnation", "requests", "steps")
    for count in rolled_up["rounds"]["replicas"]:
        yield {
            rolled_up["slots"][columns["slot"][row]]: {name: columns[name][row] for name in names}
            for row in range(start, start + count)
        }
        start += count


def _part(share: float, receipt: Document | None) -> str:
    if share:
        return "trained" if share >= 1 else "cut"
    if receipt is None:
        return "absent"
    return "late" if receipt["abstained"] is None else "abstained"
