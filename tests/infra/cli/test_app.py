"""The commands for runs on this machine, in this process."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.infra.runs import STANDIN, write_spec
from tests.kit.protocol import heartbeat
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke
from tests.support.s3server import S3Server

from skerry.infra import targets
from skerry.infra.cli import app
from skerry.infra.local import destroy
from skerry.infra.run import check_machine_and_store, run_record
from skerry.infra.spec import replication_section
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Elsewhere, Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.store import Store

CLOCK = SystemClock()


def tree(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def load(path: Path, *overrides: str) -> SpecFile:
    return check_machine_and_store.load(path, targets.kinds(), overrides, CLOCK)


def started(path: Path, *overrides: str) -> tuple[SpecFile, Store, Run]:
    """A spec, and its run as `up` creates it."""
    spec = load(path, *overrides)
    store = open_store(spec.run_uri, clock=CLOCK)
    run, continued = run_record.create_or_load_run(store, spec, CLOCK)
    assert not continued
    return spec, store, run


def test_relative_uri_of_a_folder_starts_where_it_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(write_spec(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "test-run" in invoke("runs", "file://store").stdout
    assert invoke("status", "file://store/test-run").stdout.startswith("test-run: 0 of 3 rounds done")


def test_init_writes_a_sample_and_overwrites_nothing(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    assert invoke("init", path).exit_code == 0
    path.write_text("mine")
    (tmp_path / "train" / "train.py").write_text("mine too")
    again = invoke("init", path)
    assert (again.exit_code, path.read_text()) == (2, "mine")
    assert "exists and was not changed" in again.output
    assert "train.py not changed" in invoke("init", tmp_path / "other.yaml").output
    assert (tmp_path / "train" / "train.py").read_text() == "mine too"
    assert invoke("init", tmp_path / "no" / "x.yaml").exit_code == 2
    below_a_file = invoke("init", path / "x.yaml")
    assert (below_a_file.exit_code, "name a file in a folder of yours" in below_a_file.output) == (2, True)


def test_init_sample_is_valid_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    invoke("init", path)
    result = invoke("validate", path, "--json")
    assert (result.exit_code, json.loads(result.output)["ok"]) == (0, True), result.output
    assert tree(tmp_path) == ["skerry.yaml", "train", "train/train.py"]
    script = (tmp_path / "train" / "train.py").read_text()
    compile(script, "train.py", "exec")
    assert len(script.splitlines()) < 60
    (tmp_path / "train" / "train.py").unlink()
    assert "no files to pack in" in invoke("validate", path).output


def test_files_that_git_does_not_track_are_noted(tmp_path: Path) -> None:
    code = tmp_path / "code"
    shutil.copytree(STANDIN, code)
    (code / "new.py").touch()
    subprocess.run(["git", "init", "-q"], cwd=code, check=True)
    subprocess.run(["git", "add", "train.py"], cwd=code, check=True)
    spec = write_spec(tmp_path, code=code, count=1)
    note = "not in the code, because git does not track them: "
    for result in (invoke("validate", spec), invoke("up", spec, "--quiet")):
        assert note in result.output, result.output
        assert "new.py" in result.output
    [shown] = json.loads(invoke("validate", spec, "--json").output)["notes"]
    assert shown.startswith(note)


BAD = """\
run: bad
store: file://skerry.yaml/store
code: {path: ./nowhere, command: [python, train.py]}
outer: {rounds: 3, sync_evry: 10}
faults: {grace: 60}
replicas:
  - {name: a, count: 0, target: {kind: local}}
  - {name: a, count: 1, target: {kind: local}}
"""


@pytest.mark.parametrize("command", ["validate", "up"])
def test_bad_spec_is_refused_with_every_problem(tmp_path: Path, command: str) -> None:
    path = tmp_path / "skerry.yaml"
    path.write_text(BAD)
    result = invoke(command, path, "--json")
    assert result.exit_code == 2
    *lines, last = result.output.splitlines()
    assert [line.removeprefix(f"{path}:") for line in lines] == [
        (
            f"2:8: store: is unusable: {path} is not a folder; move it away; "
            "name a writable store, e.g. store: file://.skerry/store"
        ),
        f"3:14: code.path: no such folder: {tmp_path / 'nowhere'}; write the folder that holds the training code",
        "4:20: outer.sync_evry: unknown field; did you mean sync_every?",
        "5:17: faults.grace: has no unit (60s are seconds, 60m minutes, 60h hours); got 60; write e.g. grace: 60s",
        "7:22: replicas[0].count: must be at least 1; got 0; write e.g. count: 4",
        "8:12: replicas[1].name: 'a' is already the name of replicas[0]; write another, e.g. name: a-1",
    ]
    assert json.loads(last) == {"ok": False, "problems": lines}
    assert tree(tmp_path) == ["skerry.yaml"]


REMOTE = """\
run: tiny
store: s3://acme/runs
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu
code: {{path: {code}, command: [python, train.py]}}
outer: {{rounds: 3}}
replicas: [{groups}]
"""
HERE = "{name: a, count: 1, target: {kind: local}}"
THERE = "{name: b, count: 1, target: {kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge], gpus: 1}}"


@pytest.mark.parametrize("groups", ["", HERE, THERE, f"{HERE}, {THERE}"])
def test_validate_asks_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str) -> None:
    path = tmp_path / "skerry.yaml"
    path.write_text(REMOTE.format(code=STANDIN, groups=groups))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        assert "replica" in invoke("validate", path).output
        assert server.requests == {}
    assert tree(tmp_path) == ["skerry.yaml"]


def test_bad_usage_exits_with_2(tmp_path: Path) -> None:
    assert invoke("nonsense").exit_code == 2
    assert invoke("validate", tmp_path / "no.yaml").exit_code == 2
    assert invoke("validate", write_spec(tmp_path), "--set", "rounds").exit_code == 2


def test_commands_on_a_run_that_was_never_started(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    status = invoke("status", spec)
    assert (status.exit_code, "no run at file://" in status.output) == (1, True)
    logs = invoke("logs", spec)
    assert (logs.exit_code, "no logs on this machine" in logs.output) == (1, True)
    assert "nothing to destroy" in invoke("destroy", spec, "--yes").output
    assert tree(tmp_path) == ["skerry.yaml"]


def test_destroy_deletes_only_keys_of_the_run(tmp_path: Path) -> None:
    spec, store, run = started(write_spec(tmp_path))
    assert run_record.create_or_load_run(store, spec, CLOCK) == (run, True)
    store.create(keys.code("d"), b"code")
    store.create("run.json.backup", b"mine")
    store.create("thesis/chapter-1", b"mine")
    assert destroy.list_leftovers(spec, CLOCK).objects == 2

    removed = invoke("destroy", spec.path, "--yes", "--json")

    assert (removed.exit_code, json.loads(removed.output)["objects"]) == (0, 2)
    assert invoke("destroy", spec.path, "--yes").exit_code == 0
    assert [entry.key for entry in store.list("")] == ["run.json.backup", "thesis/chapter-1"]


def test_destroy_names_a_mirror_and_deletes_it_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # it would be another machine
    path = write_spec(tmp_path)
    path.write_text(f"{path.read_text()}replication: [{{to: 'file://west'}}]\n")
    spec, store, run = started(path)
    mirror = open_store((tmp_path / "west/test-run").as_uri())
    mark = Elsewhere(why="mirror", uri=store.uri, run=run.nonce, round=0, by="a-0", created=run.created)
    mirror.create(keys.ELSEWHERE, mark.to_bytes())
    mirror.create(keys.RUN, run.to_bytes())
    mirror.create(keys.spent("a-0"), b"{}")

    first = invoke("destroy", path, "--yes")
    assert f"left: the mirror at {mirror.uri}: `--data` deletes it too" in first.output
    with pytest.raises(Invalid, match=f"delete it with `skerry destroy {mirror.uri}`"):
        run_record.check_not_lost(spec, open_store)

    second = invoke("destroy", path, "--yes", "--data")
    assert (second.exit_code, f"the mirror at {mirror.uri}" in second.output) == (0, True)
    assert mirror.list("") == []
    run_record.check_not_lost(spec, open_store)
    assert "nothing to destroy" in invoke("destroy", path, "--yes", "--data").output


def test_limit_of_a_mirror_of_a_local_run_is_refused(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    path.write_text(f"{path.read_text()}replication: [{{to: gs://acme-dr/runs, max_usd: 5}}]\n")
    refused = invoke("up", path)
    assert refused.exit_code == 2, refused.output
    assert "max_usd of gs://acme-dr/runs cannot be enforced: the price of a GB from this machine" in refused.output
    assert not (tmp_path / "store").exists()


def test_destroy_of_a_mirror_leaves_nothing_of_it(tmp_path: Path) -> None:
    _, store, run = started(write_spec(tmp_path))
    mark = Elsewhere(why="mirror", uri="s3://acme/test-run", run=run.nonce, round=0, by="a-0", created=run.created)
    store.create(keys.ELSEWHERE, mark.to_bytes())
    store.create(keys.spent("a-0"), b"{}")
    assert invoke("destroy", store.uri, "--yes").exit_code == 0
    assert store.list("") == []


def test_destroy_deletes_nothing_without_run_json(tmp_path: Path) -> None:
    precious = tmp_path / "store" / "test-run" / "code" / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    assert invoke("destroy", write_spec(tmp_path), "--yes").exit_code == 0
    assert precious.exists()


def test_another_spec_is_refused_with_each_difference(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    _, store, _ = started(path)
    path.write_text(path.read_text().replace("rounds: 3", "rounds: 9"))
    with pytest.raises(Invalid) as caught:
        run_record.create_or_load_run(store, load(path, "outer.lr=0.1", "replicas[0].count=1"), CLOCK)
    first, *differences = str(caught.value).splitlines()
    assert "give the run another name, or run `skerry destroy`" in first
    assert differences == [
        f"  replicas: a-0, a-1 -> a-0 ({path}:9:3); may change at any time",
        f"  rounds: 3 -> 9 ({path}:6:17); `skerry extend --rounds 9` changes it",
        "  lr: 0.7 -> 0.1 (--set outer.lr=0.1); `skerry extend --outer-lr 0.1` changes it",
    ]
    refused = invoke("up", path, "--set=outer.lr=0.1", "--set=replicas[0].count=1")
    assert refused.exit_code == 2
    assert refused.stderr.splitlines() == [first, *differences]


def test_make_up_fixes_the_work_of_all_replicas(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    _, store, run = started(path, "faults.make_up=true")
    assert (run.rounds, len(run.slots), run.work) == (3, 2, 6.0)
    # The number of replicas may change; the work that is due stays.
    more = load(path, "faults.make_up=true", "replicas[0].count=3")
    assert run_record.create_or_load_run(store, more, CLOCK) == (run, True)
    without = load(path, "faults.make_up=false", "outer.rounds=4")
    with pytest.raises(Invalid) as caught:
        run_record.create_or_load_run(store, without, CLOCK)
    new_run = f"`run: test-run-2`, and `init_from: {without.run_uri}` to start with the model of this one"
    assert str(caught.value).splitlines()[1:] == [
        "  rounds: 3 -> 4 (--set outer.rounds=4); `skerry extend --rounds 4` changes it",
        "  make_up: true -> false (--set faults.make_up=false); fixed when the run starts",
        f"what is fixed needs a new run: write e.g. {new_run}",
    ]


NOT_OF_THE_SPEC = {"protocol", "nonce", "spec", "created", "store", "parent", "layout", "links"}


def test_new_run_has_links_and_an_older_one_goes_on_without(tmp_path: Path) -> None:
    spec, store, run = started(write_spec(tmp_path))
    assert run.links
    older = run.model_copy(update={"links": None})
    store.replace(keys.RUN, older.to_bytes())
    assert run_record.create_or_load_run(store, load(spec.path), CLOCK) == (older, True)


def test_every_fixed_field_of_run_json_has_a_name() -> None:
    assert set(Run.model_fields) - set(run_record.FIXED) == NOT_OF_THE_SPEC


def test_status_shows_dead_replicas_as_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, store, run = started(write_spec(tmp_path))
    store.replace(keys.heartbeat("a-0"), heartbeat("a-0", run=run.nonce).to_bytes())
    monkeypatch.setattr(app, "SystemClock", FakeClock)
    result = invoke("status", spec.path)
    assert result.exit_code == 0
    assert re.search(r'^a-0 state="train, silent \d s"', result.output, re.MULTILINE), result.output
    assert "tokens/s" not in result.output
    assert "no process on this machine supervises it" in result.output
    document = json.loads(invoke("status", spec.path, "--json").output)
    assert [replica["silent"] for replica in document["replicas"]] == [True, False]


def test_unreachable_store_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, text in {"ENDPOINT_URL": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", text)
    monkeypatch.setattr(check_machine_and_store, "STORE_DEADLINE_S", 0.01)
    monkeypatch.setattr(app, "STATUS_DEADLINE_S", 0.01)
    spec = write_spec(tmp_path)
    assert invoke("validate", spec, "--set", "store=s3://b/x").exit_code == 0, "it asks no store"
    wrong = invoke("up", spec, "--set", "store=s3://b/x")
    assert wrong.exit_code == 2
    assert "store: cannot reach s3://b/x (127.0.0.1:9: connection refused); name a writable store" in wrong.output
    away = invoke("status", spec, "--set", "store=s3://b/x")
    assert (away.exit_code, "cannot reach the store (127.0.0.1:9: connection refused)" in away.output) == (1, True)
