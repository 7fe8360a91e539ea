"""Starts the replicas of one run, kills and restarts them as scheduled, and ends every one of them."""
# ruff: noqa: S101, D102  a benchmark asserts

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from chaos import figures, replica
from chaos.figures import Life, Line, Story

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import ForkServerContext
    from multiprocessing.process import BaseProcess

    from chaos.replica import Contestant, Setting
    from skerry.runtime.log.records import Codec, Reduction

TICK_S = 0.02
# Rounds before the end in which no replica is killed, so that all can finish.
QUIET_ROUNDS = 3
# How long replicas may take to finish after the first one has.
END_S = 15.0
# How long all may take to begin, and a killed process to be gone.
START_S = 60.0
GONE_S = 10.0
# Until one that crashed of itself is started again, which would else go on and on.
CRASHED_S = 1.0
# A run is cut off after so many times the seconds that its inner steps take.
PATIENCE = 3.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. mean_rounds: the mean life of a process; None: no kills and no failed requests. has_mirror: of ours."""

    contestant: Contestant
    replicas: int
    mean_rounds: float | None
    rounds: int
    sync_every: int
    step_s: float
    down_s: float
    seed: int
    codec: Codec
    reduction: Literal["auto"] | Reduction
    has_mirror: bool = False

    @property
    def round_s(self) -> float:
        return self.sync_every * self.step_s

    @property
    def name(self) -> str:
        """The case, without its contestant."""
        what = "undisturbed" if self.mean_rounds is None else f"killed /{self.mean_rounds:g}"
        return f"N={self.replicas} {what}" + (" mirror" if self.has_mirror else "")


def kill_times(case: Case, index: int) -> Iterator[float]:
    """Yield the kill times of a slot, in seconds from the start: exponential lives, the same pause between them."""
    if case.mean_rounds is None:
        return
    chance = random.Random(f"{case.seed} {case.replicas} {case.mean_rounds} {index}")  # noqa: S311  a schedule
    moment = 0.0
    while True:
        moment += chance.expovariate(1 / (case.mean_rounds * case.round_s))
        yield moment
        moment += case.down_s


@dataclass(kw_only=True)
class Slot:
    """A replica's place: its process now, when it is due to be killed or started, what its diary has said."""

    index: int
    kills: Iterator[float]
    next_kill: float
    process: BaseProcess | None = None
    number: int = -1
    started: float = 0.0
    start_at: float | None = 0.0
    offset: int = 0
    lines: list[Line] = field(default_factory=list[Line])


class Supervisor:
    """Starts the replicas of one run, kills and restarts them as scheduled, and ends every one of them."""

    def __init__(self, context: ForkServerContext, case: Case, setting: Setting) -> None:
        self._context, self._case, self._setting = context, case, setting
        self.story = Story()
        self.slots: list[Slot] = []
        for index in range(case.replicas):
            kills = kill_times(case, index)
            self.slots.append(Slot(index=index, kills=kills, next_kill=next(kills, float("inf"))))
        self._ready: dict[int, float] = {}
        self._zero = float("inf")
        self._head = 0
        self._closed_at = self._finished_at = float("inf")

    @property
    def diaries(self) -> figures.Diaries:
        return {slot.index: slot.lines for slot in self.slots}

    def run(self) -> Story:
        """Until every replica has finished, or END_S after the first one has, or patience is over."""
        began = time.monotonic()
        limit = began + START_S
        try:
            while time.monotonic() < limit and len(self.story.finished) < len(self.slots):
                for slot in self.slots:
                    self._read(slot)
                    self._attend(slot)
                if self._zero < float("inf"):
                    limit = self._zero + PATIENCE * self._case.rounds * self._case.round_s
                limit = min(limit, self._finished_at + END_S)
                time.sleep(TICK_S)
        finally:
            for slot in self.slots:
                if slot.process is not None:
                    self._end(slot, died=False)
                self._read(slot)
        self.story.ended = self._closed_at if self.story.finished else time.monotonic()
        self.story.began = self.story.began or began
        return self.story

    def _attend(self, slot: Slot) -> None:
        now = time.monotonic()
        due = now - self._zero >= slot.next_kill
        if due:
            slot.next_kill = next(slot.kills)
        if slot.process is None:
            if slot.start_at is not None and now >= slot.start_at:
                self._start(slot)
        elif (code := slot.process.exitcode) is not None:
            self._end(slot, died=code != 0)
            if code == 0:
                self.story.finished.add(slot.index)
                slot.start_at = None
            else:
                self.story.crashes += 1
                slot.start_at = time.monotonic() + max(CRASHED_S, self._case.down_s)
        elif due and self._head < self._case.rounds - QUIET_ROUNDS:
            self.story.kills.append((now, slot.index))
            self._end(slot, died=True)

    def _start(self, slot: Slot) -> None:
        slot.number += 1
        slot.started = time.monotonic()
        slot.process = self._context.Process(target=replica.start, args=(self._setting, slot.index, slot.number))
        slot.process.start()

    def _end(self, slot: Slot, *, died: bool) -> None:
        """Make sure that the process is gone, and say when the next one is due."""
        assert slot.process is not None
        slot.process.kill()
        slot.process.join(GONE_S)
        slot.process.close()  # raises if it still lives
        slot.process = None
        now = time.monotonic()
        slot.start_at = now + self._case.down_s
        self.story.lives.append(Life(slot.index, slot.number, slot.started, now, died))

    def _read(self, slot: Slot) -> None:
        """Read the complete lines of the diary since the last read."""
        path = self._setting.diary(slot.index)
        if not path.exists() or path.stat().st_size == slot.offset:
            return
        with path.open("rb") as diary:
            diary.seek(slot.offset)
            data = diary.read()
        whole = data[: data.rfind(b"\n") + 1]
        slot.offset += len(whole)
        for line in figures.read_lines(whole):
            slot.lines.append(line)
            if line.event == "ready" and slot.index not in self._ready:
                self._ready[slot.index] = line.t
                self.story.began = min(self._ready.values())
            if line.event == "closed":
                self._zero = min(self._zero, line.t)
                if line.round > self._head:
                    self._head, self._closed_at = line.round, line.t
            elif line.event == "finished":
                self._finished_at = min(self._finished_at, line.t)
