"""A place for Batch jobs, created by plain calls of boto3: for tests of the sandbox itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.testing.sandbox import Sandbox

ECS_TASKS = "ecs-tasks.amazonaws.com"


def trust(service: str) -> str:
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def allow(*statements: Mapping[str, Any]) -> str:
    return json.dumps(
        {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement} for statement in statements]}
    )


def refused(call: Callable[..., object], **parameters: Any) -> str:
    """The code with which a call is refused; "" if it is not."""
    try:
        call(**parameters)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def make_role(sandbox: Sandbox, name: str, service: str = ECS_TASKS, policy: str | None = None) -> str:
    iam = sandbox.client("iam")
    arn = iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust(service))["Role"]["Arn"]
    if policy is not None:
        iam.put_role_policy(RoleName=name, PolicyName="own", PolicyDocument=policy)
    return str(arn)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A compute environment and a queue."""

    sandbox: Sandbox
    batch: Any
    environment: str
    queue: str

    def define(self, name: str = "work", *, container: Mapping[str, Any] | None = None, **settings: Any) -> str:
        properties = {
            "image": "skerry-base:bookworm",
            "command": ["true"],
            "resourceRequirements": [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "256"}],
            **(container or {}),
        }
        created = self.batch.register_job_definition(
            jobDefinitionName=name, type="container", containerProperties=properties, **settings
        )
        return str(created["jobDefinitionArn"])

    def submit(self, definition: str, name: str = "job", **settings: Any) -> str:
        job = self.batch.submit_job(jobName=name, jobQueue=self.queue, jobDefinition=definition, **settings)
        return str(job["jobId"])

    def job(self, job: str) -> dict[str, Any]:
        return dict(self.batch.describe_jobs(jobs=[job])["jobs"][0])


def make_environment(sandbox: Sandbox, name: str = "spot", **settings: Any) -> str:
    ec2 = sandbox.client("ec2")
    subnets = [describe_subnet["SubnetId"] for describe_subnet in ec2.describe_subnets()["Subnets"]]
    groups = [
        describe_security_group["GroupId"]
        for describe_security_group in ec2.describe_security_groups()["SecurityGroups"]
    ]
    created = sandbox.client("batch").create_compute_environment(
        computeEnvironmentName=name,
        type="MANAGED",
        state="ENABLED",
        computeResources={
            "type": "SPOT",
            "minvCpus": 0,
            "maxvCpus": 8,
            "subnets": subnets,
            "securityGroupIds": groups,
            "instanceTypes": ["g5.xlarge"],
            "instanceRole": "machine",
        },
        **settings,
    )
    return str(created["computeEnvironmentArn"])


def make_queue(sandbox: Sandbox, environment: str, name: str = "queue") -> str:
    created = sandbox.client("batch").create_job_queue(
        jobQueueName=name,
        state="ENABLED",
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
    )
    return str(created["jobQueueArn"])


def make_place(sandbox: Sandbox) -> Place:
    iam = sandbox.client("iam")
    make_role(sandbox, "machine", "ec2.amazonaws.com")
    iam.create_instance_profile(InstanceProfileName="machine")
    iam.add_role_to_instance_profile(InstanceProfileName="machine", RoleName="machine")
    environment = make_environment(sandbox)
    return Place(
        sandbox=sandbox,
        batch=sandbox.client("batch"),
        environment=environment,
        queue=make_queue(sandbox, environment),
    )
