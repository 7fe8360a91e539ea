"""One start of a simulated replica: what it holds, how it begins and ends, and what it does beside training."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from tests.simulation.seat import Habits, take_seat
from tests.simulation.shelf import Shelf, ShelfCheck
from tests.simulation.training import Model

from skerry.runtime.carry import Carry
from skerry.runtime.errors import Corrupt, Diverged, Fenced, Invalid, Retryable, RunFinished, SkerryError
from skerry.runtime.impasse import Guide
from skerry.runtime.recording import Standing
from skerry.runtime.records import GENESIS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.invariants import Checker
    from tests.simulation.seat import Seat
    from tests.simulation.world import Fiber, Process, SimulatedClock

    from skerry.runtime.impasse import Impasse
    from skerry.runtime.recording import Recorder, SharedState
    from skerry.runtime.records import Phase
    from skerry.runtime.selfcheck import Diagnosis
    from skerry.runtime.store.interface import Store


class Failed(SkerryError):  # noqa: N818  ends the replica as max_retries does
    """Too many rounds failed in a row."""


class Author:
    """What `Guide` takes for the recorder and for the state: who writes a checkpoint out of turn."""

    has_fragments: Final = True

    def __init__(
        self,
        save_now: Callable[[Standing], None],
        diagnosis: Callable[[], Diagnosis | None],
        checkpointing: Callable[[], Fiber | None],
    ) -> None:
        self.save_now = save_now
        self._diagnosis = diagnosis
        self._checkpointing = checkpointing

    @property
    def is_sound(self) -> bool:
        return self._diagnosis() is None

    @property
    def is_saving(self) -> bool:
        fiber = self._checkpointing()
        return fiber is not None and not fiber.ended


class Incarnation:
    """One incarnation from its start to its end, which is left in `process.status`."""

    def __init__(
        self, process: Process, engine: Store, habits: Habits, checker: Checker, clock: SimulatedClock
    ) -> None:
        self.process = process
        self._engine = engine
        self._habits = habits
        self._checker = checker
        self._clock = clock
        self._random = random.Random(process.world.random.getrandbits(64))
        self._state = f"weights {clock.nonce()}"
        self._standing = Standing(round=0, previous=GENESIS, members=(), batches=0, work=0.0)
        self._model = Model(parts=habits.parts, fragments=habits.run.fragments, draw=self._random)
        self._carry = Carry() if habits.keeps_late and not habits.policy.spares else None
        # Of the round at hand.
        self._steps = 0
        self._share = 1.0
        self._since = clock.now()
        self._at_boundary = True
        self._look_again = 0.0
        # Of all rounds.
        self._failures = 0
        self._round_seconds: float | None = None
        self._following = False
        self._impasse: Impasse | None = None
        self._sick = False
        self._sick_looks = 0
        self._unrecorded = False
        self._bringing: Fiber | None = None
        self._checkpointing: Fiber | None = None
        self._background: list[Fiber] = []
        self._recording: Fiber | None = None
        self._recorded = 0
        self._flipped = False

    def main(self) -> None:
        """The process. Whatever is raised ends it; what the end means is for the launcher to read."""
        process = self.process
        try:
            self._seat: Seat = take_seat(process, self._engine, self._habits, self._clock)
            self._shelf = Shelf(self._seat.journal, self._seat.presence, self._clock)
            self._selfcheck = ShelfCheck(self._seat.journal, process.slot, self._shelf)
            author = Author(self._save_out_of_turn, lambda: self._selfcheck.diagnosis, lambda: self._checkpointing)
            self._guide = Guide(self._seat, cast("Recorder", author), cast("SharedState", author))
        except Retryable:
            process.status = "retry"
            return
        except (Diverged, Corrupt, Invalid) as error:
            process.status = f"refused: {error!r}"
            return
        try:
            self._work()
            self._end("finished" if self._finished else "left")
            process.status = "done" if self._finished else "stopped"
        except Fenced:
            self._end("failed")
            process.status = "fenced"
        except RunFinished:
            self._end("finished")
            process.status = "finished"
        except (Retryable, Failed, RuntimeError):
            self._end("failed")
            process.status = "retry"
        except (Diverged, Corrupt, Invalid) as error:
            process.status = f"refused: {error!r}"

    @property
    def _finished(self) -> bool:
        return self._habits.run.is_over(self._standing.round, self._standing.work)

    def _count(self, fact: str, amount: int = 1) -> None:
        self.process.world.facts[fact] += amount

    def _end(self, phase: Phase) -> None:
        for fiber in self._background:
            fiber.join()
        self._seat.presence.stop(phase)

    def _work(self) -> None:
        """From the join to the last round."""
        raise NotImplementedError

    # What goes on beside training.

    def _record(self) -> None:
        """Receipt and checkpoint of the round that was closed last, once."""
        if not self._unrecorded:
            return
        self._unrecorded = False
        standing, state, check = replace(self._standing), self._state, self._selfcheck
        if standing.round <= self._recorded:
            return  # healed, and following what it had recorded already
        self._recorded = standing.round
        idle = self._checkpointing is None or self._checkpointing.ended
        save = not self._following and idle and check.diagnosis is None and self._shelf.is_my_turn(standing)
        compares = self._habits.compares and not self._following
        if compares and check.wants(self._shelf.author(standing)):
            check.keep(standing.round, {"state": state})
        before = self._recording if self._habits.compares else None

        def write() -> None:
            try:
                if before is not None:  # one after the other, as in one thread
                    before.join()
                receipt = self._shelf.write_receipt(standing, state)
                if compares:
                    check.look(receipt, standing.members)
                if save and self._save(standing, state) and self._seat.collects:
                    self._count("objects deleted", self._seat.collector.collect().objects)
            except SkerryError as error:
                self.process.world.note(self.process.name, "told", "recorder", repr(error)[:80])

        fiber = self._recording = self._beside(write)
        if save:
            self._checkpointing = fiber

    def _save(self, standing: Standing, state: str) -> bool:
        return self._shelf.save(standing, state)

    def _beside(self, work: Callable[[], None]) -> Fiber | None:
        """In the background, or at once where there is none."""
        if not self._habits.background:
            work()
            return None
        fiber = self.process.spawn(work)
        self._background = [one for one in self._background if not one.ended] + [fiber]
        return fiber

    def _save_out_of_turn(self, standing: Standing) -> None:
        self._save(standing, self._state)
        self._count("checkpoints out of turn")
