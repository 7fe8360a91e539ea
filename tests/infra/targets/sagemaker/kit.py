"""Builders for the tests of SageMaker: a run, and its resources in the emulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, write_spec

from skerry.infra.clouds.aws.home import AwsHome
from skerry.infra.clouds.aws.session import Account
from skerry.infra.targets.sagemaker.jobs import Jobs
from skerry.infra.targets.sagemaker.machine_lookup import Machine
from skerry.infra.targets.sagemaker.target import SageMaker

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, Observed
    from skerry.infra.provision.target import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/sagemaker.yaml"
ACCOUNT: Final = Account(number="123456789012", partition="aws")
DISKLESS: Final = Machine(type="ml.c7i.xlarge", gpus=0, own_disk=False)
SMALL: Final = Machine(type="ml.g6e.xlarge", gpus=1, own_disk=True)
IMAGE: Final = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{'1' * 64}"
REGION: Final = "us-east-1"


def ground_of(
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


class Scene(kit.Scene):
    def __init__(self, aws: Aws, run: RunContext) -> None:
        super().__init__(run, AwsHome(aws), SageMaker(aws))
        self.jobs = Jobs(aws)

    def seen_job(self, desired: Desired) -> Observed:
        (seen,) = self.jobs.read([desired])
        assert seen is not None
        return seen
