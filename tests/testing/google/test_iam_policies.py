"""IAM policies: no change or condition is lost, members exist, and requests are decided by the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import ACCOUNTS, POOLS, bind, good, make_account, make_bucket, refused, token_of

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

IAM = "/storage/v1/b/bucket/iam"
OBJECTS = "/storage/v1/b/bucket/o"
MADE_UP = "made-up"
VIEWER = "roles/storage.objectViewer"
CONDITION = {"title": "own", "expression": 'resource.name.startsWith("projects/_/buckets/bucket/objects/runs/a/")'}
LISTING = 'api.getAttribute("storage.googleapis.com/objectListPrefix", "").startsWith("runs/a/")'
SET = "iam.serviceAccounts.setIamPolicy"


@pytest.fixture
def email(google: GoogleSandbox) -> str:
    """A service account; there is also a bucket."""
    make_bucket(google)
    return make_account(google)


@pytest.fixture
def member(email: str) -> str:
    return f"serviceAccount:{email}"


def read(google: GoogleSandbox, version: int = 3) -> dict[str, Any]:
    return good(google, "GET", f"{IAM}?optionsRequestedPolicyVersion={version}")


def written(google: GoogleSandbox, *bindings: dict[str, Any], **more: Any) -> tuple[int, Any]:
    body = {"version": 3, "etag": read(google)["etag"], "bindings": list(bindings)} | more
    return google.call("PUT", IAM, {name: value for name, value in body.items() if value is not None})


def test_stale_etag_is_refused_and_changes_nothing(google: GoogleSandbox, member: str) -> None:
    before = read(google)["etag"]
    assert written(google, {"role": VIEWER, "members": [member]})[0] == 200
    status, response = written(google, etag=before)
    assert (status, response["error"]["errors"][0]["reason"]) == (412, "conditionNotMet")
    assert read(google)["bindings"] == [{"role": VIEWER, "members": [member]}]
    resource = f"{ACCOUNTS}/{member.partition(':')[2]}"
    policy = {"etag": before, "bindings": [{"role": "roles/iam.serviceAccountUser", "members": [member]}]}
    assert google.call("POST", f"{resource}:setIamPolicy", {"policy": policy})[0] == 200
    status, response = google.call("POST", f"{resource}:setIamPolicy", {"policy": policy})
    assert (status, response["error"]["status"]) == (409, "ABORTED")


def test_condition_needs_version_3_to_read_and_write(google: GoogleSandbox, member: str) -> None:
    binding = {"role": VIEWER, "members": [member], "condition": CONDITION}
    assert written(google, binding, version=1)[0] == 400
    assert written(google, binding)[0] == 200
    assert read(google)["bindings"] == [binding]
    (response,) = read(google, 1)["bindings"]
    assert response["role"].startswith(f"{VIEWER}_withcond_")
    assert "condition" not in response


def test_conditions_are_not_overwritten_without_an_etag(google: GoogleSandbox, member: str) -> None:
    plain = {"role": VIEWER, "members": [member]}
    assert written(google, plain, etag=None)[0] == 200
    assert written(google, {**plain, "condition": CONDITION})[0] == 200
    status, response = written(google, plain, etag=None)
    assert (status, response["error"]["message"]) == (
        400,
        "a policy with conditions is written only with the etag that was read",
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"role": "roles/storage.objectsUser"}, "is not supported"),
        ({"members": ["serviceAccount:nobody@skerry-sandbox.iam.gserviceaccount.com"]}, "does not exist"),
        ({"members": ["replica-0@skerry-sandbox.iam.gserviceaccount.com"]}, "unknown type"),
        ({"members": ["principalSet://iam.googleapis.com/projects/p/locations/global/x"]}, "not in a format"),
        ({"condition": {"title": "", "expression": "true"}}, "a title and an expression"),
        ({"condition": {"title": "x", "expression": "request.time < timestamp('x')"}}, "in the expression"),
        ({"condition": {"title": "x", "expression": " || ".join(["true"] * 14)}}, "at most 12 logical operators"),
    ],
)
def test_invalid_binding_is_refused(google: GoogleSandbox, member: str, change: dict[str, Any], message: str) -> None:
    status, response = written(google, {"role": VIEWER, "members": [member]} | change)
    assert status == 400
    assert message in response["error"]["message"]
    assert "bindings" not in read(google)


def test_conditions_need_uniform_access(google: GoogleSandbox, member: str) -> None:
    off = {"iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}}}
    good(google, "PATCH", "/storage/v1/b/bucket", off)
    assert written(google, {"role": VIEWER, "members": [member], "condition": CONDITION})[0] == 412


def test_bindings_of_one_role_and_condition_are_merged(google: GoogleSandbox, member: str) -> None:
    other = f"serviceAccount:{make_account(google, 'replica-1')}"
    plain = {"role": VIEWER, "members": [member]}
    written(google, plain, {"role": VIEWER, "members": [other, member]}, {**plain, "condition": CONDITION})
    assert read(google)["bindings"] == [
        {"role": VIEWER, "members": [member, other]},
        {**plain, "condition": CONDITION},
    ]
    written(google, {"role": VIEWER, "members": []})
    assert "bindings" not in read(google)


def test_deleted_account_stays_in_policies_without_rights(google: GoogleSandbox, member: str, email: str) -> None:
    """Made again under its name, it is another: the old binding is not its."""
    bind(google, VIEWER, member)
    number = good(google, "GET", f"{ACCOUNTS}/{email}")["uniqueId"]
    good(google, "DELETE", f"{ACCOUNTS}/{email}")
    assert read(google)["bindings"][0]["members"] == [f"deleted:serviceAccount:{email}?uid={number}"]
    assert make_account(google) == email
    assert good(google, "GET", f"{ACCOUNTS}/{email}")["uniqueId"] != number
    assert refused(google, "GET", OBJECTS, token=token_of(google, email))[0] == 403


def test_policy_change_applies_after_the_settling_time(google: GoogleSandbox, member: str, email: str) -> None:
    google.settling = 2
    bind(google, VIEWER, member)
    token = token_of(google, email)
    assert [google.call("GET", OBJECTS, token=token)[0] for _ in range(3)] == [403, 403, 200]
    assert read(google)["bindings"], "the policy itself is told at once"


# What they allow.


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("runs/a/x", 404), ("runs/b/x", 403), ("runs/a", 403)],
)
def test_a_condition_on_the_name_covers_objects_below_it(
    google: GoogleSandbox, member: str, email: str, path: str, allowed: int
) -> None:
    bind(google, VIEWER, member, CONDITION["expression"])
    token = token_of(google, email)
    assert google.call("GET", f"{OBJECTS}/{path.replace('/', '%2F')}", token=token)[0] == allowed


def test_listing_needs_a_condition_on_its_prefix(google: GoogleSandbox, member: str, email: str) -> None:
    token = token_of(google, email)
    bind(google, VIEWER, member, CONDITION["expression"])
    assert google.call("GET", f"{OBJECTS}?prefix=runs/a/", token=token)[0] == 403
    bind(google, VIEWER, member, LISTING)
    assert google.call("GET", f"{OBJECTS}?prefix=runs/a/", token=token)[0] == 200
    assert google.call("GET", f"{OBJECTS}?prefix=runs/", token=token)[0] == 403
    assert google.call("GET", OBJECTS, token=token)[0] == 403


@pytest.mark.parametrize(
    ("role", "rights"),
    [
        ("roles/storage.objectViewer", {"storage.objects.get", "storage.objects.list"}),
        ("roles/storage.objectCreator", {"storage.objects.create"}),
        ("roles/storage.legacyBucketReader", {"storage.buckets.get", "storage.objects.list"}),
        (
            "roles/storage.objectUser",
            {f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list", "update")},
        ),
    ],
)
def test_predefined_role_has_its_permissions(
    google: GoogleSandbox, member: str, email: str, role: str, rights: set[str]
) -> None:
    bind(google, role, member)
    request = [f"storage.objects.{verb}" for verb in ("create", "delete", "get", "list", "update", "setIamPolicy")]
    request += ["storage.buckets.get", "storage.buckets.delete"]
    query = "&".join(f"permissions={item}" for item in request)
    status, response = google.call("GET", f"{IAM}/testPermissions?{query}", token=token_of(google, email))
    assert status == 200
    assert set(response["permissions"]) == rights


def test_restricted_operator_is_refused_by_permission_name(google: GoogleSandbox) -> None:
    google.restrict({"storage.buckets.create", "iam.serviceAccounts.create"})
    make_bucket(google)
    email = make_account(google)
    for http, path, body, permission in (
        ("GET", f"{ACCOUNTS}/{email}", None, "iam.serviceAccounts.get"),
        ("DELETE", "/storage/v1/b/bucket", None, "storage.buckets.delete"),
        ("PATCH", "/storage/v1/b/bucket", {}, "storage.buckets.update"),
        ("POST", "/v1/projects/skerry-sandbox/services/x.googleapis.com:enable", {}, "serviceusage.services.enable"),
        ("GET", "/v3/projects/skerry-sandbox", None, "resourcemanager.projects.get"),
        (
            "POST",
            f"{POOLS}/p/providers?workloadIdentityPoolProviderId=aws",
            {},
            "iam.workloadIdentityPoolProviders.create",
        ),
        ("GET", "/v1/projects/skerry-sandbox/locations/x/customJobs", None, "aiplatform.customJobs.list"),
        ("POST", "/v2/entries:list", {"resourceNames": []}, "logging.logEntries.list"),
    ):
        status, message = refused(google, http, path, body)
        assert status == 403
        assert f"'{permission}'" in message
    response = good(google, "POST", "/v3/projects/skerry-sandbox:testIamPermissions", {"permissions": [SET]})
    assert response == {}
    google.restrict(None)
    good(google, "GET", f"{ACCOUNTS}/{email}")


def test_a_role_on_the_project_counts_everywhere_in_it(google: GoogleSandbox, member: str, email: str) -> None:
    project = "/v3/projects/skerry-sandbox"
    policy = good(google, "POST", f"{project}:getIamPolicy", {"options": {"requestedPolicyVersion": 3}})
    policy["bindings"] = [{"role": VIEWER, "members": [member]}]
    good(google, "POST", f"{project}:setIamPolicy", {"policy": policy})
    assert google.call("GET", OBJECTS, token=token_of(google, email))[0] == 200


def test_missing_or_wrong_token_is_refused(google: GoogleSandbox, member: str) -> None:
    del member
    assert refused(google, "GET", OBJECTS, token="")[0] == 401
    assert refused(google, "GET", OBJECTS, token=MADE_UP)[0] == 401
    assert refused(google, "GET", ACCOUNTS, token="")[0] == 401
