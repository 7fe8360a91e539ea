"""Base class of the executors in clouds: launches all replicas or none, polls, collects, cancels; keeps no state.

A subclass creates the job of a replica, reads jobs, stops one, and reads its log. A job's name ends in its attempt
number: the next attempt follows from the jobs that the cloud lists.
"""

from __future__ import annotations

import re
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final

from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.executors.options import RunOptions
from skerry.infra.local.options import LocalTarget
from skerry.infra.provision.graph import as_json, generation_name
from skerry.infra.provision.handler import Desired, StateRecord
from skerry.infra.provision.target_and_store_interfaces import RunContext
from skerry.infra.run.executor import Ending, ReplicaHandle, ending_from_exit_code, seconds_of
from skerry.infra.spec import store_uri
from skerry.runtime import contract
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Handler
    from skerry.infra.run.executor import EntrypointArguments
    from skerry.infra.spec.model import ReplicaSlot
    from skerry.runtime.log.records import Place

# A start takes minutes, and each poll costs a call per job.
_POLLS: Final = Backoff(first=2.0, cap=30.0)
# A new job may stay invisible for this long; after that it does not exist.
_VISIBLE_S: Final = 60.0
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The state of a job. code: its exit code, if the cloud reports one. stopped: on request. why: the cloud's text."""

    over: bool
    code: int | None = None
    stopped: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class NamedJob:
    """A job as a listing reports it."""

    name: str
    over: bool


@dataclass(kw_only=True)
class CloudExecutor(RunOptions):
    """A ServerlessExecutor in a cloud; see also RunOptions.

    image: a replica image, or one built on it. Without `code` the command runs in its working folder.
    max_runtime: the cloud ends a job after this time. ranks: processes of a replica; None is one for each GPU.
    """

    POLLS: ClassVar[Backoff] = _POLLS
    IN_CLOUD: ClassVar[bool] = True
    """False if its jobs may reach a folder of this machine."""

    image: str
    max_runtime: timedelta = _DAY
    ranks: int | None = None
    _launched: set[ReplicaHandle] = field(default_factory=set[ReplicaHandle], init=False, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def _set_run(self, uri: str) -> None:
        super()._set_run(uri)
        if self.IN_CLOUD and self.run.startswith(store_uri.FILE):
            raise Invalid(f"jobs in a cloud cannot reach a folder of this machine: {self.run}; write s3:// or gs://")

    def launch_replicas(
        self, n_replicas: int, entrypoint: str, entrypoint_args: EntrypointArguments = ()
    ) -> list[ReplicaHandle]:
        """See ServerlessExecutor."""
        command = self.read_entrypoint(entrypoint, entrypoint_args).command
        spec = self.spec_for(n_replicas, command, LocalTarget(kind="local"))
        store_variables = self._store_variables()
        code = self.prepare(spec, {**self.environment, **store_variables}, pack_code=True).code
        context = RunContext(
            spec=spec.spec, run_uri=self.run, image=self.image, code=code or "", replica_slots=spec.replica_slots
        )
        variables = {
            **store_variables,
            **context.variables(spec.spec.replicas[0]),
            contract.PLACE: self.place.to_text(),
            contract.REPLICAS: str(n_replicas),
            **self.variables,
        }
        if code is None:
            del variables[contract.CODE]
        if self.ranks is not None:
            variables[contract.RANKS] = str(self.ranks)
        attempts = self._next_attempts(context)
        creator = self._creator(context, variables)

        def start(replica: ReplicaSlot) -> ReplicaHandle | SkerryError:
            try:
                attempt = attempts[replica.slot]
                job = creator.create(replica, attempt)
            except SkerryError as error:
                return error
            slot, index = replica.slot, replica.index
            handle = ReplicaHandle(slot=slot, index=index, attempt=attempt, job=job, backend=self.backend)
            with self._guard:  # at once, so that `close` finds it if this launch is interrupted
                self._launched.add(handle)
            return handle

        results = each(start, spec.replica_slots)
        handles = [result for result in results if isinstance(result, ReplicaHandle)]
        if len(handles) < len(results):
            self._undo(results, spec.replica_slots, attempts, creator)
        return handles

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """See ServerlessExecutor. Raises Invalid if the cloud has no record of it, or no longer."""
        return self._endings([handle])[0]

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta | float) -> list[Ending]:
        """See ServerlessExecutor. Repeats polls that fail because the cloud cannot be reached."""
        timeout = timedelta(seconds=seconds_of(timeout))
        endings: dict[ReplicaHandle, Ending] = {}
        unreachable: Retryable | None = None

        def all_ended() -> bool | None:
            nonlocal unreachable
            waiting = [handle for handle in dict.fromkeys(handles) if handle not in endings]
            try:
                polled = self._endings(waiting)
            except Retryable as error:
                unreachable = error
                return None
            unreachable = None
            endings.update({handle: end for handle, end in zip(waiting, polled, strict=True) if end is not None})
            return True if len(endings) == len(set(handles)) else None

        try:
            wait_until(self.clock, all_ended, self.clock.now() + timeout.total_seconds(), self.POLLS)
        except TimeoutError:
            late = ", ".join(handle.slot for handle in dict.fromkeys(handles) if handle not in endings)
            if unreachable is not None:
                raise TimeoutError(f"not known to have ended after {timeout}: {late}; {unreachable}") from unreachable
            raise TimeoutError(f"still running after {timeout}: {late}") from None
        return [endings[handle] for handle in handles]

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """See ServerlessExecutor. A cloud returns lines seconds after they were written."""
        self._states([handle])
        yield from self._read_log(handle)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor. A cloud has one way to stop: SIGTERM, then SIGKILL after its own grace."""
        del kill
        (state,) = self._states([handle])
        if not state.over:
            self.stop_job(handle)

    def close(self) -> None:
        """See ServerlessExecutor. Does not wait until the jobs have stopped."""
        with self._guard:
            launched, self._launched = sorted(self._launched, key=lambda handle: handle.index), set()

        def stop(handle: ReplicaHandle) -> SkerryError | None:
            try:
                self._stop_new(handle)
            except SkerryError as error:
                return error
            return None

        if failed := [error for error in each(stop, launched) if error is not None]:
            raise failed[0]

    @property
    @abstractmethod
    def place(self) -> Place:
        """The machines of the replicas, as far as the options decide them."""

    @abstractmethod
    def _creator(self, context: RunContext, variables: Mapping[str, str]) -> JobCreator:
        """Creates the jobs of one launch. variables: the variables of every replica."""

    @abstractmethod
    def _list_jobs(self, context: RunContext) -> Iterator[NamedJob]:
        """All jobs with a name of this run, ended ones too."""

    @abstractmethod
    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobState | None]:
        """The states of jobs, in the order given; None for a job without record."""

    @abstractmethod
    def _read_log(self, handle: ReplicaHandle) -> Iterator[str]:
        """The lines that a job has written."""

    @abstractmethod
    def stop_job(self, handle: ReplicaHandle) -> None:
        """Ask a job to stop; succeeds if it has ended. Raises Absent if the cloud does not know it."""

    def _stop_new(self, handle: ReplicaHandle) -> None:
        """Stop a job that was just created: a cloud may list it only after some time."""

        def ask() -> bool | None:
            try:
                self.stop_job(handle)
            except Absent:
                return None
            return True

        try:
            wait_until(self.clock, ask, self.clock.now() + _VISIBLE_S, _POLLS)
        except TimeoutError as error:
            raise Invalid(
                f"{handle.job} was created but is not visible after {_VISIBLE_S:.0f} s, so it was not stopped; "
                "look for it in the cloud's console, because it may run and cost money"
            ) from error

    def _store_variables(self) -> Mapping[str, str]:
        """Variables that a process needs to open the store, apart from credentials."""
        return {}

    def _endings(self, handles: Sequence[ReplicaHandle]) -> list[Ending | None]:
        return [_ending(state) for state in self._states(handles)]

    def _states(self, handles: Sequence[ReplicaHandle]) -> list[JobState]:
        states = self.read_jobs([handle.job for handle in handles])
        for handle, state in zip(handles, states, strict=True):
            if state is None:
                raise Invalid(
                    f"no record of {handle.job} ({handle.slot}): it never existed, or the cloud has deleted its "
                    f"record; look for its ending in outcomes/{handle.slot}/ of {self.run}"
                )
        return [state for state in states if state is not None]

    def _next_attempts(self, context: RunContext) -> Mapping[str, int]:
        """The next attempt of each slot. Raises Conflict if a job of one of them still runs."""
        pattern = re.compile(rf"{re.escape(context.stem)}-({re.escape(self.slots)}-\d+)(?:-g(\d+))?")
        attempts = {replica.slot: 0 for replica in context.replica_slots}
        live: set[str] = set()
        for job in self._list_jobs(context):
            match = pattern.fullmatch(job.name)
            if match is None or match[1] not in attempts:
                continue
            attempts[match[1]] = max(attempts[match[1]], int(match[2] or 0) + 1)
            if not job.over:
                live.add(match[1])
        if live:
            slots = sorted(live, key=list(attempts).index)
            raise Conflict(f"still running: {', '.join(slots)}; cancel or collect them")
        return attempts

    def _undo(
        self,
        results: Sequence[ReplicaHandle | SkerryError],
        replicas: Sequence[ReplicaSlot],
        attempts: Mapping[str, int],
        creator: JobCreator,
    ) -> None:
        """Stop the jobs that were created or may have been; raise the first error."""
        errors = [result for result in results if isinstance(result, SkerryError)]
        for result, replica in zip(results, replicas, strict=True):
            try:
                if isinstance(result, ReplicaHandle):
                    self._stop_new(result)
                elif isinstance(result, Retryable):
                    creator.delete(replica, attempts[replica.slot])
            except SkerryError as error:
                errors[0].add_note(f"{replica.slot} may still run: {error}")
        raise errors[0]


@dataclass(frozen=True, kw_only=True)
class JobCreator:
    """Creates the jobs of one launch. resource: of a replica. output: the resource's output that names its job."""

    handler: Handler
    resource: Callable[[ReplicaSlot], Resource]
    output: str
    run: str

    def create(self, replica: ReplicaSlot, attempt: int) -> str:
        """Create a job, once; its name for handles."""
        resource = self.resource(replica)
        desired = Desired(resource=resource, generation=attempt, run=self.run, settings=resource.settings())
        return self.handler.create(desired)[self.output]

    def delete(self, replica: ReplicaSlot, attempt: int) -> None:
        """Delete a job that may have been created."""
        self.handler.delete(job_record(self.resource(replica), attempt, {}))


def job_record(resource: Resource, attempt: int, outputs: Mapping[str, str]) -> StateRecord:
    """A job in the form that handlers and job views take."""
    return StateRecord(
        address=resource.address,
        kind=resource.KIND,
        name=generation_name(resource.name, attempt),
        generation=attempt,
        region=resource.region,
        life=resource.LIFE,
        brought=False,
        settings={name: as_json(value) for name, value in resource.settings().items()},
        outputs=outputs,
        needs=(),
    )


def _ending(job_state: JobState) -> Ending | None:
    if not job_state.over:
        return None
    if job_state.code is not None:
        return ending_from_exit_code(job_state.code, job_state.why)
    # It never ran, or its machine was lost: there is no exit code.
    return Ending(signal=signal.SIGTERM if job_state.stopped else signal.SIGKILL, why=job_state.why)
