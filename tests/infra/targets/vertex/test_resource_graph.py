from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.kit import document_of, ground_from
from tests.infra.targets.vertex.kit import EXAMPLE, check_golden, ground_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.aws.s3 import Bucket as AwsBucket
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.gcs import Bucket
from skerry.infra.clouds.google.service_accounts import ServiceAccount
from skerry.infra.provision.graph import Graph, as_json
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.replica_sizing import cap_hours, quota_of, timeout_s
from skerry.infra.targets.vertex.resource_graph import StoreInS3, build_resources
from skerry.infra.targets.vertex.resources import Job

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target import RunContext

STORE = Bucket(key="store", name="acme", region="us-central1")
ACCOUNT = "trainer@team.iam.gserviceaccount.com"


def graph_of(ground: RunContext) -> Graph:
    return Graph([STORE, *build_resources(ground, ground.spec.replicas)])


def jobs_of(graph: Graph) -> list[Job]:
    return [resource for resource in graph if isinstance(resource, Job)]


def test_graph_of_the_example_is_frozen() -> None:
    resources = sorted(graph_of(ground_from(EXAMPLE)), key=lambda resource: resource.address)
    check_golden("example", [document_of(resource) for resource in resources if resource.address != STORE.address])


def test_account_of_a_group_writes_its_own_keys_only(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, count=300))
    (account,) = [resource for resource in graph if isinstance(resource, ServiceAccount)]
    (binding,) = [resource for resource in graph if isinstance(resource, BucketBinding)]
    assert str(binding.member) == "serviceAccount:${google_service_account.vertex-replicas.email}"
    written = [pattern for rule in binding.rules if "Viewer" not in rule.role for pattern in rule.keys]
    assert "runs/tiny/members/vertex-" in written
    assert all(pattern.startswith("runs/tiny/") for pattern in written)
    jobs = jobs_of(graph)
    assert {str(job.service_account) for job in jobs} == {f"${{{account.address}.email}}"}
    assert len({job.name for job in jobs}) == 300
    assert [job.environment["SKERRY_SLOT"] for job in jobs] == [f"vertex-{number}" for number in range(300)]


def test_account_of_a_replica_reaches_no_other_slot(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, "machine: n2-standard-4, role: replica", count=12))
    binding = graph.get("google_bucket_binding.vertex-1")
    assert isinstance(binding, BucketBinding)
    written = [pattern for rule in binding.rules if "Viewer" not in rule.role for pattern in rule.keys]
    assert "runs/tiny/members/vertex-1/" in written
    assert not any("vertex-10" in pattern or pattern.endswith("vertex-1") for pattern in written)
    assert {(str(job.service_account), job.key) for job in jobs_of(graph)} == {
        (f"${{google_service_account.vertex-{number}.email}}", f"vertex-{number}") for number in range(12)
    }


def test_store_in_s3_gets_a_role_that_trusts_the_account(tmp_path: Path) -> None:
    bucket = AwsBucket(key="store", name="acme", region="us-east-1")
    for options, keys in (("role: replica", ["vertex-0", "vertex-1"]), ("role: group", ["vertex-replicas"])):
        ground = ground_of(tmp_path, f"machine: n2-standard-4, {options}", store="s3://acme/runs")
        store = StoreInS3(account="123456789012", region="us-east-1")
        graph = Graph([bucket, *build_resources(ground, ground.spec.replicas, store)])
        roles = [resource for resource in graph if isinstance(resource, Role)]
        assert [role.key for role in roles] == keys
        assert all(len(role.name) <= 60 for role in roles)
        (trust,) = roles[0].trust
        condition = trust.conditions["StringEquals"]
        assert as_json(condition["accounts.google.com:sub"]) == [f"${{google_service_account.{keys[0]}.unique_id}}"]
        assert not any(isinstance(resource, BucketBinding) for resource in graph)
        for job, key in zip(jobs_of(graph), [*keys, *keys], strict=False):
            assert str(job.environment["SKERRY_AWS_ROLE"]) == f"${{aws_role.{key}.arn}}"
            assert job.environment["SKERRY_AWS_AUDIENCE"] == f"skerry/123456789012/{ground.stem}"
            assert job.environment["AWS_REGION"] == "us-east-1"


def test_job_is_created_after_its_permissions(tmp_path: Path) -> None:
    for job in jobs_of(graph_of(ground_of(tmp_path))):
        assert job.needs() >= {
            "google_service.aiplatform",
            "google_service_account.vertex-replicas",
            "google_bucket_binding.vertex-replicas",
        }


def test_byo_account_is_used_and_gets_no_permissions(tmp_path: Path) -> None:
    graph = graph_of(ground_of(tmp_path, f"machine: n2-standard-4, byo: {{service_account: {ACCOUNT}}}"))
    assert {resource.address: resource.name for resource in graph if resource.brought} == {
        "google_service_account.vertex-replicas": ACCOUNT
    }
    assert {resource.KIND for resource in graph if not resource.brought} == {
        "google_bucket",
        "google_service",
        "vertex_job",
    }


def test_command_is_protected_from_variable_replacement(tmp_path: Path) -> None:
    (job,) = jobs_of(graph_of(ground_of(tmp_path, count=1)))
    command = job.environment["SKERRY_COMMAND"]
    assert "$" not in str(command)
    assert json.loads(str(command)) == ["python", "train.py", "--text", 'it\'s "here" $(HOME)']
    assert job.args == ("run",)


def test_ranks_equal_accelerators_and_disk_is_rounded_up(tmp_path: Path) -> None:
    options = "machine: a2-highgpu-4g, disk: 100.5GiB"
    (job,) = jobs_of(graph_of(ground_of(tmp_path, options, count=1)))
    assert (job.accelerator, job.accelerators, job.environment["SKERRY_RANKS"]) == ("nvidia-tesla-a100", 4, "4")
    assert (job.disk_gb, job.disk_type) == (101, None)
    (plain,) = jobs_of(graph_of(ground_of(tmp_path, "machine: n2-standard-4", count=1)))
    assert (plain.accelerator, plain.accelerators, plain.environment["SKERRY_RANKS"]) == (None, 0, "1")


def test_resource_has_a_reason(tmp_path: Path) -> None:
    assert all(resource.why for resource in graph_of(ground_of(tmp_path)) if resource.address != STORE.address)


@pytest.mark.parametrize(
    ("options", "hours", "expected"),
    [
        ({}, None, None),
        ({}, 2.0, 7200),
        ({"max_runtime": "30m"}, None, 1800),
        ({"max_runtime": "30m"}, 2.0, 1800),
        ({"max_runtime": "3h"}, 2.0, 7200),
        ({}, 0.001, 60),
        ({}, 400.0, 1_440_000),
        ({"scheduling": "flex_start"}, 400.0, 604_800),
    ],
)
def test_timeout_is_that_of_the_run_or_the_job(
    options: dict[str, Any], hours: float | None, expected: int | None
) -> None:
    assert timeout_s(hours, target(**options)) == expected


def test_cost_is_capped_by_the_timeout_of_the_job() -> None:
    limits = ground_from(EXAMPLE).spec.limits
    assert cap_hours(limits, target(max_runtime="6h")) == 24
    free = limits.model_copy(update={"max_hours": None})
    assert cap_hours(free, target(max_runtime="6h")) == 6
    assert cap_hours(free, target()) == 168


@pytest.mark.parametrize(
    ("accelerator", "scheduling", "expected"),
    [
        (None, "standard", "custom_model_training_cpus"),
        (None, "spot", "custom_model_training_preemptible_cpus"),
        ("nvidia-l4", "standard", "custom_model_training_nvidia_l4_gpus"),
        ("nvidia-l4", "spot", "custom_model_training_preemptible_nvidia_l4_gpus"),
        ("nvidia-tesla-t4", "flex_start", "custom_model_training_nvidia_t4_gpus"),
        ("nvidia-a100-80gb", "standard", "custom_model_training_nvidia_a100_80gb_gpus"),
        ("nvidia-h100-80gb", "standard", "custom_model_training_nvidia_h100_gpus"),
    ],
)
def test_machine_selects_the_quota(accelerator: str | None, scheduling: str, expected: str) -> None:
    assert quota_of(accelerator, scheduling) == f"aiplatform.googleapis.com/{expected}"


@given(name=st.from_regex(r"[a-z][a-zA-Z0-9._-]{0,40}", fullmatch=True))
def test_names_of_long_groups_fit(name: str) -> None:
    ground = ground_from(EXAMPLE)
    (group, *_) = ground.spec.replicas
    named = group.model_copy(update={"name": name, "count": 1})
    spec = ground.spec.model_copy(update={"replicas": (named,)})
    replica = ground.replica_slots[0]
    replicas = (type(replica)(slot=f"{name}-0", index=0, target=named.target),)
    resources = build_resources(
        type(ground)(spec=spec, run_uri=ground.run_uri, image="i", code="c", replica_slots=replicas), [named]
    )
    (job,) = [resource for resource in resources if isinstance(resource, Job)]
    (account,) = [resource for resource in resources if isinstance(resource, ServiceAccount)]
    # That leaves room for the suffix of a generation.
    assert len(job.name) <= 124
    assert 6 <= len(account.name) <= 26


def target(**options: Any) -> VertexTarget:
    fields = {
        "kind": "vertex",
        "project": "acme-diloco",
        "region": "us-central1",
        "machine": "g2-standard-8",
        **options,
    }
    return VertexTarget.model_validate(fields)
