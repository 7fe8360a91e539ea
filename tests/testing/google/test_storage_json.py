"""Buckets and objects by the JSON API: what Google adds, what it refuses, and preconditions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import obstore
import pytest
from tests.testing.google.kit import gcs, good, make_bucket, refused

if TYPE_CHECKING:
    from tests.support.clocks import FakeClock

    from skerry.testing.google import GoogleSandbox

BUCKETS = "/storage/v1/b?project=skerry-sandbox"
BUCKET = "/storage/v1/b/bucket"
DAY_S = 24 * 3600.0


def put(google: GoogleSandbox, key: str, body: bytes = b"x") -> str:
    """Its generation."""
    return str(obstore.put(gcs(google), key, body, use_multipart=False)["version"])


def test_a_new_bucket_has_what_google_gives_it(google: GoogleSandbox) -> None:
    response = good(google, "POST", BUCKETS, {"name": "bucket", "location": "us-central1"})
    assert (response["location"], response["locationType"]) == ("US-CENTRAL1", "region")
    assert response["softDeletePolicy"] == {"retentionDurationSeconds": "604800"}
    assert response["iamConfiguration"]["publicAccessPrevention"] == "inherited"
    assert response["iamConfiguration"]["uniformBucketLevelAccess"] == {"enabled": False}
    assert response["projectNumber"] == google.number
    assert good(google, "GET", BUCKET) == response
    assert [item["name"] for item in good(google, "GET", BUCKETS)["items"]] == ["bucket"]


@pytest.mark.parametrize(
    "body",
    [
        {"name": "Bucket"},
        {"name": "my-google-bucket"},
        {"name": "b"},
        {"name": "storage"},
        {"name": "bucket", "softDeletePolicy": {"retentionDurationSeconds": "60"}},
        {"name": "bucket", "iamConfiguration": {"publicAccessPrevention": "enforce"}},
        {"name": "bucket", "labels": {"Run": "x"}},
        {"name": "bucket", "labels": {"run": "gs://x"}},
        {"name": "bucket", "lifecycle": {"rule": [{"action": {"type": "Remove"}, "condition": {"age": 1}}]}},
        {"name": "bucket", "lifecycle": {"rule": [{"action": {"type": "Delete"}}]}},
    ],
)
def test_invalid_bucket_is_refused(google: GoogleSandbox, body: dict[str, Any]) -> None:
    assert refused(google, "POST", BUCKETS, body)[0] == 400
    assert google.inventory() == {}


def test_bucket_name_conflict_differs_for_own_and_foreign_buckets(google: GoogleSandbox) -> None:
    make_bucket(google)
    status, message = refused(google, "POST", BUCKETS, {"name": "bucket"})
    assert status == 409
    assert "you already own it" in message
    google.buckets.taken.add("theirs")
    status, message = refused(google, "POST", BUCKETS, {"name": "theirs"})
    assert status == 409
    assert "not available" in message


def test_patch_merges_and_removes_null(google: GoogleSandbox) -> None:
    make_bucket(google)
    rule = {"action": {"type": "Delete"}, "condition": {"age": 3}}
    change = {"labels": {"run": "a", "kind": "b"}, "lifecycle": {"rule": [rule]}}
    response = good(google, "PATCH", BUCKET, change)
    assert (response["metageneration"], response["labels"]) == ("2", {"run": "a", "kind": "b"})
    response = good(google, "PATCH", f"{BUCKET}?ifMetagenerationMatch=2", {"labels": {"run": None, "new": "c"}})
    assert response["labels"] == {"kind": "b", "new": "c"}
    assert response["lifecycle"] == {"rule": [rule]}
    assert response["iamConfiguration"]["uniformBucketLevelAccess"] == {"enabled": True}
    assert refused(google, "PATCH", f"{BUCKET}?ifMetagenerationMatch=2", {"labels": {}})[0] == 412
    assert refused(google, "PATCH", BUCKET, {"location": "EU"})[0] == 400
    assert refused(google, "PATCH", BUCKET, {"timeCreated": "2026-01-01T00:00:00Z"})[0] == 400


def test_a_bucket_with_something_in_it_is_not_deleted(google: GoogleSandbox) -> None:
    make_bucket(google)
    put(google, "a")
    assert refused(google, "DELETE", BUCKET)[0] == 409
    good(google, "DELETE", f"{BUCKET}/o/a")
    good(google, "DELETE", BUCKET)
    assert refused(google, "GET", BUCKET)[0] == 404
    assert google.inventory() == {}


def test_objects_are_listed_page_by_page_and_by_folder(google: GoogleSandbox) -> None:
    make_bucket(google)
    for key in ("runs/a/1", "runs/a/2", "runs/b/1", "top"):
        put(google, key)
    page = good(google, "GET", f"{BUCKET}/o?maxResults=3")
    assert [item["name"] for item in page["items"]] == ["runs/a/1", "runs/a/2", "runs/b/1"]
    rest = good(google, "GET", f"{BUCKET}/o?maxResults=3&pageToken={page['nextPageToken']}")
    assert [item["name"] for item in rest["items"]] == ["top"]
    folders = good(google, "GET", f"{BUCKET}/o?prefix=runs/&delimiter=/")
    assert folders["prefixes"] == ["runs/a/", "runs/b/"]
    assert "items" not in folders
    assert good(google, "GET", f"{BUCKET}/o?prefix=none") == {"kind": "storage#objects"}


def test_object_has_a_new_generation_after_each_write(google: GoogleSandbox) -> None:
    make_bucket(google)
    first = put(google, "runs/a", b"one")
    second = put(google, "runs/a", b"three")
    assert int(second) > int(first)
    response = good(google, "GET", f"{BUCKET}/o/runs%2Fa")
    assert (response["generation"], response["size"]) == (second, "5")
    assert refused(google, "GET", f"{BUCKET}/o/runs%2Fa?generation={first}")[0] == 404
    assert refused(google, "GET", f"{BUCKET}/o/runs%2Fb")[0] == 404


@pytest.mark.parametrize("http", ["GET", "DELETE"])
def test_failed_precondition_is_412_and_changes_nothing(google: GoogleSandbox, http: str) -> None:
    make_bucket(google)
    generation = put(google, "a")
    path = f"{BUCKET}/o/a"
    for query in (
        "ifGenerationMatch=0",
        "ifGenerationMatch=5",
        f"ifGenerationNotMatch={generation}",
        "ifMetagenerationMatch=2",
        "ifMetagenerationNotMatch=1",
    ):
        assert refused(google, http, f"{path}?{query}")[0] == 412
    good(google, http, f"{path}?ifGenerationMatch={generation}&ifMetagenerationMatch=1")


def test_soft_deleted_objects_are_listed_until_their_retention_ends(google: GoogleSandbox, clock: FakeClock) -> None:
    """And is paid for: a run that replaces heartbeats would keep them all."""
    good(google, "POST", BUCKETS, {"name": "bucket"})
    put(google, "a", b"1")
    put(google, "a", b"2")
    good(google, "DELETE", f"{BUCKET}/o/a")
    kept = good(google, "GET", f"{BUCKET}/o?softDeleted=true")["items"]
    assert [item["name"] for item in kept] == ["a", "a"]
    clock.advance(7 * DAY_S)
    assert "items" not in good(google, "GET", f"{BUCKET}/o?softDeleted=true")
    good(google, "PATCH", BUCKET, {"softDeletePolicy": {"retentionDurationSeconds": "0"}})
    put(google, "b")
    good(google, "DELETE", f"{BUCKET}/o/b")
    assert "items" not in good(google, "GET", f"{BUCKET}/o?softDeleted=true")
