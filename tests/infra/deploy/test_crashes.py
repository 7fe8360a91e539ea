"""An apply or destroy for AWS Batch is killed after each of its calls; the next one finishes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import share_clients
from tests.infra.crashes import Crashes, mortality_on_aws
from tests.infra.deploy.account import Operator, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

pytestmark = pytest.mark.slow
# The calls are divided between tests, so that two processes share them.
PARTS: Final = 3


@pytest.fixture
def crashes(tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Crashes:
    share_clients(monkeypatch)

    def start() -> Operator:
        return Operator(write_spec(tmp_path, count=1), {**skerry_sandbox.environment, "AWS_MAX_ATTEMPTS": "1"})

    return Crashes(start, skerry_sandbox, mortality_on_aws(skerry_sandbox, monkeypatch))


@pytest.mark.parametrize("part", range(PARTS))
def test_next_apply_finishes_one_that_was_killed(crashes: Crashes, part: int) -> None:
    # Compare counts only: ids of networks differ between accounts.
    crashes.check_apply(
        21, lambda inventory: {kind: len(names) for kind, names in inventory.items()}, part=part, parts=PARTS
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_next_destroy_finishes_one_that_was_killed(crashes: Crashes, part: int) -> None:
    crashes.check_destroy(11, part=part, parts=PARTS)
