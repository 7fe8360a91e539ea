"""The chaos benchmark's figures: every inner step that no average used is counted once, by its cause."""

from __future__ import annotations

from collections import defaultdict

from chaos.figures import Contribution, Ledger, Life, Line, read_lines

H = 20
ROUNDS = 12


class Slot:
    """One slot's diary, written as its processes would."""

    def __init__(self) -> None:
        self.lines: dict[int, list[Line]] = defaultdict(list)
        self.died: dict[int, bool] = {}
        self.contributions: list[Contribution] = []

    def ready(self, process: int, resumed: int = 0) -> None:
        self.write("ready", process, resumed=resumed)

    def steps(self, process: int, *since: int) -> None:
        for number in since:
            self.write("step", process, since=number)

    def closed(self, process: int, number: int) -> None:
        self.write("closed", process, round=number, digest=f"{number}")

    def failed(self, process: int, number: int) -> None:
        self.write("failed", process, round=number)

    def counted(self, process: int, number: int, steps: int, *, brought: bool = False) -> None:
        self.contributions.append(Contribution(number, 0, process, steps, brought=brought))

    def whole(self, process: int, *numbers: int) -> None:
        """Rounds as they should be."""
        for number in numbers:
            self.steps(process, H)
            self.counted(process, number, H)
            self.closed(process, number)

    def ends(self, process: int, *, died: bool = True) -> None:
        self.died[process] = died

    def lost(self, kept_for: int = 3) -> dict[str, int]:
        ledger = Ledger(
            contributions={contribution.round: contribution for contribution in self.contributions},
            history={number: f"{number}" for number in range(ROUNDS)},
            kept_for=kept_for,
        )
        for process, died in sorted(self.died.items()):
            ledger.read(Life(0, process, 0.0, 1.0, died), self.lines[process])
        return {name: steps for name, steps in ledger.end().items() if steps}

    def write(self, event: str, process: int, **facts: object) -> None:
        self.lines[process].append(Line(t=0.0, event=event, process=process, **facts))  # type: ignore[arg-type]


def test_what_is_used_is_not_lost() -> None:
    slot = Slot()
    slot.ready(0)
    slot.whole(0, 1, 2, 3)
    slot.ends(0, died=False)
    assert slot.lost() == {}


def test_unused_round_is_discarded() -> None:
    slot = Slot()
    slot.ready(0)
    slot.whole(0, 1, 2)
    slot.steps(0, H)
    slot.closed(0, 3)
    slot.whole(0, 4, 5, 6, 7)
    slot.ends(0, died=False)
    assert slot.lost() == {"discarded": H}
    assert slot.lost(kept_for=0) == {"discarded": H}


def test_what_was_kept_and_is_added_or_brought_is_not_lost() -> None:
    slot = Slot()
    slot.ready(0)
    slot.whole(0, 1)
    slot.steps(0, 12)
    slot.closed(0, 2)
    slot.steps(0, H)
    slot.counted(0, 3, H + 12)
    slot.closed(0, 3)
    slot.steps(0, 9)
    slot.closed(0, 4)
    slot.counted(0, 5, 9, brought=True)
    slot.steps(0, 7)
    slot.closed(0, 5)
    slot.steps(0, H)
    slot.counted(0, 6, H + 7)
    slot.closed(0, 6)
    slot.ends(0, died=False)
    assert slot.lost() == {}


def test_a_killed_process_loses_what_the_next_one_does_not_go_on_with() -> None:
    slot = Slot()
    slot.ready(0)
    slot.steps(0, 12)
    slot.ends(0)
    slot.ready(1, resumed=11)
    slot.ends(1)  # before an inner step of its own
    slot.ready(2, resumed=11)
    slot.steps(2, H)
    slot.counted(2, 1, H)
    slot.closed(2, 1)
    slot.ends(2, died=False)
    assert slot.lost() == {"killed": 1}


def test_contribution_before_the_first_step_belongs_to_the_last_process() -> None:
    slot = Slot()
    slot.ready(0)
    slot.steps(0, 12)
    slot.ends(0)
    slot.counted(1, 1, 12)
    slot.closed(1, 1)
    slot.ready(1)
    slot.whole(1, 2)
    slot.ends(1, died=False)
    assert slot.lost() == {}


def test_what_is_decided_after_a_kill_counts() -> None:
    """The next process continues counted steps; only its own step is lost."""
    slot = Slot()
    slot.ready(0)
    slot.steps(0, H)
    slot.counted(0, 1, H)
    slot.ends(0)
    slot.ready(1, resumed=H - 1)
    slot.steps(1, H)
    slot.closed(1, 1)
    slot.whole(1, 2)
    slot.ends(1, died=False)
    assert slot.lost() == {"killed": 1}


def test_what_was_late_dies_with_its_process() -> None:
    slot = Slot()
    slot.ready(0)
    slot.whole(0, 1)
    slot.steps(0, 12)
    slot.closed(0, 2)
    slot.steps(0, 3)
    slot.ends(0)
    slot.ready(1)
    slot.whole(1, 3)
    slot.ends(1, died=False)
    assert slot.lost() == {"killed": 15}


def test_restarted_replica_that_heals_is_late_and_not_a_survivor() -> None:
    slot = Slot()
    slot.ready(0)
    slot.whole(0, 1)
    slot.ends(0)
    slot.ready(1)
    slot.steps(1, H)
    slot.closed(1, 2)
    slot.whole(1, 3)
    slot.steps(1, H)
    slot.failed(1, 3)
    slot.ends(1, died=False)
    assert slot.lost(kept_for=0) == {"late": H, "discarded": H}


def test_rounds_that_are_not_in_the_history_are_lost() -> None:
    slot = Slot()
    slot.ready(0)
    slot.steps(0, H)
    slot.write("closed", 0, round=1, digest="another")
    slot.steps(0, 5)
    slot.ends(0, died=False)
    assert slot.lost() == {"in_lost_rounds": H, "in_hand_at_the_end": 5}


def test_a_line_that_its_process_was_killed_in_is_passed_over() -> None:
    line = b'{"t": %d, "event": "started", "process": 0}\n'
    data = b"\n" + line % 1 + (line % 2)[:20] + b"\n" + line % 3
    assert [line.t for line in read_lines(data)] == [1.0, 3.0]
