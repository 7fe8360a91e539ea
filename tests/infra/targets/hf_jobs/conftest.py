from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.targets.hf_jobs.jobs_api import Hub
from skerry.infra.targets.hf_jobs.labelled_jobs_service import HfJobs

if TYPE_CHECKING:
    from skerry.testing.huggingface import HuggingFaceSandbox


@pytest.fixture
def environment(huggingface: HuggingFaceSandbox) -> dict[str, str]:
    return {**huggingface.environment, "KEY_ID": "AKIA1", "SECRET_KEY": "not-shown"}


@pytest.fixture
def api(environment: dict[str, str]) -> Hub:
    return Hub(FakeClock(), environment)


@pytest.fixture
def service(api: Hub, environment: dict[str, str]) -> HfJobs:
    return HfJobs(api, environment)
