from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import of_kind
from tests.infra.targets.aws import ACCOUNT, in_cloud_storage
from tests.infra.targets.aws_batch.kit import SMALL, context_of, graph_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.targets.aws_batch.region_offer import RegionOffer
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, Job, JobDefinition

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import RunContext

OPTIONS = "instance_types: [g6e.xlarge], gpus: 1"
BYO = """byo: {job_role: 'arn:aws:iam::123456789012:role/team/mine', execution_role: exec, instance_profile: prof,
  launch_template: lt-0a, log_group: /mine, security_groups: [sg-0b, sg-0a], subnets: [subnet-0c]}"""


def test_long_role_names_fit_the_limit_of_google(tmp_path: Path) -> None:
    target = "{kind: aws_batch, region: us-east-1, instance_types: [c7i.large]}"
    others = f"  - {{name: {'g' * 30}, count: 12, target: {target}}}\n"
    long = replace(context_of(tmp_path, OPTIONS, others=others), run_uri=f"s3://acme/runs/{'n' * 40}")
    in_aws, in_google = (of_kind(graph_of(context), Role) for context in (long, in_cloud_storage(long)))
    assert max(len(role.name) for role in in_aws) > 51
    # That leaves room for a generation.
    assert max(len(role.name) for role in in_google if role.policies == {}) <= 51
    assert len({role.name for role in in_google}) == len(in_google) == len(in_aws)


def test_replica_has_its_own_definition_unless_the_group_shares_one(tmp_path: Path) -> None:
    jobs = of_kind(graph_of(context_of(tmp_path, OPTIONS, count=12)), Job)
    assert {(str(job.definition), job.key) for job in jobs} == {
        (f"${{aws_batch_definition.batch-{number}.arn}}", f"batch-{number}") for number in range(12)
    }
    graph = graph_of(context_of(tmp_path, f"{OPTIONS}, role: group", count=300))
    (definition,) = of_kind(graph, JobDefinition)
    assert "SKERRY_SLOT" not in definition.environment
    jobs = of_kind(graph, Job)
    assert jobs[1].environment == {"SKERRY_SLOT": "batch-1"}
    assert len({job.name for job in jobs}) == 300


def test_byo_resources_are_used_by_name_and_nothing_is_created(tmp_path: Path) -> None:
    graph = graph_of(context_of(tmp_path, f"{OPTIONS}, {BYO}"))
    assert {resource.address: resource.name for resource in graph if resource.brought} == {
        "aws_role.batch-replicas": "mine",
        "aws_role.batch-execution": "exec",
        "aws_instance_profile.batch-machines": "prof",
        "aws_launch_template.batch": "lt-0a",
        "aws_log_group.batch-logs": "/mine",
    }
    assert all(role.brought for role in of_kind(graph, Role))
    (environment,) = of_kind(graph, ComputeEnvironment)
    assert environment.security_groups == ("sg-0a", "sg-0b")


def test_execution_role_writes_to_the_logs_of_all_groups(tmp_path: Path) -> None:
    context = context_of(tmp_path, f"{OPTIONS}, byo: {{log_group: /mine}}")
    (mine,) = context.spec.replicas
    (ours,) = context_of(tmp_path, OPTIONS).spec.replicas
    spec = context.spec.model_copy(update={"replicas": (mine, ours.model_copy(update={"name": "second"}))})
    (role,) = [role for role in of_kind(graph_of(replace(context, spec=spec)), Role) if role.key == "execution"]
    (write,) = [policy for policy in role.policies["start"] if policy.sid == "WriteLogs"]
    start = f"arn:aws:logs:*:{ACCOUNT.number}:log-group:"
    assert set(write.resources) == {f"{start}/mine:*", f"{start}/skerry/{context.stem}*"}


@pytest.mark.parametrize(
    ("byo", "name", "created"),
    [
        ("{queue: 'arn:aws:batch:us-east-1:123456789012:job-queue/q'}", "q", set[str]()),
        ("{compute_environment: ce}", "ce", {"aws_batch_queue"}),
    ],
)
def test_byo_machines_need_no_network_and_no_profile(tmp_path: Path, byo: str, name: str, created: set[str]) -> None:
    offer = RegionOffer(vpc=None, subnets=(), machines=(SMALL,))
    graph = graph_of(context_of(tmp_path, f"instance_types: [g6e.xlarge], byo: {byo}"), offer)
    others = {"aws_bucket", "aws_role", "aws_log_group", "aws_batch_definition", "aws_batch_job"}
    assert {resource.KIND for resource in graph if not resource.brought} == others | created
    assert [resource.name for resource in graph if resource.brought] == [name]


def limits_of(context: RunContext) -> tuple[int, int | None, object]:
    definition = of_kind(graph_of(context), JobDefinition)[0]
    return definition.attempts, definition.timeout_s, definition.environment.get("SKERRY_MAX_HOURS")


def test_every_attempt_may_use_the_whole_time_of_the_run(tmp_path: Path) -> None:
    options, limits = f"{OPTIONS}, attempts: 4", "limits: {max_hours: 10}\n"
    assert limits_of(context_of(tmp_path, options)) == (4, None, None)
    assert limits_of(context_of(tmp_path, options, more=limits)) == (4, 36000, "10")
    assert limits_of(context_of(tmp_path, f"{options}, max_runtime: 6h", more=limits)) == (4, 21600, "10")


def test_hours_of_a_cost_limit_are_rounded_to_six_digits(tmp_path: Path) -> None:
    context = context_of(tmp_path, OPTIONS)
    assert limits_of(replace(context, hours=9.345678912345)) == (3, 33644, "9.34568")
    assert limits_of(replace(context, hours=9.345678912346)) == (3, 33644, "9.34568")
    assert limits_of(replace(context, hours=1e12)) == (3, 365 * 24 * 3600, "1e+12")


def test_similar_group_names_share_no_resource_name(tmp_path: Path) -> None:
    long = "a-group-with-quite-a-long-name"
    options = "{kind: aws_batch, region: us-east-1, instance_types: [g6e.xlarge], role: group}"
    names = (f"{long}-x", f"{long}.x", "batch-0", "batch-all", "machines", "execution")
    others = "".join(f"  - {{name: {name}, count: 2, target: {options}}}\n" for name in names)
    graph = graph_of(context_of(tmp_path, OPTIONS, others=others))
    places = [(resource.KIND, resource.region, resource.name) for resource in graph]
    assert len(set(places)) == len(places)
    assert max(len(role.name) for role in of_kind(graph, Role)) + len("-g999") <= 64
