"""Builders for the tests of Modal: a run, and its resources."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, write_spec
from tests.infra.targets.aws import S3_STORE

from skerry.infra.clouds.aws.session import Account
from skerry.infra.provision.graph import Graph
from skerry.infra.targets.modal.resource_graph import build_resources

if TYPE_CHECKING:
    from skerry.infra.provision.target_and_store_interfaces import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/modal.yaml"
ACCOUNT: Final = Account(number="123456789012", partition="aws")
LIMITS: Final = "limits: {max_hours: 24}\n"


def context_of(
    folder: Path, target: str = "secrets: [store-keys]", *, count: int = 2, more: str = LIMITS, groups: str = ""
) -> RunContext:
    """A run with a group `m` with these options of its target. groups: further ones."""
    group = f"  - {{name: m, count: {count}, target: {{kind: modal, {target}}}}}\n{groups}"
    code = "{path: ., command: [python, train.py]}"
    return ground_from(write_spec(folder, group, store="s3://acme/runs", image="acme/skerry:1", code=code, more=more))


def graph_of(context: RunContext) -> Graph:
    """The graph of the run, with its store in S3."""
    return Graph([S3_STORE, *build_resources(context, context.spec.replicas, {"AWS_REGION": "us-east-1"}, ACCOUNT)])
