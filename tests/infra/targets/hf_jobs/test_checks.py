"""Checks and prices of Hugging Face Jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.hf_jobs.kit import context_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.targets.hf_jobs import checks
from skerry.infra.targets.hf_jobs.options import gpus_of
from skerry.infra.targets.hf_jobs.target import open_target

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.targets.hf_jobs.jobs_api import Hub
    from skerry.testing.huggingface import HuggingFaceSandbox


def test_usable_account_passes_and_nothing_is_created(
    api: Hub, environment: dict[str, str], tmp_path: Path, huggingface: HuggingFaceSandbox
) -> None:
    groups = context_of(tmp_path, "flavor: l4x1").spec.replicas
    results = {check.name: check.ok for check in checks.checks(api, environment, groups)}
    assert results == {
        "Hugging Face": True,
        "namespace acme": True,
        "flavor of hf": True,
        "secrets of hf": True,
    }
    assert huggingface.calls.writes == []


def test_every_mistake_is_named_with_its_correction(api: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    groups = context_of(tmp_path, "flavor: h9000").spec.replicas
    groups = tuple(
        group.model_copy(update={"target": group.target.model_copy(update={"namespace": "other"})}) for group in groups
    )
    del environment["SECRET_KEY"]
    failed = [check for check in checks.checks(api, environment, groups) if not check.ok]
    assert [(check.name, check.text) for check in failed] == [
        ("namespace other", "the token's user is not a member of it"),
        ("flavor of hf", "there is no flavor h9000"),
        ("secrets of hf", "not in your environment: SECRET_KEY"),
    ]
    assert failed[1].advice == "write flavor: cpu-basic or l4x1 or a10g-largex2"
    assert all(check.stops_jobs for check in failed)


def test_price_is_that_of_the_api(environment: dict[str, str], tmp_path: Path, huggingface: HuggingFaceSandbox) -> None:
    context = context_of(tmp_path, "flavor: a10g-largex2, max_runtime: 6h")
    target = open_target(OperatorAccess(FakeClock(), environment, context.spec))
    (rate,) = target.rates(context, context.spec.replicas)
    assert (rate.per_hour, rate.count, rate.cap_hours, rate.each_start) == (pytest.approx(6.0), 2, 6.0, True)
    huggingface.fail(how="deny", on="huggingface:ListHardware")
    (rate,) = target.rates(context, context.spec.replicas)
    assert rate.per_hour is None
    assert rate.source.startswith("the prices could not be read: Hugging Face refuses: Forbidden; set HF_TOKEN to")


@pytest.mark.parametrize(
    ("flavor", "gpus"),
    [("cpu-basic", 0), ("t4-small", 1), ("l4x1", 1), ("a10g-largex4", 4), ("h200", 1), ("h200x8", 8)],
)
def test_gpus_follow_from_the_name_of_a_flavor(flavor: str, gpus: int) -> None:
    assert gpus_of(flavor) == gpus
