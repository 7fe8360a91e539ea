"""Brings a run up on this machine: takes its lock, fixes run.json, packs and unpacks the code, and supervises.

The same call continues a run that was stopped or crashed. Usable without the command line, in the main thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra import bundle
from skerry.infra.errors import in_short
from skerry.infra.founding import fix_run
from skerry.infra.observe.agreeing import digests_equal
from skerry.infra.observe.look import Observer
from skerry.infra.policy import Fate, policy_of
from skerry.infra.reports import Summary
from skerry.infra.supervise import Settings, Supervisor, stopped_by_signals
from skerry.infra.targets.docker import DockerExecutor, DockerJob, engine_for
from skerry.infra.targets.local import LocalExecutor, LocalJob
from skerry.infra.workspace import Workspace
from skerry.runtime import keys
from skerry.runtime.errors import SkerryError
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from skerry.infra.executor import Ending, ReplicaHandle
    from skerry.infra.reports import Report
    from skerry.infra.spec import SpecFile
    from skerry.infra.supervise import Replicas
    from skerry.infra.view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.records import Run
    from skerry.runtime.store import Store


# A look that takes longer is told as lost sight of the store; the replicas' own patience is the runtime's.
_LOOK_DEADLINE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is ready to be supervised. continued: it was started before. code: digest of the packed code.

    look: one look at the run, by an observer of its own.
    """

    run: Run
    store: Store
    continued: bool
    code: str
    supervisor: Supervisor
    look: Callable[[], RunView]
    clock: Clock

    def supervise(self) -> Summary:
        """Run the replicas until each is over; a run that is finished already starts none. Main thread only.

        While they run, signals stop them cleanly (see `stopped_by_signals`). The looks before and after can be
        interrupted; without the last one the summary holds what was seen before.
        """
        began = self.clock.now()
        view, unseen = self.look(), None
        if view.finished:
            return Summary(
                ok=True, view=view, results=(), wall_s=self.clock.now() - began, digests_equal=self._digests_equal(view)
            )
        with stopped_by_signals(self.supervisor):
            results = self.supervisor.run(view)
        try:
            view = self.look()
        except (SkerryError, KeyboardInterrupt) as error:
            view, unseen = self.supervisor.last_view or view, in_short(error)
        endless = self.run.rounds is None and all(result.fate is Fate.DONE for result in results)
        wall_s = self.clock.now() - began
        return Summary(
            ok=view.finished or endless,
            view=view,
            results=results,
            wall_s=wall_s,
            unseen=unseen,
            digests_equal=self._digests_equal(view),
        )

    def _digests_equal(self, view: RunView) -> bool | None:
        try:
            return digests_equal(self.store, view.closed)
        except (SkerryError, KeyboardInterrupt):  # the summary says what is known
            return None


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Who is told what happens; both are called in the thread of `supervise`."""

    on_report: Callable[[Report], None]
    on_view: Callable[[RunView], None]


@contextlib.contextmanager
def launch(
    spec: SpecFile, environment: Mapping[str, str], clock: Clock, tell: Callbacks, *, look_s: float = 1.0
) -> Generator[Launch]:
    """Everything but the start of the replicas; holds the run's lock on this machine until the context ends.

    spec: checked by `preflight.load`. environment: what replicas inherit. look_s: seconds between looks at the store.
    Raises Conflict if the run is up already, Invalid if it was started from another spec or the code cannot be packed.
    """
    packed = bundle.pack(spec.code_path)
    store = open_store(spec.run_uri, clock=clock)
    workspace = Workspace(spec.work_folder)
    with workspace.alone():
        workspace.end_leftovers()
        run, continued = fix_run(store, spec, clock)
        store.create(keys.code(packed.digest), packed.data)
        folder = workspace.code_folder(packed.digest)
        if not folder.exists():
            bundle.unpack(packed.data, packed.digest, folder)
        watched = open_store(spec.run_uri, clock=clock, deadline_s=_LOOK_DEADLINE_S)
        yield Launch(
            run=run,
            store=store,
            continued=continued,
            code=packed.digest,
            supervisor=_supervisor(
                spec,
                _executor(spec, workspace, packed.digest, environment),
                Observer(watched, run, clock),
                clock,
                tell,
                look_s,
            ),
            look=lambda: Observer(watched, run, clock).look(),
            clock=clock,
        )


def _executor(
    spec: SpecFile, workspace: Workspace, code: str, environment: Mapping[str, str]
) -> Callable[[Callable[[ReplicaHandle, Ending], None]], Replicas]:
    """Where the replicas of this spec run: every target has its line here."""
    if spec.seats[0].target.kind == "docker":
        image = spec.spec.image or ""  # coherence has seen to it that there is one
        engine = engine_for(image)
        docker = DockerJob(
            run_uri=spec.run_uri,
            run=spec.spec.run,
            seats=spec.seats,
            image=image,
            code=code,
            environment=environment,
        )
        return lambda on_end: DockerExecutor(docker, workspace, on_end, engine)
    folder = workspace.code_folder(code)
    local = LocalJob(run_uri=spec.run_uri, seats=spec.seats, folder=folder, environment=environment)
    return lambda on_end: LocalExecutor(local, workspace, on_end)


def _supervisor(
    spec: SpecFile,
    executor: Callable[[Callable[[ReplicaHandle, Ending], None]], Replicas],
    observer: Observer,
    clock: Clock,
    tell: Callbacks,
    look_s: float,
) -> Supervisor:
    settings = Settings(
        command=spec.spec.code.command,
        replicas=len(spec.seats),
        min_replicas=spec.spec.faults.min_replicas,
        restarts=policy_of(spec.spec.faults.restarts),
        look_s=look_s,
    )
    return Supervisor(
        settings,
        executor,
        observer.look,
        clock,
        on_report=tell.on_report,
        on_view=tell.on_view,
    )
