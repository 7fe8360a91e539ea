"""The replicas of a run that count as live, and the length of a look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.protocol import heartbeat, run_record
from tests.kit.records import outcome
from tests.support.clocks import FakeClock

from skerry.infra.observe.live_replicas import live_replicas, shown
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.log.records import Phase
    from skerry.runtime.log.run_record import Run


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def run(clock: FakeClock) -> Run:
    return run_record(clock)


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock=clock)


def beat(store: MemoryStore, run: Run, slot: str, sequence: int, phase: Phase = "train") -> None:
    body = heartbeat(slot, run=run.nonce, sequence=sequence, phase=phase)
    store.replace(keys.heartbeat(slot), body.to_bytes())


def beating(store: MemoryStore, run: Run, clock: FakeClock, *slots: str) -> None:
    """These slots send a heartbeat in every pause of the clock."""
    clock.on_pause = lambda: [beat(store, run, slot, 2 + len(clock.pauses)) for slot in slots] and None


def test_replica_is_live_if_its_heartbeat_changes(store: MemoryStore, run: Run, clock: FakeClock) -> None:
    for slot in ("a-10", "a-2", "dead", "other"):
        beat(store, run, slot, 1)
    member = Member(
        run=run.nonce, slot="a-2", incarnation=0, nonce="b" * 32, host="box", process=7, created="2026-01-01"
    )
    store.create(keys.member("a-2", 0), member.to_bytes())
    beating(store, run, clock, "a-2", "a-10", "other")
    live = live_replicas(store, run, clock, {"a-10", "a-2", "dead"})
    assert [replica.slot for replica in live] == ["a-2", "a-10"]
    assert shown(live) == (
        "a-2 on box (process 7) since 2026-01-01, in round 3, last heartbeat 0.0 s ago; "
        "a-10, in round 3, last heartbeat 0.0 s ago"
    )
    assert 1.5 <= sum(clock.pauses) < 2.0, "the dead one is waited for, three of its intervals"


def test_look_ends_when_all_have_sent_another_heartbeat(store: MemoryStore, run: Run, clock: FakeClock) -> None:
    beat(store, run, "a-0", 1)
    beating(store, run, clock, "a-0")
    assert len(live_replicas(store, run, clock, {"a-0"})) == 1
    assert len(clock.pauses) == 1


@pytest.mark.parametrize("end", ["nothing", "finished", "left", "failed", "outcome", "another run"])
def test_ended_replicas_are_not_waited_for(store: MemoryStore, run: Run, clock: FakeClock, end: str) -> None:
    match end:
        case "finished" | "left" | "failed":
            beat(store, run, "a-0", 1, end)
        case "outcome":
            beat(store, run, "a-0", 1)
            store.create(keys.outcome("a-0", 0), outcome("a-0", run=run.nonce).to_bytes())
        case "another run":
            beat(store, run.model_copy(update={"nonce": "c" * 32}), "a-0", 1)
        case _:
            pass
    assert live_replicas(store, run, clock, {"a-0"}) == []
    assert clock.pauses == []


def test_many_live_replicas_are_counted(store: MemoryStore, run: Run, clock: FakeClock) -> None:
    slots = [f"a-{number}" for number in range(6)]
    for slot in slots:
        beat(store, run, slot, 1)
    beating(store, run, clock, *slots)
    assert shown(live_replicas(store, run, clock, slots)).endswith("; and 2 more")
