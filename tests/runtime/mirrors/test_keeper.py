"""Replicas keep the mirrors of run.json: in turns, in the background, and within what a mirror may cost."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
from tests.kit.events import logged_events
from tests.kit.managers import begin_run, islands_of, stop_managers, train_all
from tests.kit.stores import HookedStore

from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors.budget import Budget, SpentError
from skerry.runtime.mirrors.keeper import is_due, turn_of
from skerry.runtime.mirrors.mirror import complete_checkpoints
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.log.records import MirrorState
    from skerry.runtime.store import Store

ROUNDS = 3


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    stop_managers()


def kept(folder: Path, **settings: object) -> tuple[MirrorSettings, DirectoryStore]:
    uri = folder.as_uri()
    return MirrorSettings(uri=uri, each_round=True, **settings), DirectoryStore(folder)  # type: ignore[arg-type]


def train(store: Store, *mirrors: MirrorSettings, rounds: int = ROUNDS) -> None:
    """A run of two replicas, to its end."""
    begin_run(store, "ab", minimum=2, rounds=rounds, mirrors=mirrors)
    train_all(islands_of(store, "ab", grace_s=60.0), rounds, close=True)


def states(store: Store) -> list[MirrorState]:
    """By the last heartbeat of each replica that has copied."""
    beats = [Heartbeat.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(keys.HEARTBEATS)]
    return [state for beat in beats for state in beat.mirrors or ()]


def test_replicas_keep_a_mirror_that_restores_every_round(tmp_path: Path) -> None:
    store = MemoryStore()
    settings, mirror = kept(tmp_path / "mirror")
    train(store, settings)
    cut = find_cut(mirror)
    assert (cut.round, cut.checkpoint) == (ROUNDS, ROUNDS)
    assert [state.problem for state in states(store)] == [None] * len(states(store))
    assert max(state.copied for state in states(store)) == ROUNDS


def test_training_goes_on_while_a_mirror_is_away(tmp_path: Path) -> None:
    store = MemoryStore()
    (tmp_path / "away").write_text("")  # no folder can be below a file
    away, _ = kept(tmp_path / "away" / "mirror")
    settings, mirror = kept(tmp_path / "mirror")
    train(store, away, settings)
    assert find_cut(mirror).round == ROUNDS
    problems = {state.problem for state in states(store) if state.uri == away.uri}
    assert any(problems)


def test_damage_is_reported_beside_what_was_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The heartbeat has both, and the event names the object."""
    caplog.set_level(logging.INFO, "skerry")
    damaged = keys.checkpoint_manifest(ROUNDS)

    def rot(verb: str, key: str) -> None:
        if (verb, key) == ("read", damaged):
            MemoryStore.replace(store, damaged, b"{}")

    store = HookedStore(rot)
    settings, mirror = kept(tmp_path / "mirror")
    train(store, settings)
    assert find_cut(mirror).round == ROUNDS
    behind = [state for state in states(store) if damaged in (state.problem or "")]
    older = max(complete_checkpoints(store) - {ROUNDS})
    assert (ROUNDS, older) in {(state.copied, state.checkpoint) for state in behind}
    assert damaged in str(logged_events(caplog, "mirror_behind")[-1]["error"])


def test_mirror_stops_at_its_limit_and_stays_an_older_run(tmp_path: Path) -> None:
    store = MemoryStore()
    settings, mirror = kept(tmp_path / "mirror", max_usd=1e-6, usd_per_gb=1.0)  # 1,000 bytes
    train(store, settings)
    assert any("max_usd=1e-06" in (state.problem or "") for state in states(store))
    parts = [e for e in mirror.list("") if e.key.startswith((keys.PAYLOADS, keys.CHECKPOINTS, keys.PRIVATE))]
    assert sum(entry.size for entry in parts if not entry.key.endswith(keys.MANIFEST)) <= 1000


def test_limit_counts_the_bytes_of_all_slots_and_of_earlier_incarnations() -> None:
    mirror = MemoryStore()
    settings = MirrorSettings(uri="memory://m", max_usd=10.0, usd_per_gb=1.0)
    Budget(mirror, settings, "0" * 32, "a").charge(4_000_000_000)
    Budget(mirror, settings, "0" * 32, "b").charge(5_000_000_000)
    again = Budget(mirror, settings, "0" * 32, "a")
    with pytest.raises(SpentError, match=r"\$9\.00 are spent"):
        again.charge(1_000_000_001)
    again.charge(1_000_000_000)  # what was refused is not counted
    # What was not sent is taken back, beyond the limit, too.
    Budget(mirror, settings.model_copy(update={"max_usd": 1.0}), "0" * 32, "a").charge(-600_000_000)
    again.charge(600_000_000)


@pytest.mark.parametrize(
    ("every", "checkpoint_every", "due"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7, 8]), (4, 1, [1, 2, 4, 5, 6, 8]), (1, 4, [1, 2, 4, 5, 6, 8]), (6, 4, [1, 2, 8])],
)
def test_checkpoints_are_looked_for_when_one_may_be_due(every: int, checkpoint_every: int, due: list[int]) -> None:
    settings = MirrorSettings(uri="memory://m", every=every)
    assert [closed for closed in range(1, 9) if is_due(settings, closed, checkpoint_every)] == due


def test_author_of_a_checkpoint_copies_it_and_then_the_others() -> None:
    turns = [turn_of(closed, "abc", 2, is_over=False) for closed in range(6)]
    assert turns == ["a", "b", "b", "c", "c", "a"]
    assert turn_of(5, "abc", 2, is_over=True) == "c"
    assert turn_of(5, (), 2, is_over=False) is None


def test_restored_run_has_mirrors_of_its_own() -> None:
    store, source = MemoryStore("memory://runs/x"), MemoryStore("memory://mirrors/x")
    train(store, MirrorSettings(uri=source.uri), MirrorSettings(uri="memory://second/x"), rounds=1)
    for entry in store.list(""):
        source.create(entry.key, bytes(store.read(entry.key) or b""))
    restored = fork(source, find_cut(source), MemoryStore("memory://restored/x"), "")
    assert [mirror.uri for mirror in restored.mirrors or ()] == [f"memory://second/x-{restored.nonce[:8]}"]
