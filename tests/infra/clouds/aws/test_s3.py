"""Buckets: their settings are written, read back and restored; their contents are protected."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from moto.s3 import models as s3_models
from tests.infra.clouds.aws.account import REGION, answer, check_golden, check_model, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.clouds.suites import BucketSuite
from tests.infra.kit import failing

from skerry.infra.clouds.aws.policies import DECISIVE
from skerry.infra.clouds.aws.s3 import Bucket, Buckets, create_request, part_requests
from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Conflict, Unauthorized

if TYPE_CHECKING:
    from datetime import datetime

    from skerry.infra.clouds.aws.session import Aws

BUCKET = Bucket(
    key="store",
    name="acme-runs",
    region=REGION,
    why="the run's store",
    protected=DECISIVE,
    expire_days={"teams/tiny-gpt/probe/": 1},
)
ONE = wanted(BUCKET)


def call(aws: Aws, operation: str, **parameters: Any) -> Any:
    """A call about the run's bucket."""
    return aws.call("s3", REGION, operation, Bucket="acme-runs", **parameters)


def put(aws: Aws, key: str, body: bytes = b"12345", **more: str) -> Any:
    return call(aws, "put_object", Key=key, Body=body, **more)


def our_policy() -> dict[str, Any]:
    return json.loads(part_requests(ONE, "aws")["put_bucket_policy"]["Policy"])


def our_rules() -> list[dict[str, Any]]:
    return part_requests(ONE, "aws")["put_bucket_lifecycle_configuration"]["LifecycleConfiguration"]["Rules"]


class TestBuckets(AwsHandlerSuite, BucketSuite):
    HANDLER = Buckets
    RESOURCE = BUCKET
    CHANGE = ("protected", (*BUCKET.protected, "more/*"))
    FOREIGN = "us-west-2"
    KEEPING: ClassVar = {"versioning": True, "undelete_days": 2}

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def put(self, aws: Aws, key: str) -> None:
        put(aws, key)

    def put_bytes(self, aws: Aws, key: str, body: bytes) -> None:
        put(aws, key, body)

    def delete(self, aws: Aws, key: str) -> None:
        call(aws, "delete_object", Key=key)

    def read_object(self, aws: Aws, key: str) -> bytes | None:
        with suppress(Absent):
            return call(aws, "get_object", Key=key)["Body"].read()
        return None

    def set_time(self, aws: Aws, time: datetime) -> None:
        del aws
        self._patch.setattr(s3_models, "utcnow", lambda: time.replace(tzinfo=None))

    def make_foreign(self, aws: Aws) -> None:
        region = {"CreateBucketConfiguration": {"LocationConstraint": self.FOREIGN}}
        aws.call("s3", self.FOREIGN, "create_bucket", Bucket="acme-runs", **region)

    def test_empty_untagged_bucket_is_not_adopted(self, aws: Aws, calls: list[str]) -> None:
        call(aws, "create_bucket", CreateBucketConfiguration={"LocationConstraint": REGION})
        calls.clear()
        with pytest.raises(Conflict, match=r"is not tagged as part of a run.*byo: \{bucket: true\}"):
            Buckets(aws).create(ONE)
        assert not [name for name in calls if name.startswith("s3:Put")]

    def test_bucket_created_meanwhile_by_another_is_not_adopted(
        self, aws: Aws, calls: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """S3 answers a second creation by the same account with success in us-east-1."""
        desired = wanted(replace(BUCKET, region="us-east-1"))

        def create_theirs_first(forward: Any, **request: Any) -> Any:
            forward(Bucket="acme-runs")
            return forward(**request)

        answer(monkeypatch, "create_bucket", create_theirs_first)
        with pytest.raises(Conflict, match=r"is not tagged as part of a run"):
            Buckets(aws).create(desired)
        assert not [name for name in calls if name.startswith("s3:Put")]

    def test_tags_are_in_the_call_that_creates_the_bucket(self, aws: Aws, calls: list[str]) -> None:
        Buckets(aws).create(ONE)
        assert "s3:PutBucketTagging" not in calls
        assert self.seen(aws, ONE).owner == ONE.run

    @pytest.mark.parametrize(
        ("operation", "setting", "reported"),
        [
            ("delete_public_access_block", "public", "not blocked: BlockPublicAcls, IgnorePublicAcls, "),
            ("delete_bucket_ownership_controls", "ownership", "ObjectWriter"),
            ("delete_bucket_encryption", "encryption", "none"),
            ("delete_bucket_policy", "tls_only", "False"),
            ("delete_bucket_lifecycle", "abort_uploads_days", "0"),
        ],
    )
    def test_removed_setting_is_reported_and_restored(
        self, aws: Aws, calls: list[str], operation: str, setting: str, reported: str
    ) -> None:
        Buckets(aws).create(ONE)
        call(aws, operation)
        differing = self.differing(ONE, self.seen(aws, ONE))
        assert setting in differing
        calls.clear()
        assert str(self.assert_restored(aws, ONE, *differing).settings[setting]).startswith(reported)
        assert len([name for name in calls if name.startswith("s3:Put")]) == 1

    def test_added_statement_is_reported_and_removed(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = our_policy()
        open_door = {"Sid": "Open", "Effect": "Allow", "Principal": "*", "Action": "s3:GetObject"}
        policy["Statement"].append(open_door | {"Resource": "arn:aws:s3:::acme-runs/*"})
        call(aws, "put_bucket_policy", Policy=json.dumps(policy))
        seen = self.assert_restored(aws, ONE, "further_statements")
        assert seen.settings["further_statements"] == ["Open"]

    def test_weakened_statement_is_reported(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = our_policy()
        policy["Statement"][1]["Principal"] = {"AWS": "arn:aws:iam::123456789012:root"}
        call(aws, "put_bucket_policy", Policy=json.dumps(policy))
        assert self.differing(ONE, self.seen(aws, ONE)) == {"protected", "further_statements"}

    def test_policy_lists_of_one_entry_equal_the_entry(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        policy = our_policy()
        for statement in policy["Statement"]:
            statement["Action"] = statement["Action"][0]
            statement["Principal"] = "*"
            statement["Resource"].reverse()
        call(aws, "put_bucket_policy", Policy=json.dumps(policy))
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_added_expiration_rule_is_reported_and_removed(self, aws: Aws) -> None:
        Buckets(aws).create(ONE)
        all_of_it = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30}}
        configuration = {"Rules": [*our_rules(), all_of_it]}
        call(aws, "put_bucket_lifecycle_configuration", LifecycleConfiguration=configuration)
        assert self.assert_restored(aws, ONE, "further_rules").settings["further_rules"] == ["tidy"]

    def test_update_writes_only_the_changed_part(self, aws: Aws, calls: list[str]) -> None:
        Buckets(aws).create(ONE)
        calls.clear()
        Buckets(aws).update(wanted(replace(BUCKET, abort_uploads_days=3)), {"abort_uploads_days"})
        assert [name for name in calls if name.startswith("s3:")] == ["s3:PutBucketLifecycleConfiguration"]

    def test_emptied_bucket_has_no_versions_or_uploads_and_is_deleted(self, aws: Aws) -> None:
        record = self.created(aws, ONE)
        call(aws, "put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
        for _ in range(2):
            put(aws, "x")
        call(aws, "delete_object", Key="x")
        call(aws, "create_multipart_upload", Key="big")
        assert Buckets(aws).empty(record).objects == 3
        assert not call(aws, "list_multipart_uploads").get("Uploads")
        Buckets(aws).delete(record)
        assert Buckets(aws).empty(record).objects == 0
        assert list(Buckets(aws).read([ONE])) == [None]

    def test_many_objects_are_counted_to_a_limit_and_all_deleted(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Two on a page.
        answer(monkeypatch, "list_object_versions", lambda forward, **given: forward(**given | {"MaxKeys": 2}))
        record = self.created(aws, ONE)
        for number in range(23):
            put(aws, f"{number}", b"1")
        assert Buckets(aws).contents(record) == Contents(objects=20, size_bytes=20, more=True)
        with pytest.raises(Conflict, match="more than 20 objects"):
            Buckets(aws).delete(record)
        assert Buckets(aws).empty(record) == Contents(objects=23, size_bytes=23)
        Buckets(aws).delete(record)

    def test_bucket_of_another_account_is_an_error(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        answer(monkeypatch, "head_bucket", failing(Unauthorized("403")))
        with pytest.raises(Unauthorized, match=r"in another account, or the permission s3:ListBucket is missing"):
            Buckets(aws).create(ONE)


def test_records_cannot_be_overwritten(aws: Aws) -> None:
    Buckets(aws).create(ONE)
    for folder in ("commits", "exchanges", "contributions", "receipts", "failover"):
        # Of another run in the bucket, which did not create it.
        key = f"other/second/{folder}/00000001.json"
        with pytest.raises(Unauthorized, match="s3:PutObject"):
            put(aws, key)
        put(aws, key, IfNoneMatch="*")
        with pytest.raises(Conflict):
            put(aws, key, IfNoneMatch="*")
        with pytest.raises(Unauthorized):
            call(aws, "create_multipart_upload", Key=key)
    for _ in range(2):
        put(aws, "teams/tiny-gpt/heartbeats/local-0.json")


def test_records_could_be_overwritten_without_the_deny_statement(aws: Aws) -> None:
    Buckets(aws).create(wanted(replace(BUCKET, protected=())))
    key = "teams/tiny-gpt/commits/00000001.json"
    for body in (b"first", b"second"):
        put(aws, key, body)
    assert call(aws, "get_object", Key=key)["Body"].read() == b"second"


def test_requests_equal_the_golden_file() -> None:
    in_us_east_1 = create_request(wanted(replace(BUCKET, region="us-east-1")))
    assert "LocationConstraint" not in in_us_east_1["CreateBucketConfiguration"]
    requests = {
        "create_bucket": create_request(ONE),
        **part_requests(ONE, "aws"),
    }
    for operation, request in requests.items():
        check_model("s3", "".join(part.capitalize() for part in operation.split("_")), request)
    policy = json.loads(requests["put_bucket_policy"].pop("Policy"))
    check_golden("bucket", {**requests, "policy": policy})


def test_only_start_up_checks_expire() -> None:
    expiring = [rule["Filter"]["Prefix"] for rule in our_rules() if "Expiration" in rule]
    assert expiring == ["teams/tiny-gpt/probe/"]


def test_bucket_arn_has_its_partition() -> None:
    policy = json.loads(part_requests(ONE, "aws-eusc")["put_bucket_policy"]["Policy"])
    named = {arn for statement in policy["Statement"] for arn in statement["Resource"]}
    assert {arn.partition("/")[0] for arn in named} == {"arn:aws-eusc:s3:::acme-runs"}
