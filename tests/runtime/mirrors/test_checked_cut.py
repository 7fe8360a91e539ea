"""The cut of a verdict: every byte of it has been read, and older checkpoints make up for damaged ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import begin_run, islands_of, manager_of, stop_managers, train_all
from tests.runtime.mirrors.test_mirror import CLOCK, Named, copied_after_each_round
from tests.support.clocks import FakeClock

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.errors import Conflict, Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Decision
from skerry.runtime.log.run_record import Settings, Verdict
from skerry.runtime.mirrors.checked_cut import CheckedCuts, check_free
from skerry.runtime.mirrors.failover_vote import go_on
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import check_fork, fork

if TYPE_CHECKING:
    from skerry.runtime.mirrors.restorable import Cut
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
    with pytest.raises(Corrupt, match="can be restored: payload is damaged"):
        cuts.find(mirror)
    mirror.hook = refuse_tensors
    clock.pause(250)
    with pytest.raises(Corrupt, match="can be restored: payload is damaged"):
        cuts.find(mirror)


def test_mirror_that_was_mended_is_read_again_after_minutes(mirror: Named, five_rounds: Named) -> None:
    damage(mirror, keys.CHECKPOINTS)
    clock = FakeClock()
    cuts = CheckedCuts(clock)
    with pytest.raises(Corrupt, match="payload is damaged"):
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


def change(store: Store, key: str, **fields: object) -> None:
    """Let the record be another one, that parses."""
    document = json.loads(bytes(store.read(key) or b"")) | fields
    store.replace(key, json.dumps(document, separators=(",", ":")).encode())


def fork_of(mirror: Store) -> tuple[Cut, Named]:
    cut, target = CheckedCuts(FakeClock()).find(mirror), Named("runs/fork")
    fork(mirror, cut, target, "2026-01-01")
    return cut, target


def errors_of(store: Store) -> list[str]:
    examination = examine_store(store, on_progress=lambda _done, _whole: None)
    return [item.text for item in examination.findings if item.severity == "error"]


@pytest.mark.parametrize(
    "damaged",
    [keys.receipt(0, "a"), keys.receipt(4, "a"), keys.member("a", 0), keys.outcome("a", 0), "private/a/00000004"],
)
def test_damaged_record_that_no_digest_names_stops_no_restore(mirror: Named, damaged: str) -> None:
    """A receipt is a vote, a start and an outcome are for people, a private state is made anew."""
    at = damaged if damaged.endswith(".json") else damaged + keys.MANIFEST
    mirror.create(at, b"")
    mirror.replace(at, b"{}")
    cut, target = fork_of(mirror)
    assert (cut.round, cut.checkpoint) == (5, 4)
    assert [reason for reason in cut.skipped if at in reason]
    assert target.read(at) is None
    assert [text for text in errors_of(target) if "has no membership record" not in text] == []


@pytest.mark.parametrize("key", [keys.ELSEWHERE, keys.settings(1)])
def test_damaged_record_that_nothing_names_stops_no_restore(mirror: Named, key: str) -> None:
    mirror.create(key, b"")
    mirror.replace(key, b"{}")
    cut, target = fork_of(mirror)
    assert cut.round == 5
    assert [reason for reason in cut.skipped if key in reason]
    assert read_run(target) is not None


def test_damaged_code_is_left_out_so_that_it_is_uploaded_again(mirror: Named) -> None:
    """Nothing replaces an object of that name, and no replica starts with the damaged one."""
    whole, damaged = keys.code(digest_of(b"code")), keys.code(digest_of(b"older code"))
    mirror.create(whole, b"code")
    mirror.create(damaged, b"older cod")
    cut, target = fork_of(mirror)
    assert [reason for reason in cut.skipped if damaged in reason and "upload it again" in reason]
    assert (bytes(target.read(whole) or b""), target.read(damaged)) == (b"code", None)


@pytest.mark.parametrize("fields", [{"run": "7" * 32}, {"number": 7}, {"previous": "7" * 64}])
def test_settings_that_do_not_follow_do_not_become_sound(mirror: Named, fields: dict[str, object]) -> None:
    run = read_run(mirror)
    assert run is not None
    previous = GENESIS
    for number in (1, 2):
        settings = Settings(
            run=run.nonce,
            number=number,
            previous=previous,
            from_round=0,
            rounds=number + 10,
            work=None,
            outer_lr=0.5,
            outer_momentum=0.5,
            by="operator",
            created="2026-01-01",
        )
        mirror.create(keys.settings(number), settings.to_bytes())
        previous = digest_of(settings.to_bytes())
    change(mirror, keys.settings(2), **fields)
    cut, target = fork_of(mirror)
    assert [reason for reason in cut.skipped if keys.settings(2) in reason]
    assert target.read(keys.settings(1)) is not None
    assert target.read(keys.settings(2)) is None


def test_receipt_of_another_commit_does_not_become_a_vote(mirror: Named) -> None:
    """Nor do records of another run become ones of this run."""
    change(mirror, keys.receipt(3, "a"), commit="7" * 64)
    change(mirror, keys.receipt(2, "a"), run="7" * 32)
    cut, target = fork_of(mirror)
    assert (cut.round, len(cut.skipped)) == (5, 2)
    assert target.read(keys.receipt(3, "a")) is None
    assert target.read(keys.receipt(2, "a")) is None
    assert target.read(keys.receipt(4, "a")) is not None


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (keys.contribution(0, 0, "a"), {"tokens": 99}),
        (keys.decision(1, 0), {"base": "7" * 64}),
        (keys.commit(1), {"work": 99.0}),
        (keys.commit(0), {"previous": "7" * 64}),
    ],
)
def test_new_digests_make_no_damaged_record_sound(mirror: Named, key: str, fields: dict[str, object]) -> None:
    change(mirror, key, **fields)
    with pytest.raises(Corrupt, match=r"doctor memory://mirrors/copy --repair --from COPY") as raised:
        CheckedCuts(FakeClock()).find(mirror)
    assert keys.round_of(key) == 1 or key in str(raised.value)


def test_named_round_is_restored_from_an_older_checkpoint(mirror: Named) -> None:
    damage(mirror, checkpoint(4))
    cut = CheckedCuts(FakeClock()).find(mirror, 5)
    assert (cut.round, cut.checkpoint) == (5, 2)
    assert checkpoint(4) in cut.skipped[0]
    damage(mirror, f"{keys.PAYLOADS}{4:08d}")
    with pytest.raises(Corrupt, match=f"{keys.PAYLOADS}{4:08d}"):
        CheckedCuts(FakeClock()).find(mirror, 5)


def test_checkpoint_that_is_deleted_while_it_is_read_leads_to_a_newer_one(mirror: Named) -> None:
    """The replicas go on, and keep two in their mirror."""
    newer = {entry.key: bytes(mirror.read(entry.key) or b"") for entry in mirror.list(checkpoint(4))}
    for key in newer:
        mirror.delete(key)

    def go_on(verb: str, key: str) -> None:
        if verb == "read" and key.startswith(checkpoint(2)) and not key.endswith(keys.MANIFEST):
            mirror.hook = lambda *_: None
            for entry in mirror.list(checkpoint(2)):
                mirror.delete(entry.key)
            for name, data in newer.items():
                mirror.create(name, data)

    mirror.hook = go_on
    cut = CheckedCuts(FakeClock()).find(mirror)
    assert (cut.round, cut.checkpoint, cut.skipped) == (5, 4, ())


def test_whole_cut_is_read_once(mirror: Named) -> None:
    cuts = CheckedCuts(FakeClock())
    first = cuts.find(mirror)
    mirror.hook = refuse_tensors
    assert cuts.find(mirror) == first


def test_rounds_that_too_few_have_closed_need_a_name(mirror: Named) -> None:
    """No replica would follow them, or load the checkpoint after them."""
    run = read_run(mirror)
    assert run is not None
    mirror.replace(keys.RUN, run.model_copy(update={"min_replicas": 2}).to_bytes())
    mirror.delete(keys.checkpoint_manifest(2))
    with pytest.raises(Invalid, match=r"min_replicas=2 replicas have closed round 3.*it is sound, and `--at`"):
        find_cut(mirror)
    assert find_cut(mirror, 5).round == 5


def test_round_that_was_closed_alone_ends_a_cut() -> None:
    """By a compromised replica: decision and commit fit, and have one member."""
    copy = Named("runs/two")
    begin_run(copy, "ab", minimum=2)
    train_all(islands_of(copy, "ab", grace_s=60.0), 2)
    stop_managers()
    copy.delete(keys.checkpoint_manifest(2))
    decided = keys.decision(1, 0)
    decision = Decision.parse(copy.read(decided) or b"", decided)
    alone = decision.model_copy(update={"members": decision.members[:1]}).to_bytes()
    copy.replace(decided, alone)
    change(copy, keys.commit(1), exchanges=[digest_of(alone)])
    cut = find_cut(copy)
    assert (cut.round, cut.logged) == (1, 2)
    assert "closed by fewer than min_replicas=2" in cut.skipped[0]
    assert find_cut(copy, 2).round == 2


def test_checkpoint_of_an_outvoted_writer_is_passed_over() -> None:
    """No replica would load it, so a run made of it could not start."""
    copy = Named("runs/three")
    begin_run(copy, "abc", minimum=3)
    train_all(islands_of(copy, "abc", minimum=3, grace_s=60.0), 2)
    stop_managers()
    key = keys.checkpoint_manifest(2)
    writer = CheckpointManifest.parse(copy.read(key) or b"", key).writer
    change(copy, keys.receipt(1, writer), state="7" * 32)
    cut = find_cut(copy)
    assert (cut.round, cut.checkpoint) == (2, 1)
    assert f"a majority contradicts its writer {writer}" in cut.skipped[0]


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
