"""An apply for AWS Batch that dies after each of its calls in turn, and a destroy: the next one finishes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.aws.account import share_clients
from tests.infra.crashes import Crashes, mortality_on_aws
from tests.infra.deploy.account import Operator, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow


@pytest.fixture
def crashes(tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    share_clients(monkeypatch)

    def start() -> Operator:
        return Operator(write_spec(tmp_path, count=1), {**skerry_sandbox.environment, "AWS_MAX_ATTEMPTS": "1"})

    return Crashes(start, skerry_sandbox, mortality_on_aws(skerry_sandbox, monkeypatch))


def test_apply_killed_after_each_of_its_calls(crashes: Crashes) -> None:
    # Only how many of each kind: ids of networks differ from account to account.
    crashes.check_apply(21, lambda inventory: {kind: len(names) for kind, names in inventory.items()})


def test_destroy_killed_after_each_of_its_calls(crashes: Crashes) -> None:
    crashes.check_destroy(11)
