"""Damaged and missing objects are replaced by copies with the named digest, and no others are touched."""

from __future__ import annotations

import itertools
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from tests.kit.events import logged_events
from tests.kit.managers import Island, begin_run, stop_managers, train_saved_run, wait_for
from tests.kit.ranks import on_ranks
from tests.kit.stores import HookedStore, damage, flip

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict, Corrupt, Fenced, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import Contribution
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.mirrors.repair_from_copies import Copies, NamedObject, RoundMender, mend
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from skerry.runtime.store import Span

ROUNDS = 3


@pytest.fixture(scope="module")
def original() -> tuple[Mapping[str, bytes], dict[str, torch.Tensor]]:
    """The objects of a run after some rounds, and its parameters. The payloads of two rounds are still stored."""
    store = MemoryStore()
    islands = train_saved_run(store, ROUNDS)
    return {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}, islands[0].originals


def filled(objects: Mapping[str, bytes], store: MemoryStore | None = None) -> MemoryStore:
    store = MemoryStore() if store is None else store
    for key, data in objects.items():
        store.create(key, data)
    return store


def wanted_of(objects: Mapping[str, bytes], kind: str) -> NamedObject:
    """A record or a payload of the last round."""
    key = keys.contribution(ROUNDS - 1, 0, "a")
    if kind == "record":
        return NamedObject(key=key, digest=digest_of(objects[key]))
    (part,) = Contribution.parse(objects[key], key).parts
    return NamedObject(key=keys.payload(ROUNDS - 1, "a", part.digest), part=part)


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "damaged from byte 0 on": lambda data: flip(data, 0),
    "damaged from byte 200 on": lambda data: flip(data, 200),
    "7 bytes instead of": lambda data: data[:7],
    "0 bytes instead of": lambda _: b"",
    "bytes instead of": lambda data: data + b"x",
    "missing": lambda _: None,
}


@pytest.mark.parametrize("overwrites", [True, False])
@pytest.mark.parametrize("kind", ["record", "payload"])
@pytest.mark.parametrize("was", DAMAGES)
def test_bad_object_is_replaced_by_the_first_good_copy(
    original: tuple[Mapping[str, bytes], object], was: str, kind: str, *, overwrites: bool
) -> None:
    objects, _ = original
    verbs: list[str] = []
    store = HookedStore(lambda verb, key: verbs.append(verb) if key == wanted.key and verb != "read" else None)
    wanted = wanted_of(objects, kind)
    bad = DAMAGES[was](objects[wanted.key])
    filled({key: data for key, data in objects.items() if key != wanted.key}, store)
    if bad is not None:
        store.create(wanted.key, bad)
    verbs.clear()
    damaged = filled(objects)
    damage(damaged, wanted.key, 5)
    done = mend(store, wanted, Copies([MemoryStore(), damaged, filled(objects)]), overwrites=overwrites)
    assert done is not None
    assert (done.key, was in done.was) == (wanted.key, True)
    assert {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")} == objects
    assert verbs == (["create"] if bad is None else ["replace"] if overwrites else ["delete", "create"])
    assert mend(store, wanted, Copies([]), overwrites=overwrites) is None


def test_nothing_is_written_without_a_good_copy(original: tuple[Mapping[str, bytes], object]) -> None:
    objects, _ = original

    def refuse(verb: str, _: str) -> None:
        raise Retryable(verb)

    wanted = wanted_of(objects, "payload")
    store, damaged = filled(objects), filled(objects)
    damage(store, wanted.key)
    damage(damaged, wanted.key, 8)
    before = bytes(store.read(wanted.key) or b"")
    away = HookedStore(refuse)
    copies = Copies([away, MemoryStore(), damaged])
    with pytest.raises(Corrupt, match=r"has none; .* is damaged, or another object; .* cannot be read: read"):
        mend(store, wanted, copies, overwrites=True)
    assert store.read(wanted.key) == before
    away.hook = lambda *_: pytest.fail("a store that is away is asked once")
    with pytest.raises(Corrupt, match="cannot be read"):
        mend(store, wanted, copies, overwrites=False)
    assert store.read(wanted.key) == before


def test_object_that_is_whole_or_not_needed_by_then_is_left(original: tuple[Mapping[str, bytes], object]) -> None:
    objects, _ = original
    wanted = wanted_of(objects, "payload")
    store = filled(objects)
    store.delete(wanted.key)
    others = HookedStore(lambda verb, _: changes.pop()() if verb == "read" else None)
    filled(objects, others)
    changes: list[Callable[[], object]] = [lambda: store.create(wanted.key, objects[wanted.key])]
    assert mend(store, wanted, Copies([others]), overwrites=True) is None
    store.delete(wanted.key)
    manifest = keys.checkpoint_manifest(ROUNDS)
    changes.append(lambda: store.delete(manifest))
    owned = NamedObject(key=wanted.key, part=wanted.part, owner=manifest)
    assert mend(store, owned, Copies([others]), overwrites=True) is None
    assert store.read(wanted.key) is None


def test_store_that_damages_what_it_gets_is_reported(original: tuple[Mapping[str, bytes], object]) -> None:
    objects, _ = original
    wanted = wanted_of(objects, "payload")

    class Rotten(HookedStore):
        def replace(self, key: str, data: object) -> None:
            super().replace(key, flip(bytes(data)))  # type: ignore[call-overload]

    store = Rotten(lambda *_: None)
    filled(objects, store)
    MemoryStore.replace(store, wanted.key, b"bad")
    with pytest.raises(Conflict, match="still damaged"):
        mend(store, wanted, Copies([filled(objects)]), overwrites=True)


def test_mender_goes_on_where_it_was_late(original: tuple[Mapping[str, bytes], object]) -> None:
    objects, _ = original
    store = filled(objects)
    run = read_run(store)
    assert run is not None
    own, others = (entry.key for entry in store.list(keys.payloads_prefix(ROUNDS - 1)))
    for key in (own, others):
        damage(store, key)
    copy = filled(objects)
    mender = RoundMender(RunLog(store, run), "a", ROUNDS - 1, lambda: Copies([copy]), lambda: None)
    answers = [False, True]
    assert [item.key for item in mender.mend(lambda: answers.pop(0))[0]] == [own]
    assert mender.copies == {}
    bad = store.read(others)
    assert mender.mend(lambda: False) == ([], [])
    assert (list(mender.copies), mender.copies[others].uri, store.read(others)) == ([others], copy.uri, bad)
    store.replace(others, objects[others])
    assert (mender.mend(lambda: False), mender.copies) == (([], []), {})


# Replicas.


@pytest.fixture
def lost(original: tuple[Mapping[str, bytes], object], tmp_path: Path) -> Iterator[tuple[MemoryStore, str, str]]:
    """A run with a mirror whose last round no replica has applied: its payloads are damaged and missing."""
    objects, _ = original
    store = filled({key: data for key, data in objects.items() if key != keys.checkpoint_manifest(ROUNDS)})
    mirror = DirectoryStore(tmp_path / "mirror")
    run = read_run(store)
    assert run is not None
    settings = MirrorSettings(uri=mirror.uri, each_round=True)
    store.replace(keys.RUN, run.model_copy(update={"mirrors": (settings,)}).to_bytes())
    Mirror(store, mirror, SystemClock()).catch_up()
    bad, missing = (entry.key for entry in store.list(keys.payloads_prefix(ROUNDS - 1)))
    damage(store, bad)
    store.delete(missing)
    yield store, bad, missing
    stop_managers()


@pytest.mark.parametrize("slot", ["a", "b", "c"])
def test_replica_puts_back_its_own_and_reads_others_from_the_mirror(
    original: tuple[Mapping[str, bytes], dict[str, torch.Tensor]],
    lost: tuple[MemoryStore, str, str],
    slot: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "skerry")
    objects, parameters = original
    store, *broken = lost
    before = {key: store.read(key) for key in broken}
    joined = Island(store, slot, seed=5, grace_s=60.0, max_retries=None)
    assert joined.join() == 1
    for name, tensor in parameters.items():
        assert torch.equal(joined.originals[name], tensor)
    own = [key for key in broken if keys.slot_of(key) == slot]
    assert {key: store.read(key) for key in broken} == before | {key: objects[key] for key in own}
    assert [event["key"] for event in logged_events(caplog, "payload_mended")] == own
    others = [key for key in broken if key not in own]
    assert [event["key"] for event in logged_events(caplog, "payload_read_from_copy")] == others


class MirrorForReader(HookedStore):
    """A mirror's objects. `meets` is called with what a reader of blocks gets of one of them, in this process."""

    def __init__(self, folder: Path, key: str, meets: Callable[[memoryview], None]) -> None:
        super().__init__(lambda *_: None)
        mirror = DirectoryStore(folder)
        filled({entry.key: bytes(mirror.read(entry.key) or b"") for entry in mirror.list("")}, self)
        self.whole_reads = 0
        self._key, self._size, self._meets = key, len(mirror.read(key) or b""), meets

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        data = super().read(key, span, into)
        if data is None or key != self._key:
            return data
        if span is not None and span.stop == self._size + 1:  # a mender asks for one byte more
            self.whole_reads += 1
        else:
            self._meets(data)
        return data


def test_mirror_that_loses_its_copy_meanwhile_is_not_asked_without_pause(
    lost: tuple[MemoryStore, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy is whole when it is looked for, and damaged when it is read: the replica waits, as without a copy."""
    caplog.set_level(logging.INFO, "skerry")
    store, bad, _ = lost
    joined = Island(store, "c", seed=5, grace_s=60.0, timeout=timedelta(seconds=0.5))

    def spoil(data: memoryview) -> None:
        data[:] = flip(bytes(data), len(data) - 1)

    changing = MirrorForReader(tmp_path / "mirror", bad, spoil)
    object.__setattr__(joined.manager.session, "open_mirror", lambda _: changing)
    with pytest.raises(RuntimeError, match=r"cannot be followed.*payload is damaged"):
        joined.join()
    assert len(logged_events(caplog, "payload_read_from_copy")) == 2
    assert changing.whole_reads < 20


@pytest.fixture
def rotten(original: tuple[Mapping[str, bytes], object], lost: tuple[MemoryStore, str, str]) -> tuple[MemoryStore, str]:
    """As `lost`, with one damage, in a body: no header of the run's store shows it."""
    objects, _ = original
    store, bad, missing = lost
    store.create(missing, objects[missing])
    store.replace(bad, flip(objects[bad], len(objects[bad]) - 1))
    return store, bad


@pytest.mark.parametrize("refusals", [1, None])
@pytest.mark.parametrize("kind", [Unauthorized, Invalid, Retryable])
def test_mirror_that_refuses_a_reader_ends_no_replica(
    original: tuple[object, dict[str, torch.Tensor]],
    rotten: tuple[MemoryStore, str],
    tmp_path: Path,
    kind: type[SkerryError],
    refusals: int | None,
) -> None:
    """It is asked again after a pause; one that refuses always is as good as none. None: always."""
    store, bad = rotten
    patience = timedelta(seconds=0.5 if refusals is None else 30)
    joined = Island(store, "c", seed=5, grace_s=60.0, timeout=patience)
    met: list[int] = []

    def refuse(_: memoryview) -> None:
        met.append(1)
        if refusals is None or len(met) <= refusals:
            raise kind("the mirror says no")

    mirror = MirrorForReader(tmp_path / "mirror", bad, refuse)
    object.__setattr__(joined.manager.session, "open_mirror", lambda _: mirror)
    if refusals is None:
        with pytest.raises(RuntimeError, match=r"is closed and cannot be followed.*the mirror says no"):
            joined.join()
    else:
        assert joined.join() == 1
        for name, tensor in original[1].items():
            assert torch.equal(joined.originals[name], tensor)
    assert 0 < mirror.whole_reads < 20


@pytest.mark.parametrize("opened", [0, 1], ids=["to look for a copy", "to read it"])
def test_mirror_that_cannot_be_opened_ends_no_replica(
    rotten: tuple[MemoryStore, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, opened: int
) -> None:
    caplog.set_level(logging.INFO, "skerry")
    store, bad = rotten
    joined = Island(store, "c", seed=5, grace_s=60.0, max_retries=None)
    mirror = MirrorForReader(tmp_path / "mirror", bad, lambda _: None)
    calls = itertools.count()

    def open_mirror(_: str) -> MirrorForReader:
        if next(calls) == opened:
            raise Invalid("no such scheme")
        return mirror

    object.__setattr__(joined.manager.session, "open_mirror", open_mirror)
    assert joined.join() == 1
    assert "no such scheme" in [event["error"] for event in logged_events(caplog, "payload_not_mended")]


@pytest.mark.slow
def test_each_rank_reads_its_payloads_from_the_mirror(tmp_path: Path) -> None:
    """Of replicas of two ranks, which have other tensors on each. Only rank 0 looks for copies."""
    servers: list[dist.TCPStore] = []

    def address(rank: int, slot: str) -> dict[str, Any]:
        if rank == 0:
            servers.append(dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
            (tmp_path / slot).write_text(str(servers[-1].port))
        dist.barrier()
        port = int((tmp_path / slot).read_text())
        return {"rank": rank, "world_size": 2, "store_addr": "localhost", "store_port": port}

    def work(rank: int) -> None:
        store, mirror = DirectoryStore(tmp_path / "run"), DirectoryStore(tmp_path / "mirror")
        if rank == 0:
            begin_run(store, "a", minimum=1, rounds=None, mirrors=(MirrorSettings(uri=mirror.uri, each_round=True),))
        trained = Island(store, "a", seed=rank, minimum=1, **address(rank, "a"))
        recorder = trained.manager.lifecycle.log_follower.recorder
        for closed in range(1, ROUNDS + 1):
            trained.train(closed, close=False)
            wait_for(lambda: not recorder.is_saving)  # or the next checkpoint would be skipped
        trained.manager.shutdown()
        dist.barrier()
        if rank == 0:
            Mirror(store, mirror, SystemClock(), MirrorOptions(payloads=True)).catch_up()
            store.delete(keys.checkpoint_manifest(ROUNDS))
            payloads = [entry.key for entry in store.list(keys.payloads_prefix(ROUNDS - 1))]
            assert len(payloads) == 2
            for key in payloads:
                damage(store, key)
        joined = Island(store, "b", seed=rank + 5, minimum=1, max_retries=None, **address(rank, "b"))
        assert joined.join() == 1
        for name, tensor in trained.originals.items():
            assert torch.equal(joined.originals[name], tensor)
        joined.stop()
        dist.barrier()  # the server of the TCPStore ends with rank 0

    on_ranks(2, work)


def test_replaced_process_puts_nothing_back(
    lost: tuple[MemoryStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, *broken = lost
    before = [store.read(key) for key in broken]
    joined = Island(store, "a", seed=5, grace_s=60.0, max_retries=None)
    find = Copies.find

    def found_late(copies: Copies, wanted: NamedObject) -> tuple[memoryview, str]:
        store.create(keys.member("a", len(store.list(keys.members_prefix("a")))), b"{}")
        return find(copies, wanted)

    monkeypatch.setattr(Copies, "find", found_late)
    with pytest.raises(Fenced):
        joined.join()
    assert [store.read(key) for key in broken] == before


def test_replica_without_a_whole_copy_waits_as_before(
    lost: tuple[MemoryStore, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "skerry")
    store, bad, missing = lost
    for key in (bad, missing):
        damage(DirectoryStore(tmp_path / "mirror"), key)
    before = store.read(bad)
    joined = Island(store, "a", seed=5, grace_s=60.0, timeout=timedelta(seconds=0.5))
    with pytest.raises(RuntimeError, match="is closed and cannot be followed"):
        joined.join()
    assert (store.read(bad), store.read(missing)) == (before, None)
    reported = [str(event["error"]) for event in logged_events(caplog, "payload_not_mended")]
    assert len(reported) == 2  # each once, although the round is tried again
    assert all("is damaged, or another object" in error for error in reported)
