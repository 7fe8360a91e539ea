"""Service accounts: create waits for visibility, deletes go by number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import OTHER, RUN, check_golden, check_request, wanted
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.service_accounts import (
    ServiceAccount,
    ServiceAccounts,
    account_id,
    create_request,
    email_of,
    path_of,
)
from skerry.infra.clouds.google.session import Disabled, Google
from skerry.infra.provision.graph import generation_name

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

ACCOUNT = ServiceAccount(key="vertex-replicas", name="skerry-tiny-gpt-vertex", region="", why="what replicas run as")
ONE = wanted(ACCOUNT)


class TestServiceAccounts(GoogleHandlerSuite):
    """None of its settings changes here: the project in memory disables no account."""

    HANDLER = ServiceAccounts
    RESOURCE = ACCOUNT

    def test_create_waits_for_the_new_account(self, google: Google, sandbox: GoogleSandbox) -> None:
        sandbox.settling = 3
        outputs = ServiceAccounts(google).create(ONE)
        assert outputs["email"] == f"skerry-tiny-gpt-vertex@{sandbox.project}.iam.gserviceaccount.com"
        assert outputs["unique_id"].isdigit()
        assert self.seen(google, ONE).outputs == outputs

    def test_recreated_account_has_another_number(self, google: Google) -> None:
        before = ServiceAccounts(google).create(ONE)
        ServiceAccounts(google).delete(ONE.to_record(before))
        after = ServiceAccounts(google).create(ONE)
        assert (before["email"], before["unique_id"] == after["unique_id"]) == (after["email"], False)
        # What remembers the first does not take the second away.
        ServiceAccounts(google).delete(ONE.to_record(before))
        assert self.seen(google, ONE).outputs == after

    def test_owned_accounts_are_listed_from_all_pages(self, google: Google) -> None:
        for number in range(3):
            for key, run in (("b", OTHER), ("Ä", RUN)):
                name = f"skerry-{'a' if run == RUN else 'b'}-{number}"
                ServiceAccounts(google).create(wanted(replace(ACCOUNT, name=name, key=f"{key}.{number}"), run))
        parsed = {record.address for record in ServiceAccounts(google).list_owned(RUN, [])}
        assert parsed == {f"google_service_account.Ä.{number}" for number in range(3)}

    def test_brought_account_is_read_by_address(self, google: Google, sandbox: GoogleSandbox) -> None:
        body = {"accountId": "trainer", "serviceAccount": {"displayName": "ours"}}
        google.call("iam", "POST", f"v1/projects/{sandbox.project}/serviceAccounts", body=body)
        mine = replace(ACCOUNT, name=email_of("trainer", sandbox.project), brought=True)
        seen = self.seen(google, wanted(mine))
        assert (seen.owner, seen.outputs["email"]) == (None, mine.name)

    def test_disabled_service_has_no_accounts_and_refuses_deletes(self, google: Google, sandbox: GoogleSandbox) -> None:
        record = self.created(google, ONE)
        path = f"v1/projects/{sandbox.project}/services/iam.googleapis.com:disable"
        google.call("serviceusage", "POST", path, body={})
        assert list(ServiceAccounts(google).read([ONE])) == [None]
        assert list(ServiceAccounts(google).list_owned(RUN, [])) == []
        with pytest.raises(Disabled, match=r"iam.googleapis.com is not enabled.*gcloud services enable iam"):
            ServiceAccounts(google).delete(record)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("skerry-a", "projects/acme/serviceAccounts/skerry-a@acme.iam.gserviceaccount.com"),
        ("108765432109876543210", "projects/acme/serviceAccounts/108765432109876543210"),
        ("t@others.iam.gserviceaccount.com", "projects/others/serviceAccounts/t@others.iam.gserviceaccount.com"),
        ("t@a.example.com.iam.gserviceaccount.com", "projects/-/serviceAccounts/{}"),
        ("123-compute@developer.gserviceaccount.com", "projects/123/serviceAccounts/{}"),
        ("others@appspot.gserviceaccount.com", "projects/others/serviceAccounts/{}"),
        ("x@cloudbuild.gserviceaccount.com", "projects/-/serviceAccounts/{}"),
    ],
)
def test_account_path_has_its_own_project(name: str, path: str) -> None:
    parsed = path_of(name, "acme")
    assert parsed == f"v1/{path.format(name)}"
    check_request("iam", "GET", parsed)


@pytest.mark.parametrize("enabled", [True, False])
def test_disabled_account_is_enabled(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:  # noqa: FBT001
    calls: list[tuple[str, str]] = []
    row = {"email": "a@p.iam.gserviceaccount.com", "uniqueId": "1", "disabled": enabled}

    def call(_self: Google, _service: str, method: str, path: str, **_: object) -> dict[str, object]:
        calls.append((method, path))
        return row

    monkeypatch.setattr(Google, "call", call)
    accounts = ServiceAccounts(Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}))
    accounts.update(wanted(replace(ACCOUNT, enabled=enabled)), {"enabled"})
    method, path = calls[0]
    check_request("iam", method, path, {})
    assert path.endswith(":enable" if enabled else ":disable")
    (seen,) = accounts.read([ONE])
    assert seen is not None
    assert seen.settings["enabled"] is not enabled


def test_request_equals_the_golden_file() -> None:
    request = create_request(ONE)
    check_request("iam", "POST", "v1/projects/acme/serviceAccounts", request)
    check_golden("service_account", request)


def test_long_description_is_cut_and_keeps_its_owner() -> None:
    long = wanted(replace(ACCOUNT, why="für alle Replikate " * 30, key="k" * 63), f"gs://b/{'n' * 200}", generation=99)
    about = create_request(long)["serviceAccount"]
    assert len(about["description"].encode()) <= 256
    assert about["description"].endswith(f"key={'k' * 63} generation=99]")
    assert len(about["displayName"].encode()) <= 100


@pytest.mark.parametrize("part", ["a", "vertex-replicas", "Vertex_A", "x" * 60])
@pytest.mark.parametrize("stem", ["skerry-a-0123ab", f"skerry-{'n' * 20}-0123ab"])
def test_account_id_is_short_plain_and_unique(stem: str, part: str) -> None:
    parsed = account_id(stem, part)
    assert parsed == account_id(stem, part)
    assert parsed.startswith("skerry-")
    assert len(generation_name(parsed, 99)) <= 30
    assert parsed.replace("-", "").isalnum()
    assert parsed == parsed.lower()
    assert parsed != account_id(stem, f"{part}-2") != account_id(f"{stem}0", f"{part}-2")
