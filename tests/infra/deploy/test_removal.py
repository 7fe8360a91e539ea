"""`skerry destroy` and `skerry import`: what is deleted, kept, adopted, and never touched."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import delete_state, skerry, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox


def test_destroy_keeps_data_without_the_data_option(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    output = skerry("destroy", spec, "--yes", code=1).output
    assert "`--data` deletes" in output
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # The kept data can be continued.
    skerry("apply", spec, "--auto-approve")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}
    assert "nothing to destroy" in skerry("destroy", spec, "--yes", "--data").output


def test_destroy_finds_resources_by_tag_without_state(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    delete_state(skerry_sandbox)
    assert "is not in the state" in skerry("destroy", spec, "--yes", "--data").output
    assert skerry_sandbox.inventory() == {}


def test_resources_of_others_are_never_changed(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    skerry_sandbox.client("s3").put_object(Bucket="acme-skerry", Key="theirs", Body=b"x")
    assert "byo" in skerry("plan", spec, code=1).output
    skerry("apply", spec, "--auto-approve", code=2)
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # With `byo` it is used, and kept with its contents.
    skerry("apply", spec, "--auto-approve", "--set", "byo.bucket=true")
    skerry("destroy", spec, "--yes", "--data", "--set", "byo.bucket=true")
    left = skerry_sandbox.client("s3").list_objects_v2(Bucket="acme-skerry")["Contents"]
    assert [entry["Key"] for entry in left] == ["theirs"]


def test_objects_of_another_run_keep_the_bucket(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    s3.put_object(Bucket="acme-skerry", Key="runs/other/run.json", Body=b"{}", IfNoneMatch="*")
    output = skerry("destroy", spec, "--yes", "--data").output
    assert "kept: the bucket acme-skerry, because 1 objects in it are not of this run" in output
    left = [entry["Key"] for entry in s3.list_objects_v2(Bucket="acme-skerry")["Contents"]]
    assert left == ["runs/other/run.json"]
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # Without that object the bucket is deleted too.
    s3.delete_object(Bucket="acme-skerry", Key="runs/other/run.json")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_runs_share_a_bucket_and_a_repository(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    s3, ecr = skerry_sandbox.client("s3"), skerry_sandbox.client("ecr")
    (tmp_path / "second").mkdir()
    second = write_spec(tmp_path / "second", count=1)
    second.write_text(second.read_text().replace("run: tiny", "run: second"))
    skerry("apply", spec, "--auto-approve")
    manifest = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "config": {"digest": f"sha256:{'1' * 64}"}}
    ecr.put_image(repositoryName="skerry", imageManifest=json.dumps(manifest), imageTag="1")
    skerry("apply", str(second), "--auto-approve")
    skerry("plan", str(second), "--detailed-exitcode")
    # The records of the second run are protected by the policy that the first one wrote.
    with pytest.raises(s3.exceptions.ClientError, match="AccessDenied"):
        s3.put_object(Bucket="acme-skerry", Key="runs/second/commits/00000001.json", Body=b"{}")
    output = skerry("destroy", spec, "--yes", "--data").output
    assert "kept: aws_repository.image with 1 image: other runs may use it" in output
    assert "kept: the bucket acme-skerry, because" in output
    assert len(ecr.list_images(repositoryName="skerry")["imageIds"]) == 1
    skerry("plan", str(second), "--detailed-exitcode")
    (job,) = skerry_sandbox.inventory()["job"]
    assert "-second-" in job
    assert (
        "because it belongs to the run s3://acme-skerry/runs/tiny"
        in skerry("destroy", str(second), "--yes", "--data").output
    )
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",), "repository": ("skerry",)}
    assert s3.list_objects_v2(Bucket="acme-skerry")["KeyCount"] == 0


def test_bucket_of_another_run_must_protect_this_one(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    skerry_sandbox.client("s3").delete_bucket_policy(Bucket="acme-skerry")
    (tmp_path / "second").mkdir()
    second = write_spec(tmp_path / "second", count=1)
    second.write_text(second.read_text().replace("run: tiny", "run: second"))
    output = skerry("plan", str(second), code=1).output
    assert "does not protect the records of this run, because of its tls_only and protected" in output
    assert "run `skerry apply` for s3://acme-skerry/runs/tiny" in output
    skerry("apply", spec, "--auto-approve")
    skerry("plan", str(second))


def test_bucket_of_the_user_that_protects_no_records_is_noted(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    policy = s3.get_bucket_policy(Bucket="acme-skerry")["Policy"]
    skerry("destroy", spec, "--yes", "--data")
    s3.create_bucket(Bucket="acme-skerry")
    own = ("plan", spec, "--set", "byo.bucket=true")
    note = "acme-skerry is yours and does not protect the records of this run, because of its tls_only and protected"
    assert f"note: aws_bucket.store: {note}" in skerry(*own).output
    s3.put_bucket_policy(Bucket="acme-skerry", Policy=policy)
    assert "does not protect" not in skerry(*own).output


def test_empty_bucket_of_the_user_is_neither_used_nor_deleted(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    skerry_sandbox.calls.clear()
    assert "exists but is not tagged as part of this run" in skerry("plan", spec, code=1).output
    skerry("apply", spec, "--auto-approve", code=2)
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.calls.writes == []
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}


def test_destroy_reports_what_it_deleted_without_state(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (job,) = skerry_sandbox.inventory()["job"]
    delete_state(skerry_sandbox)
    document = json.loads(skerry("destroy", spec, "--yes", "--data", "--json").stdout.splitlines()[-1])
    assert document["ok"]
    assert {"aws_batch_job.b-0", "aws_batch_queue.b", "aws_bucket.store"} <= set(document["deleted"])
    assert document["objects"] > 1
    assert skerry_sandbox.inventory() == {}
    skerry("apply", spec, "--auto-approve")
    output = skerry("destroy", spec, "--yes", "--data").output
    assert f"- aws_batch_job.b-0 deleted: {job}" in output
    assert "- aws_bucket.store deleted: acme-skerry" in output
    assert "objects (" in output


def test_bucket_without_its_tag_is_kept_and_reported(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    s3 = skerry_sandbox.client("s3")
    s3.put_bucket_tagging(Bucket="acme-skerry", Tagging={"TagSet": [{"Key": "cost-center", "Value": "42"}]})
    assert "skerry import aws_bucket.store" in skerry("plan", spec, code=1).output
    assert "left: the bucket acme-skerry" in skerry("destroy", spec, "--yes", "--data", code=1).output
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    skerry("import", "aws_bucket.store", spec, "--auto-approve")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_imported_bucket_is_repaired_and_destroyed_with_the_run(spec: str, skerry_sandbox: Sandbox) -> None:
    s3 = skerry_sandbox.client("s3")
    s3.create_bucket(Bucket="acme-skerry")
    s3.put_bucket_tagging(Bucket="acme-skerry", Tagging={"TagSet": [{"Key": "team", "Value": "research"}]})
    assert "does not exist" in skerry("import", "aws_repository.image", spec, "--auto-approve", code=2).stderr
    assert "--auto-approve" in skerry("import", "aws_bucket.store", spec, code=2).stderr
    skerry("import", "aws_bucket.store", spec, "--auto-approve")
    tags = {tag["Key"]: tag["Value"] for tag in s3.get_bucket_tagging(Bucket="acme-skerry")["TagSet"]}
    assert (tags["team"], tags["skerry:run"]) == ("research", "s3://acme-skerry/runs/tiny")
    # Missing settings are found and repaired.
    assert "public: " in skerry("plan", spec).output
    skerry("apply", spec, "--auto-approve")
    skerry("plan", spec, "--detailed-exitcode")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}
