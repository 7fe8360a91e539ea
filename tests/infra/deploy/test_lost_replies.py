"""Answers that get lost on their way, and what is there after the next apply: nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, write_spec

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.sandbox import Sandbox


@pytest.mark.parametrize("call", ["batch:SubmitJob", "batch:RegisterJobDefinition"])
def test_what_has_no_name_of_its_own_is_made_once(call: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = Operator(write_spec(tmp_path), skerry_sandbox.environment)
    skerry_sandbox.fail(how="lost_reply", on=call)
    assert one.apply().ok
    _assert_one_for_each_replica(skerry_sandbox)
    assert one.plan().plan.empty


@pytest.mark.parametrize("call", ["batch:SubmitJob", "batch:RegisterJobDefinition"])
def test_what_never_arrived_is_made_by_the_next_apply(call: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = Operator(write_spec(tmp_path), skerry_sandbox.environment)
    skerry_sandbox.fail(how="timeout", on=call)
    (failed,) = one.apply().failed
    assert failed.address.startswith(f"{KINDS[call]}.b-")
    assert one.apply().ok
    _assert_one_for_each_replica(skerry_sandbox)


KINDS = {"batch:SubmitJob": "aws_batch_job", "batch:RegisterJobDefinition": "aws_batch_definition"}


def _assert_one_for_each_replica(sandbox: Sandbox) -> None:
    there = sandbox.inventory()
    assert len(there["job"]) == len(set(there["job"])) == 2
    assert [name.rpartition(":")[2] for name in there["job definition"]] == ["1", "1"]
