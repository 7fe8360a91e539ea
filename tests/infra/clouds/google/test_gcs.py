"""Buckets: their settings are written, read back and restored; their contents are protected."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import REGION, RUN, check_golden, check_request, wanted
from tests.infra.clouds.suites import BucketSuite

from skerry.infra.clouds.google.gcs import Bucket, BucketLook, Buckets, create_request, patch_request
from skerry.infra.provision.handler import Condition, Contents
from skerry.runtime.errors import Conflict, Unauthorized
from skerry.runtime.store import open_store
from skerry.testing.google.shared_state import Project

if TYPE_CHECKING:
    from datetime import datetime

    from tests.infra.kit import Listener

    from skerry.infra.clouds.google.session import Google
    from skerry.testing.google import GoogleSandbox

BUCKET = Bucket(
    key="store", name="acme-runs", region=REGION, why="the run's store", expire_days={"teams/tiny-gpt/probe/": 1}
)
ONE = wanted(BUCKET)
PATH: Final = "storage/v1/b/acme-runs"
UNIFORM: Final = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}


def make(google: Google, location: str, **more: Any) -> None:
    """Create the bucket as another tool would."""
    body = {"name": "acme-runs", "location": location, **more}
    google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})


class TestBuckets(GoogleHandlerSuite, BucketSuite):
    HANDLER = Buckets
    RESOURCE = BUCKET
    CHANGE = ("expire_days", {**BUCKET.expire_days, "more/": 3})
    FOREIGN = "us-east1"
    KEEPING: ClassVar = {"soft_delete_s": 7 * 24 * 3600}

    @pytest.fixture(autouse=True)
    def _store(self, sandbox: GoogleSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = open_store("gs://acme-runs", environment=sandbox.environment)
        self._patch = monkeypatch

    def put(self, google: Google, key: str) -> None:
        self.put_bytes(google, key, b"12345")

    def put_bytes(self, google: Google, key: str, body: bytes) -> None:
        del google
        self.store.replace(key, body)

    def delete(self, google: Google, key: str) -> None:
        del google
        self.store.delete(key)

    def read_object(self, google: Google, key: str) -> bytes | None:
        del google
        body = self.store.read(key)
        return None if body is None else bytes(body)

    def set_time(self, google: Google, time: datetime) -> None:
        del google
        self._patch.setattr(Project, "now", lambda _: time)

    def make_foreign(self, google: Google) -> None:
        make(google, self.FOREIGN.upper(), **UNIFORM)

    def test_unlabelled_bucket_is_not_adopted(self, google: Google) -> None:
        make(google, "EU", labels={"team": "x"})
        with pytest.raises(Conflict, match=r"is not tagged as part of a run.*byo: \{bucket: true\}"):
            Buckets(google).create(ONE)
        assert Buckets(google).look("acme-runs", RUN) == BucketLook(region="eu", owner=None, uniform=False)

    @pytest.mark.parametrize("uniform", [True, False])
    def test_brought_bucket_without_uniform_access_is_broken(self, google: Google, uniform: bool) -> None:  # noqa: FBT001
        """A right that is bound to a prefix would be refused, after a minute of waiting."""
        make(google, "US-EAST1", **(UNIFORM if uniform else {}))
        seen = self.seen(google, wanted(replace(BUCKET, brought=True)))
        assert seen.condition is (Condition.READY if uniform else Condition.BROKEN)
        advice = "`gcloud storage buckets update gs://acme-runs --uniform-bucket-level-access`"
        assert (advice in seen.detail) is not uniform

    @pytest.mark.parametrize(
        ("change", "setting", "reported"),
        [
            ({"iamConfiguration": {"publicAccessPrevention": "inherited"}}, "public_access_prevention", "inherited"),
            ({"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}}, "uniform_access", False),
            ({"versioning": {"enabled": True}}, "versioning", True),
            ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, "soft_delete_s", 604800),
        ],
    )
    def test_changed_setting_is_reported_and_restored(
        self, google: Google, listener: Listener, change: dict[str, Any], setting: str, reported: object
    ) -> None:
        Buckets(google).create(ONE)
        google.call("storage", "PATCH", PATH, body=change)
        listener.calls.clear()
        assert self.assert_restored(google, ONE, setting).settings[setting] == reported
        assert [call for call in listener.calls if "GET" not in call] == [f"storage PATCH {PATH}"]

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
        google.call("storage", "PATCH", PATH, body={"lifecycle": {"rule": rules}})
        seen = self.assert_restored(google, ONE, "further_rules")
        assert rule["action"]["type"] in str(seen.settings["further_rules"])

    def test_emptied_bucket_is_deleted(self, google: Google, sandbox: GoogleSandbox) -> None:
        record, buckets = self.created(google, ONE), Buckets(google)
        for name in ("x", "y"):
            self.put(google, f"a/{name}")
        with pytest.raises(Conflict, match=r"holds 2 objects \("):
            buckets.delete(record)
        assert buckets.empty(record).objects == 2
        listed = [call for call in sandbox.calls if call.name == "storage.objects.list"]
        assert [call.query["versions"] for call in listed] == [["true"]] * len(listed)
        buckets.delete(record)
        assert list(buckets.read([ONE])) == [None]
        assert buckets.empty(record) == buckets.contents(record) == Contents(objects=0, size_bytes=0)

    def test_unreadable_bucket_is_unauthorized(self, google: Google, sandbox: GoogleSandbox) -> None:
        Buckets(google).create(ONE)
        sandbox.restrict(["storage.buckets.create"])
        with pytest.raises(Unauthorized, match=r"acme-runs exists.*storage.buckets.get"):
            Buckets(google).read([ONE])

    def test_bucket_of_another_project_is_a_conflict(self, google: Google, sandbox: GoogleSandbox) -> None:
        sandbox.buckets.taken.add("acme-runs")
        with pytest.raises(Conflict, match=r"belongs to another project; if it is yours, set `byo"):
            Buckets(google).create(ONE)

    def test_key_of_a_company_encrypts_the_bucket_and_stays(self, google: Google) -> None:
        key = "projects/acme/locations/us/keyRings/runs/cryptoKeys/runs"
        keyed = wanted(replace(BUCKET, kms_key=key))
        check_request("storage", "POST", "storage/v1/b", create_request(keyed), project="acme")
        Buckets(google).create(keyed)
        (seen,) = Buckets(google).read([keyed])
        assert seen is not None
        assert seen.settings["kms_key"] == key
        # A spec without the rule leaves the key.
        (seen,) = Buckets(google).read([ONE])
        assert seen is not None
        assert seen.settings["kms_key"] == ""
        Buckets(google).update(ONE, {"versioning"})
        (seen,) = Buckets(google).read([keyed])
        assert seen is not None
        assert seen.settings["kms_key"] == key


def test_requests_equal_the_golden_files() -> None:
    record = wanted(BUCKET, **{"Cost Centre": "R&D 4711", "7up": "Ja"})
    request = create_request(record)
    check_request("storage", "POST", "storage/v1/b", request, project="acme")
    patch = patch_request(record, {"versioning", "expire_days"})
    check_request("storage", "PATCH", PATH, patch)
    assert set(patch) == {"versioning", "lifecycle"}
    check_golden("bucket", request)
    assert patch_request(ONE, ()) == patch_request(ONE, {"region"}) == {}
