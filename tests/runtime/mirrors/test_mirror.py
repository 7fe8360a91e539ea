"""A mirror that ends after any of its writes is an older run, from which replicas go on with the same bits."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    islands_of,
    manager_of,
    stop_managers,
    train_all,
    train_and_save_each,
    wait_until_saved,
)
from tests.kit.stores import HookedStore

from skerry.infra.observe.doctor.examine import examine_store
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict, Corrupt, Diverged, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import CheckpointManifest, Part, Receipt
from skerry.runtime.log.run_record import FailoverSettings
from skerry.runtime.mirrors.ballots import Ballots
from skerry.runtime.mirrors.mirror import KEPT, Mirror, MirrorOptions, complete_checkpoints
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.mirrors.run_from_copy import fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

ROUNDS = 4
CLOCK = SystemClock()


class Named(HookedStore):
    """A memory store with a URI of its own; it raises KilledError at the create after so many."""

    def __init__(self, name: str, creates: int | None = None) -> None:
        super().__init__(self._count)
        self.name, self.left, self.created = name, creates, 0

    @property
    def uri(self) -> str:
        return f"memory://{self.name}"

    def _count(self, verb: str, key: str) -> None:
        if verb == "create":
            if self.left is not None and self.created >= self.left:
                raise KilledError(key)
            self.created += 1


class KilledError(Exception):
    pass


def trained(store: Store, rounds: int = ROUNDS) -> list[Island]:
    islands = islands_of(store, "ab", grace_s=60.0)
    train_and_save_each(islands, rounds)
    return islands


@pytest.fixture(scope="module")
def original() -> Iterator[tuple[Named, list[Island]]]:
    """A run of two replicas after some rounds; checkpoint 4 is its newest, and the payloads since checkpoint 2 stay."""
    store = Named("runs/original")
    begin_run(store, "ab", minimum=2, rounds=None)
    yield store, trained(store)
    stop_managers()


def restored(mirror: Store, name: str = "runs/restored", at: int | None = None) -> tuple[Named, Run]:
    target = Named(name)
    return target, fork(mirror, find_cut(mirror, at), target, CLOCK.utc_text())


def test_mirror_is_complete_and_restored_run_is_healthy(original: tuple[Named, list[Island]]) -> None:
    store, _ = original
    mirror = Named("mirrors/original")
    progress = Mirror(store, mirror, CLOCK).catch_up()
    assert (progress.rounds, progress.copied, progress.checkpoint) == (ROUNDS, ROUNDS, ROUNDS)
    target, run = restored(mirror)
    examination = examine_store(target, on_progress=lambda _done, _whole: None)
    assert [item.text for item in examination.findings if item.severity == "error"] == []
    before = read_run(store)
    assert before is not None
    assert run.parent is not None
    assert run.nonce != before.nonce
    assert (run.parent.uri, run.parent.run, run.parent.round) == (store.uri, before.nonce, ROUNDS)
    # A repeat copies nothing.
    assert Mirror(store, mirror, CLOCK).catch_up().objects == 0


def test_replicas_of_a_restored_run_continue_with_the_same_bits(original: tuple[Named, list[Island]]) -> None:
    store, islands = original
    mirror = Named("mirrors/original")
    Mirror(store, mirror, CLOCK).catch_up()
    target, _ = restored(mirror)
    joined = Island(target, "a", grace_s=60.0)
    joined.join()
    for name, tensor in islands[0].originals.items():
        assert torch.equal(joined.originals[name], tensor)
    joined.manager.shutdown()
    assert_same_parameters(trained(target, ROUNDS + 2))


def test_every_prefix_of_the_writes_is_an_older_run(original: tuple[Named, list[Island]]) -> None:
    store, _ = original
    whole = Named("mirrors/original")
    Mirror(store, whole, CLOCK).catch_up()
    rounds: list[int] = []
    for creates in range(whole.created + 1):
        cut_off = Named("mirrors/original", creates)
        with suppress(KilledError):
            Mirror(store, cut_off, CLOCK).catch_up()
        if not complete_checkpoints(cut_off):
            with pytest.raises(Invalid, match=r"no run at|can be restored"):
                find_cut(cut_off)
            continue
        rounds.append(find_cut(cut_off).round)
        target, _ = restored(cut_off)
        examination = examine_store(target, on_progress=lambda _done, _whole: None)
        assert [item.text for item in examination.findings if item.severity == "error"] == [], creates
        # The next one finishes the mirror.
        cut_off.left = None
        assert Mirror(store, cut_off, CLOCK).catch_up().copied == ROUNDS
        assert find_cut(cut_off).round == ROUNDS
    assert rounds
    assert rounds == sorted(rounds)


def test_process_that_starts_during_a_copy_comes_before_its_receipt(original: tuple[Named, list[Island]]) -> None:
    receipt, started = keys.receipt(ROUNDS - 1, "b"), keys.member("b", 1)
    objects = {entry.key: bytes(original[0].read(entry.key) or b"") for entry in original[0].list("")}
    source, mirror = Named("runs/original"), Named("mirrors/original")
    for key in objects.keys() - {receipt}:
        source.create(key, objects[key])
    created: list[str] = []

    def start(verb: str, key: str) -> None:
        if verb == "create":
            created.append(key)
            if key == keys.commit(ROUNDS - 1):
                source.create(started, objects[keys.member("b", 0)])
                source.create(receipt, objects[receipt])

    mirror.hook = start
    Mirror(source, mirror, CLOCK).catch_up()
    assert created.index(started) < created.index(receipt)


def test_without_a_checkpoint_of_the_head_rounds_are_followed(original: tuple[Named, list[Island]]) -> None:
    store, islands = original
    mirror = Named("mirrors/original")
    Mirror(store, mirror, CLOCK).catch_up()
    mirror.delete(keys.checkpoint_manifest(ROUNDS))
    copied = copy_of(store, [keys.checkpoint_manifest(ROUNDS)])
    cut = find_cut(copied)
    assert (cut.round, cut.checkpoint) == (ROUNDS, ROUNDS - 1)
    target, _ = restored(copied)
    joined = Island(target, "a", grace_s=60.0)
    assert joined.join() == 1
    for name, tensor in islands[0].originals.items():
        assert torch.equal(joined.originals[name], tensor)
    joined.manager.shutdown()


def test_damage_in_the_source_is_not_copied(original: tuple[Named, list[Island]]) -> None:
    store, _ = original
    damaged = Named("runs/original")
    part = next(e.key for e in store.list(keys.CHECKPOINTS + f"{ROUNDS:08d}/") if not e.key.endswith("manifest.json"))
    for entry in store.list(""):
        data = bytearray(store.read(entry.key) or b"")
        if entry.key == part:
            data[-1] ^= 1
        damaged.create(entry.key, data)
    mirror = Named("mirrors/original")
    with pytest.raises(Corrupt, match=part):
        Mirror(damaged, mirror, CLOCK).catch_up()
    assert complete_checkpoints(mirror) == {ROUNDS - 1}
    assert find_cut(mirror).round == ROUNDS


def rewritten(store: Store, key: str, change: Callable[[bytes], bytes]) -> Named:
    """A copy of the run in which one object has other bytes."""
    copied = copy_of(store, [key])
    copied.create(key, change(bytes(store.read(key) or b"")))
    return copied


def forged(**fields: object) -> Callable[[bytes], bytes]:
    """A change of a checkpoint's manifest, sealed again."""

    def change(data: bytes) -> bytes:
        return CheckpointManifest.parse(data, "manifest").model_copy(update=fields).sealed().to_bytes()

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-5],
        lambda _: b"{}",
        forged(commit="7" * 64),
        forged(run="7" * 32),
        forged(round=1),
        forged(parts=(Part(digest="7" * 32, header_bytes=64, total_bytes=128),)),
    ],
)
@pytest.mark.parametrize("payloads", [True, False])
def test_damaged_manifest_keeps_nothing_else_from_a_mirror(
    original: tuple[Named, list[Island]], change: Callable[[bytes], bytes], *, payloads: bool
) -> None:
    key = keys.checkpoint_manifest(ROUNDS)
    source, mirror = rewritten(original[0], key, change), Named("mirrors/original")
    artifact = "artifacts/a/00000001-0000/metrics.txt"
    source.create(artifact, b"loss")
    copier = Mirror(source, mirror, CLOCK, MirrorOptions(payloads=payloads))
    for _ in range(2):
        with pytest.raises(Corrupt, match=f"checkpoints/{ROUNDS:08d}"):
            copier.catch_up()
        assert (copier.progress.copied, copier.progress.checkpoint) == (ROUNDS, ROUNDS - 1)
    assert find_cut(mirror).round == (ROUNDS if payloads else ROUNDS - 1)
    assert mirror.read(artifact) == b"loss"


def test_checkpoint_that_receipts_contradict_is_not_copied() -> None:
    source, mirror = Named("runs/three"), Named("mirrors/three")
    begin_run(source, "abc", minimum=3)
    train_all(islands_of(source, "abc", minimum=3, grace_s=60.0), 2)
    stop_managers()
    writer = CheckpointManifest.parse(source.read(keys.checkpoint_manifest(2)) or b"", "manifest").writer
    key = keys.receipt(1, writer)
    differs = Receipt.parse(source.read(key) or b"", key).model_copy(update={"state": "7" * 32})
    source.replace(key, differs.to_bytes())
    with pytest.raises(Corrupt, match=f"a majority contradicts its writer {writer}"):
        Mirror(source, mirror, CLOCK).catch_up()
    assert complete_checkpoints(mirror) == {1}


def test_damaged_private_state_keeps_no_other_from_a_mirror(original: tuple[Named, list[Island]]) -> None:
    source, mirror = copy_of(original[0]), Named("mirrors/original")
    for entry in original[0].list(f"{keys.CHECKPOINTS}{ROUNDS:08d}"):
        for slot in "ab":
            key = keys.private_prefix(slot) + entry.key.removeprefix(keys.CHECKPOINTS)
            source.create(key, original[0].read(entry.key) or b"")
    key = keys.checkpoint_manifest(ROUNDS, keys.private_prefix("a"))
    source.replace(key, bytes(source.read(key) or b"")[:-5])
    with pytest.raises(Corrupt, match=key):
        Mirror(source, mirror, CLOCK).catch_up()
    assert complete_checkpoints(mirror) == {ROUNDS}
    assert keys.checkpoint_manifest(ROUNDS, keys.private_prefix("b")) in {entry.key for entry in mirror.list("")}


def test_damaged_code_keeps_nothing_else_from_a_mirror(original: tuple[Named, list[Island]]) -> None:
    key = keys.code(digest_of(b"code"))
    damaged, mirror = copy_of(original[0], []), Named("mirrors/original")
    damaged.create(key, b"cod")
    copying = Mirror(damaged, mirror, CLOCK)
    with pytest.raises(Corrupt, match=key):
        copying.catch_up()
    assert (find_cut(mirror).round, mirror.read(key)) == (ROUNDS, None)
    damaged.replace(key, b"code")
    copying.catch_up()
    assert bytes(mirror.read(key) or b"") == b"code"


def test_rounds_before_a_damaged_record_are_copied(original: tuple[Named, list[Island]]) -> None:
    """Those after it are not: no prefix of them would be a run."""
    damaged = rewritten(original[0], keys.decision(2, 0), lambda _: b"{}")
    lost = copy_of(original[0], [keys.commit(2)])
    for source, error in ((damaged, Corrupt), (lost, Diverged)):
        mirror = Named("mirrors/original")
        with pytest.raises(error, match=r"exchanges/00000002|round 2 is not closed, but commits/00000003"):
            Mirror(source, mirror, CLOCK).catch_up()
        assert (find_cut(mirror).round, complete_checkpoints(mirror)) == (2, {2})


def test_mirror_that_lost_a_commit_gets_it_again(original: tuple[Named, list[Island]]) -> None:
    mirror = Named("mirrors/original")
    Mirror(original[0], mirror, CLOCK).catch_up()
    mirror.delete(keys.commit(1))
    assert find_cut_or_none(mirror) is None
    assert Mirror(original[0], mirror, CLOCK).catch_up().copied == ROUNDS
    assert find_cut(mirror).round == ROUNDS


def find_cut_or_none(store: Store) -> int | None:
    try:
        return find_cut(store).round
    except Invalid:
        return None


def test_mirror_with_another_last_commit_is_named(original: tuple[Named, list[Island]]) -> None:
    """It may be damaged there, or the run went back to an older copy of itself: nothing may be added to it."""
    mirror = Named("mirrors/original")
    Mirror(original[0], mirror, CLOCK).catch_up()
    key = keys.commit(ROUNDS - 1)
    mirror.replace(key, bytes(mirror.read(key) or b"").replace(b'"exchanges"', b'"exchanges" '))
    before = mirror.created
    with pytest.raises(Conflict, match=f"^{mirror.uri}/{key} differs from {original[0].uri}/{key}"):
        Mirror(original[0], mirror, CLOCK).catch_up()
    assert mirror.created == before


def test_rounds_without_a_run_are_no_mirror(original: tuple[Named, list[Island]]) -> None:
    mirror = Named("mirrors/original")
    mirror.create(keys.commit(0), b"{}")
    with pytest.raises(Invalid, match="has rounds of another run, and is no mirror"):
        Mirror(original[0], mirror, CLOCK)
    assert mirror.read(keys.ELSEWHERE) is None


def test_other_bytes_of_a_payload_in_a_mirror_keep_no_later_round_from_it(
    original: tuple[Named, list[Island]],
) -> None:
    part = next(entry.key for entry in original[0].list(f"{keys.PAYLOADS}{ROUNDS - 1:08d}/"))
    mirror = Named("mirrors/original")
    mirror.create(part, b"cut off")
    with pytest.raises(Conflict, match=part):
        Mirror(copy_of(original[0], [keys.checkpoint_manifest(ROUNDS)]), mirror, CLOCK).catch_up()
    assert find_cut(mirror).round == ROUNDS - 1
    assert Mirror(original[0], mirror, CLOCK).catch_up().checkpoint == ROUNDS
    assert find_cut(mirror).round == ROUNDS


def copied_after_each_round(failover: FailoverSettings | None = None) -> Named:
    """The mirror of a run of five rounds. failover: of the run as its mirror knows it."""
    store, mirror = Named("runs/long"), Named("mirrors/long")
    begin_run(store, "a", minimum=1)
    copier: Mirror | None = None
    island = Island(store, "a", minimum=1)
    for rounds in range(1, 6):
        island.train(rounds, close=False)
        wait_until_saved(island)
        if copier is None:
            copier = Mirror(store, mirror, CLOCK, MirrorOptions(every=2))
            copier.run = copier.run.model_copy(update={"failover": failover})
            if failover is not None:
                Ballots(mirror, copier.run, "a", CLOCK, find_cut).vote(0)
        copier.catch_up()
    island.manager.shutdown()
    assert copier is not None
    copier.catch_up()
    return mirror


def test_mirror_deletes_nothing_while_a_ballot_has_votes() -> None:
    mirror = copied_after_each_round(FailoverSettings(mirror="memory://m", uri="memory://m-failover", after_s=60.0))
    assert len(complete_checkpoints(mirror)) > KEPT


def test_mirror_keeps_its_two_newest_checkpoints() -> None:
    mirror = copied_after_each_round()
    assert len(complete_checkpoints(mirror)) <= KEPT
    oldest = min(complete_checkpoints(mirror))
    assert all(keys.round_of(entry.key) >= oldest for entry in mirror.list(keys.PAYLOADS))
    assert find_cut(mirror).round == 5


@pytest.mark.parametrize("damage", ["collected", "flipped"])
def test_checkpoint_leads_past_payloads_that_are_lost(original: tuple[Named, list[Island]], damage: str) -> None:
    source, mirror = Named("runs/original"), Named("mirrors/original")
    later = [keys.commit(2), keys.commit(3), keys.checkpoint_manifest(3), keys.checkpoint_manifest(4)]
    stored = {entry.key: bytearray(original[0].read(entry.key) or b"") for entry in original[0].list("")}
    for key in list(stored):
        if key.startswith(keys.payloads_prefix(2)):
            stored[key][-1] ^= 1
            if damage == "collected":
                del stored[key]
    for key in sorted(stored.keys() - later):
        source.create(key, stored[key])
    stored["artifacts/a/00000001-0000/metrics.txt"] = bytearray(b"loss")
    charges: list[int] = []
    copier = Mirror(source, mirror, CLOCK, MirrorOptions(every=10), charge=charges.append)
    assert copier.catch_up().checkpoint == 2
    for key in later:
        source.create(key, stored[key])
    copier.catch_up()
    assert find_cut(mirror).round == ROUNDS
    # What was not sent was given back.
    bulk = (keys.CODE, keys.ARTIFACTS, keys.PAYLOADS, keys.CHECKPOINTS, keys.PRIVATE)
    sizes = [e.size for e in mirror.list("") if e.key.startswith(bulk) and not e.key.endswith(keys.MANIFEST)]
    assert sum(charges) == sum(sizes)


def copy_of(store: Store, skipped: Iterable[str] = ()) -> Named:
    copied = Named("runs/original")
    for key in sorted({entry.key for entry in store.list("")} - set(skipped)):
        copied.create(key, store.read(key) or b"")
    return copied


def test_cut_off_commit_leaves_an_older_cut(original: tuple[Named, list[Island]]) -> None:
    newest = keys.commit(ROUNDS - 1)
    copied = copy_of(original[0], [newest, keys.checkpoint_manifest(ROUNDS), keys.checkpoint_manifest(ROUNDS - 1)])
    copied.create(newest, bytes(original[0].read(newest) or b"")[:-5])
    cut = find_cut(copied)
    assert (cut.round, cut.checkpoint, cut.logged) == (ROUNDS - 1, ROUNDS - 2, ROUNDS)
    assert newest in cut.skipped[0]
    with pytest.raises(Invalid, match=newest):
        find_cut(copied, ROUNDS)


@pytest.mark.parametrize("folder", [keys.PAYLOADS, keys.CHECKPOINTS])
def test_other_bytes_under_a_name_are_no_copy(original: tuple[Named, list[Island]], folder: str) -> None:
    store, _ = original
    part = next(e.key for e in store.list(f"{folder}{ROUNDS - 1:08d}/") if not e.key.endswith("manifest.json"))
    copied = copy_of(store, [keys.checkpoint_manifest(ROUNDS)])
    mirror, target = Named("mirrors/original"), Named("runs/restored")
    for other in (mirror, target):
        other.create(part, b"cut off")
    with pytest.raises(Conflict, match=part):
        Mirror(copied, mirror, CLOCK).catch_up()
    with pytest.raises(Conflict, match=part):
        fork(copied, find_cut(copied), target, CLOCK.utc_text())


def test_prefix_with_a_run_is_no_place_for_a_mirror(original: tuple[Named, list[Island]]) -> None:
    store, _ = original
    other = Named("runs/other")
    begin_run(other, "a")
    for target, reason in ((other, "has run test already"), (store, "no mirror of itself")):
        with pytest.raises(Invalid, match=reason):
            Mirror(store, target, CLOCK)
    mirror = Named("mirrors/original")
    Mirror(store, mirror, CLOCK).catch_up()
    with pytest.raises(Invalid, match="belongs to another run"):
        Mirror(other, mirror, CLOCK)
    with pytest.raises(Invalid, match="is a mirror of memory://runs/original"):
        Mirror(mirror, Named("mirrors/second"), CLOCK).catch_up()


def test_second_restore_to_a_used_prefix_is_refused(original: tuple[Named, list[Island]]) -> None:
    store, _ = original
    mirror = Named("mirrors/original")
    Mirror(store, mirror, CLOCK).catch_up()
    target = Named("runs/restored")
    begin_run(target, "a")
    with pytest.raises(Conflict, match="has run test already"):
        fork(mirror, find_cut(mirror), target, CLOCK.utc_text())


def test_replica_does_not_start_in_a_mirror(original: tuple[Named, list[Island]]) -> None:
    mirror = Named("mirrors/original")
    Mirror(original[0], mirror, CLOCK).catch_up()
    with pytest.raises(Invalid, match="is a mirror of run memory://runs/original"):
        manager_of(mirror, "a")
