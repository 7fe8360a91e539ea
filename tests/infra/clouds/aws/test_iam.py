"""Roles, instance profiles and service-linked roles: create, read, update, list and delete."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, RUN, Listener, check_golden, check_model, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.kit import Killed, made

from skerry.infra.clouds.aws.iam import (
    InstanceProfile,
    InstanceProfiles,
    Role,
    Roles,
    ServiceLinkedRole,
    ServiceLinkedRoles,
    policy_requests,
    profile_request,
    role_request,
)
from skerry.infra.clouds.aws.policies import Statement, replica_policy, trust_service
from skerry.infra.clouds.shared import NotYetVisible
from skerry.infra.provision.graph import Graph, Life, Ref
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired

MANAGED: Final = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
READ_ONLY: Final = "arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess"
ROLE = Role(
    key="batch-0",
    name="skerry-tiny-gpt-abc123-batch-0",
    region="",
    why="what the replica batch-0 may do",
    trust=(trust_service("ecs-tasks.amazonaws.com", ACCOUNT),),
    policies={
        "replica": replica_policy(
            bucket_arn="arn:aws:s3:::acme-runs", prefix="teams/tiny-gpt", slots=["batch-0"], group=None
        )
    },
    managed=(READ_ONLY, MANAGED),
)
LOGS = Statement(actions=("logs:PutLogEvents",), resources=("arn:aws:logs:eu-central-1:123456789012:log-group:x:*",))


class TestRoles(AwsHandlerSuite):
    def handler(self, aws: Aws) -> Roles:
        return Roles(aws)

    def resource(self, aws: Aws) -> Role:
        del aws
        return ROLE

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Role)
        return replace(resource, policies={"logs": (LOGS,)}), "policies"

    @pytest.mark.parametrize(
        ("other", "setting"),
        [
            (replace(ROLE, trust=(trust_service("ec2.amazonaws.com", ACCOUNT),)), "trust"),
            (replace(ROLE, managed=(MANAGED,)), "managed"),
            (replace(ROLE, max_session_s=7200), "max_session_s"),
            (replace(ROLE, policies={**ROLE.policies, "logs": (LOGS,)}), "policies"),
            (replace(ROLE, policies={}), "policies"),
        ],
    )
    def test_parts_of_a_role_are_updated_in_place(self, aws: Aws, other: Role, setting: str) -> None:
        Roles(aws).create(wanted(ROLE))
        for role in (other, ROLE):
            assert self.differing(wanted(role), self.seen(aws, wanted(role))) == {setting}
            Roles(aws).update(wanted(role), {setting})
            self.assert_as_desired(wanted(role), self.seen(aws, wanted(role)))

    def test_added_policy_is_reported_and_removed(self, aws: Aws) -> None:
        Roles(aws).create(wanted(ROLE))
        admin = json.dumps({"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}})
        aws.call("iam", "", "put_role_policy", RoleName=ROLE.name, PolicyName="admin", PolicyDocument=admin)
        seen = self.seen(aws, wanted(ROLE))
        assert self.differing(wanted(ROLE), seen) == {"policies"}
        policies = seen.settings["policies"]
        assert isinstance(policies, dict)
        assert policies["admin"][0]["actions"] == ["*"]
        Roles(aws).update(wanted(ROLE), {"policies"})
        self.assert_as_desired(wanted(ROLE), self.seen(aws, wanted(ROLE)))

    def test_reordered_statements_are_no_difference(self, aws: Aws) -> None:
        Roles(aws).create(wanted(ROLE))
        (request,) = policy_requests(wanted(ROLE))
        document = json.loads(request["PolicyDocument"])
        for statement in document["Statement"]:
            statement["Action"] = statement["Action"][0]
            statement["Resource"].reverse()
        document["Statement"].reverse()
        aws.call("iam", "", "put_role_policy", **request | {"PolicyDocument": json.dumps(document)})
        self.assert_as_desired(wanted(ROLE), self.seen(aws, wanted(ROLE)))

    def test_policy_with_a_reference_is_compared_once_resolved(self, aws: Aws) -> None:
        arn = Ref(address="aws_bucket.store", output="arn")
        policy = replica_policy(bucket_arn=arn, prefix="teams/tiny-gpt", slots=["batch-0"], group=None)
        waiting = replace(ROLE, policies={"replica": policy})
        Roles(aws).create(wanted(ROLE))
        (seen,) = Roles(aws).read([wanted(waiting)])
        assert seen is not None
        assert seen.settings["policies"] == TestRoles.plain(wanted(ROLE))["policies"]
        assert waiting.needs() == {"aws_bucket.store"}
        with pytest.raises(Invalid, match=r"unresolved reference: \$\{aws_bucket.store.arn\}"):
            policy_requests(wanted(waiting))

    @staticmethod
    def plain(desired: Desired) -> dict[str, object]:
        return json.loads(json.dumps(desired.settings))

    def test_role_inside_an_instance_profile_is_not_deleted(self, aws: Aws) -> None:
        outputs = Roles(aws).create(wanted(ROLE))
        InstanceProfiles(aws).create(wanted(profile()))
        with pytest.raises(Conflict):
            Roles(aws).delete(made(wanted(ROLE), outputs))

    def test_role_that_stays_invisible_times_out(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Roles, "_read", lambda _self, _wanted: None)
        with pytest.raises(NotYetVisible, match=r"timed out after 60 s, waiting until the role skerry-\S+ is visible"):
            Roles(aws).create(wanted(ROLE))

    def test_listing_reads_only_roles_below_our_path(self, aws: Aws, calls: list[str]) -> None:
        trust = role_request(wanted(ROLE))["AssumeRolePolicyDocument"]
        for number in range(3):
            aws.call("iam", "", "create_role", RoleName=f"theirs-{number}", AssumeRolePolicyDocument=trust)
        Roles(aws).create(wanted(ROLE))
        calls.clear()
        assert len(list(Roles(aws).list_owned(RUN, []))) == 1
        assert calls == ["iam:ListRoles", "iam:GetRole"]


def profile() -> InstanceProfile:
    return InstanceProfile(key="machines", name="skerry-tiny-gpt-abc123-machines", region="", role=ROLE.name)


class TestInstanceProfiles(AwsHandlerSuite):
    def handler(self, aws: Aws) -> InstanceProfiles:
        return InstanceProfiles(aws)

    def resource(self, aws: Aws) -> InstanceProfile:
        for name in (ROLE.name, "other"):
            Roles(aws).create(wanted(replace(ROLE, name=name)))
        return profile()

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, InstanceProfile)
        return replace(resource, role="other"), "role"


class TestServiceLinkedRoles:
    ONE = ServiceLinkedRole(key="batch", name="AWSServiceRoleForBatch", region="", service="batch.amazonaws.com")

    def test_service_linked_role_is_created_once_and_never_deleted(self, aws: Aws, calls: list[str]) -> None:
        handler, desired = ServiceLinkedRoles(aws), wanted(self.ONE)
        assert list(handler.read([desired])) == [None]
        outputs = handler.create(desired)
        assert outputs["arn"].startswith(f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/batch.amazonaws.com/")
        calls.clear()
        assert handler.create(desired) == outputs
        assert handler.update(desired, ()) == outputs
        handler.delete(made(desired, outputs))
        (seen,) = handler.read([desired])
        assert seen is not None
        assert (seen.outputs, seen.owner) == (outputs, None)
        assert seen.settings == {"region": "", "service": "batch.amazonaws.com"}
        assert set(calls) == {"iam:ListRoles"}
        assert list(handler.list_owned(RUN, [])) == []
        assert self.ONE.LIFE is Life.SHARED

    def test_interrupted_create_is_finished_by_the_next(self, aws: Aws, listener: Listener) -> None:
        handler, desired = ServiceLinkedRoles(aws), wanted(self.ONE)
        with listener.killing(2, "after"), pytest.raises(Killed):
            handler.create(desired)
        assert handler.create(desired)["arn"]

    def test_refused_create_raises(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_arguments: object, **_more: object) -> dict[str, object]:
            raise Invalid("no such service")

        monkeypatch.setattr(type(aws), "call", refuse)
        with pytest.raises(Invalid, match="no such service"):
            ServiceLinkedRoles(aws).create(wanted(self.ONE))


def test_requests_equal_the_golden_file() -> None:
    request, (policy,) = role_request(wanted(ROLE)), policy_requests(wanted(ROLE))
    check_model("iam", "CreateRole", request)
    check_model("iam", "PutRolePolicy", policy)
    check_model("iam", "CreateInstanceProfile", profile_request(wanted(profile())))
    texts = {"trust": request.pop("AssumeRolePolicyDocument"), "policy": policy.pop("PolicyDocument")}
    parsed = {name: json.loads(text) for name, text in texts.items()}
    check_golden("role", {"create_role": request, "put_role_policy": policy, **parsed})


def test_too_long_policies_are_refused() -> None:
    slots = [f"a-replica-with-a-long-name-{number}" for number in range(40)]
    policy = replica_policy(bucket_arn="arn:aws:s3:::acme-runs", prefix="teams/tiny-gpt", slots=slots, group=None)
    with pytest.raises(Invalid, match=r"aws_role.batch-0 have \d+ characters, IAM takes 10240"):
        policy_requests(wanted(replace(ROLE, policies={"replica": policy})))


def test_grants_name_the_permissions_of_a_role() -> None:
    grants = [f"{grant.principal} may {grant.may} on {grant.on}" for grant in ROLE.grants()]
    assert grants[0] == f"ecs-tasks.amazonaws.com may act as on role {ROLE.name}"
    role = f"role {ROLE.name}"
    assert f"{role} may list on acme-runs/teams/tiny-gpt/*" in grants
    assert f"{role} may read on acme-runs/teams/tiny-gpt/*" in grants
    assert f"{role} may write on acme-runs/teams/tiny-gpt/heartbeats/batch-0.json" in grants
    assert f"{role} may create, never overwrite on acme-runs/teams/tiny-gpt/commits/*" in grants
    assert f"{role} may delete on acme-runs/teams/tiny-gpt/payloads/*" in grants
    assert grants[-1] == f"{role} may do all that the policy allows on {MANAGED}"
    bucket = Ref(address="aws_bucket.store", output="arn")
    policy = replica_policy(bucket_arn=bucket, prefix="teams/tiny-gpt", slots=["batch-0"], group=None)
    waiting = {grant.on for grant in replace(ROLE, policies={"replica": policy}).grants()}
    assert {"aws_bucket.store/teams/tiny-gpt/*", "aws_bucket.store/teams/tiny-gpt/commits/*"} <= waiting


def test_role_is_created_before_its_profile() -> None:
    machines = replace(profile(), role=ROLE.ref("name"))
    assert [desired.address for desired in Graph([machines, ROLE])] == [
        "aws_role.batch-0",
        "aws_instance_profile.machines",
    ]
