"""Identity pools and providers: soft deletes, ids that stay taken, and what they may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import POOLS, good, refused

if TYPE_CHECKING:
    from tests.support.clocks import FakeClock

    from skerry.testing.google import GoogleSandbox

POOL = f"{POOLS}/skerry"
PROVIDER = f"{POOL}/providers/aws-1"
AWS = {"aws": {"accountId": "123456789012"}, "attributeMapping": {"google.subject": "assertion.arn"}}
DAY_S = 24 * 3600.0


def make_pool(google: GoogleSandbox) -> Any:
    return good(google, "POST", f"{POOLS}?workloadIdentityPoolId=skerry", {"displayName": "x"})


def make_provider(google: GoogleSandbox, **more: Any) -> Any:
    return good(google, "POST", f"{POOL}/providers?workloadIdentityPoolProviderId=aws-1", AWS | more)


@pytest.mark.parametrize("path", [POOL, PROVIDER])
def test_deleted_resource_keeps_its_id_for_thirty_days(google: GoogleSandbox, clock: FakeClock, path: str) -> None:
    make_pool(google)
    make_provider(google)
    good(google, "DELETE", path)
    response = good(google, "GET", path)
    assert response["state"] == "DELETED"
    assert response["expireTime"].startswith("2026-01-31T")
    assert refused(google, "DELETE", path)[0] == 404
    assert refused(google, "PATCH", f"{path}?updateMask=description", {"description": "x"})[0] == 400
    parent, _, wanted = path.rpartition("/")
    kind = "Provider" if path == PROVIDER else ""
    again = f"{parent}?workloadIdentityPool{kind}Id={wanted}"
    assert refused(google, "POST", again, AWS if kind else {})[0] == 409
    good(google, "POST", f"{path}:undelete", {})
    assert good(google, "GET", path)["state"] == "ACTIVE"
    assert refused(google, "POST", f"{path}:undelete", {})[0] == 400
    good(google, "DELETE", path)
    clock.advance(30 * DAY_S)
    assert refused(google, "GET", path)[0] == 404
    good(google, "POST", again, AWS if kind else {})


def test_deleted_pools_are_listed_only_on_request(google: GoogleSandbox) -> None:
    make_pool(google)
    good(google, "DELETE", POOL)
    assert good(google, "GET", POOLS) == {}
    (result,) = good(google, "GET", f"{POOLS}?showDeleted=true")["workloadIdentityPools"]
    assert result["state"] == "DELETED"
    assert google.inventory() == {}


@pytest.mark.parametrize("name", ["gcp-skerry", "abc", "Skerry", "a" * 33, "a_b_c"])
def test_invalid_pool_id_is_refused(google: GoogleSandbox, name: str) -> None:
    assert refused(google, "POST", f"{POOLS}?workloadIdentityPoolId={name}", {})[0] == 400


@pytest.mark.parametrize(
    "change",
    [
        {"aws": {"accountId": "1234"}},
        {"oidc": {"issuerUri": "https://x"}},
        {"attributeMapping": {"subject": "assertion.arn"}},
        {"attributeMapping": {"google.subject": "assertion.arn.split('/')"}},
        {"attributeCondition": "attribute.aws_role = 'x'"},
        {"displayName": "x" * 33},
        {"description": "x" * 257},
    ],
)
def test_invalid_provider_is_refused(google: GoogleSandbox, change: dict[str, Any]) -> None:
    make_pool(google)
    status, _ = refused(google, "POST", f"{POOL}/providers?workloadIdentityPoolProviderId=aws-1", AWS | change)
    assert status == 400
    assert google.violations == []


def test_patch_changes_only_the_fields_in_its_mask(google: GoogleSandbox) -> None:
    make_pool(google)
    make_provider(google, description="x")
    change = {"attributeCondition": "assertion.account == '1'", "description": "not in the mask"}
    good(google, "PATCH", f"{PROVIDER}?updateMask=attributeCondition,displayName", change)
    response = good(google, "GET", PROVIDER)
    assert (response["attributeCondition"], response["description"]) == ("assertion.account == '1'", "x")
    assert refused(google, "PATCH", PROVIDER, change)[0] == 400


def test_change_is_visible_once_its_operation_is_done(google: GoogleSandbox) -> None:
    google.settling = 2
    operation = make_pool(google)
    assert "done" not in operation
    response = [good(google, "GET", f"/v1/{operation['name']}").get("done") for _ in range(2)]
    assert response == [None, True]
    google.settling = 1
    operation = good(google, "DELETE", POOL)
    assert good(google, "GET", POOL)["state"] == "ACTIVE"
    good(google, "GET", f"/v1/{operation['name']}")
    assert good(google, "GET", POOL)["state"] == "DELETED"


def test_missing_pool_is_404(google: GoogleSandbox) -> None:
    for http, path in (("GET", POOL), ("GET", PROVIDER), ("DELETE", POOL), ("GET", f"{POOL}/providers")):
        assert refused(google, http, path)[0] == 404
    assert refused(google, "GET", POOLS.replace("skerry-sandbox", "others"))[0] == 404
