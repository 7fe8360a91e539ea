"""The cut of a verdict: every byte of it has been read, and older checkpoints make up for damaged ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import begin_run, manager_of, stop_managers
from tests.runtime.mirrors.test_mirror import CLOCK, Named, copied_after_each_round
from tests.support.clocks import FakeClock

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Verdict
from skerry.runtime.mirrors.checked_cut import CheckedCuts, check_free
from skerry.runtime.mirrors.failover_vote import go_on
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import check_fork

if TYPE_CHECKING:
    from skerry.runtime.store import Store


@pytest.fixture(scope="module")
def five_rounds() -> Named:
    return copied_after_each_round()


@pytest.fixture
def mirror(five_rounds: Named) -> Named:
    """Checkpoints 2 and 4, and all rounds after them."""
    copy = Named("mirrors/copy")
    for entry in five_rounds.list(""):
        copy.create(entry.key, bytes(five_rounds.read(entry.key) or b""))
    return copy


def damage(store: Store, folder: str) -> None:
    """Change the last byte of each tensor there."""
    changed = [entry.key for entry in store.list(folder) if not entry.key.endswith(".json")]
    assert changed
    for key in changed:
        data = bytearray(store.read(key) or b"")
        data[-1] ^= 1
        store.replace(key, bytes(data))


def checkpoint(number: int) -> str:
    return f"{keys.CHECKPOINTS}{number:08d}"


@pytest.mark.parametrize(
    ("damaged", "expected"),
    [
        ([], (5, 4)),
        ([f"{keys.PAYLOADS}{4:08d}"], (4, 4)),
        ([checkpoint(4)], (5, 2)),
        ([checkpoint(4), f"{keys.PAYLOADS}{2:08d}"], (2, 2)),
        ([checkpoint(4), f"{keys.PAYLOADS}{3:08d}"], (3, 2)),  # rounds between two checkpoints are used, too
    ],
)
def test_newest_cut_without_damage_is_used(mirror: Named, damaged: list[str], expected: tuple[int, int]) -> None:
    for folder in damaged:
        damage(mirror, folder)
    cut = find_cut(mirror)
    assert (cut.round, cut.checkpoint) == (5, 4)
    cut = CheckedCuts(FakeClock()).find(mirror)
    assert (cut.round, cut.checkpoint) == expected


@pytest.mark.parametrize("damaged", [[checkpoint(4)], [checkpoint(4), f"{keys.PAYLOADS}{3:08d}"]])
def test_run_goes_on_from_the_cut_of_its_verdict(mirror: Named, damaged: list[str]) -> None:
    """A verdict has a round and no checkpoint: the damaged one is passed over when the run is made, too."""
    for folder in damaged:
        damage(mirror, folder)
    cut, fork = CheckedCuts(FakeClock()).find(mirror), Named("runs/fork")
    verdict = Verdict(
        run=cut.run.nonce,
        ballot=0,
        uri=fork.uri,
        round=cut.round,
        commit=cut.commit,
        votes=("a",),
        by="a",
        created="2026-01-01",
    )
    run = go_on(mirror, verdict, fork, FakeClock(), "a")
    assert verdict.leads_to(run)
    assert (find_cut(fork).round, find_cut(fork).checkpoint) == (cut.round, cut.checkpoint)
    examination = examine_store(fork, on_progress=lambda _done, _whole: None)
    assert [item.text for item in examination.findings if item.severity == "error"] == []


def test_damage_of_all_checkpoints_is_named_and_not_read_again(mirror: Named) -> None:
    damage(mirror, keys.CHECKPOINTS)
    clock = FakeClock()
    cuts = CheckedCuts(clock)
    with pytest.raises(Invalid, match="can be restored: payload is damaged"):
        cuts.find(mirror)
    mirror.hook = refuse_tensors
    clock.pause(250)
    with pytest.raises(Invalid, match="can be restored: payload is damaged"):
        cuts.find(mirror)


def test_mirror_that_was_mended_is_read_again_after_minutes(mirror: Named, five_rounds: Named) -> None:
    damage(mirror, keys.CHECKPOINTS)
    clock = FakeClock()
    cuts = CheckedCuts(clock)
    with pytest.raises(Invalid, match="payload is damaged"):
        cuts.find(mirror)
    for entry in five_rounds.list(keys.CHECKPOINTS):
        mirror.replace(entry.key, bytes(five_rounds.read(entry.key) or b""))
    clock.pause(600)
    assert cuts.find(mirror).round == 5


def test_equal_parts_of_a_contribution_are_no_damage() -> None:
    """They have one name. Two fragments, or two ranks, may have the same values."""
    store, mirror = Named("runs/equal"), Named("mirrors/equal")
    begin_run(store, "a", minimum=1)
    manager = manager_of(
        store, "a", minimum=1, checkpoint_every=2, state_dict=dict, load_state_dict=lambda _state: None
    )
    for _ in range(3):
        manager.start_quorum()
        for _ in range(2):
            manager.allreduce(torch.zeros(100)).wait()
        assert manager.should_commit()
    stop_managers()
    Mirror(store, mirror, CLOCK, MirrorOptions()).catch_up()
    assert CheckedCuts(FakeClock()).find(mirror).round == 3


def refuse_tensors(verb: str, key: str) -> None:
    if verb == "read" and not key.endswith(".json"):
        raise AssertionError(key)


def test_record_that_is_missing_makes_no_run(mirror: Named) -> None:
    mirror.delete(keys.contribution(0, 0, "a"))
    cut = find_cut(mirror)
    with pytest.raises(Corrupt, match="is missing"):
        check_fork(mirror, cut)


def test_prefix_that_has_objects_of_a_run_is_not_free(mirror: Named) -> None:
    check_free(Named("runs/empty"))
    with pytest.raises(Conflict, match="has run "):
        check_free(mirror)
    mirror.delete(keys.RUN)
    with pytest.raises(Conflict, match="has objects of another run"):
        check_free(mirror)
