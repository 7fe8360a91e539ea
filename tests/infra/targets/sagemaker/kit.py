"""Builders for the tests of SageMaker: a run, and its resources in the emulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, write_spec
from tests.infra.targets.aws import IMAGE, build_graph

from skerry.infra.clouds.aws.run_bucket_and_image_repository import AwsHome
from skerry.infra.targets.sagemaker.jobs import Jobs
from skerry.infra.targets.sagemaker.machine_lookup import Machine
from skerry.infra.targets.sagemaker.resource_graph import build_resources
from skerry.infra.targets.sagemaker.target import SageMaker

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Graph
    from skerry.infra.provision.handler import Desired, Observed
    from skerry.infra.provision.target_and_store_interfaces import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/sagemaker.yaml"
DISKLESS: Final = Machine(type="ml.c7i.xlarge", gpus=0, own_disk=False)
SMALL: Final = Machine(type="ml.g6e.xlarge", gpus=1, own_disk=True)


def context_of(
    folder: Path,
    options: str = "",
    *,
    count: int = 2,
    instance: str = "ml.g5.xlarge",
    name: str = "sm",
    command: str = "[python, train.py]",
    more: str = "",
) -> RunContext:
    """Return a run of one group with these options of its target."""
    options = f"{options}, " if options else ""
    path = write_spec(
        folder,
        f"""\
  - name: {name}
    count: {count}
    target: {{kind: sagemaker, region: us-east-1, {options}instance: {instance}}}
""",
        store="s3://acme/runs",
        image=IMAGE,
        code=f"{{path: ., command: {command}}}",
        more=more,
    )
    return ground_from(path)


def graph_of(context: RunContext, *machines: Machine) -> Graph:
    """Return the graph of the run. machines: of each group; SMALL unless given."""
    return build_graph(build_resources, context, machines or [SMALL] * len(context.spec.replicas))


class Scene(kit.Scene):
    def __init__(self, aws: Aws, run: RunContext) -> None:
        super().__init__(run, AwsHome(aws), SageMaker(aws))
        self.jobs = Jobs(aws)

    def seen_job(self, desired: Desired) -> Observed:
        (seen,) = self.jobs.read([desired])
        assert seen is not None
        return seen
