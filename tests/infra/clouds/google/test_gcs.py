"""Buckets: their settings are written, read back and restored; their contents are protected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import OTHER, REGION, RUN, check_golden, check_request, wanted
from tests.infra.kit import made

from skerry.infra.clouds.google.gcs import Bucket, BucketLook, Buckets, create_request, patch_request
from skerry.infra.provision.handler import Condition, Contents
from skerry.runtime.errors import Conflict, Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from tests.infra.kit import Listener

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Resource
    from skerry.testing.google import GoogleSandbox

BUCKET = Bucket(
    key="store", name="acme-runs", region=REGION, why="the run's store", expire_days={"teams/tiny-gpt/probe/": 1}
)
ONE = wanted(BUCKET)


@pytest.fixture
def put(sandbox: GoogleSandbox) -> Any:
    def put(key: str, body: bytes = b"12345") -> None:
        folder, _, name = key.rpartition("/")
        store = open_store(f"gs://acme-runs/{folder}", environment=sandbox.environment)
        store.replace(name, body)

    return put


UNIFORM: Final = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}


class TestBuckets(GoogleHandlerSuite):
    REMEDY = r"byo: \{bucket: true\}"

    def handler(self, google: Google) -> Buckets:
        return Buckets(google)

    def resource(self, google: Google) -> Bucket:
        del google
        return BUCKET

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Bucket)
        return replace(resource, expire_days={**resource.expire_days, "more/": 3}), "expire_days"

    def test_list_owned_finds_only_the_runs_resources(self, cloud: Google) -> None:
        outputs = Buckets(cloud).create(ONE)
        (listed,) = Buckets(cloud).list_owned(RUN, ["us-east1"])
        assert (listed.outputs, listed.address, listed.region) == (outputs, "google_bucket.store", REGION)
        for run in (OTHER, "s3://acme-runs/teams/tiny-gpt", "gs://no-such-bucket/x", "gs://"):
            assert list(Buckets(cloud).list_owned(run, [REGION])) == []

    def test_unlabelled_bucket_is_not_adopted(self, google: Google) -> None:
        body = {"name": "acme-runs", "location": "EU", "labels": {"team": "x"}}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        with pytest.raises(Conflict, match=r"is not tagged as part of a run.*byo: \{bucket: true\}"):
            Buckets(google).create(ONE)
        assert Buckets(google).look("acme-runs", RUN) == BucketLook(region="eu", owner=None, uniform=False)

    def test_brought_bucket_is_read_in_any_region(self, google: Google) -> None:
        body = {"name": "acme-runs", "location": "US-EAST1", **UNIFORM}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        (seen,) = Buckets(google).read([wanted(replace(BUCKET, brought=True))])
        assert seen is not None
        assert (seen.owner, seen.outputs["region"], seen.settings["region"]) == (None, "us-east1", "us-east1")
        assert seen.condition is Condition.READY

    def test_brought_bucket_without_uniform_access_is_broken(self, google: Google) -> None:
        """A right that is bound to a prefix would be refused, after a minute of waiting."""
        body = {"name": "acme-runs", "location": "US-EAST1"}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        (seen,) = Buckets(google).read([wanted(replace(BUCKET, brought=True))])
        assert seen is not None
        assert seen.condition is Condition.BROKEN
        assert "`gcloud storage buckets update gs://acme-runs --uniform-bucket-level-access`" in seen.detail

    @pytest.mark.parametrize(
        ("change", "setting", "reported"),
        [
            (
                {"iamConfiguration": {"publicAccessPrevention": "inherited"}},
                "public_access_prevention",
                "inherited",
            ),
            (
                {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}},
                "uniform_access",
                False,
            ),
            ({"versioning": {"enabled": True}}, "versioning", True),
            ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "soft_delete_s", 604800),
        ],
    )
    def test_changed_setting_is_reported_and_restored(
        self, google: Google, listener: Listener, change: dict[str, Any], setting: str, reported: object
    ) -> None:
        Buckets(google).create(ONE)
        google.call("storage", "PATCH", "storage/v1/b/acme-runs", body=change)
        seen = self.seen(google, ONE)
        assert self.differing(ONE, seen) == {setting}
        assert seen.settings[setting] == reported
        listener.calls.clear()
        Buckets(google).update(ONE, {setting})
        assert listener.calls == ["storage PATCH storage/v1/b/acme-runs"]
        self.assert_as_desired(ONE, self.seen(google, ONE))

    @pytest.mark.parametrize(
        "rule",
        [
            {"action": {"type": "Delete"}, "condition": {"age": 30}},
            {"action": {"type": "Delete"}, "condition": {"age": 1, "matchesPrefix": ["a/", "b/"]}},
            {"action": {"type": "SetStorageClass", "storageClass": "ARCHIVE"}, "condition": {"age": 3}},
        ],
    )
    def test_added_lifecycle_rule_is_reported_and_removed(self, google: Google, rule: dict[str, Any]) -> None:
        Buckets(google).create(ONE)
        rules = [*create_request(ONE)["lifecycle"]["rule"], rule]
        google.call("storage", "PATCH", "storage/v1/b/acme-runs", body={"lifecycle": {"rule": rules}})
        seen = self.seen(google, ONE)
        assert self.differing(ONE, seen) == {"further_rules"}
        assert rule["action"]["type"] in str(seen.settings["further_rules"])
        Buckets(google).update(ONE, {"further_rules"})
        self.assert_as_desired(ONE, self.seen(google, ONE))

    def test_emptying_one_run_keeps_the_others(self, google: Google, put: Any) -> None:
        record = made(ONE, Buckets(google).create(ONE))
        for prefix in ("teams/tiny-gpt/", "teams/tiny-gpt-2/"):
            for number in range(2):
                put(f"{prefix}heartbeats/{number}.json")
        reported: list[Contents] = []
        assert Buckets(google).empty(record, "teams/tiny-gpt/", reported.append) == Contents(objects=2, size_bytes=10)
        assert reported == [Contents(objects=2, size_bytes=10)]
        assert Buckets(google).contents(record) == Contents(objects=2, size_bytes=10)
        assert Buckets(google).contents(record, "teams/tiny-gpt/") == Contents(objects=0, size_bytes=0)

    def test_emptied_bucket_is_deleted(self, google: Google, sandbox: GoogleSandbox, put: Any) -> None:
        record = made(ONE, Buckets(google).create(ONE))
        for name in ("x", "y"):
            put(f"a/{name}")
        with pytest.raises(Conflict, match=r"holds 2 objects \(.*skerry destroy --data"):
            Buckets(google).delete(record)
        assert Buckets(google).empty(record).objects == 2
        listed = [call for call in sandbox.calls if call.name == "storage.objects.list"]
        assert [call.query["versions"] for call in listed] == [["true"]] * len(listed)
        Buckets(google).delete(record)
        assert list(Buckets(google).read([ONE])) == [None]
        assert Buckets(google).empty(record) == Buckets(google).contents(record) == Contents(objects=0, size_bytes=0)

    def test_unreadable_bucket_is_unauthorized(self, google: Google, sandbox: GoogleSandbox) -> None:
        Buckets(google).create(ONE)
        sandbox.restrict(["storage.buckets.create"])
        with pytest.raises(Unauthorized, match=r"acme-runs exists.*storage.buckets.get"):
            Buckets(google).read([ONE])
        sandbox.restrict(None)

    def test_bucket_of_another_project_is_a_conflict(self, google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
        Buckets(google).create(ONE)
        buckets = Buckets(google)
        monkeypatch.setattr(buckets, "_read", lambda _wanted: None)
        with pytest.raises(Conflict, match=r"belongs to another project; if it is yours, set `byo"):
            buckets.create(ONE)


def test_requests_equal_the_golden_files() -> None:
    record = wanted(BUCKET, **{"Cost Centre": "R&D 4711", "7up": "Ja"})
    request = create_request(record)
    check_request("storage", "POST", "storage/v1/b", request, project="acme")
    patch = patch_request(record, {"versioning", "expire_days"})
    check_request("storage", "PATCH", f"storage/v1/b/{quote('acme-runs')}", patch)
    assert set(patch) == {"versioning", "lifecycle"}
    check_golden("bucket", request)
    assert patch_request(ONE, ()) == patch_request(ONE, {"region"}) == {}
