"""Lost requests and replies: the next apply creates nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox


@pytest.mark.parametrize("call", ["batch:SubmitJob", "batch:RegisterJobDefinition"])
def test_lost_reply_creates_no_duplicate(call: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    user = Operator(write_spec(tmp_path), skerry_sandbox.environment)
    skerry_sandbox.fail(how="lost_reply", on=call)
    assert user.apply().ok
    _assert_two_of_each(skerry_sandbox)
    assert user.plan().plan.empty


def _assert_two_of_each(sandbox: Sandbox) -> None:
    inventory = sandbox.inventory()
    assert len(inventory["job"]) == len(set(inventory["job"])) == 2
    assert [name.rpartition(":")[2] for name in inventory["job definition"]] == ["1", "1"]
