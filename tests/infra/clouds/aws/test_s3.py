"""Buckets: their settings are written, read back and restored; their contents are protected."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.aws.account import OTHER, REGION, RUN, check_golden, check_model, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.kit import made

from skerry.infra.clouds.aws import s3
from skerry.infra.clouds.aws.policies import decisive
from skerry.infra.clouds.aws.s3 import Bucket, Buckets, create_request, part_requests, tagging_request
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource

BUCKET = Bucket(
    key="store",
    name="acme-runs",
    region=REGION,
    why="the run's store",
    protected=decisive("teams/tiny-gpt"),
    expire_days={"teams/tiny-gpt/probe/": 1},
)
ONE = wanted(BUCKET)


def put(aws: Aws, key: str, body: bytes = b"12345", **more: str) -> Any:
    return aws.call("s3", REGION, "put_object", Bucket="acme-runs", Key=key, Body=body, **more)


class TestBuckets(AwsHandlerSuite):
    REMEDY = r"byo: \{bucket: true\}"

    def handler(self, aws: Aws) -> Buckets:
        return Buckets(aws)

    def resource(self, aws: Aws) -> Bucket:
        del aws
        return BUCKET

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Bucket)
        return replace(resource, protected=(*resource.protected, "more/*")), "protected"

    def test_list_owned_finds_only_the_runs_resources(self, cloud: Aws) -> None:
        outputs = Buckets(cloud).create(ONE)
        assert [listed.outputs for listed in Buckets(cloud).list_owned(RUN, ["us-east-1"])] == [outputs]
        assert list(Buckets(cloud).list_owned(OTHER, [REGION])) == []
        assert list(Buckets(cloud).list_owned("gs://acme-runs/x", [REGION])) == []
        assert list(Buckets(cloud).list_owned("s3://no-such-bucket/x", [REGION])) == []

    @pytest.mark.parametrize("what", ["an object", "a tag", "a policy"])
    def test_untagged_bucket_in_use_is_not_adopted(self, aws: Aws, what: str) -> None:
        where = {"Bucket": "acme-runs"}
        region = {"CreateBucketConfiguration": {"LocationConstraint": REGION}}
        aws.call("s3", REGION, "create_bucket", **where, **region)
        match what:
            case "an object":
                put(aws, "x")
            case "a tag":
                tags = {"TagSet": [{"Key": "a", "Value": "b"}]}
                aws.call("s3", REGION, "put_bucket_tagging", **where, Tagging=tags)
            case _:
                policy = part_requests(ONE, "aws")["put_bucket_policy"]["Policy"]
                aws.call("s3", REGION, "put_bucket_policy", **where, Policy=policy)
        with pytest.raises(Conflict, match=r"is not tagged as part of a run.*byo: \{bucket: true\}"):
            Buckets(aws).create(ONE)

    def test_bare_brought_bucket_is_read(self, aws: Aws) -> None:
        region = {"CreateBucketConfiguration": {"LocationConstraint": "us-west-2"}}
        aws.call("s3", "us-west-2", "create_bucket", Bucket="acme-runs", **region)
        (seen,) = Buckets(aws).read([wanted(replace(BUCKET, brought=True))])
        assert seen is not None
        assert (seen.owner, seen.outputs["region"], seen.settings["region"]) == (None, "us-west-2", "us-west-2")

    @pytest.mark.parametrize(
        ("operation", "parameters", "setting", "reported"),
        [
            ("delete_public_access_block", {}, "public", "not blocked: BlockPublicAcls, IgnorePublicAcls, "),
            ("delete_bucket_ownership_controls", {}, "ownership", "ObjectWriter"),
            ("delete_bucket_encryption", {}, "encryption", "none"),
            ("delete_bucket_policy", {}, "tls_only", "False"),
            ("delete_bucket_lifecycle", {}, "abort_uploads_days", "0"),
        ],
    )
    def test_removed_setting_is_reported_and_restored(
        self,
        aws: Aws,
        calls: list[str],
        operation: str,
        parameters: dict[str, Any],
        setting: str,
        reported: str,
    ) -> None:
        Buckets(aws).create(ONE)
        aws.call("s3", REGION, operation, Bucket="acme-runs", **parameters)
        seen = self.seen(aws, ONE)
        assert setting in self.differing(ONE, seen)
        assert str(seen.settings[setting]).startswith(reported)
        calls.clear()
        Buckets(aws).update(ONE, self.differing(ONE, seen))
        assert len([name for name in calls if name.startswith("s3:Put")]) == 1
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_added_statement_is_reported_and_removed(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = json.loads(part_requests(ONE, "aws")["put_bucket_policy"]["Policy"])
        open_door = {"Sid": "Open", "Effect": "Allow", "Principal": "*", "Action": "s3:GetObject"}
        policy["Statement"].append(open_door | {"Resource": "arn:aws:s3:::acme-runs/*"})
        aws.call("s3", REGION, "put_bucket_policy", Bucket="acme-runs", Policy=json.dumps(policy))
        seen = self.seen(aws, ONE)
        assert self.differing(ONE, seen) == {"further_statements"}
        assert seen.settings["further_statements"] == ["Open"]
        Buckets(aws).update(ONE, {"further_statements"})
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_weakened_statement_is_reported(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = json.loads(part_requests(ONE, "aws")["put_bucket_policy"]["Policy"])
        policy["Statement"][1]["Principal"] = {"AWS": "arn:aws:iam::123456789012:root"}
        aws.call("s3", REGION, "put_bucket_policy", Bucket="acme-runs", Policy=json.dumps(policy))
        assert self.differing(ONE, self.seen(aws, ONE)) == {"protected", "further_statements"}

    def test_policy_lists_of_one_entry_equal_the_entry(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = json.loads(part_requests(ONE, "aws")["put_bucket_policy"]["Policy"])
        for statement in policy["Statement"]:
            statement["Action"] = statement["Action"][0]
            statement["Principal"] = "*"
            statement["Resource"].reverse()
        aws.call("s3", REGION, "put_bucket_policy", Bucket="acme-runs", Policy=json.dumps(policy))
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_added_expiration_rule_is_reported_and_removed(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        rules = part_requests(ONE, "aws")["put_bucket_lifecycle_configuration"]["LifecycleConfiguration"]["Rules"]
        all_of_it = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
        configuration = {"Rules": [*rules, all_of_it]}
        where = {"Bucket": "acme-runs", "LifecycleConfiguration": configuration}
        aws.call("s3", REGION, "put_bucket_lifecycle_configuration", **where)
        seen = self.seen(aws, ONE)
        assert seen.settings["further_rules"] == ["tidy"]
        assert self.differing(ONE, seen) == {"further_rules"}
        Buckets(aws).update(ONE, {"further_rules"})
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_update_writes_only_the_changed_part(self, aws: Aws, calls: list[str]) -> None:
        Buckets(aws).create(ONE)
        calls.clear()
        Buckets(aws).update(wanted(replace(BUCKET, abort_uploads_days=3)), {"abort_uploads_days"})
        assert [name for name in calls if name.startswith("s3:")] == ["s3:PutBucketLifecycleConfiguration"]

    def test_emptying_one_run_keeps_the_others(self, aws: Aws) -> None:
        record = made(ONE, Buckets(aws).create(ONE))
        for prefix in ("teams/tiny-gpt/", "teams/tiny-gpt-2/"):
            for number in range(2):
                put(aws, f"{prefix}heartbeats/{number}.json")
        reported: list[Contents] = []
        assert Buckets(aws).empty(record, "teams/tiny-gpt/", reported.append) == Contents(objects=2, size_bytes=10)
        assert reported == [Contents(objects=2, size_bytes=10)]
        assert Buckets(aws).contents(record) == Contents(objects=2, size_bytes=10)
        assert Buckets(aws).contents(record, "teams/tiny-gpt/") == Contents(objects=0, size_bytes=0)

    def test_emptied_bucket_has_no_versions_or_uploads_and_is_deleted(self, aws: Aws) -> None:
        record = made(ONE, Buckets(aws).create(ONE))
        versioned = {"Status": "Enabled"}
        aws.call("s3", REGION, "put_bucket_versioning", Bucket="acme-runs", VersioningConfiguration=versioned)
        for _ in range(2):
            put(aws, "x")
        aws.call("s3", REGION, "delete_object", Bucket="acme-runs", Key="x")
        aws.call("s3", REGION, "create_multipart_upload", Bucket="acme-runs", Key="big")
        assert Buckets(aws).empty(record).objects == 3
        assert not aws.call("s3", REGION, "list_multipart_uploads", Bucket="acme-runs").get("Uploads")
        Buckets(aws).delete(record)
        assert Buckets(aws).empty(record).objects == 0
        assert list(Buckets(aws).read([ONE])) == [None]

    def test_many_objects_are_counted_to_a_limit_and_all_deleted(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3, "_AT_ONCE", 2)
        record = made(ONE, Buckets(aws).create(ONE))
        for number in range(23):
            put(aws, f"{number}", b"1")
        assert Buckets(aws).contents(record) == Contents(objects=20, size_bytes=20, more=True)
        with pytest.raises(Conflict, match="more than 20 objects"):
            Buckets(aws).delete(record)
        assert Buckets(aws).empty(record) == Contents(objects=23, size_bytes=23)
        Buckets(aws).delete(record)

    def test_bucket_of_another_account_is_an_error(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        call = type(aws).call

        def hidden(self: Aws, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
            if operation == "head_bucket":
                raise Unauthorized("403")
            return call(self, service, region, operation, **parameters)

        monkeypatch.setattr(type(aws), "call", hidden)
        with pytest.raises(Unauthorized, match=r"in another account, or the permission s3:ListBucket is missing"):
            Buckets(aws).create(ONE)


def test_records_cannot_be_overwritten(aws: Aws) -> None:
    Buckets(aws).create(ONE)
    for folder in ("commits", "exchanges", "contributions", "receipts"):
        key = f"teams/tiny-gpt/{folder}/00000001.json"
        with pytest.raises(Unauthorized, match="s3:PutObject"):
            put(aws, key)
        put(aws, key, IfNoneMatch="*")
        with pytest.raises(Conflict):
            put(aws, key, IfNoneMatch="*")
        with pytest.raises(Unauthorized):
            aws.call("s3", REGION, "create_multipart_upload", Bucket="acme-runs", Key=key)
    put(aws, "teams/tiny-gpt/heartbeats/local-0.json")
    put(aws, "teams/tiny-gpt/heartbeats/local-0.json")


def test_records_could_be_overwritten_without_the_deny_statement(aws: Aws) -> None:
    Buckets(aws).create(wanted(replace(BUCKET, protected=())))
    for _ in range(2):
        response = put(aws, "teams/tiny-gpt/commits/00000001.json")
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 200


def test_requests_equal_the_golden_file() -> None:
    assert "CreateBucketConfiguration" not in create_request(wanted(replace(BUCKET, region="us-east-1")))
    requests = {
        "create_bucket": create_request(ONE),
        "put_bucket_tagging": tagging_request(ONE),
        **part_requests(ONE, "aws"),
    }
    for operation, request in requests.items():
        check_model("s3", "".join(part.capitalize() for part in operation.split("_")), request)
    policy = json.loads(requests["put_bucket_policy"].pop("Policy"))
    check_golden("bucket", {**requests, "policy": policy})


def test_only_start_up_checks_expire() -> None:
    rules = part_requests(ONE, "aws")["put_bucket_lifecycle_configuration"]["LifecycleConfiguration"]["Rules"]
    assert [rule["Filter"]["Prefix"] for rule in rules if "Expiration" in rule] == ["teams/tiny-gpt/probe/"]


def test_bucket_arn_has_its_partition() -> None:
    policy = json.loads(part_requests(ONE, "aws-eusc")["put_bucket_policy"]["Policy"])
    named = {arn for statement in policy["Statement"] for arn in statement["Resource"]}
    assert {arn.partition("/")[0] for arn in named} == {"arn:aws-eusc:s3:::acme-runs"}
