"""As `ranked.py`, but replica 1 is late in every round: replica 0 ends it when replica 1 has taken two inner steps.

Replica 1 then takes no more until it sees that the round is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support import ranked

from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from pathlib import Path

ENOUGH = 2


class Training(ranked.Training):
    taken = 0

    def turn(self) -> Path:
        return self.options.out / f"turn-{self.manager.current_step()}"

    def step(self) -> None:
        if self.options.index == 0:
            while not self.turn().exists():
                SystemClock().pause(0.01)
            super().step()
            return
        super().step()
        self.taken += 1
        if self.taken == ENOUGH:
            self.be_late()
            self.taken = 0

    def be_late(self) -> None:
        number = self.manager.current_step()
        # What was kept is brought in the background.
        self.manager._conduct._pool.submit(lambda: None).result(timeout=60)
        if self.manager.rank == 0:
            self.turn().touch()
        while self.manager.current_step() == number:
            self.manager.catch_up(self.inner)


if __name__ == "__main__":
    ranked.Training = Training  # type: ignore[misc]
    ranked.main()
