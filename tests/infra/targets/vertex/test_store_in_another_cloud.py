"""One run in two clouds: replicas on Vertex AI and on AWS Batch, with the store in S3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator
from tests.infra.targets.vertex.deploying import operator

from skerry.testing.plugin import skerry_sandbox

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.google.sandbox import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_sandbox"]
pytestmark = pytest.mark.slow
BATCH = """\
  - name: b
    count: 1
    target: {kind: aws_batch, region: us-east-1, instance_types: [c7i.large], vcpus: 2, memory: 1GiB}
"""


def test_run_is_created_and_destroyed_in_both_clouds(
    tmp_path: Path, sandbox: GoogleSandbox, skerry_sandbox: Sandbox
) -> None:
    path = operator(tmp_path, sandbox, role="replica").path
    path.write_text(path.read_text().replace("store: gs://", "store: s3://") + BATCH)
    deployer = Operator(path, {**skerry_sandbox.environment, **sandbox.environment})
    outcome = deployer.apply()
    assert outcome.ok, outcome.failed
    assert {kind: len(names) for kind, names in sandbox.inventory().items()} == {
        "job": 2,
        "repository": 1,
        "service account": 2,
    }
    (names,) = [names for kind, names in skerry_sandbox.inventory().items() if kind.endswith("role")]
    assert len([name for name in names if name.partition("-v-")[2]]) == 2
    sandbox.calls.clear()
    skerry_sandbox.calls.clear()
    assert deployer.plan().plan.empty
    assert deployer.apply().ok
    assert sandbox.calls.writes == []
    assert skerry_sandbox.calls.writes == []
    removed = deployer.destroy()
    assert removed.ok, (removed.left, removed.outcome.failed)
    assert sandbox.inventory() == {}
    assert skerry_sandbox.inventory() == {}
