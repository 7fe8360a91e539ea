"""`init_from` on this machine: what is refused before anything is created, and forks with real processes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from tests.infra.local.test_misuse import CODE, changes
from tests.infra.runs import Skerry, write_spec
from tests.kit.managers import Island, begin_run, wait_until_saved
from tests.kit.stores import damage
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.run.run_record import create_or_load_run
from skerry.infra.spec import model
from skerry.runtime.errors import Conflict, Invalid
from skerry.runtime.export import load
from skerry.runtime.log import keys
from skerry.runtime.log.records import CheckpointManifest, Member
from skerry.runtime.log.run_record import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.store import Store


@pytest.fixture
def source(tmp_path: Path) -> Store:
    """A finished run of four rounds, with checkpoints of the last three."""
    store = open_store((tmp_path / "store" / "base").as_uri())
    begin_run(store, ["a-0"], rounds=4)
    island = Island(store, "a-0", minimum=1)
    for closed in range(1, 5):
        island.train(closed, close=False)
        # The checkpoint of a round is skipped while the one before it is written.
        wait_until_saved(island)
    island.manager.shutdown()
    for entry in store.list(f"{keys.CHECKPOINTS}00000000/"):
        store.delete(entry.key)
    return store


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = write_spec(tmp_path, count=1)
    path.write_text(f"{path.read_text()}init_from: file://store/base\n")
    return path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store((tmp_path / "store" / "test-run").as_uri())


def spec_of(path: Path, *overrides: str) -> SpecFile:
    return model.load(path, targets.kinds(), overrides)


def manifest_of(store: Store, number: int) -> CheckpointManifest:
    key = keys.checkpoint_manifest(number)
    return CheckpointManifest.parse(store.read(key) or b"", key)


def change_run(store: Store, **changes: object) -> None:
    run = Run.parse(store.read(keys.RUN) or b"", keys.RUN)
    store.replace(keys.RUN, run.model_copy(update=changes).to_bytes())


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("no run", 2, "init_from: no run at {uri}/not; name the URI of a run's own prefix"),
        ("no round", 2, "init_from: no checkpoint of 0 rounds at {uri}/base; there are: 4, 3, 2"),
        (
            "unfinished",
            2,
            "is not finished (4 of 9 rounds are closed), so its last checkpoint is not the result; name a round with",
        ),
        ("unfinished", 2, "a round with a checkpoint: init_from: {uri}/base@4; there are: 4, 3, 2"),
        ("endless", 2, "init_from: run test is not finished (it has no end)"),
        ("no checkpoint", 2, "init_from: no checkpoint at {uri}/base yet: a replica writes the first one"),
        ("last is missing", 2, "init_from: run test has no checkpoint of its last round, 4; name a round with"),
        ("part is missing", 1, "init_from: the checkpoint of 4 rounds is incomplete: {uri}/base/checkpoints/00000004/"),
        ("part is damaged", 1, "payload is damaged: key=checkpoints/00000004/"),
        ("other log", 1, "init_from: {uri}/base/checkpoints/00000004/manifest.json belongs to another log"),
        ("itself", 2, "init_from: a run cannot start from itself: {uri}/test-run"),
    ],
)
def test_bad_source_is_refused_before_anything_is_created(
    source: Store, spec: Path, store: Store, what: str, code: int, words: str
) -> None:
    part = keys.checkpoint_part(4, manifest_of(source, 4).parts[0].digest)
    harm: dict[str, Callable[[], object]] = {
        "unfinished": lambda: change_run(source, rounds=9),
        "endless": lambda: change_run(source, rounds=None),
        "no checkpoint": lambda: [source.delete(entry.key) for entry in source.list(keys.CHECKPOINTS)],
        "last is missing": lambda: source.delete(keys.checkpoint_manifest(4)),
        "part is missing": lambda: source.delete(part),
        "part is damaged": lambda: damage(source, part),
        "other log": lambda: source.replace(
            keys.checkpoint_manifest(4), manifest_of(source, 3).model_copy(update={"round": 4}).sealed().to_bytes()
        ),
    }
    others = {"no run": "store/not", "no round": "store/base@0", "itself": "store/test-run"}
    harm.get(what, lambda: None)()
    overrides = [f"--set=init_from=file://{others[what]}"] if what in others else []
    result = invoke("up", spec, *overrides)
    assert result.exit_code == code, result.output
    assert words.format(uri=(spec.parent / "store").as_uri()) in result.stderr
    assert list(store.list("")) == []


def test_unfinished_run_with_a_round_is_a_source(source: Store, spec: Path, store: Store) -> None:
    change_run(source, rounds=9)
    run, continued = create_or_load_run(store, spec_of(spec, "init_from=file://store/base@3"), FakeClock())
    assert not continued
    assert run.init_from is not None
    assert (run.init_from.uri, run.init_from.round) == (source.uri, 3)
    copied = {entry.key.removeprefix(keys.INITIAL): entry.size for entry in store.list(keys.INITIAL)}
    prefix = f"{keys.CHECKPOINTS}00000003/"
    original = {entry.key.removeprefix(keys.CHECKPOINTS): entry.size for entry in source.list(prefix)}
    assert copied == original


def test_existing_run_never_asks_its_source_again(source: Store, spec: Path, store: Store) -> None:
    first, _ = create_or_load_run(store, spec_of(spec), FakeClock())
    for entry in source.list(""):
        source.delete(entry.key)
    for overrides in ([], ["init_from=file://store/base@4"]):
        assert create_or_load_run(store, spec_of(spec, *overrides), FakeClock()) == (first, True)
    for text, shown in (("file://store/base@3", "file://store/base@3"), ("file://store/other", "file://store/other")):
        with pytest.raises(Invalid, match=rf"  init_from: {source.uri}@4 -> {shown} \(--set init_from="):
            create_or_load_run(store, spec_of(spec, f"init_from={text}"), FakeClock())
    with pytest.raises(Invalid, match=rf"  init_from: {source.uri}@4 -> null"):
        create_or_load_run(store, spec_of(spec, "init_from=null"), FakeClock())


def test_interrupted_copy_is_completed(source: Store, spec: Path, store: Store) -> None:
    (part, *_) = manifest_of(source, 4).parts
    data = source.read(keys.checkpoint_part(4, part.digest)) or b""
    store.create(keys.checkpoint_part(4, part.digest, keys.INITIAL), data)
    run, _ = create_or_load_run(store, spec_of(spec), FakeClock())
    assert run.init_from is not None
    assert len(store.list(keys.INITIAL)) == len(source.list(f"{keys.CHECKPOINTS}00000004/"))


def test_copy_of_another_checkpoint_is_not_replaced(source: Store, spec: Path, store: Store) -> None:
    store.create(keys.checkpoint_manifest(4, keys.INITIAL), manifest_of(source, 3).to_bytes())
    with pytest.raises(Conflict, match=r"copy of another checkpoint at .*/initial/00000004/manifest.json; delete it"):
        create_or_load_run(store, spec_of(spec), FakeClock())
    assert store.read(keys.RUN) is None
    assert source.read(keys.RUN) is not None


def test_destroy_deletes_the_copy(source: Store, spec: Path, store: Store) -> None:
    create_or_load_run(store, spec_of(spec), FakeClock())
    assert store.list(keys.INITIAL)
    assert invoke("destroy", spec, "--yes").exit_code == 0
    assert list(store.list("")) == []
    assert source.read(keys.RUN) is not None


@pytest.mark.slow
def test_fork_survives_its_deleted_source_and_a_killed_replica(tmp_path: Path) -> None:
    settings = changes(outer__sync_every=4, faults__start_window="2m", faults__keep_every=1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    base = write_spec(tmp_path / "one", run="base", count=1, code=CODE)
    with Skerry("up", str(base), *settings, "--set=outer.rounds=3") as running:
        assert running.end() == 0, running.output
    source = (tmp_path / "one" / "store" / "base").as_uri()
    expected = load(source)
    spec = write_spec(tmp_path / "two", count=2, code=CODE)
    settings += [f"--set=init_from={source}", "--set=outer.rounds=100000"]
    fork = (tmp_path / "two" / "store" / "test-run").as_uri()
    with Skerry("up", str(spec), *settings, "-v") as running:
        running.until(f"starts from {source}@3: {fork}")
        running.until(" INFO initial_model_loaded")
        running.until(" INFO round_closed", times=4)
        assert invoke("destroy", base, "--yes", "--set=outer.rounds=3").exit_code == 0
        assert open_store(source).read(keys.RUN) is None
        member = Member.parse(open_store(fork).read(keys.member("a-1", 0)) or b"", "a-1")
        os.kill(member.process, signal.SIGKILL)
        running.until("a-1: killed (signal SIGKILL)")
        running.until("a-1 INFO checkpoint_loaded")  # it has caught up already if that is the newest round's
        running.until("a-1 INFO round_closed")
        running.interrupt()
        running.end()
    examined = invoke("doctor", fork, "--deep")
    assert examined.exit_code == 0, examined.output
    first = load(fork, 0)
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in expected.items())
    assert running.output.count(" INFO initial_model_loaded") in {1, 2}, "of the replicas that came before checkpoint 0"


@pytest.mark.slow
def test_fork_with_another_model_fails_with_the_names(tmp_path: Path, source: Store) -> None:
    spec = write_spec(tmp_path, count=1, code=CODE, restarts=0)
    with Skerry("up", str(spec), f"--set=init_from={source.uri}") as running:
        assert running.end() == 1
    words = f"Invalid: this script has another model than {source.uri}, from which the run starts (init_from): "
    assert f"{words}of another shape or type: weight: float32 (3, 4) -> float32 (8, 8), bias: " in running.output
