"""Replicas as custom jobs of Vertex AI, as a service account that exists, each on a machine of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from skerry.infra import accelerators
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handling import each
from skerry.infra.executors.cloud import CloudExecutor, Maker, Named, Seen, made_of
from skerry.infra.targets.vertex import reading, requests, watching
from skerry.infra.targets.vertex.resources import Job
from skerry.infra.targets.vertex.working import Jobs, cancel, described, listed
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.executor import ReplicaHandle
    from skerry.infra.handler import Made
    from skerry.infra.placement import Accelerator
    from skerry.infra.spec import Seat
    from skerry.infra.target import Ground

_STOPPED: Final = ("JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED")


@dataclass(kw_only=True)
class VertexExecutor(CloudExecutor):
    """See ServerlessExecutor.

    project: by its id. service_account: the replicas', by its e-mail address; it must let them use the run's prefix of
    the store. machine, accelerator, accelerators: as in a spec; what is built into a machine need not be said.
    """

    project: str
    region: str
    service_account: str
    machine: str
    accelerator: Accelerator | None = None
    accelerators: int | None = None
    disk_gb: int = 100
    scheduling: Literal["standard", "spot", "flex_start"] = "standard"
    network: str | None = None
    _google: Google = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions."""
        super().__post_init__()
        self._google = Google(self.clock, self.environment, project=self.project)

    def _prepared(self, ground: Ground, told: Mapping[str, str]) -> Maker:
        return Maker(
            handler=Jobs(self._google),
            resource=lambda seat: self._job(ground, seat, told),
            output="name",
            run=self.run,
        )

    def _job(self, ground: Ground, seat: Seat, told: Mapping[str, str]) -> Job:
        name, count = accelerators.fitted(self.machine, self.accelerator, self.accelerators) or (None, 0)
        return Job(
            key=seat.slot,
            name=f"{ground.stem}-{seat.slot}",
            region=self.region,
            project=self.project,
            image=self.image,
            args=("run",),
            environment={
                contract.RANKS: str(max(1, count)),
                **told,
                contract.SLOT: seat.slot,
                contract.INDEX: str(seat.index),
                contract.COMMAND: requests.plain(told[contract.COMMAND]),
            },
            machine=self.machine,
            accelerator=name,
            accelerators=count,
            disk_gb=self.disk_gb,
            disk_type=None,
            scheduling=self.scheduling,
            max_wait_s=None,
            timeout_s=int(self.max_runtime.total_seconds()),
            service_account=self.service_account,
            network=self.network,
        )

    def _listed(self, ground: Ground) -> Iterator[Named]:
        del ground  # a run's jobs carry its label
        for row in listed(self._google, self.run, self.project, self.region):
            over = reading.state(row) not in reading.LIVE
            yield Named(name=str(row.get("displayName", "")), over=over)

    def _look(self, jobs: Sequence[str]) -> Sequence[Seen | None]:
        return [self._seen_of(row) for row in each(lambda job: described(self._google, job), jobs)]

    def _seen_of(self, row: Mapping[str, Any] | None) -> Seen | None:
        if row is None:
            return None
        state = reading.state(row)
        return Seen(
            over=state not in reading.LIVE,
            code=watching.view(self._made("", 0, str(row["name"])), row).exit_code,
            stopped=state in _STOPPED,
            why=str(reading.error(row).get("message") or state.removeprefix("JOB_STATE_").lower()),
        )

    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        for line in watching.lines(self._google, self._made(handle.slot, handle.attempt, handle.job), None):
            yield line.text

    def _made(self, slot: str, attempt: int, job: str) -> Made:
        """As those want it told who put jobs into words. job: its whole name."""
        resource = Job(
            key=slot,
            name=slot,
            region=self.region,
            project=self.project,
            image=self.image,
            args=(),
            environment={},
            machine=self.machine,
            accelerator=None,
            accelerators=0,
            disk_gb=self.disk_gb,
            disk_type=None,
            scheduling=self.scheduling,
            max_wait_s=None,
            timeout_s=None,
            service_account=self.service_account,
        )
        return made_of(resource, attempt, {"name": job, "id": job.rpartition("/")[2]})

    def _stop(self, handle: ReplicaHandle) -> None:
        cancel(self._google, handle.job)
