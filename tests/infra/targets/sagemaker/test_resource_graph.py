from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import of_kind
from tests.infra.targets.aws import in_cloud_storage
from tests.infra.targets.sagemaker.kit import DISKLESS, context_of, graph_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.policies import INLINE_LIMIT, document, text_of
from skerry.infra.clouds.google.workload_identity import Provider
from skerry.infra.provision.graph import Graph, generation_name, resolved
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path


def role_of(graph: Graph) -> Role:
    (role,) = of_kind(graph, Role)
    return role


def actions(role: Role) -> set[str]:
    return {action for statements in role.policies.values() for statement in statements for action in statement.actions}


def job_of(graph: Graph) -> Job:
    return of_kind(graph, Job)[0]


def test_role_trusts_sagemaker_of_this_account_only(tmp_path: Path) -> None:
    (trust,) = role_of(graph_of(context_of(tmp_path))).trust
    assert trust.principal == {"Service": ("sagemaker.amazonaws.com",)}
    assert trust.conditions == {"StringEquals": {"aws:SourceAccount": ("123456789012",)}}


def test_network_and_key_permissions_need_those_options(tmp_path: Path) -> None:
    plain = role_of(graph_of(context_of(tmp_path), DISKLESS))
    assert not [action for action in actions(plain) if action.startswith(("ec2:", "kms:"))]
    options = "kms_key: abc-1, byo: {subnets: [subnet-0b, subnet-0a], security_groups: [sg-0a]}"
    graph = graph_of(context_of(tmp_path, options), DISKLESS)
    role, job = role_of(graph), job_of(graph)
    assert {"kms:CreateGrant", "ec2:CreateNetworkInterface", "ec2:DescribeVpcs"} <= actions(role)
    (key,) = [policy for policy in role.policies["job"] if policy.sid == "UseKey"]
    assert key.resources == ("arn:aws:kms:us-east-1:123456789012:key/abc-1",)
    assert (job.kms_key, job.subnets, job.security_groups) == ("abc-1", ("subnet-0a", "subnet-0b"), ("sg-0a",))
    length = sum(len(text_of(resolved(document(policy), lambda _: "b" * 80))) for policy in role.policies.values())
    assert length <= INLINE_LIMIT


def test_volume_is_added_to_machines_without_disks(tmp_path: Path) -> None:
    assert job_of(graph_of(context_of(tmp_path))).volume_gib is None
    assert job_of(graph_of(context_of(tmp_path), DISKLESS)).volume_gib == 100
    assert job_of(graph_of(context_of(tmp_path, "volume: 10.5GiB"), DISKLESS)).volume_gib == 11


@pytest.mark.parametrize(
    ("options", "hours", "runtime", "wait"),
    [
        ("", None, 5 * 24, None),
        ("max_runtime: 28d", None, 28 * 24, None),
        ("", 12, 12, None),
        ("", 1000, 28 * 24, None),
        ("max_runtime: 6h", 12, 6, None),
        ("spot: true, max_runtime: 6h", None, 6, 12),
        ("spot: true, max_runtime: 20d", None, 20 * 24, 30 * 24),
        ("spot: true, max_wait: 7d", 12, 12, 7 * 24),
        ("spot: true, max_wait: 7d", None, 5 * 24, 7 * 24),
        ("spot: true, max_wait: 3d", None, 3 * 24, 3 * 24),
    ],
)
def test_runtime_and_wait_follow_limits_and_options(
    tmp_path: Path, options: str, hours: int | None, runtime: int, wait: int | None
) -> None:
    job = job_of(graph_of(replace(context_of(tmp_path, options), hours=hours)))
    assert (job.max_runtime_s, job.max_wait_s) == (runtime * 3600, None if wait is None else wait * 3600)


def test_long_variable_becomes_a_hyperparameter(tmp_path: Path) -> None:
    context = context_of(tmp_path, command=f"[python, train.py, --text, '{'x' * 600}']")
    job = job_of(graph_of(context))
    assert set(job.hyperparameters) == {"SKERRY_COMMAND"}
    assert "SKERRY_COMMAND" not in job.environment
    assert max(len(text) for text in job.environment.values() if isinstance(text, str)) <= 512
    code = context.spec.code.model_copy(update={"command": ("x" * 2500,)})
    with pytest.raises(Invalid, match="SKERRY_COMMAND has 2504 characters, and SageMaker passes at most 2500"):
        graph_of(replace(context, spec=context.spec.model_copy(update={"code": code})))


@pytest.mark.parametrize(("options", "ranks"), [("", None), ("gpus: 0", "1"), ("gpus: 4", "4")])
def test_ranks_are_set_only_if_the_spec_has_gpus(tmp_path: Path, options: str, ranks: str | None) -> None:
    assert job_of(graph_of(context_of(tmp_path, options))).environment.get("SKERRY_RANKS") == ranks


def test_names_differ_between_groups_replicas_and_generations(tmp_path: Path) -> None:
    group = "a-group-of-a-very-long-name-that-no-user-would-write-but-may"
    long, alike = (context_of(tmp_path, name=f"{group}{letter}", count=3) for letter in "ab")
    outer = long.spec.outer.model_copy(update={"rounds": 1})
    other = replace(long, spec=long.spec.model_copy(update={"outer": outer}))
    names = [job.name for context in (long, alike, other) for job in of_kind(graph_of(context), Job)]
    assert len(set(names)) == 9
    assert all(len(generation_name(name, 999)) <= 63 for name in names)


def test_image_outside_ecr_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not in ECR, and SageMaker runs no other"):
        graph_of(replace(context_of(tmp_path), image="ghcr.io/acme/skerry:1"))


def test_job_with_its_store_in_cloud_storage_asks_for_its_tokens(tmp_path: Path) -> None:
    graph = graph_of(in_cloud_storage(context_of(tmp_path, "output: s3://mine/artifacts")))
    job, (provider,) = job_of(graph), of_kind(graph, Provider)
    assert job.environment["SKERRY_GOOGLE_AUDIENCE"] == provider.ref("audience")
    assert "AWS_REGION" not in job.environment
    assert job.output == "s3://mine/artifacts"
    assert not [action for action in actions(role_of(graph)) if action.startswith("s3:Get")]
