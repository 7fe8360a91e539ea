"""`skerry replicate` and `skerry restore`: a run goes on from its mirror, and its original ends."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import torch
from tests.infra.runs import write_spec
from tests.kit.managers import (
    Island,
    assert_same_parameters,
    begin_run,
    islands_of,
    stop_managers,
    train_all,
    wait_until_saved,
)
from tests.support.command_line import invoke

from skerry.infra.cli import replicate_restore_commands
from skerry.infra.run.restore_run import best_mirror
from skerry.infra.spec import replication_section
from skerry.runtime.errors import Invalid, Moved, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.records import Heartbeat, MirrorState
from skerry.runtime.log.run_record import MirrorSettings
from skerry.runtime.mirrors.mirror import complete_checkpoints
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.store import Store

ROUNDS = 3


class Places:
    """The URIs of a run, its mirror and the restored run, and its replicas; both are still in the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.original = (folder / "east/my-run").as_uri()
        self.mirrors = (folder / "west").as_uri()
        self.mirror = f"{self.mirrors}/my-run"
        self.restored = (folder / "north/my-run").as_uri()
        store = open_store(self.original)
        begin_run(store, "ab", minimum=2, store=self.original)
        self.islands = islands_of(store, "ab", grace_s=60.0)
        self.train(ROUNDS)

    def train(self, rounds: int) -> None:
        train_all(self.islands, rounds, close=False)
        for island in self.islands:
            wait_until_saved(island)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    yield Places(tmp_path)
    stop_managers()


def replicate(places: Places, *words: str) -> dict[str, object]:
    done = invoke("replicate", places.original, "--to", places.mirrors, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.output.splitlines()[-1])


def test_run_goes_on_in_another_store_when_its_own_is_lost(places: Places) -> None:
    copied = replicate(places)
    assert (copied["uri"], copied["rounds"], copied["copied"]) == (places.mirror, ROUNDS, ROUNDS)
    before = [{name: tensor.clone() for name, tensor in island.originals.items()} for island in places.islands]
    for island in places.islands:
        with suppress(OSError):
            island.stop()
    shutil.rmtree(places.folder / "east")
    preview = invoke("restore", places.mirror, "--dry-run")
    assert "no such run is there any more" in preview.output
    assert "lost: no round that is known to be closed" in preview.output
    assert not (places.folder / "north").exists()
    done = invoke("restore", places.mirror, "--to", places.restored)
    assert done.exit_code == 0, done.output
    assert "write into its spec `store: " in done.output
    store = open_store(places.restored)
    joined = Island(store, "a", grace_s=60.0)
    joined.join()
    for name, tensor in before[0].items():
        assert torch.equal(joined.originals[name], tensor)
    joined.stop()
    islands = islands_of(store, "ab", grace_s=60.0)
    train_all(islands, ROUNDS + 2)
    assert_same_parameters(islands)
    assert invoke("doctor", "--deep", places.restored).exit_code == 0


def test_replicas_of_the_original_end_when_it_is_restored_elsewhere(places: Places) -> None:
    replicate(places)
    refused = invoke("restore", places.mirror, "--to", places.restored)
    assert refused.exit_code == 2
    assert "add --auto-approve" in refused.output
    done = invoke("restore", places.mirror, "--to", places.restored, "--auto-approve", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["ended"] == ["a", "b"]
    first, second = places.islands
    with pytest.raises(Moved, match=places.restored):
        first.train(ROUNDS + 1)
    with pytest.raises(Moved, match=places.restored):
        Island(open_store(places.original), "c")
    again = invoke("restore", places.mirror, "--to", f"{places.restored}-2", "--auto-approve")
    assert again.exit_code == 1
    assert f"goes on at {places.restored}: two runs continue it now" in again.output
    second.stop()


def test_original_that_comes_back_and_goes_on_is_ended_by_a_repeat(places: Places) -> None:
    """Its replicas waited for their store; they know nothing of the restored run."""
    replicate(places)
    run_json = places.folder / "east/my-run" / keys.RUN
    run_json.rename(places.folder / keys.RUN)
    done = invoke("restore", places.mirror, "--to", places.restored)
    assert done.exit_code == 0, done.output
    assert f"if {places.original} comes back, repeat this command" in done.output
    (places.folder / keys.RUN).rename(run_json)
    places.train(ROUNDS + 2)
    replicate(places)
    refused = invoke("restore", places.mirror, "--to", places.restored, "--auto-approve", "--at", "4")
    assert (refused.exit_code, "name an empty prefix" in refused.output) == (1, True)
    again = invoke("restore", places.mirror, "--to", places.restored, "--auto-approve")
    assert again.exit_code == 0, again.output
    assert "rounds of the original that are not in it: 2" in again.output
    assert "will end at" in again.output
    assert f"goes on at {places.restored} from round {ROUNDS}\n" in again.output
    for island in places.islands:
        with pytest.raises(Moved, match=f"{places.restored}, from round {ROUNDS} on"):
            island.train(ROUNDS + 3)


def test_rounds_after_the_copy_are_reported_as_lost(places: Places) -> None:
    replicate(places)
    places.train(ROUNDS + 2)
    preview = json.loads(invoke("restore", places.mirror, "--dry-run", "--json").output.splitlines()[-1])
    assert (preview["round"], preview["lost"], preview["uri"]) == (ROUNDS, 2, None)
    refused = invoke("restore", places.mirror, "--dry-run", "--at", "1")
    assert refused.exit_code == 2
    assert f"nothing of 1 rounds at {places.mirror} can be restored" in refused.output
    assert "has 3 rounds" in invoke("restore", places.mirror, "--at", "9").output


NEWEST = f"{keys.CHECKPOINTS}{4:08d}"


def test_repeat_ends_an_original_although_its_mirror_is_damaged_by_then(places: Places) -> None:
    """Nothing is copied again, so the tensors of the mirror are not needed."""
    replicate(places)
    run_json = places.folder / "east/my-run" / keys.RUN
    run_json.rename(places.folder / keys.RUN)
    assert invoke("restore", places.mirror).exit_code == 0
    (places.folder / keys.RUN).rename(run_json)
    damage(places.folder / "west/my-run", keys.CHECKPOINTS)
    again = invoke("restore", places.mirror, "--auto-approve", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.output.splitlines()[-1])["ended"] == ["a", "b"]
    assert invoke("restore", places.mirror, "--rehearse").exit_code == 1
    for island in places.islands:
        island.stop()


def damage(store: Path, folder: str, how: str = "flipped") -> None:
    """Damage all tensors there."""
    changed = [path for path in (store / folder).rglob("*") if path.is_file() and path.suffix != ".json"]
    assert changed
    for path in changed:
        data = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if how == "flipped" else data[:-5])


def copied_twice(places: Places, *words: str) -> Path:
    """A mirror of five rounds with checkpoints of 2 and 4. Returns its folder; the store of the run is lost."""
    replicate(places, *words)
    places.train(ROUNDS + 2)
    replicate(places, *words)
    for island in places.islands:
        with suppress(OSError):
            island.stop()
    shutil.rmtree(places.folder / "east")
    return places.folder / "west/my-run"


@pytest.mark.parametrize("how", ["flipped", "cut off", "missing"])
def test_restore_passes_over_a_damaged_newest_checkpoint(places: Places, how: str) -> None:
    mirror = copied_twice(places)
    damage(mirror, NEWEST, how)
    done = invoke("restore", places.mirror, "--to", places.restored)
    assert done.exit_code == 0, done.output
    assert "goes on from round 5: checkpoint 2 and 3 rounds after it" in done.output
    assert re.search(f"not used: .*{NEWEST}/", done.output)
    assert "lost: no round" in done.output
    assert invoke("doctor", "--deep", places.restored).exit_code == 0


def test_rounds_lost_with_a_damaged_checkpoint_are_named(places: Places) -> None:
    mirror = copied_twice(places, "--no-payloads")
    damage(mirror, NEWEST)
    rehearsed = invoke("restore", places.mirror, "--rehearse")
    assert rehearsed.exit_code == 1
    assert f"`skerry doctor {places.mirror} --repair`" in rehearsed.output
    done = invoke("restore", places.mirror, "--to", places.restored, "--json")
    assert done.exit_code == 0, done.output
    restored = json.loads(done.output.splitlines()[-1])
    assert (restored["round"], restored["checkpoint"], restored["lost"]) == (2, 2, 3)
    assert NEWEST in restored["not_used"][0]


def test_restore_without_a_whole_checkpoint_changes_nothing(places: Places) -> None:
    replicate(places)
    damage(places.folder / "west/my-run", keys.CHECKPOINTS)
    refused = invoke("restore", places.mirror, "--to", places.restored, "--auto-approve")
    assert refused.exit_code == 1
    assert f"payload is damaged: key={keys.CHECKPOINTS}" in refused.output
    assert f"`skerry doctor {places.mirror} --repair --from COPY`" in refused.output
    assert open_store(places.restored).list("") == []
    assert open_store(places.original).read(keys.ELSEWHERE) is None
    for island in places.islands:
        island.stop()


def test_rehearsal_reads_every_byte_and_leaves_nothing(places: Places) -> None:
    replicate(places)
    done = invoke("restore", places.mirror, "--rehearse")
    assert done.exit_code == 0, done.output
    assert "every byte read" in done.output
    assert sorted(path.name for path in (places.folder / "west").iterdir()) == ["my-run"]
    damage(places.folder / "west/my-run", keys.CHECKPOINTS)
    failed = invoke("restore", places.mirror, "--rehearse")
    assert failed.exit_code == 1
    assert "payload is damaged" in failed.output
    assert keys.CHECKPOINTS in failed.output
    assert sorted(path.name for path in (places.folder / "west").iterdir()) == ["my-run"]


def test_copy_made_by_hand_is_refused_and_can_be_restored(places: Places) -> None:
    for island in places.islands:
        island.stop()
    shutil.copytree(places.folder / "east", places.folder / "copied")
    copied = (places.folder / "copied/my-run").as_uri()
    with pytest.raises(Invalid, match=f"is a copy of run {places.original}, made by hand"):
        Island(open_store(copied), "a")
    done = invoke("restore", copied, "--auto-approve")
    assert done.exit_code == 0, done.output
    run = read_run(open_store(f"{copied}-restored"))
    assert run is not None
    assert run.parent is not None
    assert run.parent.uri == copied


def test_folder_that_was_moved_is_no_copy(places: Places) -> None:
    for island in places.islands:
        island.stop()
    shutil.move(places.folder / "east", places.folder / "elsewhere")
    joined = Island(open_store((places.folder / "elsewhere/my-run").as_uri()), "a")
    joined.join()
    assert joined.manager.current_step() == ROUNDS
    joined.stop()


def test_up_refuses_a_mirror(tmp_path: Path, places: Places) -> None:
    replicate(places)
    spec = write_spec(tmp_path)
    refused = invoke("up", spec, "--set", f"store={places.mirrors}", "--set", "run=my-run")
    assert refused.exit_code != 0
    assert "is a mirror of run" in refused.output, refused.output


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    original = (tmp_path / "east/my-run").as_uri()
    store = open_store(original)
    begin_run(store, "a", rounds=ROUNDS)
    Island(store, "a", minimum=1).train(ROUNDS)
    done = invoke("replicate", original, "--to", (tmp_path / "west").as_uri(), "--follow", "--every", "10")
    assert done.exit_code == 0, done.output
    assert f"{ROUNDS} of {ROUNDS} rounds, checkpoint {ROUNDS}" in done.output
    stop_managers()


def test_following_goes_on_past_damage_and_ends_with_it(tmp_path: Path) -> None:
    store = open_store((tmp_path / "east/my-run").as_uri())
    begin_run(store, "a", rounds=ROUNDS)
    Island(store, "a", minimum=1).train(ROUNDS)
    damaged = keys.checkpoint_manifest(ROUNDS)
    store.replace(damaged, b"{}")
    older = max(complete_checkpoints(store) - {ROUNDS})
    done = invoke("replicate", store.uri, "--to", (tmp_path / "west").as_uri(), "--follow")
    assert done.exit_code == 1, done.output
    assert f"{ROUNDS} of {ROUNDS} rounds, checkpoint {older}" in done.output
    assert damaged in done.output
    stop_managers()


def test_status_names_damage_that_keeps_a_mirror_behind(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # it would be another machine
    spec = write_spec_of(places, "  - {to: file://west}\n")
    replicate(places)
    for island in places.islands:
        island.stop()
    store = open_store(places.original)
    reports = {
        "a": MirrorState(uri=places.mirror, copied=ROUNDS, checkpoint=2, problem="checkpoints/3 is damaged"),
        "b": MirrorState(uri=places.mirror, copied=ROUNDS - 1, checkpoint=2, problem="away"),
    }
    for slot, state in reports.items():
        key = keys.heartbeat(slot)
        beat = Heartbeat.parse(store.read(key) or b"", key)
        store.replace(key, beat.model_copy(update={"mirrors": (state,)}).to_bytes())
    status = invoke("status", spec)
    assert status.exit_code == 0, status.output
    assert "not all was copied: checkpoints/3 is damaged" in status.output
    assert "away" not in status.output


def write_spec_of(places: Places, lines: str) -> Path:
    """The spec of the run of `places`, with these mirrors."""
    (places.folder / "code").mkdir()
    (places.folder / "code/train.py").write_text("print(1)\n")
    path = places.folder / "skerry.yaml"
    path.write_text(
        f"run: my-run\nstore: file://east\ncode: {{path: code, command: [python, train.py]}}\nouter: {{rounds: null}}\n"
        f"replicas: [{{name: a, count: 2, target: {{kind: local}}}}]\nreplication:\n{lines}"
    )
    return path


def test_spec_names_the_mirrors_and_the_newest_is_restored(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # both would be other machines
    spec = write_spec_of(places, "  - {to: file://west, every: 9}\n  - {to: file://south, log: every round}\n")
    done = invoke("replicate", spec)
    assert done.exit_code == 0, done.output
    assert [line.partition(":")[2].split(",")[0] for line in done.output.splitlines()] == [
        f"{places.mirror.removeprefix('file:')}: 3 of 3 rounds",
        f"{(places.folder / 'south/my-run').as_uri().removeprefix('file:')}: 3 of 3 rounds",
    ]
    places.train(ROUNDS + 2)
    assert invoke("replicate", spec, "--to", (places.folder / "south").as_uri()).exit_code == 0
    status = invoke("status", spec).output
    assert re.search(rf"mirror {places.mirror}: 3 of 5 rounds, checkpoint \d; 2 behind", status)
    south = (places.folder / "south/my-run").as_uri()
    assert re.search(rf"mirror {south}: 5 of 5 rounds, checkpoint \d; not behind", status)
    assert f"round 5, {(places.folder / 'south').as_uri()}" in status
    for island in places.islands:
        with suppress(OSError):
            island.stop()
    shutil.rmtree(places.folder / "east")
    same = invoke("restore", spec, "--to", (places.folder / "south/my-run").as_uri())
    assert "give the new one another name" in same.output
    done = invoke("restore", spec)
    assert done.exit_code == 0, done.output
    assert f"goes on from round {ROUNDS + 2}" in done.output
    assert f"keep only these lines of its `replication:`: {places.mirrors}" in done.output
    store = open_store((places.folder / "south/my-run-restored").as_uri())
    run = read_run(store)
    assert run is not None
    assert [(mirror.uri, mirror.every) for mirror in run.mirrors or ()] == [(f"{places.mirrors}/my-run-restored", 9)]
    # The changed spec goes on with the restored run, and with its mirror.
    changed = spec.read_text().replace("run: my-run", "run: my-run-restored").replace("file://east", "file://south")
    spec.write_text(changed.replace("  - {to: file://south, log: every round}\n", ""))
    replicated = invoke("replicate", spec)
    assert replicated.exit_code == 0, replicated.output
    assert f"{places.mirrors}/my-run-restored: {ROUNDS + 2} of {ROUNDS + 2} rounds" in replicated.output


def test_older_mirror_is_restored_if_the_newest_is_damaged(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # both would be other machines
    away = (places.folder / "away").as_uri()
    spec = write_spec_of(places, f"  - {{to: file://west}}\n  - {{to: file://south}}\n  - {{to: {away}}}\n")
    assert invoke("replicate", places.original, "--to", (places.folder / "south").as_uri()).exit_code == 0
    damage(copied_twice(places), keys.CHECKPOINTS)
    (places.folder / "away").write_text("")  # no folder can be below a file
    done = invoke("restore", spec, "--to", f"{places.restored}-2")
    assert done.exit_code == 0, done.output
    assert f"at {(places.folder / 'south/my-run').as_uri()}, a mirror of" in done.output
    assert f"goes on from round {ROUNDS}" in done.output
    assert re.search(f"not used: {places.mirror}: .*payload is damaged", done.output)
    assert f"not used: {away}/my-run: " in done.output


def test_unreachable_mirror_is_passed_over_by_a_restore(places: Places) -> None:
    replicate(places)

    def open_at(uri: str) -> Store:
        if uri == "s3://away/my-run":
            raise Retryable("no answer from the region")
        return open_store(uri)

    store, passed = best_mirror(["s3://away/my-run", places.mirror], open_at, None, find_cut)
    assert store.uri == places.mirror
    assert passed == ("s3://away/my-run: no answer from the region",)


def test_mirrors_of_two_runs_with_one_name_are_not_mixed_up(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older run of that name may have left a mirror that has more rounds."""
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # both would be other machines
    spec = write_spec_of(places, "  - {to: file://west}\n  - {to: file://south}\n")
    replicate(places)
    other = open_store((places.folder / "other/my-run").as_uri())
    begin_run(other, "a", minimum=1)
    Island(other, "a", minimum=1).train(ROUNDS + 1)
    assert invoke("replicate", other.uri, "--to", (places.folder / "south").as_uri()).exit_code == 0
    refused = invoke("restore", spec, "--to", f"{places.restored}-2", "--auto-approve")
    assert refused.exit_code == 2, refused.output
    assert "the mirrors hold different runs of one name" in refused.output
    assert places.mirror in refused.output
    assert not (places.folder / "north").exists()
    (places.folder / "west/my-run" / keys.ELSEWHERE).write_text("{}")
    done = invoke("restore", places.mirror, "--to", f"{places.restored}-2", "--auto-approve")
    assert done.exit_code == 0, done.output
    assert f"not used: record does not parse: key={keys.ELSEWHERE}" in done.output
    for island in places.islands:
        with suppress(Moved):
            island.stop()


def test_original_is_opened_with_the_region_of_its_spec(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_region(uri: str, **_: object) -> Store:
        raise Unauthorized(uri)

    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # it would be another machine
    spec = write_spec_of(places, "  - {to: file://west}\n")
    assert invoke("replicate", spec).exit_code == 0
    monkeypatch.setattr(replicate_restore_commands, "open_store", without_the_region)
    done = invoke("restore", spec, "--to", f"{places.restored}-2", "--auto-approve", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["ended"] == ["a", "b"]
    for island in places.islands:
        with suppress(Moved):
            island.stop()


def test_copying_by_hand_keeps_the_limit_of_the_mirror(places: Places) -> None:
    store = open_store(places.original)
    run = read_run(store)
    assert run is not None
    limited = MirrorSettings(uri=places.mirror, max_usd=1e-9, usd_per_gb=0.09)
    store.replace(keys.RUN, run.model_copy(update={"mirrors": (limited,)}).to_bytes())
    refused = invoke("replicate", places.original, "--to", places.mirrors)
    assert refused.exit_code == 2, refused.output
    assert "would cost more than max_usd=1e-09" in refused.output
    assert open_store(places.mirror).list(keys.CHECKPOINTS) == []
    for island in places.islands:
        island.stop()


def test_spec_without_mirrors_is_refused_with_the_next_step(places: Places) -> None:
    spec = write_spec_of(places, "")
    for command in ("replicate", "restore"):
        refused = invoke(command, spec)
        assert refused.exit_code == 2
        assert "the spec names no mirror; write `replication: [{to: gs://bucket/prefix}]`" in refused.output
    for island in places.islands:
        island.stop()


def test_doctor_shows_the_rounds_that_a_run_shares_with_its_restore(places: Places) -> None:
    replicate(places)
    places.train(ROUNDS + 2)
    assert invoke("restore", places.mirror, "--to", places.restored, "--auto-approve").exit_code == 0
    for island in places.islands:
        with suppress(Moved):
            island.stop()
    compared = invoke("doctor", places.original, places.restored)
    assert compared.exit_code == 0, compared.output
    assert f"was restored from {places.original}, and goes on from round 3" in compared.output
    assert "0 rounds of its own, the original 2" in compared.output
    assert invoke("doctor", places.mirror, places.original).exit_code == 0
    store = open_store(places.original)
    store.delete(keys.ELSEWHERE)
    both = invoke("doctor", places.original, places.restored)
    assert (both.exit_code, "stop them, or two runs go on" in both.output) == (1, True)
    key = keys.contribution(1, 0, "b")
    changed = json.loads(bytes(store.read(key) or b"")) | {"tokens": 99}
    store.replace(key, json.dumps(changed).encode())
    parted = invoke("doctor", places.restored, places.original)
    assert (parted.exit_code, f"{key} differs in tokens" in parted.output) == (1, True)
