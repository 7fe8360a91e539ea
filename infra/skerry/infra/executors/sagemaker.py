"""Replicas as training jobs of SageMaker, as a role that exists, each on a machine of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.handling import Absent, each
from skerry.infra.executors.aws import region_of_store
from skerry.infra.executors.cloud import CloudExecutor, Maker, Named, Seen, made_of
from skerry.infra.targets.sagemaker import reading, watching
from skerry.infra.targets.sagemaker.layout import OUTPUT, handed_on
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.infra.targets.sagemaker.working import TrainingJobs, described
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import timedelta

    from skerry.infra.executor import ReplicaHandle
    from skerry.infra.spec import Seat
    from skerry.infra.target import Ground

# A name may have 63; an attempt takes up to five of them.
_LONGEST: Final = 58
_MODEL: Final = (
    "a run in S3 keeps what is left in /opt/ml/model; for another store write output='s3://bucket/artifacts'"
)


@dataclass(kw_only=True)
class SageMakerExecutor(CloudExecutor):
    """See ServerlessExecutor.

    role: the replicas', by ARN; SageMaker acts as it, and it must let them use the run's prefix of the store. instance:
    as SageMaker calls it, ml.g6e.xlarge. spot: spare machines; max_wait: how long a job waits for them and runs, with
    max_runtime counted in; None is twice that. volume_gib: None for machines with disks of their own. output: where
    what is left in /opt/ml/model goes; None is with the run.
    """

    region: str
    role: str
    instance: str
    spot: bool = False
    max_wait: timedelta | None = None
    volume_gib: int | None = None
    output: str | None = None
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    _aws: Aws = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        if not self.role.startswith("arn:"):
            raise Invalid(f"not the ARN of a role: {self.role!r}; write arn:aws:iam::123456789012:role/NAME")
        if self.output is None and not self.run.startswith("s3://"):
            raise Invalid(f"nowhere to put what jobs leave behind: {_MODEL}")
        self._aws = Aws(self.clock, self.environment)

    def _of_store(self) -> Mapping[str, str]:
        return region_of_store(self._aws, self.run, self.region, self.variables)

    def _prepared(self, ground: Ground, told: Mapping[str, str]) -> Maker:
        name = f"{ground.stem}-{ground.seats[-1].slot}"
        if len(name) > _LONGEST:
            raise Invalid(f"too long for a job of SageMaker: {name}; shorten slots")
        return Maker(
            handler=TrainingJobs(self._aws),
            resource=lambda seat: self._job(ground, seat, told),
            output="name",
            run=self.run,
        )

    def _job(self, ground: Ground, seat: Seat, told: Mapping[str, str]) -> TrainingJob:
        told = {**told, contract.SLOT: seat.slot, contract.INDEX: str(seat.index)}
        environment, hyperparameters = handed_on(told)
        seconds = int(self.max_runtime.total_seconds())
        wait = None if self.max_wait is None else int(self.max_wait.total_seconds())
        return TrainingJob(
            key=seat.slot,
            name=f"{ground.stem}-{seat.slot}",
            region=self.region,
            image=self.image,
            environment=environment,
            hyperparameters=hyperparameters,
            role=self.role,
            instance=self.instance,
            spot=self.spot,
            max_runtime_s=seconds,
            max_wait_s=(wait or 2 * seconds) if self.spot else None,
            volume_gib=self.volume_gib,
            output=self.output or f"{self.run}/{OUTPUT}",
            subnets=tuple(sorted(self.subnets)),
            security_groups=tuple(sorted(self.security_groups)),
        )

    def _listed(self, ground: Ground) -> Iterator[Named]:
        names = f"{ground.stem}-{self.slots}-"
        rows = self._aws.pages(
            "sagemaker", self.region, "list_training_jobs", "TrainingJobSummaries", NameContains=names
        )
        for row in rows:
            over = row["TrainingJobStatus"] not in reading.LIVE
            yield Named(name=str(row["TrainingJobName"]), over=over)

    def _look(self, jobs: Sequence[str]) -> Sequence[Seen | None]:
        return [_seen(row) for row in each(lambda job: described(self._aws, self.region, job), jobs)]

    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        empty = TrainingJob(
            key=handle.slot,
            name=handle.job,
            region=self.region,
            image="",
            environment={},
            role="",
            instance="",
            max_runtime_s=0,
            output="",
        )
        for line in watching.lines(self._aws, made_of(empty, handle.attempt, {"name": handle.job}), None):
            yield line.text

    def _stop(self, handle: ReplicaHandle) -> None:
        try:
            self._aws.call("sagemaker", self.region, "stop_training_job", TrainingJobName=handle.job)
        except Invalid as error:
            # It has come to its end meanwhile, and is rejected for that.
            (seen,) = self._look([handle.job])
            if seen is None:
                raise Absent(str(error)) from error
            if not seen.over:
                raise


def _seen(row: Mapping[str, Any] | None) -> Seen | None:
    if row is None:
        return None
    status = str(row["TrainingJobStatus"])
    return Seen(
        over=status not in reading.LIVE,
        code=reading.exit_code(row),
        stopped=status == "Stopped",
        why=str(row.get("FailureReason") or reading.secondary(row)),
    )
