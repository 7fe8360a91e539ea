"""Requests that Google's own documents do not know are refused with what is wrong, and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import ACCOUNTS, JOBS, POOLS, good, job_of, make_bucket, refused

from skerry.testing.google.discovery import document

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

BUCKETS = "/storage/v1/b?project=skerry-sandbox"
ENTRIES = "/v2/entries:list"


def job(**of_pool: Any) -> dict[str, Any]:
    body = job_of()
    body["jobSpec"]["workerPoolSpecs"][0] |= of_pool
    return body


RULE = {"name": "b-1", "lifecycle": {"rule": [{"condition": {"age": "3"}}]}}
L4 = {"machineType": "n1-standard-4", "acceleratorType": "L4"}
WRONG = [
    ("POST", ACCOUNTS, {"accountID": "replica-0"}, "unknown field accountID"),
    ("POST", ACCOUNTS, {"accountId": 7}, "accountId: 7 is no string"),
    ("POST", ACCOUNTS, {"accountId": "r-0", "serviceAccount": {"email": "x"}}, "serviceAccount.email is only output"),
    ("POST", ACCOUNTS, ["replica-0"], "the body is no object"),
    (
        "POST",
        BUCKETS,
        {"name": "b-1", "softDeletePolicy": {"retentionSeconds": "0"}},
        "unknown field softDeletePolicy.",
    ),
    ("POST", BUCKETS, {"name": "bucket", "lifecycle": {"rule": {}}}, "lifecycle.rule is no list"),
    ("POST", BUCKETS, RULE, "condition.age: '3' is no int"),
    ("POST", "/storage/v1/b", {"name": "bucket"}, "missing parameter project"),
    ("POST", f"{BUCKETS}&projekt=x", {"name": "bucket"}, "unknown parameter projekt"),
    ("POST", f"{BUCKETS}&project=y", {"name": "bucket"}, "parameter project is given 2 times"),
    ("POST", f"{BUCKETS}&projection=all", {"name": "bucket"}, "'all' is none of full, noAcl"),
    ("GET", f"{BUCKETS}&maxResults=many", None, "'many' is no integer"),
    ("GET", f"{BUCKETS}&softDeleted=yes", None, "'yes' is no boolean"),
    ("GET", BUCKETS, {"name": "bucket"}, "the method has no body"),
    ("POST", f"{POOLS}?workloadIdentityPoolId=p", {"state": "ACTIVE"}, "state is only output"),
    ("PATCH", f"{POOLS}/p-ool?updateMask=a%20b", {}, "is no google-fieldmask"),
    ("POST", f"{POOLS.replace('global', 'a/b')}?workloadIdentityPoolId=p", {}, "no such path"),
    ("POST", JOBS, job(replicaCount=1.5), r"replicaCount: 1\.5 is no string"),
    ("POST", JOBS, job(replicaCount="one"), "'one' is no int64"),
    ("POST", JOBS, job(machineSpec=L4), "'L4' is none of"),
    ("POST", JOBS, job(containerSpec={"imageURI": "x"}), r"workerPoolSpecs\[0\]\.containerSpec\.imageURI"),
    ("POST", JOBS, job_of(scheduling={"timeout": "1h"}), "'1h' is no google-duration"),
    ("POST", JOBS, {**job_of(), "state": "JOB_STATE_RUNNING"}, "state is only output"),
    ("POST", JOBS, {"displayName": "x"}, "missing field jobSpec"),
    ("POST", ENTRIES, {"resourceNames": "projects/p"}, "resourceNames is no list"),
    ("POST", ENTRIES, {"resourceNames": [], "pageSize": True}, "True is no integer"),
    ("PUT", ACCOUNTS, {}, "no such method: PUT"),
    ("GET", "/v1/projects/skerry-sandbox/serviceAcounts", None, "no such path"),
    ("GET", f"{ACCOUNTS}/a@b/keys", None, "does not support iam.projects.serviceAccounts.keys"),
    ("GET", "/compute/v1/projects/p/regions", None, "does not support Compute Engine"),
]


@pytest.mark.parametrize(("http", "path", "body", "message"), WRONG)
def test_unknown_request_parts_are_refused_by_name(
    google: GoogleSandbox, http: str, path: str, body: Any, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        good(google, http, path, body)
    assert len(google.violations) == 1
    assert google.inventory() == {}


def test_every_problem_of_a_request_is_named(google: GoogleSandbox) -> None:
    status, message = refused(google, "POST", ACCOUNTS, {"accountID": "x", "serviceAccount": {"displayNme": 1}})
    assert status == 400
    assert "unknown field accountID; unknown field serviceAccount.displayNme" in message


def test_documented_request_is_accepted(google: GoogleSandbox) -> None:
    good(google, "POST", ACCOUNTS, {"accountId": "replica-0", "serviceAccount": {"displayName": "x"}})
    make_bucket(google)
    good(google, "PATCH", "/storage/v1/b/bucket", {"labels": {"a": None}, "lifecycle": None})
    good(google, "POST", JOBS, job(replicaCount=1))  # an int64 is text or a number
    good(google, "GET", f"{BUCKETS}&maxResults=5&fields=items(name)&prettyPrint=false&%24alt=json")
    assert google.violations == []


def test_requests_that_are_no_json_are_refused(google: GoogleSandbox) -> None:
    status, response = google.call("POST", ACCOUNTS, None)
    assert (status, response["error"]["status"]) == (400, "INVALID_ARGUMENT")


def test_methods_are_found_by_their_paths() -> None:
    iam, storage = document("iam", "v1"), document("storage", "v1")
    result = iam.match("DELETE", "/v1/projects/p/locations/global/workloadIdentityPools/pool/providers/aws")
    assert result is not None
    assert result[0].id == "iam.projects.locations.workloadIdentityPools.providers.delete"
    assert result[1] == {"name": "projects/p/locations/global/workloadIdentityPools/pool/providers/aws"}
    result = iam.match("POST", "/v1/projects/p/serviceAccounts/a@b.c:setIamPolicy")
    assert result is not None
    assert result[0].id == "iam.projects.serviceAccounts.setIamPolicy"
    result = storage.match("GET", "/storage/v1/b/bucket/o/runs%2Fa%2Fx:y")
    assert result is not None
    assert result[1] == {"bucket": "bucket", "object": "runs/a/x:y"}
    assert storage.match("GET", "/storage/v1/b/bucket/o/runs/a") is None


def test_every_handler_has_a_method_in_its_document(google: GoogleSandbox) -> None:
    """A handler for a method that no document has would never be called."""
    from skerry.testing.google.server import SERVICES  # noqa: PLC0415

    known = {method.id for service in SERVICES for method in document(*service).methods}
    assert set(google.handlers) <= known
