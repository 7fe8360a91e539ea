"""Comparing receipts: the verdicts on one round, and a monitor that reads the receipts of a run."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import pytest
from tests.kit.divergence import receipt, receipts, write_receipt
from tests.kit.stores import HookedStore
from tests.support.clocks import FakeClock

from skerry.runtime.checkpointing.receipt_comparison import (
    LARGE,
    MAX_READS,
    PATIENCE,
    QUIET,
    WINDOW,
    Agreed,
    AveragesDiffer,
    ReceiptMonitor,
    StatesDiffer,
    Verdict,
    compare,
    is_outvoted,
    receipts_of,
)
from skerry.runtime.errors import Retryable
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterable

RUN = "a" * 32


def verdict_of_first(states: str, members: str = "") -> Verdict | None:
    """The verdict of r-0. members: the numbers of the round's members; all of them if empty."""
    mine, *others = receipts(states)
    return compare(mine, others, [f"r-{i}" for i in members or range(len(states))])


def differ(wrong: str, right: str, *, majority: bool, number: int = 0) -> StatesDiffer:
    """The verdict that these replicas, by their numbers, are wrong and right."""
    slots = [tuple(f"r-{i}" for i in numbers) for numbers in (wrong, right)]
    return StatesDiffer(round=number, slots=slots[0], right=slots[1], majority=majority)


def agreed(number: int, slots: str = "012") -> Agreed:
    return Agreed(round=number, slots=tuple(f"r-{i}" for i in slots))


# One round.


@pytest.mark.parametrize(
    ("states", "verdict"),
    [
        ("bbb", agreed(0)),
        ("bbd", differ("2", "01", majority=True)),
        ("dbb", differ("0", "12", majority=True)),
        ("bd", differ("1", "0", majority=False)),
        ("bbdd", differ("23", "01", majority=False)),
        ("bdbd", differ("13", "02", majority=False)),
        ("bde", differ("12", "0", majority=False)),
        ("bdde", differ("123", "0", majority=False)),
    ],
)
def test_majority_is_right_otherwise_the_first_member(states: str, verdict: Verdict) -> None:
    assert verdict_of_first(states) == verdict


@pytest.mark.parametrize(
    ("states", "members", "verdict"),
    [
        pytest.param("bdd", "01", differ("12", "0", majority=False), id="two members differ"),
        pytest.param("bdd", "0", differ("12", "0", majority=False), id="the only member is right"),
        pytest.param("bdd", "12", differ("0", "12", majority=True), id="all members agree"),
        pytest.param("bdd", "1", differ("0", "12", majority=False), id="the only member is another"),
        pytest.param("bbd", "012", differ("2", "01", majority=True), id="complete"),
        pytest.param("bbd", "0123", differ("2", "01", majority=False), id="a missing receipt changes nothing"),
        pytest.param("bd", "012", None, id="a missing receipt may change the verdict"),
        pytest.param("dbb", "0123", None, id="a missing receipt may break the tie"),
    ],
)
def test_only_members_vote_and_missing_votes_are_awaited(states: str, members: str, verdict: Verdict | None) -> None:
    assert verdict_of_first(states, members) == verdict


@pytest.mark.parametrize("states", ["bbd", "dbb", "bd", "bdd", "bbdd", "bdbd", "bde", "bdde", "bbbdd", "bdebd"])
def test_all_replicas_reach_the_same_verdict_from_any_receipts(states: str) -> None:
    by_slot = {written.slot: written for written in receipts(states)}
    complete = [compare(mine, list(reversed(by_slot.values())), by_slot) for mine in by_slot.values()]
    assert all(verdict == complete[0] for verdict in complete)
    assert isinstance(complete[0], StatesDiffer)
    right = by_slot[complete[0].right[0]].state
    for count in range(len(by_slot)):
        for subset in combinations(by_slot.values(), count):
            for mine in subset:
                verdict = compare(mine, subset, by_slot)
                assert not isinstance(verdict, StatesDiffer) or by_slot[verdict.right[0]].state == right


def test_averages_are_compared_before_states() -> None:
    others = [receipt("r-1"), receipt("r-2", average="f", state="d")]
    expected = AveragesDiffer(round=0, slots=("r-2",), right=("r-0", "r-1"), majority=True)
    assert compare(receipt("r-0"), others, ["r-0", "r-1", "r-2"]) == expected


def test_verdict_lists_slots_in_slot_order() -> None:
    others = [receipt(f"r-{i}", state="d") for i in (10, 2, 9)]
    verdict = compare(receipt("r-1"), others, ["r-1", "r-2", "r-9", "r-10"])
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.slots, verdict.right) == (("r-1",), ("r-2", "r-9", "r-10"))


@pytest.mark.parametrize("change", [{"scope": "registered"}, {"commit": "e" * 64}, {"round_number": 1}])
def test_incomparable_receipts_are_left_out(change: dict[str, object]) -> None:
    others = [receipt("r-1", state="d", **change), receipt("r-2", state="e")]  # type: ignore[arg-type]
    assert compare(receipt("r-0"), others, ["r-0", "r-1", "r-2"]) == differ("2", "0", majority=False)
    assert compare(receipt("r-0"), others[:1], ["r-0", "r-1"]) == agreed(0, "0")


@pytest.mark.parametrize(
    ("states", "outvoted"), [("bbd", [2]), ("bd", []), ("bdd", [0]), ("bbdd", []), ("b", []), ("bde", [])]
)
def test_only_a_majority_outvotes_a_slot(states: str, outvoted: list[int]) -> None:
    written = receipts(states)
    assert [i for i in range(len(written)) if is_outvoted(f"r-{i}", written)] == outvoted
    assert not is_outvoted("absent", written)


# A run.


class MonitoredRun:
    """Receipts of a run of r-0 to r-2 in a memory store, and the monitor of r-0, which counts its requests."""

    def __init__(self, memory: MemoryStore | None = None, members: int = 3) -> None:
        self.memory = memory or MemoryStore()
        self.store = Retrying(self.memory, FakeClock())
        self.monitor = ReceiptMonitor(self.store if memory is None else memory, "r-0")
        self.members = tuple(f"r-{i}" for i in range(members))

    def round(self, number: int, states: str = "bbb", *, writes: Iterable[int] = (1, 2)) -> list[Verdict]:
        """r-0 expects a round's receipts, the replicas of `writes` write theirs, and r-0 looks."""
        written = receipts(states, number)
        for i in writes:
            write_receipt(self.memory, written[i])
        self.monitor.expect(written[0], self.members)
        return self.monitor.look()

    def rounds(self, count: int, states: str = "bbb", *, writes: Iterable[int] = (1, 2)) -> list[Verdict]:
        """The verdicts of rounds 0 to `count` - 1."""
        return [verdict for number in range(count) for verdict in self.round(number, states, writes=writes)]

    def requests(self) -> int:
        return self.store.usage.requests


def test_rounds_get_verdicts_in_order_when_receipts_are_complete() -> None:
    run = MonitoredRun()
    assert run.round(0, writes=(1,)) == []
    assert run.round(1, "bbd") == []
    assert run.round(2) == []
    write_receipt(run.memory, receipt("r-2", 0))
    assert run.monitor.look() == [agreed(0), differ("2", "01", majority=True, number=1)]


@pytest.mark.parametrize(("states", "majority"), [("bbdb", False), ("bbdbb", True)])
def test_wait_for_an_irrelevant_missing_receipt_is_bounded(states: str, *, majority: bool) -> None:
    """The last receipt is missing. r-0 and r-1 have a majority without it, or no other state can have one."""
    run = MonitoredRun(members=len(states))
    writers = range(1, len(states) - 1)
    assert run.rounds(WINDOW, states, writes=writers) == []
    (verdict,) = run.round(WINDOW, states, writes=writers)
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.round, verdict.slots, verdict.majority) == (0, ("r-2",), majority)


def test_undecidable_round_is_skipped_for_a_complete_one() -> None:
    run, last = MonitoredRun(), WINDOW + 2
    assert run.rounds(last, "dbb", writes=(1,)) == []
    verdicts = [verdict for number in range(last, last + 4) for verdict in run.round(number, "dbb")]
    assert verdicts == [differ("0", "12", majority=True, number=last)]


def test_verdict_without_a_permanently_missing_receipt() -> None:
    run, quiet = MonitoredRun(), WINDOW + PATIENCE
    assert run.rounds(quiet, "bdd", writes=(1,)) == []
    assert run.round(quiet, "bdd", writes=(1,)) == [differ("1", "0", majority=False, number=PATIENCE)]


def test_single_receipt_gives_no_verdict() -> None:
    assert MonitoredRun().rounds(2 * WINDOW, writes=()) == []


def test_two_differing_replicas_reach_the_same_verdict_at_any_time() -> None:
    memory = MemoryStore()
    monitors = {slot: ReceiptMonitor(memory, slot) for slot in ("r-0", "r-1")}
    verdicts: dict[str, list[Verdict]] = {"r-0": [], "r-1": []}
    for number in range(3 * WINDOW):
        for mine in receipts("bd", number):
            write_receipt(memory, mine)
            monitors[mine.slot].expect(mine, monitors)
        verdicts["r-0"] += monitors["r-0"].look()
        if number == 2 * WINDOW:  # r-1 looks only once, and late
            verdicts["r-1"] += monitors["r-1"].look()
    for first, *_ in verdicts.values():
        assert first == differ("1", "0", majority=False, number=first.round)


def test_lasting_difference_is_reported_at_growing_intervals() -> None:
    rounds = [verdict.round for verdict in MonitoredRun().rounds(60, "bbd")]
    assert rounds == [0, QUIET, QUIET + 2 * QUIET + 1, QUIET + 2 * QUIET + 1 + 4 * QUIET + 3]


def test_difference_after_many_equal_rounds_is_reported_at_once() -> None:
    run = MonitoredRun()
    states = ["bbd", *["bbb"] * (2 * QUIET + 1), "bbd", *["bbd"] * QUIET]
    verdicts = [verdict for number, letters in enumerate(states) for verdict in run.round(number, letters)]
    assert [verdict.round for verdict in verdicts if not isinstance(verdict, Agreed)] == [0, 2 * QUIET + 2]
    assert run.round(len(states), "bbd")[0].round == 2 * QUIET + 2 + QUIET


def test_forgotten_rounds_get_no_verdict() -> None:
    run = MonitoredRun()
    run.round(0, "dbb")
    run.monitor.forget(1)
    assert run.monitor.agreed == 0
    assert run.round(1) == []
    assert run.round(2) == [agreed(1)]


def test_last_equal_round_is_known() -> None:
    run = MonitoredRun()
    last_equal = [run.monitor.agreed]
    for number, states in ((5, "bbb"), (6, "bbb"), (7, "bbd"), (8, "bbd")):
        run.round(number, states)
        last_equal.append(run.monitor.agreed)
    assert last_equal == [None, 4, 5, 6, 6]


@pytest.mark.parametrize("damage", [b"{", receipt("r-2", run="f" * 32).to_bytes()])
@pytest.mark.parametrize(("states", "verdict"), [("bb", agreed(0, "01")), ("bd", differ("1", "0", majority=False))])
def test_damaged_or_foreign_receipt_has_no_vote_and_ends_the_wait(damage: bytes, states: str, verdict: Verdict) -> None:
    run = MonitoredRun()
    run.memory.replace(keys.receipt(0, "r-2"), damage)
    run.round(0, states, writes=(1,))
    assert run.round(1) == [verdict]
    assert [written.slot for written in receipts_of(run.store, RUN, 0)] == ["r-1"]


def test_round_costs_one_listing_and_one_read_per_receipt() -> None:
    run = MonitoredRun()
    run.round(0)
    before = run.requests()
    for number in range(1, 11):
        assert run.round(number) == [agreed(number - 1)]
    assert run.requests() - before == 10 * (1 + 2)


def test_receipts_of_many_members_are_compared_in_some_rounds_only() -> None:
    """32 members: every fourth round, so that a round costs each of them eight reads."""
    run = MonitoredRun(members=4 * LARGE)
    equal, states = "b" * 4 * LARGE, "b" * (4 * LARGE - 1) + "d"
    others = range(1, 4 * LARGE)
    verdicts = [
        verdict
        for number in range(20)
        for verdict in run.round(number, equal if number < 10 else states, writes=others)
    ]
    assert [(type(verdict), verdict.round) for verdict in verdicts] == [
        (Agreed, 0),
        (Agreed, 4),
        (Agreed, 8),
        (StatesDiffer, 12),
    ]
    assert run.requests() <= 20 * LARGE


def test_last_round_is_compared_however_many_members_there_are() -> None:
    states = "b" * (4 * LARGE - 1) + "d"
    run = MonitoredRun(members=len(states))
    run.round(4, "b" * len(states), writes=range(1, len(states)))
    assert run.round(5, states, writes=range(1, len(states))) == [Agreed(round=4, slots=run.members)]
    assert run.monitor.look(last=True) == []
    run.monitor.expect(receipt("r-0", 5), run.members, last=True)
    (verdict,) = run.monitor.look(last=True)
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.round, verdict.slots) == (5, (run.members[-1],))


def test_permanently_missing_receipt_costs_bounded_requests() -> None:
    run = MonitoredRun()
    run.rounds(10, writes=(1,))
    before = run.requests()
    run.round(10, writes=(1,))
    assert run.requests() - before <= WINDOW + 1


def test_one_look_reads_a_bounded_number_of_receipts() -> None:
    run = MonitoredRun(members=MAX_READS + 10)
    others, states = range(1, len(run.members)), "b" * len(run.members)
    run.round(0, states, writes=others)
    before = run.requests()
    assert run.round(1, states, writes=others) == []
    assert run.requests() - before == 1 + MAX_READS
    assert run.monitor.look() == [Agreed(round=0, slots=run.members)]


def test_foreign_objects_among_receipts_are_skipped() -> None:
    """Even if their content is a receipt."""
    run = MonitoredRun()
    folder = keys.receipts_prefix(1)
    for name, body in {
        "README": b"a note",
        ".x.json": b"a note",
        "r-0.json.bak": receipt("r-0", 1).to_bytes(),
        "old/r-1.json": receipt("r-1", 1, state="d").to_bytes(),
        "copy-of-r-2.json": receipt("r-2", 1).to_bytes(),
    }.items():
        run.memory.create(folder + name, body)
    verdicts = [verdict for number in range(6) for verdict in run.round(number, "bbb" if number < 3 else "bbd")]
    assert [type(verdict) for verdict in verdicts] == [Agreed, Agreed, Agreed, StatesDiffer]
    assert [written.slot for written in receipts_of(run.store, RUN, 1)] == ["r-1", "r-2"]


def test_unreadable_round_is_dropped_when_it_is_old() -> None:
    def fail(verb: str, key: str) -> None:
        if (verb, key) == ("read", keys.receipt(5, "r-1")):
            raise Retryable("broken")

    run = MonitoredRun(HookedStore(fail))
    verdicts: list[Verdict] = []
    failures = 0
    for number in range(60):
        try:
            verdicts += run.round(number, "bbb" if number < 20 else "bbd")
        except Retryable:
            failures += 1
    assert failures == WINDOW
    assert next(verdict for verdict in verdicts if isinstance(verdict, StatesDiffer)).slots == ("r-2",)


def test_round_is_settled_when_the_receipts_of_all_members_are_equal() -> None:
    run = MonitoredRun()
    settled = [run.monitor.settled]
    for number, (states, writers) in enumerate([("bbb", (1, 2)), ("bbb", (1, 2)), ("bbb", (1,)), ("bbd", (1, 2))]):
        run.round(number, states, writes=writers)
        settled.append(run.monitor.settled)
    for number in range(4, 4 + WINDOW):
        run.round(number, "bbd")
    assert [*settled, run.monitor.settled] == [None, 0, 1, 2, 2, 2]
