"""Builders for the tests of AWS Batch: a run, its resources in the emulation, and the statuses of its jobs."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import batch_backends
from tests.infra import kit
from tests.infra.kit import ground_from, write_spec
from tests.infra.targets.aws import ACCOUNT, IMAGE, build_graph

from skerry.infra.clouds.aws.run_bucket_and_image_repository import AwsHome
from skerry.infra.targets.aws_batch.machine_sizing import Machine
from skerry.infra.targets.aws_batch.region_offer import RegionOffer
from skerry.infra.targets.aws_batch.resource_graph import build_resources
from skerry.infra.targets.aws_batch.target import AwsBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Graph
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/batch.yaml"
ENVIRONMENT: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
SMALL: Final = Machine(type="g6e.xlarge", vcpus=4, memory_mib=32768, gpus=1)
LARGE: Final = Machine(type="g6e.12xlarge", vcpus=48, memory_mib=393216, gpus=4)
OFFER: Final = RegionOffer(vpc="vpc-1", subnets=("subnet-1", "subnet-2"), machines=(SMALL,))


def context_of(folder: Path, target: str, *, count: int = 2, others: str = "", more: str = "") -> RunContext:
    """Return a run with one group `batch`. target: its options; others: further groups; more: other sections."""
    path = write_spec(
        folder,
        f"  - {{name: batch, count: {count}, target: {{kind: aws_batch, region: us-east-1, {target}}}}}\n{others}",
        store="s3://acme/runs",
        image=IMAGE,
        code="""{path: ., command: [python, train.py, --text, "it's \\"here\\" $HOME"]}""",
        more=more,
    )
    return ground_from(path)


def graph_of(context: RunContext, *offers: RegionOffer) -> Graph:
    """Return the graph of the run. offers: for each group; OFFER unless given."""
    return build_graph(build_resources, context, offers or [OFFER] * len(context.spec.replicas))


class Scene(kit.Scene):
    def __init__(self, aws: Aws, run: RunContext) -> None:
        super().__init__(run, AwsHome(aws), AwsBatch(aws))


def job_of(state_record: StateRecord) -> Any:
    """Return the job object of the emulation."""
    return batch_backends[ACCOUNT.number][state_record.region]._jobs[state_record.outputs["id"]]  # noqa: SLF001  moto has no other way


def multiply(state_record: StateRecord, ids: Sequence[str]) -> None:
    """Copy the job once under each of these ids."""
    for name in ids:
        twin = copy.copy(job_of(state_record))
        twin.job_id = name
        batch_backends[ACCOUNT.number][state_record.region]._jobs[name] = twin  # noqa: SLF001  same


def let_stop(state_record: StateRecord) -> None:
    """Make the job end as soon as it is terminated."""
    job_of(state_record).terminate = partial(set_status, state_record.outputs["id"], "FAILED")


def set_status(job: str, status: str, reason: str | None = None) -> None:
    """Set the status as if Batch had changed it."""
    emulated: Any = batch_backends[ACCOUNT.number]["us-east-1"]._jobs[job]  # noqa: SLF001  same
    emulated.status = emulated._status = status  # noqa: SLF001  same
    emulated.job_stopped = status in {"SUCCEEDED", "FAILED"}
    emulated.job_stopped_reason = reason
