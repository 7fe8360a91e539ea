"""Secret bindings: ours are written and deleted, those of other owners are kept, and no value is read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import RUN, check_golden, check_request, wanted
from tests.infra.clouds.google.test_service_accounts import ACCOUNT

from skerry.infra.clouds.google.bucket_bindings import changed_policy
from skerry.infra.clouds.google.secret_bindings import SecretBinding, SecretBindings, binding_of
from skerry.infra.clouds.google.service_accounts import ServiceAccounts, email_of
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible

if TYPE_CHECKING:
    from tests.infra.kit import Listener

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.graph import Resource
    from skerry.testing.google import GoogleSandbox

MEMBER = f"serviceAccount:{email_of(ACCOUNT.name, 'skerry-sandbox')}"
SECRET = "projects/skerry-sandbox/secrets/hf"  # noqa: S105  a name
BINDING = SecretBinding(
    key="skerry-sandbox-hf-vertex-replicas", name="skerry-tiny-gpt-vertex", region="", secret=SECRET, member=MEMBER
)
ONE = wanted(BINDING)


@pytest.fixture(autouse=True)
def secret(sandbox: GoogleSandbox) -> None:
    sandbox.enable("secretmanager.googleapis.com")
    path = f"/v1/projects/{sandbox.project}/secrets?secretId=hf"
    assert sandbox.call("POST", path, {"replication": {"automatic": {}}})[0] == 200


def policy(google: Google) -> dict[str, Any]:
    query = {"options.requestedPolicyVersion": "3"}
    return google.call("secretmanager", "GET", f"v1/{SECRET}:getIamPolicy", query=query)


class TestSecretBindings(GoogleHandlerSuite):
    HANDLER = SecretBindings

    def resource(self, google: Google) -> SecretBinding:
        ServiceAccounts(google).create(wanted(ACCOUNT))
        return BINDING

    def named(self, resource: Resource, number: int) -> Resource:
        return replace(resource, name=f"{resource.name}-{number}")

    def test_list_owned_finds_only_the_runs_resources(self, google: Google) -> None:
        """Only a spec and a state name a user's secrets, so none is searched."""
        SecretBindings(google).create(wanted(self.resource(google)))
        assert list(SecretBindings(google).list_owned(RUN, [])) == []

    def test_bindings_of_other_owners_are_kept(self, google: Google) -> None:
        self.resource(google)
        current = policy(google)
        others = {"role": "roles/secretmanager.secretAccessor", "members": ["user:a@example.com"]}
        body = {"policy": {"version": 3, "etag": current["etag"], "bindings": [others]}}
        google.call("secretmanager", "POST", f"v1/{SECRET}:setIamPolicy", body=body)
        record = self.created(google, ONE)
        assert len(policy(google)["bindings"]) == 2
        SecretBindings(google).delete(record)
        assert policy(google)["bindings"] == [others]

    @pytest.mark.parametrize(
        "changed",
        [
            {"role": "roles/storage.objectAdmin"},
            {"condition": {**binding_of(ONE)["condition"], "expression": "true"}},
        ],
        ids=["role", "condition"],
    )
    def test_widened_binding_is_reported_and_restored(self, google: Google, changed: dict[str, Any]) -> None:
        self.resource(google)
        self.created(google, ONE)
        current = policy(google)
        (binding,) = current["bindings"]
        body = {"policy": {**current, "bindings": [{**binding, **changed}]}}
        google.call("secretmanager", "POST", f"v1/{SECRET}:setIamPolicy", body=body)
        assert self.differing(ONE, self.seen(google, ONE)) == {"member"}
        self.assert_restored(google, ONE, "member")
        assert policy(google)["bindings"] == [binding_of(ONE)]

    def test_missing_secret_is_named(self, google: Google) -> None:
        missing = wanted(replace(BINDING, secret="projects/skerry-sandbox/secrets/none"))  # noqa: S106  a name
        assert list(SecretBindings(google).read([missing])) == [None]
        with pytest.raises(Absent, match="secrets/none"):
            SecretBindings(google).create(missing)

    def test_missing_account_times_out(self, google: Google) -> None:
        with pytest.raises(NotYetVisible, match=f"waiting until the policy of {SECRET} can be changed"):
            SecretBindings(google).create(ONE)

    def test_unchanged_policy_is_not_written(self, google: Google, listener: Listener) -> None:
        self.resource(google)
        SecretBindings(google).create(ONE)
        listener.calls.clear()
        SecretBindings(google).create(ONE)
        assert listener.calls == [f"secretmanager GET v1/{SECRET}:getIamPolicy"]


def test_policy_equals_the_golden_file() -> None:
    written = {"policy": changed_policy({"etag": "CAE="}, BINDING.name, (binding_of(ONE),))}
    check_request("secretmanager", "POST", f"v1/{SECRET}:setIamPolicy", written)
    check_golden("secret_binding", written)
    query = {"options.requestedPolicyVersion": "3"}
    check_request("secretmanager", "GET", f"v1/{SECRET}:getIamPolicy", **query)


def test_rights_name_the_secret_and_its_reader() -> None:
    (title,) = SecretBinding.rights(BINDING.name, {"secret": SECRET, "member": MEMBER})
    assert title == f"secret {SECRET}: {MEMBER}"
