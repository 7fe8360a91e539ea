"""Mirrors in the other cloud and in another region: their buckets and rights are created, repaired and deleted."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import Operator, skerry, write_run

from skerry.infra.deploy import read_clouds
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.run.change_run_settings import expect_slots
from skerry.infra.spec import replication_section
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS
from skerry.runtime.log.run_record import Elsewhere, Run, Verdict
from skerry.runtime.store import open_store
from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.runtime.store import Store
    from skerry.testing.both_clouds import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]

HOME: Final = "s3://acme-skerry/runs/tiny"
BATCH: Final = """\
  - name: b
    count: 1
    target: {{kind: aws_batch, region: us-east-1, instance_types: [c7i.large], vcpus: 2, memory: 1GiB}}
"""
VERTEX: Final = """\
  - name: v
    count: 1
    image: us-central1-docker.pkg.dev/{project}/skerry/replica@sha256:{digest}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4}}
"""
MIRRORS: Final = """\
limits: {max_hours: 24}
replication:
  - {to: gs://acme-dr/runs, log: every round}
  - {to: s3://acme-west/runs, region: us-west-2}
"""


@pytest.fixture
def clouds(skerry_clouds: Clouds) -> Clouds:
    skerry_clouds.aws.any_image = True
    skerry_clouds.google.any_image = True
    return skerry_clouds


@pytest.fixture
def spec(tmp_path: Path, clouds: Clouds) -> str:
    groups = (BATCH + VERTEX).format(project=clouds.google.project, digest="0123456789abcdef" * 4)
    return str(write_run(tmp_path, groups, more=MIRRORS))


def mark(uri: str, of: str = HOME) -> None:
    """Begin a mirror of the run, as its replicas do."""
    store = open_store(uri)
    record = Elsewhere(why="mirror", uri=of, run="0" * 32, round=0, by="b-0", created="2026-01-01")
    assert store.create(keys.ELSEWHERE, record.to_bytes())
    assert store.create(keys.payload(1, "b-0", "0" * 32), b"x")


def test_mirrors_are_created_repaired_and_deleted(spec: str, clouds: Clouds) -> None:
    planned = skerry("plan", spec).output
    assert re.search(r"aws_bucket.mirror-acme-west +acme-west \(us-west-2\) +a mirror of the run", planned)
    assert re.search(r"google_bucket.mirror-acme-dr +acme-dr \(us-central1\) +a mirror of the run", planned)
    skerry("apply", spec, "--auto-approve")
    s3 = clouds.aws.client("s3")
    assert s3.get_bucket_location(Bucket="acme-west")["LocationConstraint"] == "us-west-2"
    tags = {tag["Key"]: tag["Value"] for tag in s3.get_bucket_tagging(Bucket="acme-west")["TagSet"]}
    assert tags["skerry:run"] == HOME
    assert s3.get_bucket_encryption(Bucket="acme-west")
    skerry("plan", spec, "--detailed-exitcode")
    s3.delete_bucket_policy(Bucket="acme-west")
    assert "aws_bucket.mirror-acme-west" in skerry("plan", spec, "--detailed-exitcode", code=2).output
    skerry("apply", spec, "--auto-approve")
    skerry("plan", spec, "--detailed-exitcode")
    for uri in ("gs://acme-dr/runs/tiny", "s3://acme-west/runs/tiny"):
        mark(uri)
    kept = skerry("destroy", spec, "--yes", code=1).output
    assert "left: the mirror at gs://acme-dr/runs/tiny: `--data` deletes it too" in kept
    skerry("destroy", spec, "--yes", "--data")
    assert (clouds.aws.inventory(), clouds.google.inventory()) == ({}, {})


def test_objects_of_others_keep_the_bucket_of_a_mirror(spec: str, clouds: Clouds) -> None:
    skerry("apply", spec, "--auto-approve")
    mark("gs://acme-dr/runs/tiny")
    restored = open_store("gs://acme-dr/runs/tiny-restored")
    assert restored.create(keys.RUN, b"{}")
    output = skerry("destroy", spec, "--yes", "--data").output
    assert "kept: the bucket acme-dr, because 1 objects in it are not of this run" in output
    assert bytes(restored.read(keys.RUN) or b"") == b"{}"
    assert open_store("gs://acme-dr/runs/tiny").read(keys.ELSEWHERE) is None
    assert clouds.google.inventory() == {"bucket": ("acme-dr",)}


def test_bucket_of_the_user_holds_a_mirror_and_stays(spec: str, clouds: Clouds) -> None:
    s3 = clouds.aws.client("s3")
    s3.create_bucket(Bucket="acme-west", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    assert "byo" in skerry("plan", spec, code=1).output
    own = ("--set", "replication[1].byo.bucket=true")
    skerry("apply", spec, "--auto-approve", *own)
    assert s3.get_bucket_location(Bucket="acme-west")["LocationConstraint"] == "us-west-2"
    mark("s3://acme-west/runs/tiny")
    skerry("destroy", spec, "--yes", "--data", *own)
    assert clouds.aws.inventory() == {"bucket": ("acme-west",)}
    assert s3.list_objects_v2(Bucket="acme-west")["KeyCount"] == 0


def test_mirror_in_a_folder_is_left_by_name_and_deleted_with_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_section, "same_disk", lambda *_: False)  # it would be another machine
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\n")
    (commands / "squeue").chmod(0o755)
    groups = "  - {name: hpc, count: 1, target: {kind: slurm}}\n"
    west = (tmp_path / "west").as_uri()
    path = write_run(
        tmp_path,
        groups,
        store=(tmp_path / "store").as_uri(),
        image="x",
        more=f"limits: {{max_hours: 1}}\nreplication: [{{to: '{west}'}}]\n",
    )
    operator = Operator(path, {"PATH": f"{commands}:{os.environ['PATH']}"})
    mark(f"{west}/tiny", of=operator.deployment().run)
    removed = operator.destroy(data=False)
    assert removed.left == (f"the mirror at {west}/tiny: `--data` deletes it too",)
    assert operator.destroy().ok
    assert open_store(f"{west}/tiny").list("") == []


def test_plan_names_the_rights_of_each_replica_on_each_mirror(spec: str, clouds: Clouds) -> None:
    output = skerry("plan", spec, "-v").output
    mirror = r"\(arn of aws_bucket.mirror-acme-west\)/runs/tiny"
    for pattern in (
        r"google_bucket_binding.mirror-acme-dr-b-",
        r"google_bucket_binding.mirror-acme-dr-v-",
        rf'"s3:PutObject".*\n.*"{mirror}/\*".*\n.*"Condition".*\n.*"Null".*\n.*"s3:if-none-match": \["false"\]',
        rf'"s3:DeleteObject".*\n.*\n.*"{mirror}/payloads/\*",\n.*"{mirror}/checkpoints/\*",\n.*"{mirror}/private/\*"\n',
        r'"SKERRY_BUCKET_REGION_0": "acme-west=\(region of aws_bucket.mirror-acme-west\)"',
    ):
        assert re.search(pattern, output), pattern
    table = output[output.index("if this is lost") : output.index("plan: ")]
    assert [re.split(r"  +", line)[:2] for line in table.splitlines()[1:]] == [
        ["a process", "the store"],
        ["a machine", "the store"],
        ["the bucket acme-skerry", "round r, gs://acme-dr/runs"],
        ["the region us-east-1", "round r, gs://acme-dr/runs"],
        ["the account at AWS", "round r, gs://acme-dr/runs"],
        ["AWS", "round r, gs://acme-dr/runs"],
        ["the store and all mirrors", "nothing"],
    ]
    assert re.search(r"mirror s3://acme-west/runs/tiny: \$[0-9.]+ a copy, .* in all; stored: \$[0-9.]+ a month", output)
    assert clouds.aws.calls.writes == clouds.google.calls.writes == []


def test_place_of_a_run_that_goes_on_must_be_free(tmp_path: Path, clouds: Clouds) -> None:
    spec = write_failover(tmp_path, clouds)
    skerry("apply", spec, "--auto-approve")
    assert "by votes at gs://acme-dr/runs/tiny" in skerry("doctor", spec).output
    home = open_store(HOME)
    open_store("gs://acme-dr/runs/tiny-failover").create(keys.RUN, bytes(home.read(keys.RUN) or b""))
    home.delete(keys.RUN)
    refused = skerry("apply", spec, "--auto-approve", code=2)
    assert "gs://acme-dr/runs/tiny-failover, where this run would go on by itself, has run" in refused.stderr
    assert "so the run could not go on there" in skerry("doctor", spec, code=1).output


def test_mirror_with_the_votes_that_cannot_be_read_is_named(
    tmp_path: Path, clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store that answers may be one that the run has left: no command takes it for the run."""
    spec = write_failover(tmp_path, clouds)
    skerry("apply", spec, "--auto-approve")

    def refuse(_: Store) -> None:
        raise Unauthorized("refused")

    monkeypatch.setattr(read_clouds, "find_move", refuse)
    problem = f"gs://acme-dr/runs/tiny, which knows whether the run has left {HOME}, cannot be read: refused"
    assert problem in skerry("status", spec, code=1).stderr
    assert problem in skerry("report", spec, code=1).stderr
    assert "cannot be checked" in skerry("doctor", spec).output


def write_failover(folder: Path, clouds: Clouds) -> str:
    """The spec of a run whose mirror in Google is where its replicas vote."""
    groups = (BATCH + VERTEX).format(project=clouds.google.project, digest="0123456789abcdef" * 4)
    return str(write_run(folder, groups, more=MIRRORS + "failover: automatic\nfaults: {min_replicas: 2}\n"))


def test_status_follows_a_run_that_left_its_store(tmp_path: Path, clouds: Clouds) -> None:
    spec = write_failover(tmp_path, clouds)
    planned = skerry("plan", spec, "-v").output
    assert re.search(r"the bucket acme-skerry +round r, gs://acme-dr/runs +5m, by itself", planned)
    assert '"SKERRY_FAILOVER": "gs://acme-dr/runs/tiny"' in planned
    assert "gs://acme-dr/runs/tiny-failover" not in skerry("apply", spec, "--auto-approve").output
    home, mirror = open_store(HOME), open_store("gs://acme-dr/runs/tiny")
    run = Run.parse(home.read(keys.RUN) or b"", keys.RUN)
    assert run.failover is not None
    assert (run.failover.mirror, run.failover.after_s) == (mirror.uri, 300.0)
    verdict = Verdict(
        run=run.nonce,
        ballot=0,
        uri=run.failover.uri,
        round=0,
        commit=GENESIS,
        votes=("b-0", "v-0"),
        by="b-0",
        created="2026-01-01",
    )
    mirror.create(keys.verdict(0), verdict.to_bytes())
    moved = f"the run left {HOME}: it goes on at {run.failover.uri} from round 0"
    early = skerry("status", spec).output
    assert moved in early
    assert f"{run.failover.uri} has no run yet; if its replicas cannot make it, restore a mirror" in early
    examined = skerry("doctor", spec, code=1).output
    assert moved in examined
    assert "that run is not there yet" in examined
    fork = run.model_copy(update={"nonce": "1" * 32, "name": "tiny-failover", "failover": None, "mirrors": None})
    open_store(run.failover.uri).create(keys.RUN, fork.to_bytes())
    refused = skerry("doctor", spec, "--undelete", "1h", code=2)
    assert f"the run left {HOME} and is at {run.failover.uri}" in refused.stderr
    shown = skerry("status", spec).output
    assert f"the run left {HOME}: it goes on at {run.failover.uri} from round 0" in shown
    assert "write `store: gs://acme-dr/runs`, `run: tiny-failover`" in shown
    assert "tiny-failover" in shown
    home.delete(keys.RUN)
    refused = skerry("apply", spec, "--auto-approve", code=2)
    assert "it goes on at gs://acme-dr/runs/tiny-failover" in refused.output + refused.stderr
    with pytest.raises(Invalid, match="keeps its replicas"):
        expect_slots(home, RunSettings(first=run), ["b-0"], removes=True, by="a", now="2026-01-01")
