from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from moto.batch.models import batch_backends
from tests.infra.clouds.aws.account import ACCOUNT, REGION, RUN, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite
from tests.infra.targets.aws_batch.kit import Scene, context_of

from skerry.infra.clouds.aws.iam import (
    InstanceProfile,
    InstanceProfiles,
    Role,
    Roles,
    ServiceLinkedRole,
    ServiceLinkedRoles,
)
from skerry.infra.clouds.aws.policies import trust_service
from skerry.infra.provision.handler import Condition, Desired, Handler, Observed
from skerry.infra.targets.aws_batch.handlers import ComputeEnvironments, JobDefinitions, LaunchTemplates, Queues
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, JobDefinition, LaunchTemplate, Queue
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.infra.kit import Listener

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource


class TestLaunchTemplates(AwsHandlerSuite):
    REMEDY: ClassVar[str] = "name it under `byo:`"

    def handler(self, aws: Aws) -> Handler:
        return LaunchTemplates(aws)

    def resource(self, aws: Aws) -> Resource:
        del aws
        return LaunchTemplate(key="a", name="skerry-a", region=REGION, disk_gib=50)

    def changed(self, resource: Resource) -> None:
        """Return nothing: any change replaces the resource."""

    def test_byo_template_is_read_by_its_id(self, aws: Aws) -> None:
        outputs = LaunchTemplates(aws).create(wanted(self.resource(aws)))
        mine = LaunchTemplate(key="b", name=outputs["id"], region=REGION, disk_gib=1, brought=True)
        (seen,) = LaunchTemplates(aws).read([wanted(mine)])
        assert seen is not None
        assert (seen.outputs, seen.settings["disk_gib"]) == (outputs, 50)

    def test_unencrypted_disk_differs(self, aws: Aws) -> None:
        LaunchTemplates(aws).create(wanted(self.resource(aws)))
        plain = {"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 50, "Encrypted": False}}]}
        response = aws.call(
            "ec2", REGION, "create_launch_template_version", LaunchTemplateName="skerry-a", LaunchTemplateData=plain
        )
        number = str(response["LaunchTemplateVersion"]["VersionNumber"])
        aws.call("ec2", REGION, "modify_launch_template", LaunchTemplateName="skerry-a", DefaultVersion=number)
        (seen,) = LaunchTemplates(aws).read([wanted(self.resource(aws))])
        assert seen is not None
        assert (seen.settings["disk_gib"], seen.settings["hop_limit"]) == (0, 0)


def environment_of(aws: Aws, key: str = "a") -> ComputeEnvironment:
    """Return an environment after creating the resources it refers to."""
    service = wanted(
        ServiceLinkedRole(key="batch", name="AWSServiceRoleForBatch", region="", service="batch.amazonaws.com")
    )
    role = wanted(Role(key="m", name="skerry-m", region="", trust=(trust_service("ec2.amazonaws.com", ACCOUNT),)))
    name = Roles(aws).create(role)["name"]
    profile = InstanceProfiles(aws).create(wanted(InstanceProfile(key="m", name="skerry-m", region="", role=name)))
    template = LaunchTemplates(aws).create(wanted(LaunchTemplate(key="m", name="skerry-m", region=REGION, disk_gib=50)))
    subnets = aws.call("ec2", REGION, "describe_subnets")["Subnets"]
    groups = aws.call("ec2", REGION, "describe_security_groups")["SecurityGroups"]
    return ComputeEnvironment(
        key=key,
        name=f"skerry-{key}",
        region=REGION,
        spot=True,
        allocation="SPOT_PRICE_CAPACITY_OPTIMIZED",
        instance_types=("g5.xlarge", "g6.xlarge"),
        image_type="ECS_AL2023_NVIDIA",
        max_vcpus=8,
        subnets=tuple(sorted(subnet["SubnetId"] for subnet in subnets)),
        security_groups=(groups[0]["GroupId"],),
        instance_profile=profile["arn"],
        launch_template=template["id"],
        service_role=ServiceLinkedRoles(aws).create(service)["arn"],
    )


class TestComputeEnvironments(AwsHandlerSuite):
    REMEDY: ClassVar[str] = "name it under `byo:`"

    def handler(self, aws: Aws) -> Handler:
        return ComputeEnvironments(aws)

    def resource(self, aws: Aws) -> Resource:
        return environment_of(aws)

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, ComputeEnvironment)
        return replace(resource, max_vcpus=16), "max_vcpus"

    def test_invalid_environment_is_reported_with_the_reason_of_batch(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desired = wanted(environment_of(aws))
        ComputeEnvironments(aws).create(desired)
        invalidate(monkeypatch, "CLIENT_ERROR - not authorized to perform sts:AssumeRole")
        (seen,) = ComputeEnvironments(aws).read([desired])
        assert seen is not None
        assert (seen.condition, seen.detail) == (
            Condition.BROKEN,
            "invalid: CLIENT_ERROR - not authorized to perform sts:AssumeRole",
        )
        with pytest.raises(Invalid, match=r"cannot use the compute environment skerry-a: invalid: CLIENT_ERROR"):
            ComputeEnvironments(aws).create(desired)

    @pytest.mark.parametrize(
        "reason",
        [
            "CLIENT_ERROR - User: arn:aws:sts::1:assumed-role/x is not authorized to perform: ecs:DescribeClusters",
            "CLIENT_ERROR - Invalid IamInstanceProfile: skerry-m",
        ],
    )
    def test_new_roles_are_validated_again(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch, calls: Listener, reason: str
    ) -> None:
        desired = wanted(environment_of(aws))
        known_s = aws.clock.now() + 40
        looked = [aws.clock.now()]
        backend = type(batch_backends[ACCOUNT][REGION])
        update = backend.update_compute_environment

        def look(self: Any, *positional: Any, **rest: Any) -> Any:
            looked.append(aws.clock.now())
            return update(self, *positional, **rest)

        monkeypatch.setattr(backend, "update_compute_environment", look)
        # Batch reports it valid only after another update.
        invalidate(monkeypatch, reason, lambda: looked[-1] < known_s)
        calls.take()
        outputs = ComputeEnvironments(aws).create(desired)
        assert aws.clock.now() >= known_s
        taken = calls.take()
        assert taken.count("batch:CreateComputeEnvironment") == 1
        assert 1 <= taken.count("batch:UpdateComputeEnvironment") <= 6
        assert outputs == self.seen(aws, desired).outputs
        self.assert_as_desired(desired, self.seen(aws, desired))

    def test_permanent_failure_is_reported_at_once(
        self, aws: Aws, monkeypatch: pytest.MonkeyPatch, calls: Listener
    ) -> None:
        desired = wanted(environment_of(aws))
        invalidate(monkeypatch, "CLIENT_ERROR - The subnet ID 'subnet-1' does not exist")
        calls.take()
        with pytest.raises(Invalid, match="The subnet ID"):
            ComputeEnvironments(aws).create(desired)
        assert "batch:UpdateComputeEnvironment" not in calls.take()

    def test_two_hundred_environments_are_read_in_two_calls(self, aws: Aws, calls: Listener) -> None:
        desired = wanted(environment_of(aws))
        ComputeEnvironments(aws).create(desired)
        calls.take()
        many = [desired, *(replace(desired, generation=number) for number in range(1, 200))]
        seen = ComputeEnvironments(aws).read(many)
        assert [entry is not None for entry in seen] == [True] + [False] * 199
        assert calls.take() == ["batch:DescribeComputeEnvironments"] * 2


class TestQueues(AwsHandlerSuite):
    REMEDY: ClassVar[str] = "name it under `byo:`"

    def handler(self, aws: Aws) -> Handler:
        return Queues(aws)

    def resource(self, aws: Aws) -> Resource:
        arn = ComputeEnvironments(aws).create(wanted(environment_of(aws)))["arn"]
        return Queue(key="a", name="skerry-a", region=REGION, compute_environments=(arn,))

    def changed(self, resource: Resource) -> tuple[Resource, str]:
        assert isinstance(resource, Queue)
        return replace(resource, hopeless_after_s=900), "hopeless_after_s"

    def test_queue_moves_to_other_machines_in_place(self, aws: Aws) -> None:
        before = wanted(self.resource(aws))
        outputs = Queues(aws).create(before)
        other = ComputeEnvironments(aws).create(wanted(environment_of(aws, "b")))["arn"]
        assert isinstance(before.resource, Queue)
        after = wanted(replace(before.resource, compute_environments=(other,)))
        assert self.differing(after, self.seen(aws, after)) == {"compute_environments"}
        assert Queues(aws).update(after, {"compute_environments"}) == outputs
        self.assert_as_desired(after, self.seen(aws, after))

    def test_foreign_change_is_seen_in_its_setting(self, aws: Aws) -> None:
        desired = wanted(self.resource(aws))
        Queues(aws).create(desired)
        aws.call("batch", REGION, "update_job_queue", jobQueue="skerry-a", state="DISABLED", priority=7)
        settled(aws, desired)
        assert self.differing(desired, self.seen(aws, desired)) == {"enabled", "priority"}
        limits = [
            {
                "reason": "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
                "state": "RUNNABLE",
                "maxTimeSeconds": 600,
                "action": "CANCEL",
            }
        ]
        aws.call("batch", REGION, "update_job_queue", jobQueue="skerry-a", jobStateTimeLimitActions=limits)
        assert "hopeless_after_s" in self.differing(desired, self.seen(aws, desired))


class TestJobDefinitions(AwsHandlerSuite):
    REMEDY: ClassVar[str] = "name it under `byo:`"

    def handler(self, aws: Aws) -> Handler:
        return JobDefinitions(aws)

    def resource(self, aws: Aws) -> Resource:
        del aws
        return JobDefinition(
            key="a",
            name="skerry-a",
            region=REGION,
            image="acme/skerry:gpu",
            command=("run",),
            environment={"SKERRY_SLOT": "a-0"},
            gpus=1,
            vcpus=4,
            memory_mib=8192,
            shared_memory_mib=2048,
            job_role="arn:aws:iam::123456789012:role/a",
            execution_role="arn:aws:iam::123456789012:role/b",
            log_group="/skerry/a",
            attempts=3,
            timeout_s=3600,
        )

    def changed(self, resource: Resource) -> None:
        """Return nothing: any change replaces the resource."""

    def test_definition_without_gpus_and_timeout_does_not_differ(self, aws: Aws) -> None:
        resource = self.resource(aws)
        assert isinstance(resource, JobDefinition)
        desired = wanted(replace(resource, gpus=0, timeout_s=None))
        JobDefinitions(aws).create(desired)
        self.assert_as_desired(desired, self.seen(aws, desired))

    def test_delete_removes_own_revisions_only(self, aws: Aws) -> None:
        desired = wanted(self.resource(aws))
        outputs = JobDefinitions(aws).create(desired)
        properties = {
            "image": "x",
            "resourceRequirements": [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "64"}],
        }
        for tags in (desired.tags, {"of": "others"}):
            aws.call(
                "batch",
                REGION,
                "register_job_definition",
                jobDefinitionName="skerry-a",
                type="container",
                containerProperties=properties,
                tags=tags,
            )
        JobDefinitions(aws).delete(desired.to_record(outputs))
        left = aws.call("batch", REGION, "describe_job_definitions", jobDefinitionName="skerry-a", status="ACTIVE")
        assert [row["tags"] for row in left["jobDefinitions"]] == [{"of": "others"}]

    def test_known_definitions_are_read_in_hundreds(self, aws: Aws, calls: Listener) -> None:
        resource = self.resource(aws)
        known: list[Desired] = []
        for number in range(250):
            desired = wanted(replace(resource, key=f"a-{number}", name=f"skerry-a-{number}"))
            known.append(replace(desired, outputs=JobDefinitions(aws).create(desired)))
        calls.take()
        assert all(seen is not None for seen in JobDefinitions(aws).read(known))
        assert calls.take() == ["batch:DescribeJobDefinitions"] * 3


def test_delete_leaves_resources_of_another_owner(aws: Aws) -> None:
    environment = environment_of(aws)
    ComputeEnvironments(aws).create(wanted(environment))
    other = replace(environment, key="b")
    with pytest.raises(Conflict, match="the compute environment skerry-a exists already and belongs to the run"):
        ComputeEnvironments(aws).delete(wanted(other).to_record({}))
    (seen,) = ComputeEnvironments(aws).read([wanted(environment)])
    assert seen is not None
    assert seen.owner == RUN
    template = replace(LaunchTemplate(key="m", name="skerry-m", region=REGION, disk_gib=50), key="b")
    with pytest.raises(Conflict, match="the launch template skerry-m exists already"):
        LaunchTemplates(aws).delete(wanted(template).to_record({}))


def test_delete_disables_queues_and_machines_first(aws: Aws, calls: Listener, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, "instance_types: [g5.xlarge], gpus: 1", count=1))
    scene.make()
    calls.take()
    for resource in reversed(list(scene.graph)):
        if resource.KIND in {Queue.KIND, ComputeEnvironment.KIND, JobDefinition.KIND, LaunchTemplate.KIND}:
            scene.handlers[resource.KIND].delete(scene.record(resource.address))
    operations = [name.removeprefix("batch:") for name in calls.take()]
    order = [name for name in operations if not name.startswith("ec2:Describe") and not name.startswith("Describe")]
    assert order == [
        "UpdateJobQueue",
        "DeleteJobQueue",
        "UpdateComputeEnvironment",
        "DeleteComputeEnvironment",
        "DeregisterJobDefinition",
        "ec2:DeleteLaunchTemplate",
    ]
    # After each of the first four, Batch is polled until the operation has finished.
    for before, after in itertools.pairwise(order[:5]):
        between = operations[operations.index(before) + 1 : operations.index(after)]
        assert len([name for name in between if name.startswith("Describe")]) >= 2, (before, between)


def test_created_resources_do_not_differ_from_the_spec(aws: Aws, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, "instance_types: [g5.xlarge, g6.xlarge], gpus: 1, spot: true"))
    scene.make()
    assert {node.address: scene.differing(node.address) for node in scene.graph if scene.differing(node.address)} == {}
    unseen = {node.KIND: set(node.settings()) - set(seen_of(scene, node).settings) for node in scene.graph}
    assert {kind: names for kind, names in unseen.items() if names} == {"aws_batch_job": {"environment", "log_group"}}


def seen_of(scene: Scene, resource: Resource) -> Observed:
    seen = scene.seen(resource.address)
    assert seen is not None
    return seen


def settled(aws: Aws, desired: Desired) -> None:
    """Describe the queue until Batch has applied the update."""
    for _ in range(4):
        aws.call("batch", REGION, "describe_job_queues", jobQueues=[desired.name])


def invalidate(monkeypatch: pytest.MonkeyPatch, reason: str, still: Callable[[], bool] = lambda: True) -> None:
    """Report valid compute environments as invalid while `still()` is true."""
    backend = type(batch_backends[ACCOUNT][REGION])
    real = backend.describe_compute_environments

    def describe(self: Any, *names: Any, **rest: Any) -> list[dict[str, Any]]:
        invalid = {"status": "INVALID", "statusReason": reason}
        rows: list[dict[str, Any]] = real(self, *names, **rest)
        return [{**row, **invalid} if row["status"] == "VALID" and still() else row for row in rows]

    monkeypatch.setattr(backend, "describe_compute_environments", describe)
