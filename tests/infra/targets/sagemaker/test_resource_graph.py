from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.kit import document_of, ground_from
from tests.infra.targets.sagemaker.kit import ACCOUNT, DISKLESS, EXAMPLE, SMALL, check_golden, ground_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import INLINE_LIMIT, document, text_of
from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.cross_cloud import GoogleStore
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.gcs import Bucket as GoogleBucket
from skerry.infra.clouds.google.workload_identity import Provider
from skerry.infra.provision.graph import Graph, generation_name, resolved, short_name
from skerry.infra.targets.sagemaker.resource_graph import build_resources
from skerry.infra.targets.sagemaker.resources import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import RunContext
    from skerry.infra.targets.sagemaker.machine_lookup import Machine

STORE = Bucket(key="store", name="acme", region="us-east-1")


def graph_of(ground: RunContext, machine: Machine = SMALL) -> Graph:
    groups = ground.spec.replicas
    return Graph([STORE, *build_resources(ground, ACCOUNT, groups, [machine] * len(groups))])


def jobs(graph: Graph) -> list[Job]:
    return [resource for resource in graph if isinstance(resource, Job)]


def roles(graph: Graph) -> list[Role]:
    return [resource for resource in graph if isinstance(resource, Role)]


def actions(role: Role) -> set[str]:
    return {action for statements in role.policies.values() for statement in statements for action in statement.actions}


def test_graph_of_the_example_is_frozen() -> None:
    ground = ground_from(EXAMPLE)
    resources = build_resources(ground, ACCOUNT, ground.spec.replicas, [SMALL, DISKLESS])
    check_golden("example", [document_of(each) for each in sorted(resources, key=lambda resource: resource.address)])


def test_role_of_a_group_reaches_its_own_slots_only(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, count=12))
    (role,) = roles(graph)
    assert len({str(job.role) for job in jobs(graph)}) == 1
    policy = json.loads(text_of(resolved(document(role.policies["run"]), lambda _: "BUCKET")))
    written = [
        pattern
        for statement in policy["Statement"]
        if "s3:PutObject" in statement["Action"]
        for pattern in statement["Resource"]
    ]
    assert any("/heartbeats/sm-*" in pattern for pattern in written)
    assert all("BUCKET/runs/tiny/" in pattern for pattern in written)


def test_role_of_a_replica_reaches_no_other_slot(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "role: replica", count=12))
    assert len(roles(graph)) == 12
    role = graph.get("aws_role.sm-1")
    assert isinstance(role, Role)
    policy = text_of(resolved(document(role.policies["run"]), lambda _: "BUCKET"))
    assert "sm-1/" in policy
    assert "sm-10" not in policy
    assert "sm-*" not in policy


def test_role_trusts_sagemaker_of_this_account_only(tmp_path: Path) -> None:
    (role,) = roles(graph_of(ground_of(tmp_path)))
    (trust,) = role.trust
    assert trust.principal == {"Service": ("sagemaker.amazonaws.com",)}
    assert trust.conditions == {"StringEquals": {"aws:SourceAccount": ("123456789012",)}}


def test_network_and_key_permissions_need_those_options(tmp_path: Path) -> None:
    (plain,) = roles(graph_of(ground_of(tmp_path), DISKLESS))
    assert not [action for action in actions(plain) if action.startswith(("ec2:", "kms:"))]
    options = "kms_key: abc-1, byo: {subnets: [subnet-0b, subnet-0a], security_groups: [sg-0a]}"
    graph = graph_of(ground_of(tmp_path, options), DISKLESS)
    (role,) = roles(graph)
    assert {"kms:CreateGrant", "ec2:CreateNetworkInterface", "ec2:DescribeVpcs"} <= actions(role)
    (key,) = [policy for policy in role.policies["job"] if policy.sid == "UseKey"]
    assert key.resources == ("arn:aws:kms:us-east-1:123456789012:key/abc-1",)
    job = jobs(graph)[0]
    assert (job.kms_key, job.subnets, job.security_groups) == ("abc-1", ("subnet-0a", "subnet-0b"), ("sg-0a",))
    length = sum(len(text_of(resolved(document(policy), lambda _: "b" * 80))) for policy in role.policies.values())
    assert length <= INLINE_LIMIT


def test_byo_role_is_used_by_name_and_nothing_is_created(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "byo: {role: 'arn:aws:iam::123456789012:role/team/mine'}"))
    (role,) = roles(graph)
    assert (role.name, role.brought) == ("mine", True)


def test_volume_is_added_to_machines_without_disks(tmp_path: Path) -> None:
    assert jobs(graph_of(ground_of(tmp_path)))[0].volume_gib is None
    assert jobs(graph_of(ground_of(tmp_path), DISKLESS))[0].volume_gib == 100
    assert jobs(graph_of(ground_of(tmp_path, "volume: 10.5GiB"), DISKLESS))[0].volume_gib == 11


TIMES = {
    "defaults": ("", "", 5 * 24, None),
    "the longest time of a job": ("max_runtime: 28d", "", 28 * 24, None),
    "a limit of the run": ("", "limits: {max_hours: 12}\n", 12, None),
    "a limit of the run above that of a job": ("", "limits: {max_hours: 1000}\n", 28 * 24, None),
    "a limit of the job": ("max_runtime: 6h", "limits: {max_hours: 12}\n", 6, None),
    "spot": ("spot: true, max_runtime: 6h", "", 6, 12),
    "spot, long": ("spot: true, max_runtime: 20d", "", 20 * 24, 30 * 24),
    "spot, with a wait": ("spot: true, max_wait: 7d", "limits: {max_hours: 12}\n", 12, 7 * 24),
    "spot, with a short wait": ("spot: true, max_wait: 7d", "", 5 * 24, 7 * 24),
    "spot, with a shorter wait": ("spot: true, max_wait: 3d", "", 3 * 24, 3 * 24),
}


@pytest.mark.parametrize("case", TIMES)
def test_runtime_and_wait_follow_limits_and_options(tmp_path: Path, case: str) -> None:
    options, more, runtime, wait = TIMES[case]
    job = jobs(graph_of(ground_of(tmp_path, options, more=more)))[0]
    assert (job.max_runtime_s, job.max_wait_s) == (runtime * 3600, None if wait is None else wait * 3600)


def test_long_variable_becomes_a_hyperparameter(tmp_path: Path) -> None:
    ground = ground_of(tmp_path, command=f"[python, train.py, --text, '{'x' * 600}']")
    job = jobs(graph_of(ground))[0]
    assert set(job.hyperparameters) == {"SKERRY_COMMAND"}
    assert "SKERRY_COMMAND" not in job.environment
    assert max(len(text) for text in job.environment.values() if isinstance(text, str)) <= 512
    code = ground.spec.code.model_copy(update={"command": ("x" * 2500,)})
    with pytest.raises(Invalid, match="SKERRY_COMMAND has 2504 characters, and SageMaker passes at most 2500"):
        graph_of(replace(ground, spec=ground.spec.model_copy(update={"code": code})))


def test_ranks_are_set_only_if_the_spec_has_gpus(tmp_path: Path) -> None:
    assert "SKERRY_RANKS" not in jobs(graph_of(ground_of(tmp_path)))[0].environment
    assert jobs(graph_of(ground_of(tmp_path, "gpus: 0")))[0].environment["SKERRY_RANKS"] == "1"
    assert jobs(graph_of(ground_of(tmp_path, "gpus: 4")))[0].environment["SKERRY_RANKS"] == "4"


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True), number=st.integers(0, 1023))
def test_name_part_is_short_and_valid(name: str, number: int) -> None:
    short = short_name(name, 11)
    assert len(f"{'s' * 34}-{short}-{number}-{'d' * 6}-g999") <= 63
    assert set(short) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert short == short.strip("-")
    assert "" not in short.split("-") or short != name


def test_names_differ_between_groups_replicas_and_generations(tmp_path: Path) -> None:
    group = "a-group-of-a-very-long-name-that-no-user-would-write-but-may"
    long, alike = (ground_of(tmp_path, name=f"{group}{letter}", count=3) for letter in "ab")
    other = ground_of(tmp_path, name=f"{group}a", count=3, more="")
    other = replace(
        other, spec=other.spec.model_copy(update={"outer": other.spec.outer.model_copy(update={"rounds": 1})})
    )
    names = [job.name for ground in (long, alike, other) for job in jobs(graph_of(ground))]
    assert len(set(names)) == 9
    assert all(len(generation_name(name, 999)) <= 63 for name in names)


def test_resource_has_a_reason(tmp_path: Path) -> None:
    assert all(resource.why for resource in graph_of(ground_of(tmp_path)) if resource.address != STORE.address)


def test_image_outside_ecr_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not in ECR, and SageMaker runs no other"):
        graph_of(replace(ground_of(tmp_path), image="ghcr.io/acme/skerry:1"))


@pytest.mark.parametrize("role", ["group", "replica"])
def test_store_in_cloud_storage_grants_the_roles_the_same_rights(tmp_path: Path, role: str) -> None:
    ground = ground_of(tmp_path, f"role: {role}, output: s3://mine/artifacts")
    abroad = GoogleStore(
        number="987654321098",
        bucket=GoogleBucket(key="store", name="acme", region="us-central1"),
        prefix="runs/tiny",
    )
    away = replace(ground, run_uri="gs://acme/runs/tiny")
    graph = Graph([abroad.bucket, *build_resources(away, ACCOUNT, ground.spec.replicas, [SMALL], abroad)])
    names = [f"sm-{number}" for number in range(2)] if role == "replica" else ["sm-replicas"]
    (provider,) = [resource for resource in graph if isinstance(resource, Provider)]
    assert [str(role) for role in provider.roles] == [f"${{aws_role.{name}.name}}" for name in names]
    assert [resource.key for resource in graph if isinstance(resource, BucketBinding)] == names
    for own in roles(graph):
        assert set(own.policies) == {"job"}
        assert not [action for action in actions(own) if action.startswith("s3:Get")]
    for job in jobs(graph):
        assert job.environment["SKERRY_GOOGLE_AUDIENCE"] == provider.ref("audience")
        assert "AWS_REGION" not in job.environment
        binding = names[0] if role == "group" else job.key
        assert f"google_bucket_binding.{binding}" in job.needs()
        assert job.output == "s3://mine/artifacts"


def test_byo_role_with_a_name_too_long_for_google_is_rejected(tmp_path: Path) -> None:
    role = f"arn:aws:iam::123456789012:role/{'r' * 56}"
    ground = ground_of(tmp_path, f"output: s3://mine/artifacts, byo: {{role: '{role}'}}")
    bucket = GoogleBucket(key="store", name="acme", region="us-central1")
    abroad = GoogleStore(number="987654321098", bucket=bucket, prefix="runs/tiny")
    away = replace(ground, run_uri="gs://acme/runs/tiny")
    with pytest.raises(Invalid, match=r"role r{56} of replicas sm .*at most 55 characters; .* `byo\.role`"):
        build_resources(away, ACCOUNT, ground.spec.replicas, [SMALL], abroad)
    build_resources(ground, ACCOUNT, ground.spec.replicas, [SMALL])
