"""Receipts compared: who differs, who is right, what it costs to find out, and what is not told twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime import keys
from skerry.runtime.alarm import (
    MAX_READS,
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
from skerry.runtime.records import CheckpointManifest, Receipt
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from collections.abc import Iterable

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


def judged(states: str, author: str | None = None, *, field: str = "state") -> Verdict:
    mine, *others = receipts(states, field=field)
    return compare(mine, others, author)


# One round.


def test_equal_receipts_agree() -> None:
    assert judged("bbb") == Agreed(round=0, slots=("r-0", "r-1", "r-2"))


@pytest.mark.parametrize(
    ("states", "author", "slots", "right", "majority"),
    [
        ("bbd", None, ("r-2",), ("r-0", "r-1"), True),
        ("bbd", "r-2", ("r-2",), ("r-0", "r-1"), True),
        ("dbb", None, ("r-0",), ("r-1", "r-2"), True),
        ("bd", "r-1", ("r-0",), ("r-1",), False),
        ("bd", None, ("r-1",), ("r-0",), False),
        ("bd", "r-9", ("r-1",), ("r-0",), False),
        ("bbdd", "r-3", ("r-0", "r-1"), ("r-2", "r-3"), False),
        ("bbde", "r-3", ("r-0", "r-1", "r-2"), ("r-3",), False),
    ],
)
def test_the_majority_is_right_then_the_author_then_the_first(
    states: str, author: str | None, slots: tuple[str, ...], right: tuple[str, ...], *, majority: bool
) -> None:
    assert judged(states, author) == StatesDiffer(round=0, slots=slots, right=right, majority=majority)


def test_averages_are_judged_before_states() -> None:
    others = [receipt("r-1"), receipt("r-2", average="f", state="d")]
    expected = AveragesDiffer(round=0, slots=("r-2",), right=("r-0", "r-1"), majority=True)
    assert compare(receipt("r-0"), others, None) == expected


def test_slots_are_told_in_slot_order() -> None:
    others = [receipt(f"r-{i}", state="d") for i in (10, 2, 9)]
    verdict = compare(receipt("r-1"), others, None)
    assert isinstance(verdict, StatesDiffer)
    assert (verdict.slots, verdict.right) == (("r-1",), ("r-2", "r-9", "r-10"))


@pytest.mark.parametrize("change", [{"scope": "registered"}, {"commit": "e" * 64}, {"number": 1}])
def test_what_cannot_be_compared_is_left_out(change: dict[str, object]) -> None:
    assert compare(receipt("r-0"), [receipt("r-1", state="d", **change)], None) == Agreed(round=0, slots=("r-0",))  # type: ignore[arg-type]


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
        self.members = ("r-0", "r-1", "r-2")

    def write(self, *found: Receipt) -> None:
        for one in found:
            assert self.memory.create(keys.receipt(one.round, one.slot), one.to_bytes())

    def round(self, number: int, states: str = "bbb", *, writes: Iterable[int] = (1, 2)) -> list[Verdict]:
        """My receipt of one round, those of `writes`, and a look."""
        found = [receipt(f"r-{i}", number, state=letter) for i, letter in enumerate(states)]
        self.write(*(found[i] for i in writes))
        self.alarm.expect(found[0], self.members)
        return self.alarm.look()

    def checkpoint(self, number: int, writer: str) -> None:
        manifest = CheckpointManifest(
            run=NONCE,
            round=number,
            commit=COMMIT,
            members=self.members,
            batches=0,
            index="1" * 32,
            parts=(),
            tree="{}",
            writer=writer,
            nonce=NONCE,
        )
        assert self.memory.create(keys.checkpoint_manifest(number), manifest.to_bytes())


def agreed(number: int, *slots: str) -> Agreed:
    return Agreed(round=number, slots=slots or ("r-0", "r-1", "r-2"))


def test_a_round_is_judged_once_its_members_receipts_are_there() -> None:
    watch = Watch()
    assert watch.round(0, writes=(1,)) == []
    assert watch.round(1) == []
    watch.write(receipt("r-2", 0))
    assert watch.alarm.look() == [agreed(0)]
    assert watch.round(2) == [agreed(1)]


def test_rounds_are_judged_in_their_order() -> None:
    watch = Watch()
    watch.round(0, writes=(1,))
    assert watch.round(1, "bbd") == []
    assert watch.round(2) == []
    watch.write(receipt("r-2", 0))
    found = watch.alarm.look()
    assert [type(verdict) for verdict in found] == [Agreed, StatesDiffer]


def test_a_missing_receipt_is_waited_for_only_so_long() -> None:
    watch = Watch()
    assert [watch.round(number, "bdd", writes=(1,)) for number in range(WINDOW)] == [[]] * WINDOW
    (verdict,) = watch.round(WINDOW)
    assert verdict == StatesDiffer(round=0, slots=("r-1",), right=("r-0",), majority=False)


def test_a_receipt_of_mine_alone_is_no_news() -> None:
    watch = Watch()
    assert [watch.round(number, writes=()) for number in range(2 * WINDOW)] == [[]] * (2 * WINDOW)


def test_without_a_majority_the_rounds_checkpoint_is_waited_for() -> None:
    watch = Watch()
    watch.members = ("r-0", "r-1")
    watch.round(0, "bd", writes=(1,))
    assert watch.round(1, "bd", writes=(1,)) == []
    watch.checkpoint(1, "r-1")
    assert watch.alarm.look() == [StatesDiffer(round=0, slots=("r-0",), right=("r-1",), majority=False)]


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
