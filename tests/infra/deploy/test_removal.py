"""`skerry destroy` and `skerry import`: what is deleted, kept, adopted, and never touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.deploy.account import delete_state, skerry

if TYPE_CHECKING:
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
    output = skerry("destroy", spec, "--yes", "--data", code=1).output
    assert "because 1 objects in it are not of this run" in output
    left = [entry["Key"] for entry in s3.list_objects_v2(Bucket="acme-skerry")["Contents"]]
    assert left == ["runs/other/run.json"]
    assert skerry_sandbox.inventory() == {"bucket": ("acme-skerry",)}
    # Without that object the bucket is deleted too.
    s3.delete_object(Bucket="acme-skerry", Key="runs/other/run.json")
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
