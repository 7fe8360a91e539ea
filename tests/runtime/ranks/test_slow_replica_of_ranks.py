"""A slow replica of several ranks ends its rounds early, on all of its ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import Island, Pace, decisions, receipts, together
from tests.runtime.ranks.replicas import RankedReplica, closing_replicas

from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def closed_replicas() -> Iterator[None]:
    with closing_replicas():
        yield


H = 6


def slow_round(island: Island, pace: Pace) -> None:
    """Take a third of the inner steps, then wait until the others have committed."""
    number = island.manager.current_step()
    for _ in range(H // 3):
        island.step()
    pace.allow(number + 1)
    while island.manager.current_step() == number:
        # Two ranks that ask without a pause take the processor from the replicas that they wait for.
        pace.wait_for_look()
        island.manager.catch_up(island.inner)


def race(store: MemoryStore, rounds: int, grace_s: float) -> list[RankedReplica]:
    """Train three replicas of two ranks; r-9 takes a third of the others' inner steps."""
    pace = Pace()
    replicas = [RankedReplica(store, slot, minimum=2, grace_s=grace_s, sync_every=H) for slot in ("r-0", "r-1", "r-9")]

    def work(island: Island, *, slow: bool) -> None:
        with island.diloco:
            island.manager.catch_up(island.inner)
            while island.manager.current_step() < rounds:
                if slow:
                    slow_round(island, pace)
                else:
                    pace.until(island.manager.current_step())
                    island.step()
                    island.manager.catch_up(island.inner)
        island.manager.shutdown()

    together(
        [
            lambda i=island, slow=replica is replicas[2]: work(i, slow=slow)
            for replica in replicas
            for island in replica.islands
        ]
    )
    for number in range(rounds - 1):
        assert len({receipt.state for receipt in receipts(store, number).values()}) == 1
    return replicas


@pytest.mark.slow
def test_slow_replica_ends_its_rounds_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.runtime.training.early_end_policy._MARGIN", 0.0)
    store = MemoryStore()
    race(store, 8, grace_s=10.0)
    shares = [share for decision in decisions(store) for share in decision.members if share.slot == "r-9"]
    assert len(shares) >= 6
    assert [share.weight for share in shares] == pytest.approx([1 / 3] * len(shares))
