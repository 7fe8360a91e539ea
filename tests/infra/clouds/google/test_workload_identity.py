"""Pools and providers: create, restore, list; changes to the admitted identities are found and reverted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.google.handlers import GoogleHandlerSuite
from tests.infra.clouds.google.kit import OTHER, RUN, check_golden, check_request, wanted

from skerry.infra.clouds.google.workload_identity import (
    MOST_CONDITION,
    OidcProvider,
    OidcProviders,
    Pool,
    Pools,
    Provider,
    Providers,
    condition,
    members_prefix,
    oidc_provider_body,
    pool_body,
    pool_id,
    provider_body,
    provider_name,
    sessions,
)
from skerry.infra.provision.graph import as_json, generation_name
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.google.session import Google
    from skerry.testing.google import GoogleSandbox

POOL = Pool(key="aws", name="skerry-tiny-gpt", region="", why="where jobs of AWS are let in")
WHERE = "projects/415104041262/locations/global/workloadIdentityPools/skerry-tiny-gpt"
PROVIDER = Provider(
    key="batch",
    name="skerry-tiny-gpt/aws-batch",
    region="",
    why="roles of batch",
    pool=WHERE,
    account="123456789012",
    sessions="arn:aws:sts::123456789012:assumed-role/",
    roles=("skerry-tiny-gpt-batch-0", "skerry-tiny-gpt-batch-1"),
)
CLUSTER = OidcProvider(
    key="kubernetes",
    name="skerry-tiny-gpt/kubernetes",
    region="",
    why="accounts of the cluster",
    pool=WHERE,
    issuer="https://oidc.example.com/id/0123",
    subjects=("system:serviceaccount:train:skerry-tiny-", "system:serviceaccount:more:skerry-tiny-"),
)
START = sessions("123456789012", "aws")
PARENT = "v1/projects/skerry-sandbox/locations/global/workloadIdentityPools"


class Federated(GoogleHandlerSuite):
    """Tests of resources that stay soft-deleted."""

    def test_deleted_resource_is_restored_and_updated(self, google: Google, sandbox: GoogleSandbox) -> None:
        record = self.created(google, wanted(self.resource(google)))
        self.handler(google).delete(record)
        change = self.changed(self.RESOURCE)
        assert change is not None
        after = wanted(change[0])
        sandbox.settling = 2
        assert self.handler(google).create(after) == record.outputs
        self.assert_as_desired(after, self.seen(google, after))

    def test_deleted_resource_of_another_run_stays_deleted(self, google: Google) -> None:
        resource = self.resource(google)
        self.handler(google).delete(self.created(google, wanted(resource, OTHER)))
        with pytest.raises(Conflict, match="its id stays taken for 30 days"):
            self.handler(google).create(wanted(resource))
        assert list(self.handler(google).read([wanted(resource)])) == [None]

    def test_create_and_delete_wait_for_operations(self, google: Google, sandbox: GoogleSandbox) -> None:
        desired = wanted(self.resource(google))
        sandbox.settling = 3
        record = self.created(google, desired)
        self.assert_as_desired(desired, self.seen(google, desired))
        self.handler(google).delete(record)
        assert list(self.handler(google).read([desired])) == [None]

    def test_deleted_resources_are_not_listed(self, google: Google) -> None:
        self.handler(google).delete(self.created(google, wanted(self.resource(google))))
        assert list(self.handler(google).list_owned(RUN, [])) == []


class TestPools(Federated):
    HANDLER = Pools
    RESOURCE = POOL
    CHANGE = ("enabled", False)

    def test_pool_outputs_name_its_members(self, google: Google) -> None:
        outputs = Pools(google).create(wanted(POOL))
        assert outputs == {
            "name": WHERE,
            "id": "skerry-tiny-gpt",
            "members": f"principalSet://iam.googleapis.com/{WHERE}/attribute.aws_role/",
        }
        assert outputs["members"] == members_prefix("415104041262", POOL.name)


class TestProviders(Federated):
    HANDLER = Providers
    RESOURCE = PROVIDER
    CHANGE = ("roles", ("skerry-tiny-gpt-batch-0",))

    def resource(self, google: Google) -> Provider:
        Pools(google).create(wanted(POOL))
        return PROVIDER

    def test_provider_outputs_have_the_audience(self, google: Google) -> None:
        self.resource(google)
        outputs = Providers(google).create(wanted(PROVIDER))
        where = f"{WHERE}/providers/aws-batch"
        assert outputs == {"name": where, "audience": f"//iam.googleapis.com/{where}"}

    def test_provider_of_a_deleted_pool_is_absent(self, google: Google) -> None:
        self.resource(google)
        record = self.created(google, wanted(PROVIDER))
        Pools(google).delete(wanted(POOL).to_record({}))
        Providers(google).delete(record)
        assert list(Providers(google).list_owned(RUN, [])) == []

    @pytest.mark.parametrize(
        ("body", "setting"),
        [
            ({"attributeCondition": "true"}, "roles"),
            ({"attributeCondition": f"attribute.aws_role in {sorted(PROVIDER.roles)}"}, "roles"),
            ({"attributeMapping": {"google.subject": "assertion.account", "attribute.aws_role": "'x'"}}, "aws_role"),
            ({"disabled": True}, "enabled"),
        ],
    )
    def test_widened_provider_is_reported_and_restored(
        self, google: Google, body: dict[str, Any], setting: str
    ) -> None:
        self.resource(google)
        desired = wanted(PROVIDER)
        Providers(google).create(desired)
        mask = {"updateMask": next(iter(body))}
        google.call("iam", "PATCH", f"{PARENT}/skerry-tiny-gpt/providers/aws-batch", body=body, query=mask)
        differing = self.differing(desired, self.seen(google, desired))
        assert setting in differing
        self.assert_restored(google, desired, *differing)


class TestOidcProviders(Federated):
    HANDLER = OidcProviders
    RESOURCE = CLUSTER
    CHANGE = ("issuer", "https://oidc.example.com/id/4567")

    def resource(self, google: Google) -> OidcProvider:
        Pools(google).create(wanted(POOL))
        return CLUSTER

    @pytest.mark.parametrize(
        ("body", "setting"),
        [
            ({"attributeCondition": "true"}, "subjects"),
            ({"attributeMapping": {"google.subject": "assertion.aud"}}, "subject"),
            ({"oidc": {"issuerUri": "https://evil.example.com"}}, "issuer"),
            ({"oidc": {"issuerUri": CLUSTER.issuer, "allowedAudiences": ["any"]}}, "audiences"),
            ({"oidc": {"issuerUri": CLUSTER.issuer, "jwksJson": '{"keys": []}'}}, "issuer"),
            ({"disabled": True}, "enabled"),
        ],
    )
    def test_widened_provider_is_reported_and_restored(
        self, google: Google, body: dict[str, Any], setting: str
    ) -> None:
        desired = wanted(self.resource(google))
        OidcProviders(google).create(desired)
        mask = {"updateMask": next(iter(body))}
        google.call("iam", "PATCH", f"{PARENT}/skerry-tiny-gpt/providers/kubernetes", body=body, query=mask)
        assert setting in self.differing(desired, self.seen(google, desired))
        self.assert_restored(google, desired, setting)

    def test_each_type_of_provider_lists_its_own(self, google: Google) -> None:
        OidcProviders(google).create(wanted(self.resource(google)))
        Providers(google).create(wanted(PROVIDER))
        addresses = [
            record.address for kind in (Providers, OidcProviders) for record in kind(google).list_owned(RUN, [])
        ]
        assert addresses == [PROVIDER.address, CLUSTER.address]


def test_requests_equal_the_golden_files() -> None:
    pool, provider = pool_body(wanted(POOL)), provider_body(wanted(PROVIDER))
    check_request("iam", "POST", PARENT, pool, workloadIdentityPoolId=POOL.name)
    path = f"{PARENT}/skerry-tiny-gpt/providers"
    check_request("iam", "POST", path, provider, workloadIdentityPoolProviderId="aws-batch")
    check_request("iam", "PATCH", f"{path}/aws-batch", provider, updateMask=",".join(sorted(provider)))
    check_golden("pool", pool)
    check_golden("provider", provider)
    check_request("iam", "POST", path, oidc_provider_body(wanted(CLUSTER)), workloadIdentityPoolProviderId="kubernetes")


def test_too_many_roles_are_refused() -> None:
    roles = [f"skerry-{'n' * 20}-0123ab-{'p' * 16}-{number}" for number in range(100)]
    with pytest.raises(
        Invalid, match=r"100 roles do not fit into the 4096 characters of a condition; set `role: group`"
    ):
        condition(roles, START)
    assert len(condition(roles[:68], START)) <= MOST_CONDITION


@pytest.mark.parametrize("stem", ["skerry-a-0123ab", f"skerry-{'n' * 20}-0123ab"])
def test_ids_are_short_in_every_generation(stem: str) -> None:
    pool = pool_id(stem)
    parsed, provider = provider_name(pool, "a long name of a group, and more").split("/")
    assert parsed == pool
    for desired in (pool, provider):
        assert 4 <= len(generation_name(desired, 99)) <= 32
        assert not desired.startswith("gcp-")


def test_rights_name_the_admitted_roles() -> None:
    settings = {name: as_json(value) for name, value in replace(PROVIDER, roles=("batch-0",)).settings().items()}
    (rights,) = Provider.rights(PROVIDER.name, settings).values()
    assert rights == {"account": "123456789012", "sessions": PROVIDER.sessions, "roles": ["batch-0"]}
