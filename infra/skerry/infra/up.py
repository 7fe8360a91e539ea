"""Brings a run up on this machine: takes its lock, fixes run.json, packs and unpacks the code, and supervises.

The same call continues a run that was stopped or crashed. Usable without the command line, in the main thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra import bundle
from skerry.infra.observe.look import Observer
from skerry.infra.policy import Fate, RestartPolicy
from skerry.infra.reports import Summary
from skerry.infra.supervise import Settings, Supervisor
from skerry.infra.targets.local import LocalExecutor, LocalJob
from skerry.infra.workspace import Workspace
from skerry.runtime import keys
from skerry.runtime.errors import Conflict, Corrupt
from skerry.runtime.records import Run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from skerry.infra.reports import Report
    from skerry.infra.spec import SpecFile
    from skerry.infra.view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A run that is ready to be supervised. continued: it was started before. code: digest of the packed code."""

    run: Run
    store: Store
    continued: bool
    code: str
    supervisor: Supervisor
    clock: Clock

    def look(self) -> RunView:
        """One look at the run."""
        return Observer(self.store, self.run, self.clock).look()

    def supervise(self) -> Summary:
        """Run the replicas until each is over; a run that is finished already starts none."""
        began = self.clock.now()
        results = () if self.look().finished else self.supervisor.run()
        ok = all(result.fate is Fate.DONE for result in results)
        return Summary(ok=ok, view=self.look(), results=results, wall_s=self.clock.now() - began)


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
    Raises Conflict if the run is up already or was started from another spec, Invalid if the code cannot be packed.
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
        supervisor = _supervisor(spec, workspace, folder, Observer(store, run, clock), environment, clock, tell, look_s)
        yield Launch(run=run, store=store, continued=continued, code=packed.digest, supervisor=supervisor, clock=clock)


def fix_run(store: Store, spec: SpecFile, clock: Clock) -> tuple[Run, bool]:
    """The run.json of this prefix, written now or before; True if before. Raises Conflict if it says something else."""
    outer, faults = spec.spec.outer, spec.spec.faults
    proposed = Run(
        nonce=clock.nonce(),
        name=spec.spec.run,
        spec=spec.digest(),
        slots=tuple(seat.slot for seat in spec.seats),
        rounds=outer.rounds,
        sync_every=outer.sync_every,
        fragments=outer.fragments,
        outer_lr=outer.lr,
        outer_momentum=outer.momentum,
        min_replicas=faults.min_replicas,
        grace_s=faults.grace.total_seconds(),
        start_window_s=faults.start_window.total_seconds(),
        checkpoint_every=faults.checkpoint_every,
        codec=outer.codec,
        weighting=outer.weighting,
        created=clock.utc_text(),
    )
    if store.create(keys.RUN, proposed.to_bytes()):
        return proposed, False
    found = find_run(store)
    if found is None:
        raise Corrupt(f"{keys.RUN} exists and cannot be read: {store.uri}")
    if found.spec != proposed.spec:
        different = [name for name in _FIXED if getattr(found, name) != getattr(proposed, name)]
        raise Conflict(
            f"run {found.name!r} was started from another spec on {found.created}: {', '.join(different)} differ; "
            "change `run:` to start a new one, or `skerry destroy` to delete the old one"
        )
    return found, True


def find_run(store: Store) -> Run | None:
    """The run that was started under this prefix, if one was."""
    data = store.read(keys.RUN)
    return None if data is None else Run.parse(data, keys.RUN)


_FIXED = (*(name for name in Run.model_fields if name not in {"protocol", "nonce", "spec", "created"}),)


def _supervisor(
    spec: SpecFile,
    workspace: Workspace,
    code: Path,
    observer: Observer,
    environment: Mapping[str, str],
    clock: Clock,
    tell: Callbacks,
    look_s: float,
) -> Supervisor:
    restarts = spec.spec.faults.restarts
    job = LocalJob(run_uri=spec.run_uri, seats=spec.seats, folder=code, environment=environment)
    settings = Settings(
        command=spec.spec.code.command,
        replicas=len(spec.seats),
        min_replicas=spec.spec.faults.min_replicas,
        restarts=RestartPolicy(
            limit=restarts.max, window_s=None if restarts.window is None else restarts.window.total_seconds()
        ),
        look_s=look_s,
    )
    return Supervisor(
        settings,
        lambda on_end: LocalExecutor(job, workspace, on_end),
        observer.look,
        clock,
        on_report=tell.on_report,
        on_view=tell.on_view,
    )
