"""Every request that a spec can lead to is one that botocore's own models of the services allow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.infra.kit import of_kind
from tests.infra.targets.aws import ACCOUNT
from tests.infra.targets.aws_batch.kit import LARGE, OFFER, check_golden, context_of, graph_of

from skerry.infra.provision.graph import Ref, Resource, Value, as_json, resolved
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.aws_batch import requests
from skerry.infra.targets.aws_batch.resource_graph import build_resources
from skerry.infra.targets.aws_batch.resource_types import ComputeEnvironment, Job, JobDefinition, LaunchTemplate, Queue
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.targets.aws_batch.region_offer import RegionOffer

Request = Callable[[Desired], Mapping[str, Value]]
REQUESTS: Final[dict[type[Resource], list[tuple[str, str, Request]]]] = {
    LaunchTemplate: [("ec2", "CreateLaunchTemplate", requests.launch_template)],
    ComputeEnvironment: [
        ("batch", "CreateComputeEnvironment", requests.compute_environment),
        ("batch", "UpdateComputeEnvironment", requests.compute_environment_update),
    ],
    Queue: [
        ("batch", "CreateJobQueue", requests.queue),
        ("batch", "UpdateJobQueue", requests.queue_update),
    ],
    JobDefinition: [("batch", "RegisterJobDefinition", requests.job_definition)],
    Job: [("batch", "SubmitJob", requests.job)],
}
TARGETS = st.fixed_dictionaries(
    {"instance_types": st.just("[g6e.12xlarge]")},
    optional={
        "gpus": st.integers(0, 4),
        "spot": st.sampled_from(["true", "false"]),
        "vcpus": st.integers(1, 48),
        "memory": st.sampled_from(["3GiB", "100GiB", "2.5GB"]),
        "shared_memory": st.sampled_from(["64MiB", "1GiB"]),
        "disk": st.sampled_from(["30GiB", "1TiB", "100.5GiB"]),
        "attempts": st.integers(1, 10),
        "role": st.sampled_from(["replica", "group"]),
        "max_runtime": st.sampled_from(["60s", "1.5h", "30d"]),
        "allocation": st.sampled_from(["best_fit_progressive", "best_fit_progressive_ordered"]),
        "byo": st.sampled_from(["{job_role: mine}", "{subnets: [subnet-0a]}", "{launch_template: lt-0a}"]),
    },
)


@functools.cache
def shape_of(service: str, operation: str) -> Any:
    return get_session().get_service_model(service).operation_model(operation).input_shape


def wanted(resource: Resource, *, known: bool) -> Desired:
    values = {
        name: resolved(value, lambda ref: output(ref) if known else None) for name, value in resource.settings().items()
    }
    return Desired(resource=resource, generation=0, run="s3://acme/runs/tiny", settings=values)


def output(ref: Ref) -> str:
    kind, _, key = ref.address.partition(".")
    return {"region": "us-east-1", "id": f"id-{key}", "name": key}.get(ref.output, f"arn:aws:{kind}:::{key}")


def requests_of(context: RunContext, offer: RegionOffer) -> list[tuple[str, str, Resource, Request]]:
    return [
        (service, operation, resource, request)
        for resource in build_resources(context, ACCOUNT, context.spec.replicas, [offer])
        if not resource.brought
        for service, operation, request in REQUESTS.get(type(resource), [])
    ]


def test_requests_are_frozen(tmp_path: Path) -> None:
    context = context_of(
        tmp_path, "instance_types: [g6e.xlarge], gpus: 1, spot: true", count=1, more="limits: {max_hours: 12}\n"
    )
    bodies = {
        f"{resource.address} {operation}": as_json(request(wanted(resource, known=False)))
        for _, operation, resource, request in requests_of(context, OFFER)
    }
    check_golden("requests", bodies)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=TARGETS, hours=st.none() | st.floats(1, 8000), count=st.integers(1, 5))
def test_requests_of_any_spec_match_the_service_models(
    tmp_path: Path, options: dict[str, Any], hours: float | None, count: int
) -> None:
    text = ", ".join(f"{name}: {value}" for name, value in options.items())
    context = context_of(tmp_path, text, count=count, more="" if hours is None else f"limits: {{max_hours: {hours}}}\n")
    requests_made = requests_of(context, replace(OFFER, machines=(LARGE,)))
    assert {operation for _, operation, _, _ in requests_made} >= {
        "CreateComputeEnvironment",
        "CreateJobQueue",
        "SubmitJob",
    }
    for service, operation, resource, request in requests_made:
        sent = ready(dict(request(wanted(resource, known=True))))
        report = ParamValidator().validate(sent, shape_of(service, operation))
        assert not report.has_errors(), report.generate_report()


def test_unresolved_reference_is_not_sent(tmp_path: Path) -> None:
    context = context_of(tmp_path, "instance_types: [g6e.xlarge]", count=1)
    (queue,) = of_kind(graph_of(context), Queue)
    with pytest.raises(Invalid, match=r"known: \(arn of aws_batch_environment.batch\)"):
        ready(requests.queue(wanted(queue, known=False)))


def test_command_reaches_the_container_unchanged(tmp_path: Path) -> None:
    context = context_of(tmp_path, "instance_types: [g6e.xlarge]", count=1)
    (definition,) = of_kind(graph_of(context), JobDefinition)
    assert definition.environment["SKERRY_COMMAND"] == '["python", "train.py", "--text", "it\'s \\"here\\" $HOME"]'
    assert definition.command == ("run",)


ENDINGS = {
    (0, ""): "EXIT",
    (10, "Essential container in task exited"): "RETRY",
    (20, "Essential container in task exited"): "EXIT",
    (20, "Host EC2 (instance i-0a) terminated."): "EXIT",
    (30, "Essential container in task exited"): "EXIT",
    (10, "Host EC2 (instance i-0a) terminated."): "RETRY",
    (30, "Host EC2 (instance i-0a) terminated."): "EXIT",
    (None, "Host EC2 (instance i-0a) terminated."): "RETRY",
    (1, "Essential container in task exited"): "RETRY",
    (137, "Essential container in task exited"): "RETRY",
    (200, "Essential container in task exited"): "RETRY",
}


@pytest.mark.parametrize(("code", "reason"), ENDINGS)
def test_retry_rules_follow_the_exit_codes_of_the_contract(code: int | None, reason: str) -> None:
    def fits(pattern: str, value: str) -> bool:
        return value.startswith(pattern[:-1]) if pattern.endswith("*") else value == pattern

    def matches(rule: Mapping[str, str]) -> bool:
        ended = {"onExitCode": None if code is None else str(code), "onStatusReason": reason, "onReason": "any"}
        return all(name == "action" or fits(pattern, ended[name] or "") for name, pattern in rule.items())

    assert len(requests.ENDINGS) <= 5
    assert next((rule["action"] for rule in requests.ENDINGS if matches(rule)), "RETRY") == ENDINGS[code, reason]
