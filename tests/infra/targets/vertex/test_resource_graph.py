from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.kit import ground_from, of_kind
from tests.infra.targets.vertex.kit import EXAMPLE, context_of, graph_of

from skerry.infra.clouds.aws.iam import Role
from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.service_accounts import ServiceAccount
from skerry.infra.provision.graph import as_json
from skerry.infra.targets.vertex.accelerators_disk_time_and_quota import cap_hours, quota_of, timeout_s
from skerry.infra.targets.vertex.options import VertexTarget
from skerry.infra.targets.vertex.resource_types import Job

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = "machine: n2-standard-4"
ACCOUNT = "trainer@team.iam.gserviceaccount.com"


def written_keys(binding: BucketBinding) -> list[str]:
    """The patterns of the objects that an account may write."""
    return [pattern for rule in binding.rules if "Viewer" not in rule.role for pattern in rule.keys]


def test_account_of_a_group_writes_its_own_keys_only(tmp_path: Path) -> None:
    graph = graph_of(context_of(tmp_path, count=300))
    (account,), (binding,) = of_kind(graph, ServiceAccount), of_kind(graph, BucketBinding)
    assert str(binding.member) == "serviceAccount:${google_service_account.vertex-replicas.email}"
    written = written_keys(binding)
    assert "runs/tiny/members/vertex-" in written
    assert all(pattern.startswith("runs/tiny/") for pattern in written)
    jobs = of_kind(graph, Job)
    assert {str(job.service_account) for job in jobs} == {f"${{{account.address}.email}}"}
    assert len({job.name for job in jobs}) == 300
    assert [job.environment["SKERRY_SLOT"] for job in jobs] == [f"vertex-{number}" for number in range(300)]
    # A job is created after its permissions, which its settings do not reference.
    service = "google_service.aiplatform"
    assert all(job.needs() >= {service, account.address, binding.address} for job in jobs)


def test_account_of_a_replica_reaches_no_other_slot(tmp_path: Path) -> None:
    graph = graph_of(context_of(tmp_path, f"{PLAIN}, role: replica", count=12))
    (binding,) = [binding for binding in of_kind(graph, BucketBinding) if binding.key == "vertex-1"]
    written = written_keys(binding)
    assert "runs/tiny/members/vertex-1/" in written
    assert not any("vertex-10" in pattern or pattern.endswith("vertex-1") for pattern in written)
    assert {(str(job.service_account), job.key) for job in of_kind(graph, Job)} == {
        (f"${{google_service_account.vertex-{number}.email}}", f"vertex-{number}") for number in range(12)
    }


@pytest.mark.parametrize(("role", "keys"), [("replica", ["vertex-0", "vertex-1"]), ("group", ["vertex-replicas"])])
def test_store_in_s3_gets_a_role_that_trusts_the_account(tmp_path: Path, role: str, keys: list[str]) -> None:
    context = context_of(tmp_path, f"{PLAIN}, role: {role}", store="s3://acme/runs")
    graph = graph_of(context)
    roles = of_kind(graph, Role)
    assert [role.key for role in roles] == keys
    assert all(len(role.name) <= 60 for role in roles)
    (trust,) = roles[0].trust
    condition = trust.conditions["StringEquals"]
    assert as_json(condition["accounts.google.com:sub"]) == [f"${{google_service_account.{keys[0]}.unique_id}}"]
    assert of_kind(graph, BucketBinding) == []
    for job, key in zip(of_kind(graph, Job), [*keys, *keys], strict=False):
        assert str(job.environment["SKERRY_AWS_ROLE"]) == f"${{aws_role.{key}.arn}}"
        assert job.environment["SKERRY_AWS_AUDIENCE"] == f"skerry/123456789012/{context.stem}"
        assert job.environment["AWS_REGION"] == "us-east-1"


def test_byo_account_is_used_and_gets_no_permissions(tmp_path: Path) -> None:
    graph = graph_of(context_of(tmp_path, f"{PLAIN}, byo: {{service_account: {ACCOUNT}}}"))
    brought = {resource.address: resource.name for resource in graph if resource.brought}
    assert brought == {"google_service_account.vertex-replicas": ACCOUNT}
    created = {resource.KIND for resource in graph if not resource.brought}
    assert created == {"google_bucket", "google_service", "vertex_job"}


def test_command_is_protected_from_variable_replacement(tmp_path: Path) -> None:
    (job,) = of_kind(graph_of(context_of(tmp_path, count=1)), Job)
    command = str(job.environment["SKERRY_COMMAND"])
    assert "$" not in command
    assert json.loads(command) == ["python", "train.py", "--text", 'it\'s "here" $(HOME)']
    assert job.args == ("run",)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("machine: a2-highgpu-4g, disk: 100.5GiB", ("nvidia-tesla-a100", 4, "4", 101)),
        (PLAIN, (None, 0, "1", 100)),
    ],
)
def test_ranks_equal_accelerators_and_disk_is_rounded_up(
    tmp_path: Path, options: str, expected: tuple[object, ...]
) -> None:
    (job,) = of_kind(graph_of(context_of(tmp_path, options, count=1)), Job)
    assert (job.accelerator, job.accelerators, job.environment["SKERRY_RANKS"], job.disk_gb) == expected


def target(**options: Any) -> VertexTarget:
    place = {"kind": "vertex", "project": "acme-diloco", "region": "us-central1", "machine": "g2-standard-8"}
    return VertexTarget.model_validate({**place, **options})


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
        (None, "standard", "cpus"),
        (None, "spot", "preemptible_cpus"),
        ("nvidia-l4", "standard", "nvidia_l4_gpus"),
        ("nvidia-l4", "spot", "preemptible_nvidia_l4_gpus"),
        ("nvidia-tesla-t4", "flex_start", "nvidia_t4_gpus"),
        ("nvidia-a100-80gb", "standard", "nvidia_a100_80gb_gpus"),
        ("nvidia-h100-80gb", "standard", "nvidia_h100_gpus"),
    ],
)
def test_machine_selects_the_quota(accelerator: str | None, scheduling: str, expected: str) -> None:
    assert quota_of(accelerator, scheduling) == f"aiplatform.googleapis.com/custom_model_training_{expected}"


@given(name=st.from_regex(r"[a-z][a-zA-Z0-9._-]{0,40}", fullmatch=True))
def test_names_of_long_groups_fit(name: str) -> None:
    context = ground_from(EXAMPLE)
    named = context.spec.replicas[0].model_copy(update={"name": name, "count": 1})
    spec = context.spec.model_copy(update={"replicas": (named,)})
    slot = replace(context.replica_slots[0], slot=f"{name}-0")
    graph = graph_of(replace(context, spec=spec, replica_slots=(slot,)))
    (job,), (account,) = of_kind(graph, Job), of_kind(graph, ServiceAccount)
    # That leaves room for the suffix of a generation.
    assert len(job.name) <= 124
    assert 6 <= len(account.name) <= 26
