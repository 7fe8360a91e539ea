"""Jobs of a real service that do what a test tells them by words in the run's store."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.cloud import settings
from tests.cloud.place import NAME
from tests.cloud.settings import until
from tests.infra.executors.suite import ACTIONS, OUTER, Stage, lines_of

from skerry.infra.deploy.read_clouds import read_rates
from skerry.infra.executors import BatchExecutor, SageMakerExecutor, VertexExecutor
from skerry.infra.executors.cloud_executor_base import JobCreator
from skerry.infra.provision.graph import Life
from skerry.infra.provision.handler import Condition
from skerry.runtime.errors import Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.cloud.place import Place
    from tests.cloud.settings import Settings

    from skerry.infra.executors import ReplicaHandle, ServerlessExecutor
    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.provision.target_and_store_interfaces import Target
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.runtime.clock import Clock

STARTS: Final = 40
"""Jobs that the suite starts in one service, and a few more."""
_LONGEST: Final = timedelta(hours=1)
_SHORTEST: Final = timedelta(minutes=15)
# As the suite's own script, but for where its words come from. argv: the number from which on words are its own.
SCRIPT: Final = (
    """\
import json, os, sys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.store import open_store
clock, store = SystemClock(), open_store(os.environ['SKERRY_RUN'])
words = f"words/{os.environ['SKERRY_SLOT']}/"
last = words + sys.argv[1]
while True:
    look = lambda: next(iter(store.list(words, last)), None)
    last = wait_until(clock, look, clock.now() + 3600, Backoff(first=0.2, cap=2.0)).key
    verb, _, text = bytes(store.read(last)).decode().partition(' ')
"""
    + ACTIONS
)
_RUNS = itertools.count()


@dataclass(kw_only=True)
class Ground:
    """A deployment without its jobs. outputs: of its resources, by address. longest: each job may run.

    left: how many jobs may still be started, that is paid for.
    """

    place: Place
    outputs: Mapping[str, Mapping[str, str]]
    longest: timedelta
    left: int = STARTS


def ground(place: Place, config: Settings) -> Ground:
    """Makes it. Skips the tests if there is not enough money for them."""
    rates = read_rates(place.deployment)
    hourly = sum(rate.per_hour or 0.0 for rate in rates) / sum(rate.count for rate in rates)
    longest = min(_LONGEST, timedelta(hours=config.share_usd / STARTS / hourly)) if hourly else _LONGEST
    if longest < _SHORTEST:
        enough = hourly * STARTS * (_SHORTEST / timedelta(hours=1)) * settings.SHARES
        pytest.skip(f"{settings.MAX_USD} is too little for {STARTS} jobs at ${hourly:.3f}/h: set {enough:.0f}")
    place.make()
    return Ground(place=place, outputs=place.outputs(), longest=longest)


class CloudStage(Stage):
    """A run of its own below that of the place, which its jobs may read and no more: they write no outcomes."""

    def __init__(self, where: Ground, clock: Clock, patch: pytest.MonkeyPatch) -> None:
        self.ground = where
        self.place = where.place
        self.outputs = where.outputs
        self.clock = clock
        self.patch = patch
        self.run = f"{self.place.run_uri}/{next(_RUNS)}/tiny"
        self._said = 0
        self._first = 0
        self._words = open_store(self.run, clock=clock, environment={**os.environ, **self.environment()})

    @abstractmethod
    def executor(self, **options: Any) -> ServerlessExecutor: ...

    def common(self, own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Return an executor's options: common ones, of this service, and of the test."""
        response = {"run": self.run, "outer": OUTER, "clock": self.clock, "max_runtime": self.ground.longest}
        return {**response, "image": self.group.image, **own, **more}

    @property
    def command(self) -> list[str]:
        self._first = self._said
        return ["-c", SCRIPT, f"{self._first:08d}"]

    def launch(self, executor: ServerlessExecutor, count: int = 2) -> list[ReplicaHandle]:
        assert self.ground.left >= count, f"more than {STARTS} jobs: what they may cost was reckoned for these"
        handles = super().launch(executor, count)
        self.ground.left -= len(handles)
        return handles

    def environment(self) -> Mapping[str, str]:
        return self.place.deployment.home.environment(self.place.deployment.context)

    def write(self, handle: ReplicaHandle, text: str) -> None:
        self._say(handle, f"write {text}")
        until(self.clock, lambda: text in self._lines(handle))

    def finish(self, handle: ReplicaHandle, code: int) -> None:
        self._say(handle, f"exit {code}")

    def lose(self, handle: ReplicaHandle) -> None:
        self._say(handle, "kill")

    def variables_of(self, handle: ReplicaHandle) -> Mapping[str, str]:
        self._say(handle, "tell")
        result: list[str] = []

        def look() -> bool:
            result[:] = [line for line in self._lines(handle) if line.startswith("[")]
            return bool(result)

        until(self.clock, look)
        return dict(json.loads(result[-1])[1])

    def live(self) -> int:
        """Wait until stopped jobs have ended; a service needs time for that."""
        result: list[object] = []

        def gone() -> bool:
            jobs = [item for item in self._owned() if item.life is Life.JOB]
            result[:] = [job for job in self._target.jobs(jobs) if job.condition is Condition.READY] if jobs else []
            return not result

        with contextlib.suppress(TimeoutError):
            until(self.clock, gone)
        return len(result)

    def refuse_one(self) -> None:
        create = JobCreator.create

        def second_refused(maker: JobCreator, replica: ReplicaSlot, attempt: int) -> str:
            if replica.index == 1:
                raise Unauthorized("refused by the test")
            return create(maker, replica, attempt)

        self.patch.setattr(JobCreator, "create", second_refused)

    def close(self) -> None:
        """Stop what still runs, and take away what jobs were made from."""
        left = []
        for item in self._owned():
            try:
                self._target.handlers()[item.kind].delete(item)
            except Exception as error:  # noqa: BLE001  the others are to be stopped all the same
                left.append(f"{item.kind} {item.name}: {error}")
        if left:
            # Its own: the place's goes with the place.
            spec = shutil.copy(self.place.spec, tempfile.mkdtemp(prefix=NAME))
            store, _, name = self.run.rpartition("/")
            command = f"skerry destroy {spec} --set run={name} --set store={store} --yes --data"
            pytest.fail("\n".join(["LEFT, and it may cost:", *left, f"take it away:  {command}"]), pytrace=False)

    @property
    def group(self) -> Any:
        """Of the place's spec, with a target of this service."""
        (group,) = self.place.deployment.spec.spec.replicas
        return group

    @property
    def _target(self) -> Target:
        (target,) = self.place.deployment.targets.values()
        return target

    def _owned(self) -> list[StateRecord]:
        """Return the resources of this run, jobs first."""
        handlers = reversed(list(self._target.handlers().values()))
        return [item for handler in handlers for item in handler.list_owned(self.run, {self.group.target.region})]

    def _lines(self, handle: ReplicaHandle) -> list[str]:
        return lines_of(self.executor(), handle)

    def _say(self, handle: ReplicaHandle, text: str) -> None:
        self._said += 1
        assert self._words.create(f"words/{handle.slot}/{self._said:08d}", text.encode())


class BatchStage(CloudStage):
    def executor(self, **options: Any) -> BatchExecutor:
        own = {
            "region": self.group.target.region,
            "queue": self.outputs["aws_batch_queue.b"]["arn"],
            "job_role": self.outputs["aws_role.b-replicas"]["arn"],
            "execution_role": self.outputs["aws_role.execution"]["arn"],
            "log_group": self.outputs[f"aws_log_group.{self.group.target.region}"]["name"],
            "vcpus": 2,
            "memory_mib": 3072,
        }
        return BatchExecutor(**self.common(own, options))


class SageMakerStage(CloudStage):
    def executor(self, **options: Any) -> SageMakerExecutor:
        own = {
            "region": self.group.target.region,
            "role": self.outputs["aws_role.s-replicas"]["arn"],
            "instance": self.group.target.instance,
            "volume_gib": 30,
        }
        return SageMakerExecutor(**self.common(own, options))


class VertexStage(CloudStage):
    def executor(self, **options: Any) -> VertexExecutor:
        own = {
            "project": self.group.target.project,
            "region": self.group.target.region,
            "service_account": self.outputs["google_service_account.v-replicas"]["email"],
            "machine": self.group.target.machine,
        }
        return VertexExecutor(**self.common(own, options))
