"""`skerry-replica run`: from an empty container to a training script, and from its end to the container's.

take over, drop    the platform's folders, then root
find the place     contract, hyperparameters, the platform's numbers; run.json
fetch the code     by its digest, unpacked into a fresh folder
run it             plainly, or with torchrun where there are several GPUs
end                outcome record, SageMaker's failure file, exit code
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.contract import STOP_BUDGET_S, ExitCode
from skerry.runtime.entry import machine
from skerry.runtime.entry.ending import (
    OUT_OF_TIME,
    Incarnation,
    Verdict,
    stopped_by_signal,
    tell_platform,
    verdict,
    verdict_of_error,
)
from skerry.runtime.entry.place import ML, job_of, orders_of, settle
from skerry.runtime.entry.privileges import drop
from skerry.runtime.entry.processes import Family, Unstarted
from skerry.runtime.entry.unpacking import fetch
from skerry.runtime.errors import Invalid, SkerryError, Unauthorized
from skerry.runtime.journal import Journal, read_run
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.contract import Contract
    from skerry.runtime.entry.place import Job, Orders
    from skerry.runtime.records import Outcome, Run
    from skerry.runtime.store import Store

ALIVE: Final = "SKERRY_ALIVE"
"""A file that is touched while this process turns: the container's health check looks at its age."""
LEASH: Final = "SKERRY_LEASH"
"""stdin: end everything when standard input ends."""
_PYTHON: Final = ("python", "python3")
# A stop's budget is the training script's; what is left of a platform's 30 s goes to the outcome.
_LAST_WORD_S: Final = 3.0
SETTLED_S: Final = 120.0
"""Roles, pools and rights are known everywhere within a minute or two of being made, say AWS's and Google's guides."""
_SETTLING_S: Final = 5.0
# A longer word of a command is a script itself: nothing for a log's first line.
_WORD: Final = 120


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Everything that must be known before the command is started. left_s: of the run's time; None is without end."""

    place: Contract
    incarnation: Incarnation
    folder: Path
    left_s: float | None


def run(arguments: Sequence[str], environment: dict[str, str], clock: Clock, ml: Path = ML) -> ExitCode:
    """Be the replica that `environment` describes, to its end. arguments: a command that wins over SKERRY_COMMAND.

    Main thread only, and once: it takes over the signals of this process. environment: is changed.
    """
    alive = environment.get(ALIVE)
    try:
        for line in drop(environment, ml):
            _say(line)
        family = Family(clock, stop_s=STOP_BUDGET_S, alive=None if not alive else Path(alive))
        if environment.get(LEASH) == "stdin":
            family.leash(0)
        job = job_of(environment, ml)
        orders = orders_of(environment, arguments, ml)
    except SkerryError as error:
        return _end(verdict_of_error(error), None, ml)
    _say(f"{job}; {_resources(environment)}")
    with tempfile.TemporaryDirectory(prefix="skerry-", ignore_cleanup_errors=True) as work:
        incarnation: Incarnation | None = None
        try:
            found = family.prepare(lambda: _ready(orders, job, Path(work), clock))
            if found is None:
                return _end(stopped_by_signal(" before it was started"), None, ml)
            incarnation = found.incarnation
            if isinstance(found, _Unready):
                return _end(verdict_of_error(found.error), incarnation, ml)
            if found.left_s is not None and found.left_s <= 0:
                return _end(OUT_OF_TIME, found.incarnation, ml)
            command = command_of(orders, machine.n_gpus(environment))
            surroundings = _surroundings(environment, found.place, command.ranks)
            _say(f"{found.place.slot} of {found.place.replicas}: {command}")
            until = None if found.left_s is None else clock.now() + found.left_s
            ended = family.run(command.words, surroundings, found.folder, until)
        except (Unstarted, SkerryError) as error:
            wrong = Invalid(str(error)) if isinstance(error, Unstarted) else error
            return _end(verdict_of_error(wrong), incarnation, ml)
        return _end(verdict(ended, _recorded(incarnation)), incarnation, ml)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is started. ranks: how many processes of the replica that makes."""

    words: tuple[str, ...]
    ranks: int

    def __str__(self) -> str:
        return " ".join(word if word.isprintable() and len(word) <= _WORD else "..." for word in self.words)


def command_of(orders: Orders, n_gpus: int) -> Command:
    """The command, with torchrun before it if the replica has several ranks. Raises Invalid if it cannot be. Pure."""
    ranks = orders.ranks if orders.ranks is not None else max(1, n_gpus)
    program, *rest = orders.command
    words = (sys.executable if program in _PYTHON else program, *rest)
    if ranks == 1:
        return Command(words=words, ranks=1)
    if program not in _PYTHON or not rest or (rest[0].startswith("-") and rest[0] != "-m"):
        raise Invalid(
            f"{ranks} ranks need a Python script, and the command is {' '.join(orders.command)}; "
            "write [python, script.py, ...], or set SKERRY_RANKS=1 and start the ranks yourself"
        )
    # By its own name a container may not find itself: without a network it has no address, and the ranks wait for ever.
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--max-restarts", "0")
    script = ("--module", *rest[1:]) if rest[0] == "-m" else tuple(rest)
    return Command(words=(sys.executable, *torchrun, "--nproc-per-node", str(ranks), *script), ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class _Unready:
    """What went wrong when it was known already whose failure it is."""

    incarnation: Incarnation
    error: SkerryError


def _ready(orders: Orders, job: Job, work: Path, clock: Clock) -> _Ready | _Unready:
    store = open_store(orders.run_uri, clock=clock)
    run = read_run(store) if job.platform is None else first_read(store, clock)
    if run is None:
        raise Invalid(f"no run under {orders.run_uri}: start it with `skerry up`, which writes it")
    place = settle(orders, job, run.slots)
    incarnation = Incarnation(
        Journal(open_store(orders.run_uri, clock=clock, deadline_s=_LAST_WORD_S), run), place.slot, clock
    )
    left_s = None if orders.max_hours is None else orders.max_hours * 3600 - _age_s(run, clock)
    if orders.code is None:
        return _Ready(place=place, incarnation=incarnation, folder=Path.cwd(), left_s=left_s)
    try:
        fetch(store, orders.code, work / "code")
    except SkerryError as error:
        return _Unready(incarnation=incarnation, error=error)
    return _Ready(place=place, incarnation=incarnation, folder=work / "code", left_s=left_s)


def first_read(store: Store, clock: Clock) -> Run | None:
    """run.json, asked for again while the store lets nobody in: a job's role may have just been made.

    Raises Unauthorized if that stays so.
    """
    until = clock.now() + SETTLED_S
    told = False
    while True:
        try:
            return read_run(store)
        except Unauthorized as error:
            if clock.now() >= until:
                raise
            if not told:
                told = True
                _say(f"{error}; asking for {SETTLED_S:g} s more: what was just made is not known everywhere at once")
        clock.pause(_SETTLING_S)


def _age_s(run: Run, clock: Clock) -> float:
    """How long ago run.json was written. Two clocks of the world that agree to the minute are enough for a limit."""
    return (datetime.fromisoformat(clock.utc_text()) - datetime.fromisoformat(run.created)).total_seconds()


def _surroundings(environment: Mapping[str, str], place: Contract, ranks: int) -> dict[str, str]:
    """What the command finds: all that this process has, and the whole contract."""
    own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, int(machine.cores() / ranks)))}
    if ranks > 1:
        # torch 2.13 with gloo: a group that torchrun starts meets the addresses of its last start otherwise.
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {**own, **environment, **place.environment()}


def _resources(environment: Mapping[str, str]) -> str:
    shm = machine.shm_bytes()
    small = f" (small for data loaders with workers; give the container more than {machine.SMALL_SHM_BYTES >> 20} MB)"
    return (
        f"{machine.cores():g} cores, {machine.n_gpus(environment)} GPUs, /dev/shm {shm >> 20} MB"
        f"{small if shm <= machine.SMALL_SHM_BYTES else ''}"
    )


def _recorded(incarnation: Incarnation) -> Outcome | None:
    with contextlib.suppress(SkerryError):
        return incarnation.outcome()
    return None


def _end(found: Verdict, incarnation: Incarnation | None, ml: Path) -> ExitCode:
    if incarnation is not None:
        try:
            incarnation.record(found)
        except SkerryError as error:
            _say(f"the outcome could not be written: {error}")
    tell_platform(found, ml)
    _say(f"exit code {int(found.code)}: {found.reason}")
    return found.code


def _say(line: str) -> None:
    """One line of this program's own on stderr, where the script's are too."""
    sys.stderr.write(f"skerry-replica: {line}\n")
    sys.stderr.flush()
