"""Forks ranks of a gloo job, so that they share what this process has imported."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

T = TypeVar("T")
_FORK = multiprocessing.get_context("fork")


class RankError(Exception):
    """A rank has failed, or ended without a result."""


def on_ranks(count: int, work: Callable[[int], T], *, timeout_s: float = 60.0) -> list[T]:
    """The result of `work(rank)` in each process of a job. An error of a rank is raised, with its traceback as text."""
    outcomes = outcomes_of(count, work, timeout_s=timeout_s)
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, RankError), f"rank {rank}: {outcome}"
    return outcomes  # type: ignore[return-value]


def outcomes_of(count: int, work: Callable[[int], T], *, timeout_s: float = 60.0) -> list[T | RankError]:
    """The result or the error of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting")
        pipes, processes = [], []
        for rank in range(count):
            mine, its = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_run, args=(rank, count, meeting, work, its))
            process.start()
            its.close()
            pipes.append(mine)
            processes.append(process)
        try:
            outcomes: list[object] = []
            for pipe in pipes:  # the others may wait for a rank that has failed
                failed = any(isinstance(outcome, RankError) for outcome in outcomes)
                outcomes.append(_outcome(pipe, 2.0 if failed else timeout_s))
            return outcomes  # type: ignore[return-value]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _outcome(pipe: Connection, timeout_s: float) -> object:
    if not pipe.poll(timeout_s):
        return RankError(f"still running after {timeout_s} s")
    try:
        return pickle.loads(pipe.recv_bytes())  # noqa: S301  of a process that this one has forked
    except EOFError:
        return RankError("ended without a result")


def _run(rank: int, count: int, meeting: Path, work: Callable[[int], object], pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count))
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)
        outcome: object = work(rank)
    except BaseException:  # noqa: BLE001  the test reports it; not every error can be pickled
        outcome = RankError(traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))
    # A rank that is done must not close connections that others still use.
    pipe.close()
    _FORK.Event().wait()
