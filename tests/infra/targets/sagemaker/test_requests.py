from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from botocore.session import get_session
from botocore.validate import ParamValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.infra.kit import of_kind
from tests.infra.targets.sagemaker.kit import DISKLESS, SMALL, check_golden, context_of, graph_of

from skerry.infra.provision.graph import Ref, as_json, resolved
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.sagemaker import requests
from skerry.infra.targets.sagemaker.resource_types import Job
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.runtime.errors import Invalid
from skerry.testing.aws.shims.sagemaker_requests import problems_of

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.targets.sagemaker.machine_lookup import Machine

TARGETS = st.fixed_dictionaries(
    {},
    optional={
        "gpus": st.integers(0, 8),
        "spot": st.just("true"),
        "max_runtime": st.sampled_from(["60s", "24h", "28d"]),
        "max_pending": st.sampled_from(["30m", "2h", "28d"]),
        "retries": st.integers(0, 30),
        "role": st.sampled_from(["group", "replica"]),
        "volume": st.sampled_from(["1GiB", "100GiB", "16TiB"]),
        "kms_key": st.just("1234abcd-12ab-34cd-56ef-1234567890ab"),
        "output": st.just("s3://mine/artifacts"),
        "byo": st.just("{role: mine, subnets: [subnet-0a], security_groups: [sg-0a]}"),
    },
)

SHAPE = get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob").input_shape


def output(ref: Ref) -> str:
    return "us-east-1" if ref.output == "region" else f"arn:aws:iam::123456789012:role/skerry/{ref.address}"


def wanted(context: RunContext, machine: Machine, *, known: bool) -> Desired:
    job = of_kind(graph_of(context, machine), Job)[0]
    values = {
        name: resolved(value, lambda ref: output(ref) if known else None) for name, value in job.settings().items()
    }
    return Desired(resource=job, generation=0, run=context.run_uri, settings=values, extra={"team": "research"})


def test_request_is_frozen(tmp_path: Path) -> None:
    context = context_of(tmp_path, "spot: true, gpus: 1, max_pending: 12h", count=1, more="limits: {max_hours: 12}\n")
    check_golden("request", as_json(requests.job(wanted(context, SMALL, known=False))))


def test_request_with_all_options_is_frozen(tmp_path: Path) -> None:
    options = (
        "max_runtime: 6h, retries: 0, volume: 50GiB, kms_key: abc-1, output: s3://mine/artifacts, "
        "byo: {role: mine, subnets: [subnet-0a], security_groups: [sg-0a]}"
    )
    context = context_of(tmp_path, options, count=1, instance="ml.c7i.xlarge", command=f"[python, {'x' * 600}]")
    check_golden("request_with_all", as_json(requests.job(wanted(context, DISKLESS, known=False))))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=TARGETS, hours=st.none() | st.floats(0.02, 8000), own_disk=st.booleans())
def test_request_of_any_spec_matches_the_service_model(
    tmp_path: Path, options: dict[str, Any], hours: float | None, *, own_disk: bool
) -> None:
    text = ", ".join(f"{name}: {value}" for name, value in options.items())
    context = context_of(tmp_path, text, count=1, more="" if hours is None else f"limits: {{max_hours: {hours}}}\n")
    sent = ready(requests.job(wanted(context, SMALL if own_disk else DISKLESS, known=True)))
    report = ParamValidator().validate(sent, SHAPE)
    assert not report.has_errors(), report.generate_report()
    # The service's words, patterns and upper limits, which botocore leaves to the service.
    assert problems_of(sent) == []


def test_unresolved_reference_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=r"known: \(arn of aws_role.sm-replicas\)"):
        ready(requests.job(wanted(context_of(tmp_path, count=1), SMALL, known=False)))
