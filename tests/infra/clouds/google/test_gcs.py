"""The bucket: all that makes it safe is written, read back, and put right; what is in it is never lost by mistake."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
from tests.infra.google.ground import OTHER, REGION, RUN, check_golden, check_request, wanted
from tests.infra.google.handlers import GoogleHandlerSuite
from tests.infra.ground import made

from skerry.infra.clouds.google.storage import Bucket, Buckets, Look, create_request, patch_request
from skerry.infra.handler import Condition, Held
from skerry.runtime.errors import Conflict, Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from tests.infra.ground import Listener

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Resource
    from skerry.infra.testing.google import GoogleSandbox

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

    def test_a_runs_own_are_found_and_nobody_elses(self, cloud: Google) -> None:
        outputs = Buckets(cloud).create(ONE)
        (found,) = Buckets(cloud).owned(RUN, ["us-east1"])
        assert (found.outputs, found.address, found.region) == (outputs, "google_bucket.store", REGION)
        for run in (OTHER, "s3://acme-runs/teams/tiny-gpt", "gs://no-such-bucket/x", "gs://"):
            assert list(Buckets(cloud).owned(run, [REGION])) == []

    def test_what_has_no_label_of_a_run_is_somebody_elses(self, google: Google) -> None:
        body = {"name": "acme-runs", "location": "EU", "labels": {"team": "x"}}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        with pytest.raises(Conflict, match=r"carries no tag of a run.*byo: \{bucket: true\}"):
            Buckets(google).create(ONE)
        assert Buckets(google).look("acme-runs", RUN) == Look(region="eu", owner=None, uniform=False)

    def test_the_users_own_is_read_wherever_it_is(self, google: Google) -> None:
        body = {"name": "acme-runs", "location": "US-EAST1", **UNIFORM}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        (seen,) = Buckets(google).read([wanted(replace(BUCKET, brought=True))])
        assert seen is not None
        assert (seen.owner, seen.outputs["region"], seen.settings["region"]) == (None, "us-east1", "us-east1")
        assert seen.condition is Condition.READY

    def test_the_users_own_with_rights_by_object_cannot_be_used(self, google: Google) -> None:
        """A right that is bound to a prefix would be refused, after a minute of waiting."""
        body = {"name": "acme-runs", "location": "US-EAST1"}
        google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
        (seen,) = Buckets(google).read([wanted(replace(BUCKET, brought=True))])
        assert seen is not None
        assert seen.condition is Condition.BROKEN
        assert "`gcloud storage buckets update gs://acme-runs --uniform-bucket-level-access`" in seen.detail

    @pytest.mark.parametrize(
        ("change", "setting", "told"),
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
    def test_a_part_that_somebody_changed_is_seen_and_put_back(
        self, google: Google, listener: Listener, change: dict[str, Any], setting: str, told: object
    ) -> None:
        Buckets(google).create(ONE)
        google.call("storage", "PATCH", "storage/v1/b/acme-runs", body=change)
        seen = self.seen(google, ONE)
        assert self.differing(ONE, seen) == {setting}
        assert seen.settings[setting] == told
        listener.calls.clear()
        Buckets(google).update(ONE, {setting})
        assert listener.calls == ["storage PATCH storage/v1/b/acme-runs"]
        self.assert_as_wanted(ONE, self.seen(google, ONE))

    @pytest.mark.parametrize(
        "rule",
        [
            {"action": {"type": "Delete"}, "condition": {"age": 30}},
            {"action": {"type": "Delete"}, "condition": {"age": 1, "matchesPrefix": ["a/", "b/"]}},
            {"action": {"type": "SetStorageClass", "storageClass": "ARCHIVE"}, "condition": {"age": 3}},
        ],
    )
    def test_a_rule_of_somebody_elses_is_seen_and_taken_away(self, google: Google, rule: dict[str, Any]) -> None:
        Buckets(google).create(ONE)
        rules = [*create_request(ONE)["lifecycle"]["rule"], rule]
        google.call("storage", "PATCH", "storage/v1/b/acme-runs", body={"lifecycle": {"rule": rules}})
        seen = self.seen(google, ONE)
        assert self.differing(ONE, seen) == {"further_rules"}
        assert rule["action"]["type"] in str(seen.settings["further_rules"])
        Buckets(google).update(ONE, {"further_rules"})
        self.assert_as_wanted(ONE, self.seen(google, ONE))

    def test_a_bucket_with_objects_in_it_stays(self, google: Google, put: Any) -> None:
        outputs = Buckets(google).create(ONE)
        for number in range(3):
            put(f"teams/tiny-gpt/heartbeats/local-{number}.json", b"x" * 1500)
        with pytest.raises(Conflict, match=r"holds 3 objects \(.*skerry destroy --data"):
            Buckets(google).delete(made(ONE, outputs))
        assert self.seen(google, ONE).owner == RUN

    def test_emptied_of_one_run_it_still_holds_the_others(self, google: Google, put: Any) -> None:
        one = made(ONE, Buckets(google).create(ONE))
        for prefix in ("teams/tiny-gpt/", "teams/tiny-gpt-2/"):
            for number in range(2):
                put(f"{prefix}heartbeats/{number}.json")
        told: list[Held] = []
        assert Buckets(google).empty(one, "teams/tiny-gpt/", told.append) == Held(objects=2, size_bytes=10)
        assert told == [Held(objects=2, size_bytes=10)]
        assert Buckets(google).held(one) == Held(objects=2, size_bytes=10)
        assert Buckets(google).held(one, "teams/tiny-gpt/") == Held(objects=0, size_bytes=0)

    def test_emptied_it_goes(self, google: Google, sandbox: GoogleSandbox, put: Any) -> None:
        one = made(ONE, Buckets(google).create(ONE))
        for name in ("x", "y"):
            put(f"a/{name}")
        assert Buckets(google).empty(one).objects == 2
        listed = [call for call in sandbox.calls if call.name == "storage.objects.list"]
        assert [call.query["versions"] for call in listed] == [["true"]] * len(listed)
        Buckets(google).delete(one)
        assert list(Buckets(google).read([ONE])) == [None]
        assert Buckets(google).empty(one) == Buckets(google).held(one) == Held(objects=0, size_bytes=0)

    def test_a_bucket_that_is_hidden_is_said_to_be_somebody_elses(self, google: Google, sandbox: GoogleSandbox) -> None:
        Buckets(google).create(ONE)
        sandbox.restrict(["storage.buckets.create"])
        with pytest.raises(Unauthorized, match=r"acme-runs exists.*storage.buckets.get"):
            Buckets(google).read([ONE])
        sandbox.restrict(None)

    def test_a_name_that_another_project_has_is_told(self, google: Google, monkeypatch: pytest.MonkeyPatch) -> None:
        Buckets(google).create(ONE)
        buckets = Buckets(google)
        monkeypatch.setattr(buckets, "_read", lambda _wanted: None)
        with pytest.raises(Conflict, match=r"taken by another project; if it is yours, say `byo"):
            buckets.create(ONE)


def test_the_requests_are_those_of_the_golden_files() -> None:
    one = wanted(BUCKET, **{"Cost Centre": "R&D 4711", "7up": "Ja"})
    request = create_request(one)
    check_request("storage", "POST", "storage/v1/b", request, project="acme")
    patch = patch_request(one, {"versioning", "expire_days"})
    check_request("storage", "PATCH", f"storage/v1/b/{quote('acme-runs')}", patch)
    assert set(patch) == {"versioning", "lifecycle"}
    check_golden("bucket", request)


def test_nothing_is_written_where_nothing_changed() -> None:
    assert patch_request(ONE, ()) == {}
    assert patch_request(ONE, {"region"}) == {}
