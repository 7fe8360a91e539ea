"""`skerry doctor --repair` makes a run whole again from its mirror, and writes nothing that no record names."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import train_saved_run
from tests.kit.stores import HookedStore, damage, flip
from tests.support.command_line import invoke

from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.run.repair_run import known_copies, repair
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import CheckpointManifest
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.runtime.store import Store

ROUNDS = 3
LAST = ROUNDS - 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run after some rounds. Its newest checkpoint is missing, so the last payloads are needed."""
    folder = tmp_path_factory.mktemp("trained")
    store = DirectoryStore(folder)
    train_saved_run(store, ROUNDS)
    for entry in store.list(f"{keys.CHECKPOINTS}{ROUNDS:08d}"):
        store.delete(entry.key)
    for entry in store.list(f"{keys.CHECKPOINTS}{LAST:08d}"):
        private = keys.private_prefix("a") + entry.key.removeprefix(keys.CHECKPOINTS)
        store.create(private, store.read(entry.key) or b"")
    return folder


class Places:
    """A run with a mirror that its run.json names."""

    def __init__(self, trained: Path, folder: Path, *, each_round: bool = True) -> None:
        shutil.copytree(trained, folder / "run")
        self.run, self.mirror = DirectoryStore(folder / "run"), DirectoryStore(folder / "mirror")
        document = json.loads(bytes(self.run.read(keys.RUN) or b""))
        settings = MirrorSettings(uri=self.mirror.uri, each_round=each_round)
        document |= {"store": self.run.uri, "mirrors": [settings.model_dump()]}
        self.run.replace(keys.RUN, json.dumps(document).encode())
        Mirror(self.run, self.mirror, SystemClock(), MirrorOptions(payloads=each_round)).catch_up()

    def change(self, key: str, **fields: object) -> None:
        self.run.replace(key, json.dumps(json.loads(bytes(self.run.read(key) or b"")) | fields).encode())


@pytest.fixture
def places(trained: Path, tmp_path: Path) -> Places:
    return Places(trained, tmp_path)


def objects(store: Store) -> dict[str, bytes]:
    return {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}


def key_of(store: Store, prefix: str) -> str:
    return next(entry.key for entry in store.list(prefix) if not entry.key.endswith(keys.MANIFEST))


def lose_last_round(places: Places) -> list[str]:
    """Each record names the next one, so the last one is known only when the others are mended."""
    lost = [keys.commit(1), keys.decision(1, 0), keys.contribution(1, 0, "a"), keys.contribution(LAST, 0, "b")]
    lost.append(key_of(places.run, f"{keys.PAYLOADS}{LAST:08d}/b/"))
    for key in lost:
        places.run.delete(key)
    return lost


def cut_off(store: Store, key: str) -> list[str]:
    store.replace(key, bytes(store.read(key) or b"")[:-3])
    return [key]


def flipped(store: Store, key: str) -> list[str]:
    damage(store, key, 300)
    return [key]


def changed(places: Places, key: str, **fields: object) -> list[str]:
    places.change(key, **fields)
    return [key]


DAMAGES: dict[str, Callable[[Places], list[str]]] = {
    "cut off commit": lambda places: cut_off(places.run, keys.commit(LAST)),
    "changed commit": lambda places: changed(places, keys.commit(1), work=99.0),
    "changed decision": lambda places: changed(places, keys.decision(LAST, 0), proposer="x"),
    "replaced contribution": lambda places: changed(places, keys.contribution(0, 0, "a"), tokens=77),
    "lost round": lose_last_round,
    "cut off payload": lambda places: cut_off(places.run, key_of(places.run, f"{keys.PAYLOADS}{LAST:08d}/a/")),
    "cut off part": lambda places: cut_off(places.run, key_of(places.run, f"{keys.CHECKPOINTS}{LAST:08d}/")),
    "flipped payload": lambda places: flipped(places.run, key_of(places.run, f"{keys.PAYLOADS}{LAST:08d}/a/")),
    "flipped part": lambda places: flipped(places.run, key_of(places.run, f"{keys.CHECKPOINTS}{LAST:08d}/")),
    "flipped private": lambda places: flipped(places.run, key_of(places.run, f"{keys.PRIVATE}a/{LAST:08d}/")),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_run_is_whole_again(places: Places, name: str) -> None:
    before = objects(places.run)
    bad = DAMAGES[name](places)
    done = invoke("doctor", places.run.uri, "--repair", "--deep", "--json")
    document = json.loads(done.output.splitlines()[-1])
    assert (done.exit_code, document["ok"], document["problems"]) == (0, True, []), done.output
    assert {item["key"] for item in document["mended"]} == set(bad)
    assert {item["uri"] for item in document["mended"]} == {places.mirror.uri}
    assert objects(places.run) == before


def test_mirror_is_mended_from_its_original(places: Places) -> None:
    before = objects(places.mirror)
    cut_off(places.mirror, keys.commit(1))
    places.mirror.delete(key_of(places.mirror, keys.PAYLOADS))
    done = invoke("doctor", places.mirror.uri, "--repair")
    assert done.exit_code == 0, done.output
    assert f"mended: {keys.commit(1)} from {places.run.uri}: it was " in done.output
    assert objects(places.mirror) == before


def test_mirror_without_payloads_gets_none(trained: Path, tmp_path: Path) -> None:
    places = Places(trained, tmp_path, each_round=False)
    before = objects(places.mirror)
    assert not any(key.startswith(keys.PAYLOADS) for key in before)
    invoke("doctor", places.mirror.uri, "--repair")
    assert objects(places.mirror) == before


def test_healthy_run_is_not_written(places: Places) -> None:
    def refuse(verb: str, key: str) -> None:
        assert verb in {"read", "list"}, key

    store = HookedStore(lambda *_: None)
    for key, data in objects(places.run).items():
        store.create(key, data)
    store.hook = refuse
    done = repair(store, [places.mirror], lambda: examine_store(store, lambda *_: None))
    assert (done.ok, done.mended, done.problems) == (True, (), ())


def test_damaged_copies_and_those_of_other_runs_are_not_used(places: Places, tmp_path: Path) -> None:
    key = key_of(places.run, f"{keys.PAYLOADS}{LAST:08d}/a/")
    damage(places.mirror, key)
    places.run.delete(keys.commit(1))
    places.mirror.replace(keys.commit(1), bytes(places.mirror.read(keys.commit(0)) or b""))
    cut_off(places.run, key)
    other = DirectoryStore(tmp_path / "other")
    other.create(key, b"bytes of another run")
    before = objects(places.run)
    done = invoke("doctor", places.run.uri, "--repair", "--from", other.uri)
    assert done.exit_code == 1
    for bad in (key, keys.commit(1)):
        assert f"not mended: no copy of {bad}: " in done.output
    assert f"that of {places.mirror.uri} is damaged, or another object" in done.output
    assert objects(places.run) == before


def test_objects_that_no_record_names_are_never_written(places: Places) -> None:
    places.run.delete(keys.RUN)
    for key in (keys.receipt(1, "a"), keys.checkpoint_manifest(LAST), keys.member("a", 0)):
        places.run.delete(key)
    before = objects(places.run)
    with pytest.raises(Invalid, match="--from URI"):
        repair(places.run, (), lambda: examine_store(places.run))
    assert invoke("doctor", places.run.uri, "--repair", "--from", places.mirror.uri).exit_code == 1
    assert objects(places.run) == before


def test_refusal_of_the_store_is_reported_and_others_are_mended(places: Places) -> None:
    def refuse(verb: str, key: str) -> None:
        if verb == "replace" and key == keys.commit(1):
            raise Unauthorized("denied by the bucket's policy")

    store = HookedStore(refuse)
    cut_off(places.run, keys.commit(1))
    cut_off(places.run, keys.decision(LAST, 0))
    for key, data in objects(places.run).items():
        MemoryStore.create(store, key, data)
    done = repair(store, [places.mirror], lambda: examine_store(store))
    assert [item.key for item in done.mended] == [keys.decision(LAST, 0)]
    assert done.problems == (f"{keys.commit(1)}: the store refuses to replace it: denied by the bucket's policy",)
    assert not done.ok


def test_store_that_damages_what_it_gets_is_not_called_mended(places: Places) -> None:
    class Rotten(MemoryStore):
        def create(self, key: str, data: bytes) -> bool:
            return super().create(key, flip(data, 300) if key in lost else data)

    store, lost = Rotten(), set[str]()
    for key, data in objects(places.run).items():
        store.create(key, data)
    lost.add(key_of(store, f"{keys.PAYLOADS}{LAST:08d}/a/"))
    for key in lost:
        store.delete(key)
    done = repair(store, [places.mirror], lambda: examine_store(store))
    assert (done.ok, done.mended, len(done.problems)) == (False, (), 1)


def test_damage_that_remains_after_a_mended_part_is_reported(places: Places) -> None:
    key = keys.checkpoint_manifest(LAST)
    for store in (places.run, places.mirror):
        manifest = CheckpointManifest.parse(store.read(key) or b"", key)
        store.replace(key, manifest.model_copy(update={"index": "0" * 32}).sealed().to_bytes())
    damage(places.run, key_of(places.run, f"{keys.CHECKPOINTS}{LAST:08d}/"), 300)
    done = repair(places.run, [places.mirror], lambda: examine_store(places.run, lambda *_: None))
    assert len(done.mended) == 1
    assert not done.ok


def test_payload_that_is_deleted_while_the_log_is_read_is_not_put_back(places: Places) -> None:
    def collect(verb: str, key: str) -> None:
        if (verb, key) == ("list", keys.PAYLOADS):
            store.hook = lambda *_: None
            commit = digest_of(store.read(keys.commit(LAST)) or b"")
            newest = {"round": LAST + 1, "commit": commit}
            for part in manifest.parts:
                data = store.read(keys.checkpoint_part(LAST, part.digest)) or b""
                store.create(keys.checkpoint_part(LAST + 1, part.digest), data)
            sealed = manifest.model_copy(update=newest).sealed()
            store.create(keys.checkpoint_manifest(LAST + 1), sealed.to_bytes())
            for entry in store.list(f"{keys.PAYLOADS}{LAST:08d}/"):
                store.delete(entry.key)

    store = HookedStore(lambda *_: None)
    for key, data in objects(places.run).items():
        store.create(key, data)
    key = keys.checkpoint_manifest(LAST)
    manifest = CheckpointManifest.parse(store.read(key) or b"", key)
    store.hook = collect
    assert repair(store, [places.mirror], lambda: examine_store(store)).mended == ()


def test_copies_are_known_from_the_run_and_its_marks(places: Places) -> None:
    assert known_copies(places.run) == [places.mirror.uri]
    assert known_copies(places.mirror) == [places.run.uri]
    parent = {"uri": "s3://lost/run", "run": "d" * 32, "round": 1, "commit": "f" * 64}
    places.change(keys.RUN, parent=parent)
    assert known_copies(places.run) == [places.mirror.uri, "s3://lost/run"]
    places.run.replace(keys.RUN, b"{")
    assert known_copies(places.run) == []


@pytest.mark.parametrize(
    ("words", "text"), [(("--from", "file:///x"), "add --repair"), (("file:///x", "--repair"), "leave out")]
)
def test_options_that_do_not_belong_together_are_refused(places: Places, words: tuple[str, ...], text: str) -> None:
    done = invoke("doctor", places.run.uri, *words)
    assert (done.exit_code, text in done.output) == (2, True)
