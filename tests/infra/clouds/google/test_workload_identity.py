"""Pools and providers: made, taken back from the dead, never taken from others; whom they let in is seen and mended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.google.ground import OTHER, RUN, check_golden, check_request, wanted
from tests.infra.google.handlers import GoogleHandlerSuite
from tests.infra.ground import made

from skerry.infra.clouds.google.federation import (
    MOST_CONDITION,
    Pool,
    Pools,
    Provider,
    Providers,
    condition,
    members_prefix,
    pool_body,
    pool_id,
    provider_body,
    provider_name,
    sessions,
)
from skerry.infra.graph import Grant, Ref, generation_name
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Resource
    from skerry.infra.testing.google import GoogleSandbox

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
START = sessions("123456789012", "aws")
PARENT = "v1/projects/skerry-sandbox/locations/global/workloadIdentityPools"


class Federated(GoogleHandlerSuite):
    """What pools and providers have in common."""

    def test_one_that_was_deleted_is_taken_back_and_put_right(self, google: Google, sandbox: GoogleSandbox) -> None:
        before = wanted(self.resource(google))
        outputs = self.handler(google).create(before)
        self.handler(google).delete(made(before, outputs))
        change = self.changed(before.resource)
        assert change is not None
        after = wanted(change[0])
        sandbox.settling = 2
        assert self.handler(google).create(after) == outputs
        self.assert_as_wanted(after, self.seen(google, after))

    def test_a_dead_one_of_somebody_elses_is_left_dead(self, google: Google) -> None:
        resource = self.resource(google)
        outputs = self.handler(google).create(wanted(resource, OTHER))
        self.handler(google).delete(made(wanted(resource, OTHER), outputs))
        with pytest.raises(Conflict, match="its id stays taken for 30 days"):
            self.handler(google).create(wanted(resource))
        assert list(self.handler(google).read([wanted(resource)])) == [None]

    def test_operations_are_waited_for(self, google: Google, sandbox: GoogleSandbox) -> None:
        one = wanted(self.resource(google))
        sandbox.settling = 3
        outputs = self.handler(google).create(one)
        self.assert_as_wanted(one, self.seen(google, one))
        self.handler(google).delete(made(one, outputs))
        assert list(self.handler(google).read([one])) == [None]

    def test_deleted_ones_are_nobodys(self, google: Google) -> None:
        one = wanted(self.resource(google))
        self.handler(google).delete(made(one, self.handler(google).create(one)))
        assert list(self.handler(google).owned(RUN, [])) == []


class TestPools(Federated):
    def handler(self, google: Google) -> Pools:
        return Pools(google)

    def resource(self, google: Google) -> Pool:
        del google
        return POOL

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Pool)
        return replace(resource, enabled=False), "enabled"

    def test_its_outputs_are_what_policies_name(self, google: Google) -> None:
        outputs = Pools(google).create(wanted(POOL))
        assert outputs == {
            "name": WHERE,
            "id": "skerry-tiny-gpt",
            "members": f"principalSet://iam.googleapis.com/{WHERE}/attribute.aws_role/",
        }
        assert outputs["members"] == members_prefix("415104041262", POOL.name)


class TestProviders(Federated):
    def handler(self, google: Google) -> Providers:
        return Providers(google)

    def resource(self, google: Google) -> Provider:
        Pools(google).create(wanted(POOL))
        return PROVIDER

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Provider)
        return replace(resource, roles=("skerry-tiny-gpt-batch-0",)), "roles"

    def test_its_outputs_are_what_a_token_is_asked_for_with(self, google: Google) -> None:
        self.resource(google)
        outputs = Providers(google).create(wanted(PROVIDER))
        where = f"{WHERE}/providers/aws-batch"
        assert outputs == {"name": where, "audience": f"//iam.googleapis.com/{where}"}

    def test_a_provider_goes_with_its_pool(self, google: Google) -> None:
        self.resource(google)
        one = wanted(PROVIDER)
        outputs = Providers(google).create(one)
        Pools(google).delete(made(wanted(POOL), {}))
        Providers(google).delete(made(one, outputs))
        assert list(Providers(google).owned(RUN, [])) == []

    @pytest.mark.parametrize(
        ("body", "setting"),
        [
            ({"attributeCondition": "true"}, "roles"),
            ({"attributeCondition": f"attribute.aws_role in {sorted(PROVIDER.roles)}"}, "roles"),
            ({"attributeMapping": {"google.subject": "assertion.account", "attribute.aws_role": "'x'"}}, "aws_role"),
            ({"disabled": True}, "enabled"),
        ],
    )
    def test_what_lets_others_in_is_seen_and_mended(self, google: Google, body: dict[str, Any], setting: str) -> None:
        self.resource(google)
        one = wanted(PROVIDER)
        Providers(google).create(one)
        mask = {"updateMask": next(iter(body))}
        google.call("iam", "PATCH", f"{PARENT}/skerry-tiny-gpt/providers/aws-batch", body=body, query=mask)
        seen = self.seen(google, one)
        assert setting in self.differing(one, seen)
        Providers(google).update(one, self.differing(one, seen))
        self.assert_as_wanted(one, self.seen(google, one))


def test_the_requests_are_those_of_the_golden_files() -> None:
    pool, provider = pool_body(wanted(POOL)), provider_body(wanted(PROVIDER))
    check_request("iam", "POST", PARENT, pool, workloadIdentityPoolId=POOL.name)
    path = f"{PARENT}/skerry-tiny-gpt/providers"
    check_request("iam", "POST", path, provider, workloadIdentityPoolProviderId="aws-batch")
    check_request("iam", "PATCH", f"{path}/aws-batch", provider, updateMask=",".join(sorted(provider)))
    check_golden("pool", pool)
    check_golden("provider", provider)


def test_only_our_roles_are_let_in_by_name() -> None:
    body = provider_body(wanted(PROVIDER))
    assert body["aws"] == {"accountId": "123456789012"}
    assert body["attributeMapping"] == {
        "google.subject": "assertion.arn",
        "attribute.aws_role": "assertion.arn.extract('assumed-role/{role}/')",
    }
    roles = "['skerry-tiny-gpt-batch-0', 'skerry-tiny-gpt-batch-1']"
    sessions_ = "assertion.arn.startsWith('arn:aws:sts::123456789012:assumed-role/')"
    assert body["attributeCondition"] == f"{sessions_} && attribute.aws_role in {roles}"


def test_roles_that_have_no_room_are_told() -> None:
    roles = [f"skerry-{'n' * 20}-0123ab-{'p' * 16}-{number}" for number in range(100)]
    with pytest.raises(
        Invalid, match=r"100 roles have no room in the 4096 characters of a condition; say `role: group`"
    ):
        condition(roles, START)
    assert len(condition(roles[:68], START)) <= MOST_CONDITION


@pytest.mark.parametrize("stem", ["skerry-a-0123ab", f"skerry-{'n' * 20}-0123ab"])
def test_ids_are_short_in_every_generation(stem: str) -> None:
    pool = pool_id(stem)
    found, provider = provider_name(pool, "a long name of a group, and more").split("/")
    assert found == pool
    for one in (pool, provider):
        assert 4 <= len(generation_name(one, 99)) <= 32
        assert not one.startswith("gcp-")


def test_a_plan_says_who_is_let_in() -> None:
    role = Ref(address="aws_role.batch-0", output="name")
    assert replace(PROVIDER, roles=(role,)).grants() == (
        Grant(who="role ${aws_role.batch-0.name} of 123456789012", may="be known in", on="pool skerry-tiny-gpt"),
    )
