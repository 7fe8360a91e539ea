from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.kit import document_of, ground_from
from tests.infra.targets.aws_batch.kit import ACCOUNT, EXAMPLE, OFFER, SMALL, check_golden, ground_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import document, text_of
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.cross_cloud import GoogleStore
from skerry.infra.clouds.google.gcs import Bucket as GoogleBucket
from skerry.infra.provision.graph import Graph, resolved, short_name
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.aws_batch.region_offer import RegionOffer
from skerry.infra.targets.aws_batch.resource_graph import build_resources
from skerry.infra.targets.aws_batch.resources import ComputeEnvironment, Job, JobDefinition
from skerry.infra.targets.shared.aws_replica_roles import name_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import RunContext

STORE = Bucket(key="store", name="acme", region="us-east-1")
BYO = """byo: {job_role: 'arn:aws:iam::123456789012:role/team/mine', execution_role: exec, instance_profile: prof,
  launch_template: lt-0a, log_group: /mine, security_groups: [sg-0b, sg-0a], subnets: [subnet-0c]}"""


def graph_of(ground: RunContext, *offers: RegionOffer) -> Graph:
    return Graph([STORE, *build_resources(ground, ACCOUNT, ground.spec.replicas, offers or (OFFER,))])


def roles(graph: Graph) -> list[Role]:
    return [resource for resource in graph if isinstance(resource, Role)]


def test_graph_of_the_example_is_frozen() -> None:
    ground = ground_from(EXAMPLE)
    west = RegionOffer(
        vpc="vpc-2",
        subnets=("subnet-3",),
        machines=(Machine(type="c7i.2xlarge", vcpus=8, memory_mib=16384, gpus=0),),
    )
    resources = sorted(graph_of(ground, OFFER, west), key=lambda resource: resource.address)
    check_golden("example", [document_of(resource) for resource in resources if resource.address != STORE.address])


def abroad(ground: RunContext) -> Graph:
    """Return the graph of the run with its store in Cloud Storage."""
    bucket = GoogleBucket(key="store", name="acme", region="us-central1")
    store = GoogleStore(number="987654321098", bucket=bucket, prefix="runs/tiny")
    away, groups = replace(ground, run_uri=ground.run_uri.replace("s3://", "gs://")), ground.spec.replicas
    return Graph([store.bucket, *build_resources(away, ACCOUNT, groups, [OFFER] * len(groups), store)])


def test_byo_role_with_a_name_too_long_for_google_is_rejected(tmp_path: Path) -> None:
    text = "instance_types: [c7i.large], byo: {{job_role: 'arn:aws:iam::123456789012:role/team/{}'}}"
    abroad(ground_of(tmp_path, text.format("r" * 55)))
    with pytest.raises(Invalid, match=r"role r{56} of replicas batch .*at most 55 characters; .* `byo\.job_role`"):
        abroad(ground_of(tmp_path, text.format("r" * 56)))
    # With a store in S3, Google does not read the name.
    graph_of(ground_of(tmp_path, text.format("r" * 56)))


def test_long_role_names_fit_the_limit_of_google(tmp_path: Path) -> None:
    target = "{kind: aws_batch, region: us-east-1, instance_types: [c7i.large]}"
    others = f"  - {{name: {'g' * 30}, count: 12, target: {target}}}\n"
    ground = ground_of(tmp_path, "instance_types: [c7i.large]", others=others)
    long = replace(ground, run_uri=f"s3://acme/runs/{'n' * 40}")
    in_aws, in_google = roles(graph_of(long, OFFER, OFFER)), roles(abroad(long))
    assert max(len(role.name) for role in in_aws) > 51
    # That leaves room for a generation.
    assert max(len(role.name) for role in in_google if role.policies == {}) <= 51
    assert len({role.name for role in in_google}) == len(in_google) == len(in_aws)


def test_role_of_a_replica_reaches_no_other_slot(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "instance_types: [g6e.xlarge], gpus: 1", count=12))
    role = graph.get("aws_role.batch-1")
    assert isinstance(role, Role)
    policy = json.loads(text_of(resolved(document(role.policies["run"]), lambda _: "BUCKET")))
    written = [
        pattern
        for statement in policy["Statement"]
        if "s3:PutObject" in statement["Action"]
        for pattern in statement["Resource"]
    ]
    assert any("batch-1/" in pattern for pattern in written)
    assert not any("batch-10" in pattern or "batch-*" in pattern for pattern in written)
    assert all("BUCKET/runs/tiny/" in pattern for pattern in written)
    jobs = [job for job in graph if isinstance(job, Job)]
    assert {(str(job.definition), job.key) for job in jobs} == {
        (f"${{aws_batch_definition.batch-{number}.arn}}", f"batch-{number}") for number in range(12)
    }


def test_group_role_shares_one_role_and_definition(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "instance_types: [g6e.xlarge], gpus: 1, role: group", count=300))
    assert {role.key for role in roles(graph)} == {"machines", "execution", "batch-replicas"}
    (definition,) = [resource for resource in graph if isinstance(resource, JobDefinition)]
    assert "SKERRY_SLOT" not in definition.environment
    jobs = [job for job in graph if isinstance(job, Job)]
    assert [job.environment for job in jobs[:2]] == [
        {"SKERRY_SLOT": "batch-0", "SKERRY_INDEX": "0"},
        {"SKERRY_SLOT": "batch-1", "SKERRY_INDEX": "1"},
    ]
    assert len({job.name for job in jobs}) == 300


def test_byo_resources_are_used_by_name_and_nothing_is_created(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, f"instance_types: [g6e.xlarge], {BYO}"))
    brought = {resource.address: resource.name for resource in graph if resource.brought}
    assert brought == {
        "aws_role.batch-replicas": "mine",
        "aws_role.batch-execution": "exec",
        "aws_instance_profile.batch-machines": "prof",
        "aws_launch_template.batch": "lt-0a",
        "aws_log_group.batch-logs": "/mine",
    }
    assert {role.name for role in roles(graph) if not role.brought} == set()
    environment = graph.get("aws_batch_environment.batch")
    assert isinstance(environment, ComputeEnvironment)
    assert environment.security_groups == ("sg-0a", "sg-0b")


def test_execution_role_writes_to_the_logs_of_all_groups(tmp_path: Path) -> None:
    ground = ground_of(tmp_path, "instance_types: [g6e.xlarge], byo: {log_group: /mine}")
    (mine,) = ground.spec.replicas
    ours = ground_of(tmp_path, "instance_types: [g6e.xlarge]").spec.replicas[0]
    spec = ground.spec.model_copy(update={"replicas": (mine, ours.model_copy(update={"name": "second"}))})
    graph = graph_of(replace(ground, spec=spec), OFFER, OFFER)
    (role,) = [role for role in roles(graph) if role.key == "execution"]
    (write,) = [policy for policy in role.policies["start"] if policy.sid == "WriteLogs"]
    start = f"arn:aws:logs:*:{ACCOUNT.number}:log-group:"
    assert set(write.resources) == {f"{start}/mine:*", f"{start}/skerry/{ground.stem}*"}


@pytest.mark.parametrize(
    ("byo", "created"),
    [
        ("{queue: 'arn:aws:batch:us-east-1:123456789012:job-queue/q'}", set[str]()),
        ("{compute_environment: ce}", {"aws_batch_queue"}),
    ],
)
def test_byo_machines_need_no_network_and_no_profile(tmp_path: Path, byo: str, created: set[str]) -> None:
    offer = RegionOffer(vpc=None, subnets=(), machines=(SMALL,))
    graph = graph_of(ground_of(tmp_path, f"instance_types: [g6e.xlarge], byo: {byo}"), offer)
    others = {"aws_bucket", "aws_role", "aws_log_group", "aws_batch_definition", "aws_batch_job"}
    assert {resource.KIND for resource in graph if not resource.brought} == others | created
    (brought,) = [resource for resource in graph if resource.brought]
    assert brought.name in {"q", "ce"}


def test_resource_has_a_reason(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "instance_types: [g6e.xlarge], gpus: 1, spot: true"))
    assert all(resource.why for resource in graph if resource.address != STORE.address)


def limits_of(ground: RunContext) -> set[tuple[int, int | None, object]]:
    definitions = [resource for resource in graph_of(ground) if isinstance(resource, JobDefinition)]
    return {
        (definition.attempts, definition.timeout_s, definition.environment.get("SKERRY_MAX_HOURS"))
        for definition in definitions
    }


def test_every_attempt_may_use_the_whole_time_of_the_run(tmp_path: Path) -> None:
    options = "instance_types: [g6e.xlarge], gpus: 1, attempts: 4"
    assert limits_of(ground_of(tmp_path, options)) == {(4, None, None)}
    assert limits_of(ground_of(tmp_path, options, more="limits: {max_hours: 10}\n")) == {(4, 36000, "10")}
    shorter = ground_of(tmp_path, f"{options}, max_runtime: 6h", more="limits: {max_hours: 10}\n")
    assert limits_of(shorter) == {(4, 21600, "10")}


def test_hours_of_a_cost_limit_are_rounded_to_six_digits(tmp_path: Path) -> None:
    ground = ground_of(tmp_path, "instance_types: [g6e.xlarge], gpus: 1", more="limits: {max_hours: 10}\n")
    assert limits_of(replace(ground, hours=9.345678912345)) == {(3, 33644, "9.34568")}
    assert limits_of(replace(ground, hours=9.345678912346)) == {(3, 33644, "9.34568")}
    assert limits_of(replace(ground, hours=1e12)) == {(3, 365 * 24 * 3600, "1e+12")}


def test_similar_group_names_share_no_resource_name(tmp_path: Path) -> None:
    long = "a-group-with-quite-a-long-name"
    options = "{kind: aws_batch, region: us-east-1, instance_types: [g6e.xlarge], role: group}"
    names = (f"{long}-x", f"{long}.x", "batch-0", "batch-all", "machines", "execution")
    others = "".join(f"  - {{name: {name}, count: 2, target: {options}}}\n" for name in names)
    ground = ground_of(tmp_path, "instance_types: [g6e.xlarge]", others=others)
    resources = list(graph_of(ground, *[OFFER] * (len(names) + 1)))
    places = [(resource.KIND, resource.region, resource.name) for resource in resources]
    assert len(set(places)) == len(places)
    assert max(len(role.name) for role in resources if isinstance(role, Role)) + len("-g999") <= 64


@given(st.text("abcXY.-_0129", min_size=1, max_size=63), st.text("abcXY.-_0129", min_size=1, max_size=63))
def test_name_part_is_short_and_unique(first: str, second: str) -> None:
    part = short_name(first, 16)
    assert len(part) <= 16
    assert set(part) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert (part == short_name(second, 16)) is (first == second)


def test_name_is_the_end_of_an_arn() -> None:
    assert name_of("arn:aws:iam::1:role/a/b") == "b"
    assert name_of("plain/name") == "plain/name"
