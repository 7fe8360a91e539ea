"""`skerry-replica run`: starts the training script in a container, and ends the container when the script ends.

1. change the owner of the platform's folders, then drop root
2. determine the slot: contract, hyperparameters, the platform's numbers; run.json
3. fetch the code by its digest, and unpack it into a fresh folder; fetch the job's secrets
4. run the script, with torchrun if there are several GPUs; only its environment holds the secrets. Where the ranks keep
   copies of their state, run it again if one is lost: the copies are lost with the container
5. where the run has `failover`, go on in another store once this one is lost (`failover_watch`)
6. where the group has `revive: peers`, start its lost jobs again beside the script (`peer_watch`)
7. write the outcome record and SageMaker's failure file; return the exit code
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from skerry.runtime.container import hardware
from skerry.runtime.container.code_archive import fetch
from skerry.runtime.container.failover_watch import OutOfTimeError, StoreWatch, find_run
from skerry.runtime.container.identify_replica import ML, detect_job, read_settings, resolve_contract
from skerry.runtime.container.outcome import (
    OUT_OF_TIME,
    ExitDecision,
    OutcomeRecorder,
    decide_exit,
    decide_exit_for_error,
    stopped_by_signal,
    time_limit,
    write_failure_file,
)
from skerry.runtime.container.peer_watch import PeerWatch, watch_peers
from skerry.runtime.container.privileges import drop_privileges
from skerry.runtime.container.process_tree import NotStarted, ProcessTree
from skerry.runtime.container.secrets import fetch_secrets
from skerry.runtime.container.write_identity_token_file import write_token_file
from skerry.runtime.contract import CODE, FAILOVER, STOP_BUDGET_S, ExitCode
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.log.installed_versions import read_software
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.log.setting_changes import RunSettings
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.container.identify_replica import Job, ReplicaSettings
    from skerry.runtime.contract import Contract
    from skerry.runtime.log.records import Outcome
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

T = TypeVar("T")

ALIVE: Final = "SKERRY_ALIVE"
"""A file that this process touches regularly; the container's health check looks at its age."""
LEASH: Final = "SKERRY_LEASH"
"""stdin: end all processes when standard input is closed."""
_PYTHON: Final = ("python", "python3")
# STOP_BUDGET_S belongs to the training script; the rest of a platform's 30 s is for the outcome record.
_OUTCOME_S: Final = 3.0
PERMISSIONS_TIMEOUT_S: Final = 120.0
"""New roles, pools and permissions take effect within a minute or two, by the guides of AWS and Google."""
_PERMISSIONS_POLL_S: Final = 5.0
# A process that is lost again and again has a cause that a new container may lack, such as a broken GPU.
_RESTARTS: Final = 3
# A longer word of a command is a script itself and would clutter the log's first line.
_MAX_LOGGED_WORD: Final = 120


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Everything needed to start the command. until: the run's limit, by clock.now(). secrets: by variable.

    watch: of the run's store, where the run has failover. peers: of the group, where its replicas revive each other.
    early_end: this job must not run its command. has_copies: the ranks keep copies of their state on this machine.
    """

    contract: Contract
    recorder: OutcomeRecorder
    folder: Path
    until: float | None
    secrets: Mapping[str, str] = field(repr=False)
    watch: StoreWatch | None
    peers: PeerWatch | None
    early_end: ExitDecision | None
    has_copies: bool = False


@dataclass(frozen=True, kw_only=True)
class _NotPrepared:
    """A failure after the slot was determined, so that it can be recorded."""

    recorder: OutcomeRecorder
    error: SkerryError


def run(arguments: Sequence[str], environment: dict[str, str], clock: Clock, ml: Path = ML) -> ExitCode:
    """Run the replica that `environment` describes, to its end. arguments: a command that wins over SKERRY_COMMAND.

    Main thread only, and once: it takes over the signals of this process. environment: is changed.
    """
    alive = environment.get(ALIVE)
    try:
        for line in drop_privileges(environment, ml):
            _log(line)
        write_token_file(environment)
        tree = ProcessTree(clock, stop_s=STOP_BUDGET_S, alive=None if not alive else Path(alive))
        if environment.get(LEASH) == "stdin":
            tree.leash(0)
        job = detect_job(environment, ml)
        settings = read_settings(environment, arguments, ml)
        if settings.code is not None:  # SageMaker may have given it as a parameter
            environment[CODE] = settings.code
    except SkerryError as error:
        return _end(decide_exit_for_error(error), None, ml)
    _log(f"{job}; {_resources(environment)}")
    with tempfile.TemporaryDirectory(prefix="skerry-", ignore_cleanup_errors=True) as work:
        attempts = _Attempts(settings, job, environment, tree, clock)
        try:
            ended = attempts.run(Path(work))
        except OutOfTimeError:
            ended = _Ended(decision=OUT_OF_TIME, recorder=attempts.recorder)
        except (_StoppedError, SkerryError) as error:
            stopped = isinstance(error, _StoppedError)
            ended = _Ended(
                decision=stopped_by_signal(" before it was started") if stopped else decide_exit_for_error(error)
            )
        return _end(ended.decision, ended.recorder, ml)


class _StoppedError(Exception):
    """A stop was requested while a store was asked."""


def _at(settings: ReplicaSettings, uri: str | None) -> ReplicaSettings:
    if uri is None:
        raise _StoppedError
    if uri != settings.run_uri:
        _log(f"the run goes on at {uri}")
    return replace(settings, run_uri=uri)


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """The end of one attempt. watch: of a run with failover, whose store may be lost.

    is_store_in_doubt: it ended before the command, by an error that a store that is away may have caused. can_restart:
    the command was lost, and copies of its state are on this machine.
    """

    decision: ExitDecision
    recorder: OutcomeRecorder | None = None
    watch: StoreWatch | None = None
    is_store_in_doubt: bool = False
    can_restart: bool = False


def _failed(error: SkerryError, recorder: OutcomeRecorder | None) -> _Ended:
    in_doubt = isinstance(error, Retryable | Unauthorized)
    return _Ended(decision=decide_exit_for_error(error), recorder=recorder, is_store_in_doubt=in_doubt)


class _Attempt:
    """The command, prepared and run at one URI."""

    def __init__(
        self,
        settings: ReplicaSettings,
        job: Job,
        environment: Mapping[str, str],
        tree: ProcessTree,
        clock: Clock,
        earlier: OutcomeRecorder | None = None,
    ) -> None:
        """earlier: of an attempt at the same URI."""
        self._settings, self._job, self._environment = settings, job, environment
        self._tree, self._clock, self._earlier = tree, clock, earlier

    def run(self, work: Path) -> _Ended:
        """To its end. Raises _StoppedError if a stop is requested before it has begun."""
        recorder: OutcomeRecorder | None = None
        settings, tree, clock = self._settings, self._tree, self._clock
        try:
            prepared = tree.prepare(
                lambda: _prepare(settings, self._job, self._environment, work, clock, self._earlier)
            )
            if prepared is None:
                raise _StoppedError
            recorder = prepared.recorder
            if isinstance(prepared, _NotPrepared):
                return _failed(prepared.error, recorder)
            if prepared.early_end is not None:
                return _Ended(decision=prepared.early_end, recorder=recorder)
            if (watch := prepared.watch) is not None:
                uri = tree.prepare(watch.await_store)
                if uri != settings.run_uri:
                    self._settings, self._earlier = _at(settings, uri), None
                    return self.run(Path(tempfile.mkdtemp(dir=work)))
            command = command_of(settings, hardware.count_gpus(self._environment))
            command_environment = _command_environment(self._environment, prepared, command.ranks)
            _log(f"{prepared.contract.slot} of {prepared.contract.replicas}: {command}")
            tree.forget_interrupt()
            with contextlib.ExitStack() as watches:
                if watch is not None:
                    watch.start(tree.interrupt)
                    watches.callback(watch.stop)
                if prepared.peers is not None:
                    prepared.peers.start()
                    watches.callback(prepared.peers.stop)
                result = tree.run(command.words, command_environment, prepared.folder, prepared.until)
        except OutOfTimeError:
            return _Ended(decision=OUT_OF_TIME, recorder=recorder)
        except (NotStarted, SkerryError) as error:
            return _failed(Invalid(str(error)) if isinstance(error, NotStarted) else error, recorder)
        decision = decide_exit(result, _recorded(recorder))
        was_lost = decision.code == ExitCode.RETRY and not (result.stopped or result.leash_closed or result.interrupted)
        can_restart = prepared.has_copies and was_lost
        return _Ended(decision=decision, recorder=recorder, watch=watch, can_restart=can_restart)


class _Attempts:
    """The attempts of one container, one after the other. recorder: of the last one."""

    def __init__(
        self,
        settings: ReplicaSettings,
        job: Job,
        environment: Mapping[str, str],
        tree: ProcessTree,
        clock: Clock,
    ) -> None:
        self.recorder: OutcomeRecorder | None = None
        self._settings, self._job, self._environment = settings, job, environment
        self._tree, self._clock = tree, clock

    def run(self, work: Path) -> _Ended:
        """To the end of the last one. Raises OutOfTimeError, _StoppedError, and what a store raises."""
        tree, settings, restarts = self._tree, self._settings, _RESTARTS
        if settings.failover is not None:
            find = partial(find_run, settings.failover, settings.run_uri, self._clock, settings.max_hours)
            self._settings = _at(settings, tree.prepare(find))
        ended = self._attempt(work, stays=True)
        while True:
            uri = self._settings.run_uri
            if (watch := ended.watch) is not None and tree.prepare(partial(watch.is_lost, ended.decision)):
                _log(f"the run's store is away, or the run has left it: {uri}; {ended.decision.reason}")
                uri = tree.prepare(watch.await_store)
            elif ended.can_restart and restarts > 0:
                restarts -= 1
                _record(ended.decision, self.recorder)
                _log(f"{ended.decision.reason}; starting it again beside the copies of its state")
            else:
                return ended
            stays, self._settings = uri == self._settings.run_uri, _at(self._settings, uri)
            ended = self._attempt(Path(tempfile.mkdtemp(dir=work)), stays=stays)
            if watch is not None and ended.is_store_in_doubt and stays:
                # The slot's claim is known to this watch alone: a new start could not vote.
                tree.prepare(lambda: self._clock.pause(_PERMISSIONS_POLL_S))
                ended = replace(ended, watch=watch)

    def _attempt(self, work: Path, *, stays: bool) -> _Ended:
        """stays: at the URI of the attempt before."""
        earlier = self.recorder if stays else None
        ended = _Attempt(self._settings, self._job, self._environment, self._tree, self._clock, earlier).run(work)
        self.recorder = ended.recorder or self.recorder
        return ended


@dataclass(frozen=True, kw_only=True)
class Command:
    """The command to start. ranks: how many processes of the replica it makes."""

    words: tuple[str, ...]
    ranks: int

    def __str__(self) -> str:
        return " ".join(word if word.isprintable() and len(word) <= _MAX_LOGGED_WORD else "..." for word in self.words)


def command_of(settings: ReplicaSettings, n_gpus: int) -> Command:
    """The command, with torchrun before it if the replica has several ranks. Raises Invalid if it cannot be. Pure."""
    ranks = settings.ranks if settings.ranks is not None else max(1, n_gpus)
    program, *rest = settings.command
    words = (sys.executable if program in _PYTHON else program, *rest)
    if ranks == 1:
        return Command(words=words, ranks=1)
    if program not in _PYTHON or not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        raise Invalid(
            f"{ranks} ranks need a Python script, and the command is {' '.join(settings.command)}; "
            "write [python, script.py, ...], or set SKERRY_RANKS=1 and start the ranks yourself"
        )
    # A container without a network cannot resolve its own name, and the ranks would wait for ever.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0")
    script = ("--module", *rest[1:]) if rest[0] == "-m" else tuple(rest)
    return Command(words=(sys.executable, *torchrun, "--nproc-per-node", str(ranks), *script), ranks=ranks)


def _prepare(
    settings: ReplicaSettings,
    job: Job,
    environment: Mapping[str, str],
    work: Path,
    clock: Clock,
    earlier: OutcomeRecorder | None,
) -> _Prepared | _NotPrepared:
    store = open_store(settings.run_uri, clock=clock)
    try:
        run = read_run(store) if job.platform is None else read_run_with_new_permissions(store, clock)
    except (Invalid, Unauthorized) as error:  # no such bucket, or its account is closed
        raise (error if settings.failover is None else Retryable(str(error))) from error
    if run is None:
        # The store of a run with failover may have just been deleted; a verdict then says where the run goes on.
        kind = Invalid if settings.failover is None else Retryable
        raise kind(f"no run under {settings.run_uri}: start it with `skerry up`, which writes it")
    changed = RunSettings(RunLog(store, run))
    changed.read()
    contract = resolve_contract(settings, job, run.slots, changed.slots)
    outcome_store = open_store(settings.run_uri, clock=clock, deadline_s=_OUTCOME_S)
    software = read_software(environment)
    recorder = OutcomeRecorder(RunLog(outcome_store, run), contract.slot, clock, settings.place, software, earlier)
    until = time_limit(run, settings.max_hours, clock)
    folder = Path.cwd()
    try:
        if settings.code is not None:
            folder = work / "code"
            fetch(store, settings.code, folder)
        secrets = fetch_secrets_with_new_permissions(settings.secrets, environment, clock)
    except SkerryError as error:
        return _NotPrepared(recorder=recorder, error=error)
    watch = None if run.failover is None else StoreWatch(run, run.failover, settings.run_uri, recorder, clock, until)
    peers, superfluous = watch_peers(settings, job, contract.slot, environment, RunLog(store, run), clock)
    early_end = OUT_OF_TIME if until is not None and until <= clock.now() else None
    if superfluous is not None:
        early_end = ExitDecision(code=ExitCode.STOPPED, reason=superfluous, stopped=True)
    return _Prepared(
        contract=contract,
        recorder=recorder,
        folder=folder,
        until=until,
        secrets=secrets,
        watch=watch,
        peers=peers,
        early_end=early_end,
        has_copies=run.peers is not None,
    )


def read_run_with_new_permissions(store: Store, clock: Clock) -> Run | None:
    """Read run.json, and retry while the store refuses the credentials: a job's role may have just been created.

    Raises Unauthorized if it still refuses after PERMISSIONS_TIMEOUT_S.
    """
    return _retried(lambda: read_run(store), (Unauthorized,), clock)


def fetch_secrets_with_new_permissions(
    references: Mapping[str, str], environment: Mapping[str, str], clock: Clock
) -> dict[str, str]:
    """Fetch the secrets, and retry while a service refuses the credentials or is busy: replicas start together.

    Raises the last error after PERMISSIONS_TIMEOUT_S, and Invalid at once.
    """
    return _retried(lambda: fetch_secrets(references, environment, clock), (Unauthorized, Retryable), clock)


def _retried(ask: Callable[[], T], errors: tuple[type[SkerryError], ...], clock: Clock) -> T:
    """The result of `ask`, called again after these errors until PERMISSIONS_TIMEOUT_S is over; logs the first."""
    deadline = clock.now() + PERMISSIONS_TIMEOUT_S
    logged = False
    while True:
        try:
            return ask()
        except errors as error:
            if clock.now() >= deadline:
                raise
            if not logged:
                logged = True
                reason = ": new permissions take effect with a delay" if isinstance(error, Unauthorized) else ""
                _log(f"{error}; retrying for {PERMISSIONS_TIMEOUT_S:g} s{reason}")
        clock.pause(_PERMISSIONS_POLL_S)


def _command_environment(environment: Mapping[str, str], prepared: _Prepared, ranks: int) -> dict[str, str]:
    """The command's environment: this process's, the complete contract, and the secrets."""
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, int(hardware.usable_cores() / ranks)))}
    if ranks > 1:
        # torch 2.13 with gloo: a restarted torchrun group would otherwise find the addresses of its last start.
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    failover = {} if prepared.watch is None else {FAILOVER: prepared.watch.mirror_uri}
    return {**defaults, **environment, **prepared.contract.environment(), **failover, **prepared.secrets}


def _resources(environment: Mapping[str, str]) -> str:
    shm = hardware.shm_bytes()
    small = f" (small for data loaders with workers; give the container more than {hardware.SMALL_SHM_BYTES >> 20} MB)"
    return (
        f"{hardware.usable_cores():g} cores, {hardware.count_gpus(environment)} GPUs, /dev/shm {shm >> 20} MB"
        f"{small if shm <= hardware.SMALL_SHM_BYTES else ''}"
    )


def _recorded(recorder: OutcomeRecorder) -> Outcome | None:
    with contextlib.suppress(SkerryError):
        return recorder.read()
    return None


def _end(exit_decision: ExitDecision, recorder: OutcomeRecorder | None, ml: Path) -> ExitCode:
    _record(exit_decision, recorder)
    write_failure_file(exit_decision, ml)
    _log(f"exit code {int(exit_decision.code)}: {exit_decision.reason}")
    return exit_decision.code


def _record(exit_decision: ExitDecision, recorder: OutcomeRecorder | None) -> None:
    if recorder is not None:
        try:
            recorder.record(exit_decision)
        except SkerryError as error:
            _log(f"the outcome could not be written: {error}")


def _log(line: str) -> None:
    """Write one line of this program to stderr, where the script's output also goes."""
    sys.stderr.write(f"skerry-replica: {line}\n")
    sys.stderr.flush()
