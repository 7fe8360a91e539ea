"""What executors of clouds have in common: all or none, what an ending is, who is waited for and who is stopped.

A cloud gives the rest: make the job of a seat, look at jobs, stop one, read what it wrote. A job's name ends in its
attempt, which is found by looking at what is there, so nobody has to remember anything.
"""

from __future__ import annotations

import re
import signal
import threading
from abc import abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from skerry.infra import coherence
from skerry.infra.clouds.handling import Absent, each
from skerry.infra.executor import Ending, ReplicaHandle, ending_of_code
from skerry.infra.executors.options import RunOptions
from skerry.infra.graph import as_json, generation_name
from skerry.infra.handler import Made, Wanted
from skerry.infra.placement import LocalTarget
from skerry.infra.target import Ground
from skerry.runtime import contract
from skerry.runtime.clock import Backoff, wait_until
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler
    from skerry.infra.spec import Seat

# A start takes minutes there, and a look costs a call for each job.
_LOOKS: Final = Backoff(first=2.0, cap=30.0)
# As long as what was just made may stay invisible; then it is gone, with its record.
_SHOWN_S: Final = 60.0
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a cloud says of a job. code: None if it says none. stopped: on request. why: in the cloud's own words."""

    over: bool
    code: int | None = None
    stopped: bool = False
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A job by its name, as a listing has it."""

    name: str
    over: bool


@dataclass(kw_only=True)
class CloudExecutor(RunOptions):
    """See ServerlessExecutor; besides, of those in a cloud.

    image: what jobs run; a replica image, or one built on it. Without `code` the command runs in its working folder.
    max_runtime: after that the cloud ends a start. ranks: processes of a replica; None is one for each GPU.
    """

    image: str
    max_runtime: timedelta = _DAY
    ranks: int | None = None
    _mine: set[ReplicaHandle] = field(default_factory=set[ReplicaHandle], init=False, repr=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        """See RunOptions. Raises Invalid for a store that no job reaches."""
        super().__post_init__()
        if self.run.startswith(coherence.FILE):
            raise Invalid(f"no job of a cloud reaches a folder of this machine: {self.run}; write s3:// or gs://")

    def launch_replicas(self, n_replicas: int, entrypoint: str, entrypoint_args: Sequence[str]) -> list[ReplicaHandle]:
        """See ServerlessExecutor. Nothing can be started while one of these slots still runs: raises Conflict."""
        spec = self.described(n_replicas, (entrypoint, *entrypoint_args), LocalTarget(kind="local"))
        visible = self._of_store()
        code = self.founded(spec, {**self.environment, **visible}, packs=True).code
        ground = Ground(spec=spec.spec, run_uri=self.run, image=self.image, code=code or "", seats=spec.seats)
        told = {**visible, **ground.variables(spec.spec.replicas[0]), **self.variables}
        if code is None:
            del told[contract.CODE]
        if self.ranks is not None:
            told[contract.RANKS] = str(self.ranks)
        attempts = self._attempts(ground)
        maker = self._prepared(ground, told)

        def start(seat: Seat) -> ReplicaHandle | SkerryError:
            try:
                attempt = attempts[seat.slot]
                job = maker.create(seat, attempt)
            except SkerryError as error:
                return error
            handle = ReplicaHandle(slot=seat.slot, index=seat.index, attempt=attempt, job=job)
            with self._guard:  # at once: whoever interrupts this may close it
                self._mine.add(handle)
            return handle

        begun = each(start, spec.seats)
        handles = [one for one in begun if isinstance(one, ReplicaHandle)]
        if len(handles) < len(begun):
            self._undo(begun, spec.seats, attempts, maker)
        return handles

    def poll(self, handle: ReplicaHandle) -> Ending | None:
        """See ServerlessExecutor. Raises Invalid if the cloud has no record of it, or not any more."""
        return self._endings([handle])[0]

    def collect(self, handles: Sequence[ReplicaHandle], timeout: timedelta) -> list[Ending]:
        """See ServerlessExecutor. A cloud that is away meanwhile is asked again."""
        known: dict[ReplicaHandle, Ending] = {}
        away: Retryable | None = None

        def ask() -> bool | None:
            nonlocal away
            waited = [one for one in dict.fromkeys(handles) if one not in known]
            try:
                found = self._endings(waited)
            except Retryable as error:
                away = error
                return None
            away = None
            known.update({one: ending for one, ending in zip(waited, found, strict=True) if ending is not None})
            return True if len(known) == len(set(handles)) else None

        try:
            wait_until(self.clock, ask, self.clock.now() + timeout.total_seconds(), _LOOKS)
        except TimeoutError:
            late = ", ".join(one.slot for one in dict.fromkeys(handles) if one not in known)
            if away is not None:
                raise TimeoutError(f"not known to have ended after {timeout}: {late}; {away}") from away
            raise TimeoutError(f"still running after {timeout}: {late}") from None
        return [known[one] for one in handles]

    def logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """See ServerlessExecutor. A cloud tells lines seconds after they were written."""
        self._seen([handle])
        yield from self._lines(handle)

    def cancel(self, handle: ReplicaHandle, *, kill: bool = False) -> None:
        """See ServerlessExecutor. A cloud has one way to stop: it asks, and kills after its own grace."""
        del kill
        (seen,) = self._seen([handle])
        if not seen.over:
            self._stop(handle)

    def close(self) -> None:
        """See ServerlessExecutor. Does not wait for what it has asked to stop."""
        with self._guard:
            mine, self._mine = sorted(self._mine, key=lambda one: one.index), set()

        def stop(handle: ReplicaHandle) -> SkerryError | None:
            try:
                self._stop_begun(handle)
            except SkerryError as error:
                return error
            return None

        if failed := [error for error in each(stop, mine) if error is not None]:
            raise failed[0]

    @abstractmethod
    def _prepared(self, ground: Ground, told: Mapping[str, str]) -> Maker:
        """What makes the jobs of one launch. told: the variables of every replica."""

    @abstractmethod
    def _listed(self, ground: Ground) -> Iterator[Named]:
        """The jobs of this run's names that there are, whatever became of them."""

    @abstractmethod
    def _look(self, jobs: Sequence[str]) -> Sequence[Seen | None]:
        """What became of jobs, in the order asked; None for one of which there is no record."""

    @abstractmethod
    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        """What a job has written."""

    @abstractmethod
    def _stop(self, handle: ReplicaHandle) -> None:
        """Ask a job to stop. One that has ended meanwhile is success. Raises Absent if the cloud does not know it."""

    def _stop_begun(self, handle: ReplicaHandle) -> None:
        """Stop what was made here, and be it unknown at first: a cloud may show a job some time after it was made."""

        def ask() -> bool | None:
            try:
                self._stop(handle)
            except Absent:
                return None
            return True

        try:
            wait_until(self.clock, ask, self.clock.now() + _SHOWN_S, _LOOKS)
        except TimeoutError as error:
            raise Invalid(
                f"{handle.job} was made, and after {_SHOWN_S:.0f} s it is not there to be stopped: look for it in the "
                "cloud's console, for it may run and cost all the same"
            ) from error

    def _of_store(self) -> Mapping[str, str]:
        """What a process needs to open the store besides credentials."""
        return {}

    def _endings(self, handles: Sequence[ReplicaHandle]) -> list[Ending | None]:
        return [_ending(seen) for seen in self._seen(handles)]

    def _seen(self, handles: Sequence[ReplicaHandle]) -> list[Seen]:
        found = self._look([one.job for one in handles])
        for handle, seen in zip(handles, found, strict=True):
            if seen is None:
                raise Invalid(
                    f"no record of {handle.job} ({handle.slot}): never there, or deleted or forgotten since; "
                    f"how it ended may stand in outcomes/{handle.slot}/ of {self.run}"
                )
        return [seen for seen in found if seen is not None]

    def _attempts(self, ground: Ground) -> Mapping[str, int]:
        """The next attempt of each slot. Raises Conflict if one of them still runs."""
        pattern = re.compile(rf"{re.escape(ground.stem)}-({re.escape(self.slots)}-\d+)(?:-g(\d+))?")
        found = {seat.slot: 0 for seat in ground.seats}
        live: set[str] = set()
        for one in self._listed(ground):
            match = pattern.fullmatch(one.name)
            if match is None or match[1] not in found:
                continue
            found[match[1]] = max(found[match[1]], int(match[2] or 0) + 1)
            if not one.over:
                live.add(match[1])
        if live:
            raise Conflict(f"still running: {', '.join(sorted(live, key=list(found).index))}; cancel or collect them")
        return found

    def _undo(
        self,
        begun: Sequence[ReplicaHandle | SkerryError],
        seats: Sequence[Seat],
        attempts: Mapping[str, int],
        maker: Maker,
    ) -> None:
        """Stop what was started, also what may have been; raise the first cause."""
        causes = [one for one in begun if isinstance(one, SkerryError)]
        for one, seat in zip(begun, seats, strict=True):
            try:
                if isinstance(one, ReplicaHandle):
                    self._stop_begun(one)
                elif isinstance(one, Retryable):
                    maker.forget(seat, attempts[seat.slot])
            except SkerryError as error:
                causes[0].add_note(f"{seat.slot} may still run: {error}")
        raise causes[0]


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Makes the jobs of one launch. resource: of a seat. output: by which of its outputs a handle names a job."""

    handler: Handler
    resource: Callable[[Seat], Resource]
    output: str
    run: str

    def create(self, seat: Seat, attempt: int) -> str:
        """Make a job, once; its name in handles."""
        resource = self.resource(seat)
        wanted = Wanted(resource=resource, generation=attempt, run=self.run, settings=resource.settings())
        return self.handler.create(wanted)[self.output]

    def forget(self, seat: Seat, attempt: int) -> None:
        """End a job of which nobody knows whether it was made."""
        self.handler.delete(made_of(self.resource(seat), attempt, {}))


def made_of(resource: Resource, attempt: int, outputs: Mapping[str, str]) -> Made:
    """A job as those who look at jobs and read their logs want it told."""
    return Made(
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


def _ending(seen: Seen) -> Ending | None:
    if not seen.over:
        return None
    if seen.code is not None:
        return ending_of_code(seen.code, seen.why)
    # It never ran, or its machine is gone: nobody says a code.
    return Ending(signal=signal.SIGTERM if seen.stopped else signal.SIGKILL, why=seen.why)
