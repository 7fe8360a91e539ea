"""Starts or continues a run on this machine: locks it, writes run.json, packs and unpacks the code, and supervises.

Usable without the command line, in the main thread.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.local.container_starts import ContainerOptions, ContainerStarts, engine_for
from skerry.infra.local.process_starts import ProcessOptions, ProcessStarts
from skerry.infra.local.record_killed_replicas import EndingRecorder
from skerry.infra.local.replica_env_secrets_and_data import read_inputs
from skerry.infra.local.supervisor import Settings, Supervisor, stop_on_signals
from skerry.infra.local.up_destroy_events import ReplicaRestarting, ReplicaResult, RoundsMissed, Summary
from skerry.infra.local.workspace import Workspace, operator_name
from skerry.infra.observe.digests_agree import digests_equal
from skerry.infra.observe.history import read_history
from skerry.infra.observe.live_replicas import live_replicas, shown
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_participation import ParticipationFollower, participation_of
from skerry.infra.run import code_archive
from skerry.infra.run.change_run_settings import expect_slots
from skerry.infra.run.restart_policy import ReplicaFate, policy_from_spec
from skerry.infra.run.run_record import (
    check_not_lost,
    check_same_run,
    create_or_load_run,
    load_run,
    load_settings,
    require_settings,
)
from skerry.infra.spec.model import ReplicaSlot
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Conflict, Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from skerry.infra.local.replica_env_secrets_and_data import ReplicaInputs
    from skerry.infra.local.replica_starts import AnyStarts
    from skerry.infra.local.up_destroy_events import Event
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.run.executor import Ending, ReplicaHandle
    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.clock import Clock
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


# A read of the store that takes longer is reported as a failure; replicas have their own timeouts.
_READ_DEADLINE_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run that is ready to be supervised. continued: it was started before. code: digest of the packed code.

    note: on files that git does not track, for people. read_view: the current view, read by an observer of its own.
    """

    run: Run
    store: Store
    continued: bool
    code: str
    note: str | None = None
    supervisor: Supervisor
    read_view: Callable[[], RunView]
    clock: Clock
    finish: Callable[[], None] = lambda: None

    def supervise(self) -> Summary:
        """Run the replicas until each has ended for good; none if the run is finished already. Main thread only.

        While they run, signals stop them cleanly (see `stop_on_signals`). The views before and after can be
        interrupted; without the last one the summary has the previous view.
        """
        began = self.clock.now()
        view, unseen = self.read_view(), None
        if view.finished:
            return self._summary(view, ok=True, wall_s=self.clock.now() - began)
        with stop_on_signals(self.supervisor):
            results = self.supervisor.run(view)
        try:
            self.finish()
            view = self.read_view()
        except (SkerryError, KeyboardInterrupt) as error:
            view, unseen = self.supervisor.last_view or view, in_short(error)
        endless = self.run.rounds is None and all(result.fate is ReplicaFate.DONE for result in results)
        wall_s = self.clock.now() - began
        return self._summary(view, results, ok=view.finished or endless, wall_s=wall_s, unseen=unseen)

    def _summary(
        self,
        view: RunView,
        results: tuple[ReplicaResult, ...] = (),
        *,
        ok: bool,
        wall_s: float,
        unseen: str | None = None,
    ) -> Summary:
        """Add what the history shows, if it can be read."""
        summary = Summary(ok=ok, view=view, results=results, wall_s=wall_s, unseen=unseen)
        try:
            history = read_history(self.store)
        except (SkerryError, KeyboardInterrupt):  # the summary shows it as unknown
            return summary
        equal = digests_equal(history.rounds, view.closed)
        return replace(summary, digests_equal=equal, participation=participation_of(history))


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Receivers of events and views; called in the thread of `supervise`."""

    on_event: Callable[[Event], None]
    on_view: Callable[[RunView], None]


def refuse_take_over(text: str) -> None:
    """Raise Conflict with the description of live replicas."""
    raise Conflict(f"{text}; stop them there first")


@dataclass(frozen=True, kw_only=True)
class ChangedSlots:
    """The slots that a run expects since a change."""

    slots: tuple[str, ...]
    ok: bool = True


def change_running(spec: SpecFile, clock: Clock) -> ChangedSlots | None:
    """Store the slots of the spec if the run is up on this machine and expects others.

    The `up` that supervises the run then starts and stops replicas, each with the code of its own start. None if the
    run is not up here, expects these slots, or would need a group that it has not had. Raises Invalid if the run was
    started from another spec.
    """
    store = open_store(spec.run_uri, clock=clock, deadline_s=_READ_DEADLINE_S)
    settings = None if Workspace(spec.work_folder).lock_holder() is None else load_settings(store)
    if settings is None:
        return None
    check_same_run(settings, spec, clock)
    slots = [replica.slot for replica in spec.replica_slots]
    if set(slots) == set(settings.now.slots) or not {_group(slot) for slot in slots} <= {
        _group(slot) for slot in settings.now.slots
    }:
        return None
    now, by = clock.utc_text(), operator_name()
    return ChangedSlots(slots=expect_slots(store, settings, slots, removes=True, by=by, now=now))


def _group(slot: str) -> str:
    return slot.rpartition("-")[0]


def _check_limits(spec: SpecFile) -> None:
    """Raise Invalid if a mirror of a new run has a limit, which could not be kept."""
    for line in spec.mirrors.values():
        if line.max_usd is not None:
            index = spec.spec.replication.index(line)
            raise Invalid(
                f"max_usd of {line.to} cannot be enforced: the price of a GB from this machine is unknown; remove it "
                f"({spec.written.place(('replication', index, 'max_usd'))})"
            )


@contextlib.contextmanager
def launch(
    spec: SpecFile,
    environment: Mapping[str, str],
    clock: Clock,
    callbacks: Callbacks,
    *,
    poll_s: float = 1.0,
    ask_take_over: Callable[[str], None] = refuse_take_over,
) -> Generator[LocalRun]:
    """Prepare a run and hold its lock on this machine until the context ends; `supervise` starts the replicas.

    spec: checked by `preflight.load`. environment: inherited by replicas. poll_s: seconds between reads of the store.
    ask_take_over: called with a description if replicas of the run are at work that were not started from this folder;
    it returns to take over their slots, which ends them, and raises an error otherwise. Raises Conflict if the run is
    up already; Invalid if it was started from another spec, if only a mirror has it, if a mirror has a limit, if the
    code cannot be packed, or if a secret's variable or a folder of data does not exist.
    """
    inputs = read_inputs(spec, environment)
    packed = code_archive.pack(spec.code_path)
    store = open_store(spec.run_uri, clock=clock)
    workspace = Workspace(spec.work_folder)
    with workspace.locked():
        workspace.kill_leftovers()
        run, continued, settings = _create_or_continue(store, spec, clock, ask_take_over)
        workspace.uri_file.write_text(spec.run_uri)
        store.create(keys.code(packed.digest), packed.data)
        if not (folder := workspace.code_folder(packed.digest)).exists():
            code_archive.unpack(packed.data, packed.digest, folder)
        polled = open_store(spec.run_uri, clock=clock, deadline_s=_READ_DEADLINE_S)
        endings = EndingRecorder(polled, run, clock)
        observer = Observer(polled, settings, clock, read_history(polled) if continued else None)
        follower = ParticipationFollower(observer, is_new=not continued)
        expected = {replica.slot for replica in spec.replica_slots}

        def look() -> RunView:
            endings.write()
            view = observer.view()
            if expected != set(observer.slots):
                expected.clear()
                expected.update(observer.slots)
                supervisor.expect(_replicas_of(spec, observer.slots, inputs))
            for text in follower.look():
                supervisor.report(RoundsMissed(text=text))
            return view

        def finish() -> None:
            endings.write()
            observer.view()
            observer.view()  # with the receipts of the rounds that the first one has found closed
            for text in follower.look():
                callbacks.on_event(RoundsMissed(text=text))

        supervisor = _supervisor(
            spec,
            _starts_for(spec, workspace, packed.digest, environment, inputs),
            look,
            clock,
            Callbacks(on_event=_noting(endings, callbacks.on_event), on_view=callbacks.on_view),
            poll_s,
        )
        yield LocalRun(
            run=run,
            store=store,
            continued=continued,
            code=packed.digest,
            note=packed.note,
            supervisor=supervisor,
            read_view=lambda: Observer(polled, settings, clock, read_history(polled)).view(),
            clock=clock,
            finish=finish,
        )


def _create_or_continue(
    store: Store, spec: SpecFile, clock: Clock, ask_take_over: Callable[[str], None]
) -> tuple[Run, bool, RunSettings]:
    """The run, True if it was there before, and its settings, with the slots of the spec. See `launch`."""
    if spec.mirrors and load_run(store) is None:
        _check_limits(spec)
        check_not_lost(spec, lambda uri: open_store(uri, clock=clock, deadline_s=_READ_DEADLINE_S))
    run, continued = create_or_load_run(store, spec, clock)
    settings = require_settings(store)
    if continued:
        slots = [replica.slot for replica in spec.replica_slots]
        # Those of this folder are dead by now: its lock is held, and what was left over is killed. Also of those that
        # the spec does not have, because they are removed from the run.
        if live := live_replicas(store, run, clock, {*slots, *run.slots}):
            ask_take_over(f"run {run.name} is live, and not by this folder: {shown(live)}")
        expect_slots(store, settings, slots, removes=True, by=operator_name(), now=clock.utc_text())
    return run, continued, settings


def _replicas_of(spec: SpecFile, slots: Sequence[str], inputs: dict[str, ReplicaInputs]) -> tuple[ReplicaSlot, ...]:
    """The replicas with these slots, as far as the spec has their groups. inputs: gets those of new slots."""
    targets = {group.name: group.target for group in spec.spec.replicas}
    known = [(index, slot) for index, slot in enumerate(slots) if _group(slot) in targets]
    for _, slot in known:
        inputs.setdefault(slot, inputs[f"{_group(slot)}-0"])
    return tuple(ReplicaSlot(slot=slot, index=index, target=targets[_group(slot)]) for index, slot in known)


def _noting(endings: EndingRecorder, on_event: Callable[[Event], None]) -> Callable[[Event], None]:
    """`on_event`, which also passes the ends of replicas to the recorder."""

    def report(event: Event) -> None:
        if isinstance(event, (ReplicaRestarting, ReplicaResult)) and event.ending is not None:
            endings.note(event.slot, event.ending, event.last_line)
        on_event(event)

    return report


def _starts_for(
    spec: SpecFile,
    workspace: Workspace,
    code: str,
    environment: Mapping[str, str],
    inputs: dict[str, ReplicaInputs],
) -> Callable[[Callable[[ReplicaHandle, Ending], None]], AnyStarts]:
    """The constructor of the replica starts for this spec's target."""
    if spec.replica_slots[0].target.kind == "docker":
        image = spec.spec.image or ""  # the consistency check requires one
        engine = engine_for(image)
        docker = ContainerOptions(
            run_uri=spec.run_uri,
            run=spec.spec.run,
            replicas=spec.replica_slots,
            image=image,
            code=code,
            environment=environment,
            inputs=inputs,
        )
        return lambda on_end: ContainerStarts(docker, workspace, on_end, engine)
    folder = workspace.code_folder(code)
    local = ProcessOptions(
        run_uri=spec.run_uri,
        replicas=spec.replica_slots,
        folder=folder,
        environment=environment,
        code=code,
        inputs=inputs,
    )
    return lambda on_end: ProcessStarts(local, workspace, on_end)


def _supervisor(
    spec: SpecFile,
    starts: Callable[[Callable[[ReplicaHandle, Ending], None]], AnyStarts],
    read_view: Callable[[], RunView],
    clock: Clock,
    callbacks: Callbacks,
    poll_s: float,
) -> Supervisor:
    settings = Settings(
        command=spec.spec.code.command,
        replicas=len(spec.replica_slots),
        min_replicas=spec.spec.faults.min_replicas,
        restarts=policy_from_spec(spec.spec.faults.restarts),
        poll_s=poll_s,
    )
    return Supervisor(
        settings,
        starts,
        read_view,
        clock,
        on_event=callbacks.on_event,
        on_view=callbacks.on_view,
    )
