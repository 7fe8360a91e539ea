"""Service accounts: made, waited for until they are seen, never confused with others of their name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.google.ground import OTHER, RUN, check_golden, check_request, wanted
from tests.infra.google.handlers import GoogleHandlerSuite
from tests.infra.ground import made
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.identity import (
    ServiceAccount,
    ServiceAccounts,
    account_id,
    create_request,
    email_of,
    path_of,
)
from skerry.infra.clouds.google.session import Disabled, Google
from skerry.infra.graph import generation_name

if TYPE_CHECKING:
    from skerry.infra.graph import Resource
    from skerry.infra.testing.google import GoogleSandbox

ACCOUNT = ServiceAccount(key="vertex-replicas", name="skerry-tiny-gpt-vertex", region="", why="what replicas run as")
ONE = wanted(ACCOUNT)


class TestServiceAccounts(GoogleHandlerSuite):
    def handler(self, google: Google) -> ServiceAccounts:
        return ServiceAccounts(google)

    def resource(self, google: Google) -> ServiceAccount:
        del google
        return ACCOUNT

    def changed(self, resource: Resource) -> None:
        """The project in memory turns no account off."""

    def test_a_new_account_is_waited_for(self, google: Google, sandbox: GoogleSandbox) -> None:
        sandbox.settling = 3
        outputs = ServiceAccounts(google).create(ONE)
        assert outputs["email"] == f"skerry-tiny-gpt-vertex@{sandbox.project}.iam.gserviceaccount.com"
        assert outputs["unique_id"].isdigit()
        assert self.seen(google, ONE).outputs == outputs

    def test_one_that_is_made_again_is_another(self, google: Google) -> None:
        before = ServiceAccounts(google).create(ONE)
        ServiceAccounts(google).delete(made(ONE, before))
        after = ServiceAccounts(google).create(ONE)
        assert (before["email"], before["unique_id"] == after["unique_id"]) == (after["email"], False)
        # What remembers the first does not take the second away.
        ServiceAccounts(google).delete(made(ONE, before))
        assert self.seen(google, ONE).outputs == after

    def test_all_pages_are_looked_at_for_a_runs_own(self, google: Google) -> None:
        for number in range(3):
            ServiceAccounts(google).create(
                wanted(replace(ACCOUNT, name=f"skerry-b-{number}", key=f"b-{number}"), OTHER)
            )
        for number in range(3):
            ServiceAccounts(google).create(wanted(replace(ACCOUNT, name=f"skerry-a-{number}", key=f"Ä.{number}")))
        found = {one.address for one in ServiceAccounts(google).owned(RUN, [])}
        assert found == {f"google_service_account.Ä.{number}" for number in range(3)}

    def test_the_users_own_is_read_by_its_address(self, google: Google, sandbox: GoogleSandbox) -> None:
        body = {"accountId": "trainer", "serviceAccount": {"displayName": "ours"}}
        google.call("iam", "POST", f"v1/projects/{sandbox.project}/serviceAccounts", body=body)
        mine = replace(ACCOUNT, name=email_of("trainer", sandbox.project), brought=True)
        (seen,) = ServiceAccounts(google).read([wanted(mine)])
        assert seen is not None
        assert (seen.owner, seen.outputs["email"]) == (None, mine.name)

    def test_before_its_service_is_on_there_is_none_and_none_is_said_to_be_deleted(
        self, google: Google, sandbox: GoogleSandbox
    ) -> None:
        outputs = ServiceAccounts(google).create(ONE)
        path = f"v1/projects/{sandbox.project}/services/iam.googleapis.com:disable"
        google.call("serviceusage", "POST", path, body={})
        assert list(ServiceAccounts(google).read([ONE])) == [None]
        assert list(ServiceAccounts(google).owned(RUN, [])) == []
        with pytest.raises(Disabled, match=r"iam.googleapis.com is not enabled.*gcloud services enable iam"):
            ServiceAccounts(google).delete(made(ONE, outputs))


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
def test_an_account_is_asked_for_in_its_own_project(name: str, path: str) -> None:
    found = path_of(name, "acme")
    assert found == f"v1/{path.format(name)}"
    check_request("iam", "GET", found)


@pytest.mark.parametrize("enabled", [True, False])
def test_one_that_somebody_turned_off_is_turned_on(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:  # noqa: FBT001
    asked: list[tuple[str, str]] = []
    told = {"email": "a@p.iam.gserviceaccount.com", "uniqueId": "1", "disabled": enabled}

    def call(_self: Google, _service: str, method: str, path: str, **_: object) -> dict[str, object]:
        asked.append((method, path))
        return told

    monkeypatch.setattr(Google, "call", call)
    accounts = ServiceAccounts(Google(FakeClock(), {"GOOGLE_CLOUD_PROJECT": "acme"}))
    accounts.update(wanted(replace(ACCOUNT, enabled=enabled)), {"enabled"})
    method, path = asked[0]
    check_request("iam", method, path, {})
    assert path.endswith(":enable" if enabled else ":disable")
    (seen,) = accounts.read([ONE])
    assert seen is not None
    assert seen.settings["enabled"] is not enabled


def test_the_request_is_that_of_the_golden_file() -> None:
    request = create_request(ONE)
    check_request("iam", "POST", "v1/projects/acme/serviceAccounts", request)
    check_golden("service_account", request)


def test_a_long_description_is_cut_and_keeps_its_mark() -> None:
    long = wanted(replace(ACCOUNT, why="für alle Replikate " * 30, key="k" * 63), f"gs://b/{'n' * 200}", generation=99)
    about = create_request(long)["serviceAccount"]
    assert len(about["description"].encode()) <= 256
    assert about["description"].endswith(f"key={'k' * 63} generation=99]")
    assert len(about["displayName"].encode()) <= 100


@pytest.mark.parametrize("part", ["a", "vertex-replicas", "Vertex_A", "x" * 60])
@pytest.mark.parametrize("stem", ["skerry-a-0123ab", f"skerry-{'n' * 20}-0123ab"])
def test_an_id_is_short_and_plain_in_every_generation_and_no_others(stem: str, part: str) -> None:
    found = account_id(stem, part)
    assert found == account_id(stem, part)
    assert found.startswith("skerry-")
    assert len(generation_name(found, 99)) <= 30
    assert found.replace("-", "").isalnum()
    assert found == found.lower()
    assert found != account_id(stem, f"{part}-2") != account_id(f"{stem}0", f"{part}-2")
