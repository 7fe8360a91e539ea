"""Roles, instance profiles and service-linked roles: create, read, update, list and delete."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import ACCOUNT, RUN, Listener, answer, check_golden, check_model, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.kit import Killed, failing, plain

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
from skerry.infra.clouds.handler_helpers import Absent, NotYetVisible
from skerry.infra.provision.graph import Graph, Life, Ref, as_json
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource

MANAGED: Final = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
READ_ONLY: Final = "arn:aws:iam::aws:policy/AmazonS3ReadOnlyAccess"
LOGS = Statement(actions=("logs:PutLogEvents",), resources=("arn:aws:logs:eu-central-1:123456789012:log-group:x:*",))


def policies(arn: str | Ref = "arn:aws:s3:::acme-runs", slots: Sequence[str] = ("batch-0",)) -> dict[str, object]:
    return {"replica": replica_policy(bucket_arn=arn, prefix="teams/tiny-gpt", slots=slots, group=None)}


ROLE = Role(
    key="batch-0",
    name="skerry-tiny-gpt-abc123-batch-0",
    region="",
    why="what the replica batch-0 may do",
    trust=(trust_service("ecs-tasks.amazonaws.com", ACCOUNT),),
    policies=policies(),
    managed=(READ_ONLY, MANAGED),
)
ONE = wanted(ROLE)
PROFILE = InstanceProfile(key="machines", name="skerry-tiny-gpt-abc123-machines", region="", role=ROLE.name)
# Its policy names the bucket by reference.
WAITING = replace(ROLE, policies=policies(Ref(address="aws_bucket.store", output="arn")))


class TestRoles(AwsHandlerSuite):
    HANDLER = Roles
    RESOURCE = ROLE
    CHANGE = ("policies", {"logs": (LOGS,)})

    @pytest.mark.parametrize(
        ("setting", "other"),
        [
            ("trust", (trust_service("ec2.amazonaws.com", ACCOUNT),)),
            ("managed", (MANAGED,)),
            ("max_session_s", 7200),
            ("policies", {**ROLE.policies, "logs": (LOGS,)}),
            ("policies", {}),
        ],
    )
    def test_parts_of_a_role_are_updated_in_place(self, aws: Aws, setting: str, other: object) -> None:
        Roles(aws).create(ONE)
        for role in (replace(ROLE, **{setting: other}), ROLE):
            self.assert_restored(aws, wanted(role), setting)

    def test_added_policy_is_reported_and_removed(self, aws: Aws) -> None:
        Roles(aws).create(ONE)
        admin = json.dumps({"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": "*", "Resource": "*"}})
        aws.call("iam", "", "put_role_policy", RoleName=ROLE.name, PolicyName="admin", PolicyDocument=admin)
        observed = plain(self.assert_restored(aws, ONE, "policies").settings["policies"])
        assert observed["admin"][0]["actions"] == ["*"]

    def test_reordered_statements_are_no_difference(self, aws: Aws) -> None:
        Roles(aws).create(ONE)
        (request,) = policy_requests(ONE)
        document = json.loads(request["PolicyDocument"])
        for statement in document["Statement"]:
            statement["Action"] = statement["Action"][0]
            statement["Resource"].reverse()
        document["Statement"].reverse()
        aws.call("iam", "", "put_role_policy", **request | {"PolicyDocument": json.dumps(document)})
        self.assert_as_desired(ONE, self.seen(aws, ONE))

    def test_policy_with_a_reference_is_compared_once_resolved(self, aws: Aws) -> None:
        Roles(aws).create(ONE)
        assert self.seen(aws, wanted(WAITING)).settings["policies"] == plain(ONE.settings["policies"])
        assert WAITING.needs() == {"aws_bucket.store"}
        with pytest.raises(Invalid, match=r"before this is known: \(arn of aws_bucket.store\)"):
            policy_requests(wanted(WAITING))

    def test_role_inside_an_instance_profile_is_not_deleted(self, aws: Aws) -> None:
        record = self.created(aws, ONE)
        InstanceProfiles(aws).create(wanted(PROFILE))
        with pytest.raises(Conflict):
            Roles(aws).delete(record)

    def test_role_that_stays_invisible_times_out(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        answer(monkeypatch, "get_role", failing(Absent("no such role")))
        with pytest.raises(NotYetVisible, match=r"timed out after 60 s, waiting until the role skerry-\S+ is visible"):
            Roles(aws).create(ONE)

    def test_listing_reads_only_roles_below_our_path(self, aws: Aws, calls: list[str]) -> None:
        trust = role_request(ONE)["AssumeRolePolicyDocument"]
        for number in range(3):
            aws.call("iam", "", "create_role", RoleName=f"theirs-{number}", AssumeRolePolicyDocument=trust)
        Roles(aws).create(ONE)
        calls.clear()
        assert len(list(Roles(aws).list_owned(RUN, []))) == 1
        assert calls == ["iam:ListRoles", "iam:GetRole"]


class TestInstanceProfiles(AwsHandlerSuite):
    HANDLER = InstanceProfiles
    CHANGE = ("role", "other")

    def resource(self, aws: Aws) -> Resource:
        for name in (ROLE.name, "other"):
            Roles(aws).create(wanted(replace(ROLE, name=name)))
        return PROFILE


class TestServiceLinkedRoles:
    BATCH = ServiceLinkedRole(key="batch", name="AWSServiceRoleForBatch", region="", service="batch.amazonaws.com")
    ONE = wanted(BATCH)

    def test_service_linked_role_is_created_once_and_never_deleted(self, aws: Aws, calls: list[str]) -> None:
        handler = ServiceLinkedRoles(aws)
        assert list(handler.read([self.ONE])) == [None]
        outputs = handler.create(self.ONE)
        assert outputs["arn"].startswith(f"arn:aws:iam::{ACCOUNT}:role/aws-service-role/batch.amazonaws.com/")
        calls.clear()
        assert handler.create(self.ONE) == handler.update(self.ONE, ()) == outputs
        handler.delete(self.ONE.to_record(outputs))
        (seen,) = handler.read([self.ONE])
        assert seen is not None
        assert (seen.outputs, seen.owner) == (outputs, None)
        assert seen.settings == {"region": "", "service": "batch.amazonaws.com"}
        assert set(calls) == {"iam:ListRoles"}
        assert list(handler.list_owned(RUN, [])) == []
        assert ServiceLinkedRole.LIFE is Life.SHARED

    def test_interrupted_create_is_finished_by_the_next(self, aws: Aws, listener: Listener) -> None:
        with listener.killing(2, "after"), pytest.raises(Killed):
            ServiceLinkedRoles(aws).create(self.ONE)
        assert ServiceLinkedRoles(aws).create(self.ONE)["arn"]

    def test_refused_create_raises(self, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
        answer(monkeypatch, "create_service_linked_role", failing(Invalid("no such service")))
        with pytest.raises(Invalid, match="no such service"):
            ServiceLinkedRoles(aws).create(self.ONE)


def test_requests_equal_the_golden_file() -> None:
    request, (policy,) = role_request(ONE), policy_requests(ONE)
    check_model("iam", "CreateRole", request)
    check_model("iam", "PutRolePolicy", policy)
    check_model("iam", "CreateInstanceProfile", profile_request(wanted(PROFILE)))
    parsed = {
        "trust": json.loads(request.pop("AssumeRolePolicyDocument")),
        "policy": json.loads(policy.pop("PolicyDocument")),
    }
    check_golden("role", {"create_role": request, "put_role_policy": policy, **parsed})


def test_too_long_policies_are_refused() -> None:
    slots = [f"a-replica-with-a-long-name-{number}" for number in range(40)]
    with pytest.raises(Invalid, match=r"aws_role.batch-0 have \d+ characters, IAM takes 10240"):
        policy_requests(wanted(replace(ROLE, policies=policies(slots=slots))))


def test_rights_of_a_role_are_its_policy_documents() -> None:
    settings = {name: as_json(value) for name, value in ROLE.settings().items()}
    rights = Role.rights(ROLE.name, settings)
    title = f"role {ROLE.name}"
    assert [*rights] == [f"{title}: trust policy", f"{title}: policy replica", f"{title}: attached policies"]
    sent = {request["PolicyName"]: json.loads(request["PolicyDocument"]) for request in policy_requests(wanted(ROLE))}
    assert rights[f"{title}: policy replica"] == sent["replica"]
    assert rights[f"{title}: attached policies"] == [*ROLE.managed]


def test_role_is_created_before_its_profile() -> None:
    graph = Graph([replace(PROFILE, role=ROLE.ref("name")), ROLE])
    assert [resource.address for resource in graph] == ["aws_role.batch-0", "aws_instance_profile.machines"]
