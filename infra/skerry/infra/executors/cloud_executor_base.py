"""Base class of the executors in clouds: launches all replicas or none, polls, collects, cancels; keeps no state.

A subclass says which options of a target its own are, and describes a job by the target's code; the target creates,
reads and stops it. A job's name ends in its attempt number: the next attempt follows from the jobs that are listed.
"""

from __future__ import annotations

import re
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Final, TypeVar, cast

from pydantic import ValidationError

from skerry.infra import targets
from skerry.infra.clouds.handler_helpers import Absent, each
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.executors.options import RunOptions, problems_of
from skerry.infra.provision.graph import Life
from skerry.infra.provision.handler import Condition, Desired, StateRecord
from skerry.infra.provision.target_and_store_interfaces import RunContext
from skerry.infra.run.executor import Ending, ReplicaHandle, ending_from_exit_code, seconds_of
from skerry.infra.spec import store_uri
from skerry.infra.spec.target_kinds import TargetOptions
from skerry.infra.targets.shared.job_view_helpers import AGAIN, DOCTOR, UNKNOWN
from skerry.runtime import contract
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import JobHandler
    from skerry.infra.provision.target_and_store_interfaces import JobView, Target
    from skerry.infra.run.executor import EntrypointArguments
    from skerry.infra.spec.model import ReplicaSlot

T = TypeVar("T", bound=TargetOptions)

# A start takes minutes, and each poll costs a call per job.
_POLLS: Final = Backoff(first=2.0, cap=30.0)
# A new job may stay invisible for this long; after that it does not exist.
_VISIBLE_S: Final = 60.0
_DAY: Final = timedelta(days=1)
# Where no region is named: an endpoint of AWS that answers for every bucket.
_ANY_REGION: Final = "us-east-1"


@dataclass(kw_only=True)
class CloudExecutor(RunOptions):
    """A ServerlessExecutor in a cloud; see also RunOptions.

    image: a replica image, or one built on it. Without `code` the command runs in its working folder.
    max_runtime: the cloud ends a job after this time. ranks: processes of a replica; None is one for each GPU.
    """

    POLLS: ClassVar[Backoff] = _POLLS
    IN_CLOUD: ClassVar[bool] = True
    """False if its jobs may reach a folder of this machine."""
    TELLS_REGION: ClassVar[bool] = True
    """True if a variable of its jobs holds the region of a bucket in S3; clients sign requests for that region."""
    OUTPUT: ClassVar[str] = "id"
    """The output of a job that names it in handles; where it is absent, the job's name does."""
    NAMES: ClassVar[Mapping[str, str]] = {}
    """Options of the target that have another name here, with that name."""

    image: str
    max_runtime: timedelta = _DAY
    ranks: int | None = None
    _launched: set[ReplicaHandle] = field(default_factory=set[ReplicaHandle], init=False, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _options: TargetOptions = field(init=False, repr=False)
    _access: OperatorAccess = field(init=False, repr=False)
    _target: Target = field(init=False, repr=False)
    _jobs: JobHandler = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions. Raises Invalid, with every problem, for options that a spec could not have."""
        super().__post_init__()
        try:
            self._options = self._as_target()
        except ValidationError as error:
            raise Invalid(f"{type(self).__name__} cannot take this: {problems_of(error, self.NAMES)}") from error
        groups = (self.group_of(1, self._options),)
        self._access = OperatorAccess(self.clock, self.environment, groups=groups)
        self._target = targets.open_target(self._options.kind, self._access)
        self._jobs = cast("JobHandler", self._target.handlers()[self._target.job_kind])

    def _set_run(self, uri: str) -> None:
        super()._set_run(uri)
        if self.IN_CLOUD and self.run.startswith(store_uri.FILE):
            raise Invalid(f"jobs in a cloud cannot reach a folder of this machine: {self.run}; write s3:// or gs://")

    def launch_replicas(
        self, n_replicas: int, entrypoint: str, entrypoint_args: EntrypointArguments = ()
    ) -> list[ReplicaHandle]:
        """See ServerlessExecutor."""
        command = self.read_entrypoint(entrypoint, entrypoint_args).command
        spec = self.spec_for(n_replicas, command, self._options)
        store_variables = self._store_variables()
        code = self.prepare(spec, {**self.environment, **store_variables}, pack_code=True).code
        context = RunContext(
            spec=spec.spec, run_uri=self.run, image=self.image, code=code or "", replica_slots=spec.replica_slots
        )
        variables = {
            **store_variables,
            **context.variables(spec.spec.replicas[0]),
            contract.REPLICAS: str(n_replicas),
            **self.variables,
        }
        if code is None:
            del variables[contract.CODE]
        if self.ranks is not None:
            variables[contract.RANKS] = str(self.ranks)
        attempts = self._next_attempts(context)
        creator = JobCreator(self._jobs, self._describe(context, variables), self.OUTPUT, self.run)

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
        self._views([handle])
        for line in self._target.logs(self._record(handle.job), None):
            yield line.text

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor. A cloud has one way to stop: SIGTERM, then SIGKILL after its own grace."""
        del kill
        (view,) = self._views([handle])
        if not _is_over(view):
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

    def read_jobs(self, jobs: Sequence[str]) -> Sequence[JobView | None]:
        """The target's views of jobs, in the order given; None for a job without record."""
        views = self._target.jobs([self._record(job) for job in jobs])
        return [None if view.state == UNKNOWN else view for view in views]

    def stop_job(self, handle: ReplicaHandle) -> None:
        """Ask a job to stop; succeeds if it has ended. Raises Absent if the cloud does not know it."""
        self._jobs.stop(self._record(handle.job))

    @abstractmethod
    def _as_target(self) -> TargetOptions:
        """The options of the target that are these. Raises ValidationError for others."""

    @abstractmethod
    def _describe(self, context: RunContext, variables: Mapping[str, str]) -> Callable[[ReplicaSlot], Resource]:
        """Describes the jobs of one launch, by replica. variables: of every replica; each has its own in addition."""

    def _options_of(self, kind: type[T], **own: object) -> T:
        """The options of a target that have the same names here. own: those of other names or forms."""
        shared = {name: getattr(self, name) for name in kind.model_fields if hasattr(self, name)}
        values = {**shared, "kind": kind.name(), **own}
        for name, value in values.items():
            if isinstance(value, timedelta):
                values[name] = f"{value.total_seconds():.0f}s"
        return kind.model_validate(values)

    def _record(self, job: str) -> StateRecord:
        """A job in the form that its target takes. job: as handles have it."""
        kind = self._target.job_kind
        return StateRecord(
            address=f"{kind}.{job}",
            kind=kind,
            name=job,
            generation=0,
            region=getattr(self._options, "region", ""),
            life=Life.JOB,
            brought=False,
            # Without its run, which the first launch may name, a job is read by its own name.
            settings={"environment": {contract.RUN_URI: self.run}} if self.run else {},
            outputs={self.OUTPUT: job},
            needs=(),
        )

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
        bucket = self.run.removeprefix("s3://").partition("/")[0]
        if not self.TELLS_REGION or not self.run.startswith("s3://"):
            return {}
        region = self.variables.get("AWS_REGION")
        if region is None:
            known = self.environment.get("AWS_REGION", _ANY_REGION)
            near = getattr(self._options, "region", known) if self._options.CLOUD == "aws" else known
            region = str(self._access.aws.call("s3", near, "head_bucket", Bucket=bucket).get("BucketRegion") or near)
        return {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}

    def _endings(self, handles: Sequence[ReplicaHandle]) -> list[Ending | None]:
        return [ending_of(view) for view in self._views(handles)]

    def _views(self, handles: Sequence[ReplicaHandle]) -> list[JobView]:
        views = self.read_jobs([handle.job for handle in handles])
        for handle, view in zip(handles, views, strict=True):
            if view is None:
                raise Invalid(
                    f"no record of {handle.job} ({handle.slot}): it never existed, or the cloud has deleted its "
                    f"record; look for its ending in outcomes/{handle.slot}/ of {self.run or 'its run'}"
                )
        return [view for view in views if view is not None]

    def _next_attempts(self, context: RunContext) -> Mapping[str, int]:
        """The next attempt of each slot. Raises Conflict if a job of one of them still runs."""
        pattern = re.compile(rf"{re.escape(context.stem)}-({re.escape(self.slots)}-\d+)(?:-g(\d+))?")
        attempts = {replica.slot: 0 for replica in context.replica_slots}
        live: set[str] = set()
        for job in self._jobs.names(self._record(""), self.run):
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


@dataclass(frozen=True)
class JobCreator:
    """Creates the jobs of one launch. resource: of a replica. output: the job's output that names it in handles."""

    handler: JobHandler
    resource: Callable[[ReplicaSlot], Resource]
    output: str
    run: str

    def create(self, replica: ReplicaSlot, attempt: int) -> str:
        """Create a job, once; its name for handles."""
        desired = self._desired(replica, attempt)
        return self.handler.create(desired).get(self.output, desired.name)

    def delete(self, replica: ReplicaSlot, attempt: int) -> None:
        """Delete a job that may have been created."""
        self.handler.delete(self._desired(replica, attempt).to_record({}))

    def _desired(self, replica: ReplicaSlot, attempt: int) -> Desired:
        resource = self.resource(replica)
        return Desired(resource=resource, generation=attempt, run=self.run, settings=resource.settings())


def _is_over(view: JobView) -> bool:
    return view.condition is not Condition.READY and not view.stopping


def ending_of(view: JobView) -> Ending | None:
    """The ending that a view shows, without the commands that need a spec; None while the job may run."""
    if not _is_over(view):
        return None
    why = view.why.replace(f"; {AGAIN}", "").replace(f"; {DOCTOR}", "")  # commands for a spec
    if view.exit_code is not None:
        return ending_from_exit_code(view.exit_code, why)
    # It never ran, or its machine was lost: there is no exit code.
    return Ending(signal=signal.SIGTERM if view.stopped else signal.SIGKILL, why=why)
