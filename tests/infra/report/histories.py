"""The history of a small run: losses, held-out losses, and a killed, a cut, a late and an abstaining replica."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.kit.protocol import run_record
from tests.kit.records import outcome
from tests.support.clocks import FakeClock

from skerry.infra.observe.history import RunHistory, Start
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_view import ReplicaView, RunView
from skerry.infra.report.build_facts import Sources, build_facts
from skerry.runtime.log.records import Telemetry
from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory

if TYPE_CHECKING:
    from skerry.infra.report.facts import ReportFacts
    from skerry.runtime.log.summarize_round import Part

BEGAN = 1_772_674_200.0
ROUND_S = 20.0
KILLED = "killed (signal SIGKILL)"


@dataclass
class SmallRun:
    """A run whose parts are all trained, but for those in `parts`: (slot, round) to the part.

    kill: the slot that is absent in these rounds, after its first start was killed.
    """

    rounds: int = 40
    slots: tuple[str, ...] = ("east-0", "east-1", "west-0", "west-1")
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)
    kill: tuple[str, int, int] | None = None
    losses: dict[int, float] = field(default_factory=dict)
    reason: str = "NaN in parameter 'w'"
    metrics: tuple[str, ...] = ("val_loss",)
    differs: frozenset[int] = frozenset()
    name: str = "tiny-gpt"

    def history(self) -> RunHistory:
        run = run_record(
            FakeClock(), nonce="a" * 32, name=self.name, slots=self.slots, rounds=self.rounds, sync_every=20
        )
        return RunHistory(
            run=run,
            uri="s3://acme/runs/tiny-gpt",
            rounds=tuple(self.round(number) for number in range(self.rounds)),
            starts=tuple(start for slot in self.slots for start in self.starts(slot)),
            heartbeats={},
        )

    def sources(self, **changes: object) -> Sources:
        history = self.history()
        view = RunView(
            run=self.name,
            uri=history.uri,
            rounds=history.run.rounds,
            closed=self.rounds,
            work=0.0,
            due=None,
            participants=len(self.slots),
            replicas=tuple(ReplicaView(slot=slot, outcome="done") for slot in self.slots),
            agreement=None,
            now_at=BEGAN + self.rounds * ROUND_S + 60,
        )
        values: dict[str, object] = {
            "history": history,
            "view": view,
            "settings": RunSettings(first=history.run),
            "findings": (),
        }
        return Sources(**(values | changes))  # type: ignore[arg-type]

    def facts(self, **changes: object) -> ReportFacts:
        return build_facts(self.sources(**changes))

    def starts(self, slot: str) -> list[Start]:
        values = {"slot": slot, "place": None, "host": f"host-of-{slot}"}
        if self.kill is None or slot != self.kill[0]:
            return [Start(**values, incarnation=0, began_at=BEGAN, ended_at=None, outcome=None)]  # type: ignore[arg-type]
        killed_at, back_at = (BEGAN + number * ROUND_S for number in self.kill[1:])
        end = outcome(slot, status="retry", exit_code=137, reason=KILLED)
        return [
            Start(**values, incarnation=0, began_at=BEGAN, ended_at=killed_at, outcome=end),  # type: ignore[arg-type]
            Start(**values, incarnation=1, began_at=back_at, ended_at=None, outcome=None),  # type: ignore[arg-type]
        ]

    def round(self, number: int) -> RoundHistory:
        return RoundHistory(
            round=number,
            closed_at=BEGAN + (number + 1) * ROUND_S,
            replicas=tuple(self.replica(slot, number) for slot in self.slots),
            averages_equal=number not in self.differs,
            state_equal=number not in self.differs,
        )

    def replica(self, slot: str, number: int) -> ReplicaRound:
        part = self.parts.get((slot, number), "trained")
        incarnation = 0
        if self.kill is not None and slot == self.kill[0]:
            part = "absent" if self.kill[1] <= number <= self.kill[2] else part
            incarnation = int(number > self.kill[2])
        if part == "absent":
            return ReplicaRound(slot=slot, part=part)
        share = {"trained": 1.0, "cut": 0.5}.get(part, 0.0)
        loss = self.losses.get(number, 2.0 + 2.0 * math.exp(-number / 8))
        loss += 0.02 * math.sin(7 * number + self.slots.index(slot))
        held_out = {name: loss + 0.1 + index for index, name in enumerate(self.metrics)} if number % 5 == 0 else {}
        return ReplicaRound(
            slot=slot,
            part=part,
            share=share,
            incarnation=incarnation,
            telemetry=Telemetry(
                loss=loss, steps=20, possible=20, tokens=10_000, train_s=16.0, learning_rate=1e-3, metrics=held_out
            ),
            seconds={"encode": 0.1, "upload": 0.9, "wait": 2.0, "download": 0.5, "reduce": 0.1},
            uploaded_bytes=1_000_000,
            downloaded_bytes=3_000_000,
            requests=50,
            reason=self.reason if part == "abstained" else None,
        )


def eventful(**changes: object) -> SmallRun:
    """The small run with one of everything."""
    parts = {("west-0", 5): "cut", ("west-0", 6): "cut", ("east-1", 12): "late", ("east-0", 30): "abstained"}
    return SmallRun(parts=parts, kill=("west-1", 20, 22), **changes)  # type: ignore[arg-type]
