"""Receipts compared: who differs, who is right, what it costs to find out, and what is not told twice."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime import keys
from skerry.runtime.alarm import (
    MAX_READS,
    PATIENCE,
    QUIET,
    WINDOW,
    Agreed,
    Alarm,
    AveragesDiffer,
    StatesDiffer,
    Verdict,
    compare,
    is_outvoted,
    receipts_of,
)
from skerry.runtime.errors import Retryable
from skerry.runtime.records import Receipt
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.runtime.store import Span

NONCE = "0" * 32
COMMIT = "c" * 64


def receipt(slot: str, number: int = 0, *, state: str | None = "b", average: str = "a", **more: object) -> Receipt:
    fields: dict[str, object] = {
        "run": NONCE,
        "round": number,
        "slot": slot,
        "incarnation": 0,
        "commit": COMMIT,
        "averages": (average * 32,),
        "state": None if state is None else state * 32,
        "scope": "fragments",
        "contributed": True,
        "uploaded_bytes": 0,
        "downloaded_bytes": 0,
        "requests": 0,
        "seconds": {},
    }
    return Receipt(**(fields | more))  # type: ignore[arg-type]


def receipts(states: str, *, field: str = "state") -> list[Receipt]:
    """One receipt for each letter, of r-0, r-1 and so on."""
    return [receipt(f"r-{i}", **{field: letter}) for i, letter in enumerate(states)]  # type: ignore[arg-type]


def judged(states: str, *, members: str = "", field: str = "state") -> Verdict | None:
    """What r-0 says. members: their numbers; everybody if left out."""
    mine, *others = receipts(states, field=field)
    return compare(mine, others, [f"r-{i}" for i in members or range(len(states))])


# One round.


def test_equal_receipts_agree() -> None:
    assert judged("bbb") == Agreed(round=0, slots=("r-0", "r-1", "r-2"))


@pytest.mark.parametrize(
    ("states", "slots", "right", "majority"),
    [
        ("bbd", ("r-2",), ("r-0", "r-1"), True),
        ("dbb", ("r-0",), ("r-1", "r-2"), True),
        ("bd", ("r-1",), ("r-0",), False),
        ("bbdd", ("r-2", "r-3"), ("r-0", "r-1"), False),
        ("bdbd", ("r-1", "r-3"), ("r-0", "r-2"), False),
        ("bde", ("r-1", "r-2"), ("r-0",), False),
        ("bdde", ("r-1", "r-2", "r-3"), ("r-0",), False),
    ],
)
def test_the_majority_is_right_else_the_first(
    states: str, slots: tuple[str, ...], right: tuple[str, ...], *, majority: bool
) -> None:
    assert judged(states) == StatesDiffer(round=0, slots=slots, right=right, majority=majority)


@pytest.mark.parametrize("states", ["bbd", "dbb", "bd", "bbdd", "bde", "bdde", "bdbde"])
def test_all_come_to_the_same_judgement(states: str) -> None:
    found = receipts(states)
    members = [one.slot for one in found]
    verdicts = [compare(mine, [one for one in reversed(found) if one != mine], members) for mine in found]
    assert all(verdict == verdicts[0] for verdict in verdicts)


@pytest.mark.parametrize(
    ("states", "members", "right", "majority"),
    [
        ("bdd", "01", ("r-0",), False),
        ("bdd", "0", ("r-0",), False),
        ("bdd", "12", ("r-1", "r-2"), True),
        ("bdd", "1", ("r-1", "r-2"), False),
    ],
)
def test_only_members_vote(states: str, members: str, right: tuple[str, ...], *, majority: bool) -> None:
    verdict = judged(states, members=members)
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.right, verdict.majority) == (right, majority)


@pytest.mark.parametrize("states", ["bbd", "dbb", "bd", "bdd", "bbdd", "bdbd", "bde", "bdde", "bbbdd", "bdebd"])
def test_a_receipt_that_is_missing_never_turns_a_judgement_round(states: str) -> None:
    found = {one.slot: one for one in receipts(states)}
    held = {slot: one.state for slot, one in found.items()}
    whole = compare(found["r-0"], found.values(), found)
    assert isinstance(whole, StatesDiffer)
    for number in range(len(found)):
        for seen in combinations(found.values(), number):
            for mine in seen:
                verdict = compare(mine, seen, found)
                if isinstance(verdict, StatesDiffer):
                    assert held[verdict.right[0]] == held[whole.right[0]]


@pytest.mark.parametrize(
    ("states", "members", "decided"),
    [("bbd", "012", True), ("bd", "012", False), ("bbd", "0123", True), ("dbb", "0123", False)],
)
def test_what_missing_receipts_can_turn_round_is_not_judged(states: str, members: str, *, decided: bool) -> None:
    assert (judged(states, members=members) is not None) == decided


def test_averages_are_judged_before_states() -> None:
    others = [receipt("r-1"), receipt("r-2", average="f", state="d")]
    expected = AveragesDiffer(round=0, slots=("r-2",), right=("r-0", "r-1"), majority=True)
    assert compare(receipt("r-0"), others, ["r-0", "r-1", "r-2"]) == expected


def test_slots_are_told_in_slot_order() -> None:
    others = [receipt(f"r-{i}", state="d") for i in (10, 2, 9)]
    verdict = compare(receipt("r-1"), others, ["r-1", "r-2", "r-9", "r-10"])
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.slots, verdict.right) == (("r-1",), ("r-2", "r-9", "r-10"))


@pytest.mark.parametrize("change", [{"scope": "registered"}, {"commit": "e" * 64}, {"number": 1}])
def test_what_cannot_be_compared_is_left_out(change: dict[str, object]) -> None:
    others = [receipt("r-1", state="d", **change), receipt("r-2", state="e")]  # type: ignore[arg-type]
    expected = StatesDiffer(round=0, slots=("r-2",), right=("r-0",), majority=False)
    assert compare(receipt("r-0"), others, ["r-0", "r-1", "r-2"]) == expected
    assert compare(receipt("r-0"), others[:1], ["r-0", "r-1"]) == Agreed(round=0, slots=("r-0",))


@pytest.mark.parametrize(
    ("states", "outvoted"), [("bbd", [2]), ("bd", []), ("bdd", [0]), ("bbdd", []), ("b", []), ("bde", [])]
)
def test_only_a_majority_outvotes(states: str, outvoted: list[int]) -> None:
    found = receipts(states)
    assert [i for i in range(len(found)) if is_outvoted(f"r-{i}", found)] == outvoted
    assert not is_outvoted("not here", found)


# Reading.


class Watch:
    """An alarm of r-0, and a store that counts."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.store = Retrying(self.memory, FakeClock())
        self.alarm = Alarm(self.store, "r-0")
        self.members: tuple[str, ...] = ("r-0", "r-1", "r-2")

    def write(self, *found: Receipt) -> None:
        for one in found:
            assert self.memory.create(keys.receipt(one.round, one.slot), one.to_bytes())

    def round(self, number: int, states: str = "bbb", *, writes: Iterable[int] = (1, 2)) -> list[Verdict]:
        """My receipt of one round, those of `writes`, and a look."""
        found = [receipt(f"r-{i}", number, state=letter) for i, letter in enumerate(states)]
        self.write(*(found[i] for i in writes))
        self.alarm.expect(found[0], self.members)
        return self.alarm.look()


def agreed(number: int, *slots: str) -> Agreed:
    return Agreed(round=number, slots=slots or ("r-0", "r-1", "r-2"))


def test_a_round_is_judged_once_its_members_receipts_are_there() -> None:
    watch = Watch()
    assert watch.round(0, writes=(1,)) == []
    assert watch.round(1) == []
    watch.write(receipt("r-2", 0))
    assert watch.alarm.look() == [agreed(0)]
    assert watch.round(2) == [agreed(1)]


def test_an_object_that_is_nobodys_receipt_is_passed_by() -> None:
    watch = Watch()
    for name in ("README", ".x.json"):
        watch.memory.create(f"{keys.receipts_of(0)}{name}", b"left here by somebody")
    watch.round(0)
    assert watch.round(1) == [agreed(0)]
    assert len(receipts_of(watch.store, NONCE, 0)) == 2


def test_rounds_are_judged_in_their_order() -> None:
    watch = Watch()
    watch.round(0, writes=(1,))
    assert watch.round(1, "bbd") == []
    assert watch.round(2) == []
    watch.write(receipt("r-2", 0))
    found = watch.alarm.look()
    assert [type(verdict) for verdict in found] == [Agreed, StatesDiffer]


@pytest.mark.parametrize(("states", "majority"), [("bbdb", False), ("bbdbb", True)])
def test_a_missing_receipt_that_changes_nothing_is_waited_for_only_so_long(states: str, *, majority: bool) -> None:
    """The last one's is missing: without it r-0 and r-1 have a majority, or nobody can have another."""
    watch = Watch()
    watch.members = tuple(f"r-{i}" for i in range(len(states)))
    there = range(1, len(states) - 1)
    assert [watch.round(number, states, writes=there) for number in range(WINDOW)] == [[]] * WINDOW
    (verdict,) = watch.round(WINDOW, states, writes=there)
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.round, verdict.slots, verdict.majority) == (0, ("r-2",), majority)


def test_a_round_that_a_missing_receipt_can_turn_is_given_up_for_one_that_has_it() -> None:
    watch = Watch()
    for number in range(WINDOW + 2):
        assert watch.round(number, "dbb", writes=(1,)) == []
    last = WINDOW + 2
    assert watch.round(last, "dbb") == []
    (verdict,) = [verdict for number in range(last + 1, last + 4) for verdict in watch.round(number, "dbb")]
    assert verdict == StatesDiffer(round=last, slots=("r-0",), right=("r-1", "r-2"), majority=True)


def test_who_is_silent_for_good_is_done_without() -> None:
    watch = Watch()
    quiet = WINDOW + PATIENCE
    assert [watch.round(number, "bdd", writes=(1,)) for number in range(quiet)] == [[]] * quiet
    (verdict,) = watch.round(quiet, "bdd", writes=(1,))
    assert verdict == StatesDiffer(round=PATIENCE, slots=("r-1",), right=("r-0",), majority=False)


def test_a_receipt_of_mine_alone_is_no_news() -> None:
    watch = Watch()
    assert [watch.round(number, writes=()) for number in range(2 * WINDOW)] == [[]] * (2 * WINDOW)


def test_two_that_differ_come_to_the_same_judgement_whenever_they_look() -> None:
    memory = MemoryStore()
    alarms = {slot: Alarm(memory, slot) for slot in ("r-0", "r-1")}
    said: dict[str, list[Verdict]] = {"r-0": [], "r-1": []}
    for number in range(3 * WINDOW):
        for slot, alarm in alarms.items():
            mine = receipt(slot, number, state="b" if slot == "r-0" else "d")
            memory.create(keys.receipt(number, slot), mine.to_bytes())
            alarm.expect(mine, alarms)
        said["r-0"] += alarms["r-0"].look()
        if number == 2 * WINDOW:  # r-1 comes to it only now: something else took its time
            said["r-1"] += alarms["r-1"].look()
    first = {slot: verdicts[0] for slot, verdicts in said.items()}
    assert all(
        isinstance(one, StatesDiffer) and (one.slots, one.right) == (("r-1",), ("r-0",)) for one in first.values()
    )


def test_a_difference_is_told_once_until_it_lasts() -> None:
    watch = Watch()
    told = [verdict.round for number in range(60) for verdict in watch.round(number, "bbd")]
    assert told == [0, QUIET, QUIET + 2 * QUIET + 1, QUIET + 2 * QUIET + 1 + 4 * QUIET + 3]


def test_after_many_equal_rounds_a_difference_is_told_at_once_again() -> None:
    watch = Watch()
    states = ["bbd", *["bbb"] * (2 * QUIET + 1), "bbd", *["bbd"] * QUIET]
    told = [v.round for n, s in enumerate(states) for v in watch.round(n, s) if not isinstance(v, Agreed)]
    assert told == [0, 2 * QUIET + 2]
    assert watch.round(len(states), "bbd")[0].round == 2 * QUIET + 2 + QUIET


def test_what_is_forgotten_is_not_judged() -> None:
    watch = Watch()
    watch.round(0, "dbb")
    watch.alarm.forget(1)
    assert watch.alarm.agreed == 0
    assert watch.round(1) == []
    assert watch.round(2) == [agreed(1)]


def test_the_last_round_in_which_all_were_equal_is_known() -> None:
    watch = Watch()
    assert watch.alarm.agreed is None
    watch.round(5)
    assert watch.alarm.agreed == 4
    watch.round(6)
    assert watch.alarm.agreed == 5
    watch.round(7, "bbd")
    watch.round(8, "bbd")
    assert watch.alarm.agreed == 6


@pytest.mark.parametrize("damage", [b"{", receipt("r-2", run="f" * 32).to_bytes()])
def test_a_damaged_receipt_or_another_runs_is_left_out_and_read_once(damage: bytes) -> None:
    watch = Watch()
    watch.memory.replace(keys.receipt(0, "r-2"), damage)
    watch.round(0, writes=(1,))
    assert watch.round(1) == [agreed(0, "r-0", "r-1")]
    assert [one.slot for one in receipts_of(watch.store, NONCE, 0)] == ["r-1"]


def test_a_damaged_receipt_has_no_vote_and_is_not_waited_for() -> None:
    watch = Watch()
    watch.memory.replace(keys.receipt(0, "r-2"), b"{")
    watch.round(0, "bd", writes=(1,))
    assert watch.round(1) == [StatesDiffer(round=0, slots=("r-1",), right=("r-0",), majority=False)]


def test_a_round_costs_one_listing_and_one_read_per_receipt() -> None:
    watch = Watch()
    watch.round(0)
    before = watch.store.usage.requests
    for number in range(1, 11):
        assert watch.round(number) == [agreed(number - 1)]
    assert watch.store.usage.requests - before == 10 * (1 + 2)


def test_a_replica_that_is_silent_for_good_costs_a_bounded_number_of_requests() -> None:
    watch = Watch()
    for number in range(10):
        watch.round(number, writes=(1,))
    before = watch.store.usage.requests
    watch.round(10, writes=(1,))
    assert watch.store.usage.requests - before <= WINDOW + 1


def test_a_look_reads_only_so_many_receipts_and_the_next_one_reads_on() -> None:
    watch = Watch()
    watch.members = tuple(f"r-{i}" for i in range(MAX_READS + 10))
    everybody = range(1, len(watch.members))
    states = "b" * len(watch.members)
    watch.round(0, states, writes=everybody)
    before = watch.store.usage.requests
    assert watch.round(1, states, writes=everybody) == []
    assert watch.store.usage.requests - before == 1 + MAX_READS
    assert watch.alarm.look() == [agreed(0, *watch.members)]


def strays(number: int) -> dict[str, bytes]:
    """What somebody left among the receipts of a round, most of it receipts in their content."""
    return {
        f"receipts/{number:08d}/r-0.json.bak": receipt("r-0", number).to_bytes(),
        f"receipts/{number:08d}/old/r-1.json": receipt("r-1", number, state="d").to_bytes(),
        f"receipts/{number:08d}/copy-of-r-2.json": receipt("r-2", number).to_bytes(),
    }


def test_stray_objects_among_receipts_are_passed_over() -> None:
    watch = Watch()
    for key, data in strays(1).items():
        watch.memory.create(key, data)
    found = [verdict for number in range(6) for verdict in watch.round(number, "bbb" if number < 3 else "bbd")]
    assert [type(verdict) for verdict in found] == [Agreed, Agreed, Agreed, StatesDiffer]
    assert [one.slot for one in receipts_of(watch.store, NONCE, 1)] == ["r-1", "r-2"]


class Broken(MemoryStore):
    """One object of it cannot be read, ever."""

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        if key == keys.receipt(5, "r-1"):
            raise Retryable("broken")
        return super().read(key, span, into)


def test_a_round_that_cannot_be_read_is_dropped_once_it_is_old() -> None:
    watch = Watch()
    watch.memory = Broken()
    watch.alarm = Alarm(watch.memory, "r-0")
    told: list[Verdict] = []
    raised = 0
    for number in range(60):
        try:
            told += watch.round(number, "bbb" if number < 20 else "bbd")
        except Retryable:
            raised += 1
        assert len(watch.alarm._open) <= WINDOW + 1
    assert raised == WINDOW
    assert next(one for one in told if isinstance(one, StatesDiffer)).slots == ("r-2",)
