"""Builders for the tests of Hugging Face Jobs: a run, and its jobs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, of_kind, write_spec
from tests.infra.targets.aws import S3_STORE

from skerry.infra.provision.graph import Graph
from skerry.infra.targets.hf_jobs.resource_graph import build_resources
from skerry.infra.targets.hf_jobs.resource_types import Job

if TYPE_CHECKING:
    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.target_and_store_interfaces import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/hf_jobs.yaml"
KEYS: Final = "secrets: {AWS_ACCESS_KEY_ID: KEY_ID, AWS_SECRET_ACCESS_KEY: SECRET_KEY}"
LIMITS: Final = "limits: {max_hours: 24}\n"


def context_of(
    folder: Path, target: str = "flavor: cpu-basic", *, count: int = 2, more: str = LIMITS, image: str = "acme/skerry:1"
) -> RunContext:
    """A run with one group `hf` with these options of its target."""
    group = f"  - {{name: hf, count: {count}, target: {{kind: hf_jobs, namespace: acme, {KEYS}, {target}}}}}\n"
    code = """{path: ., command: [python, train.py, --text, "it's \\"here\\" $(HOME) $$"]}"""
    return ground_from(write_spec(folder, group, store="s3://acme/runs", image=image, code=code, more=more))


def graph_of(context: RunContext) -> Graph:
    """The graph of the run, with its store in S3."""
    return Graph([S3_STORE, *build_resources(context, context.spec.replicas, {"AWS_REGION": "us-east-1"})])


def jobs_of(context: RunContext) -> list[Desired]:
    """The desired jobs of the run."""
    return [kit.wanted(job, context.run_uri, **context.spec.tags) for job in of_kind(graph_of(context), Job)]
