"""Measures the copies between the ranks of a replica, against the limit of gloo and NVIDIA's resiliency extension.

    scripts/bench replication [--ranks 4] [--mib 64] [--tensors 16 1024] [--turns 5] [--json]

Ranks are processes on this machine, in cliques of two. Each turn measures all in turns, so that they share the state of
the machine; the medians of their ratios are the result:

p2p        one flat buffer of the same bytes to the peer and back at the same time: the least that a copy takes
replicate  a state of so many tensors, with seals; `ratio`: to p2p
retrieve   the state of rank 1, which has lost everything; `ratio`: to the extension's, if that can be imported
           (PYTHONPATH=.venv-nvrx, which `scripts/test` installs), else to p2p

beyond_mib: the peak of memory in a first `replicate`, beyond what there was and the received bytes. The extension's
retrieval needs CUDA; the benchmark takes that out, and gives it no seal to check.
"""
# ruff: noqa: D103  it explains itself above

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from skerry.runtime.replication import BasicTensorAwareStateDict, CliqueReplicationStrategy

if TYPE_CHECKING:
    from collections.abc import Callable

LOST = 1


def state_of(rank: int, tensors: int, size: int) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict(
        {str(n): torch.full((size // tensors // 4,), rank + n / 7) for n in range(tensors)}
    )


def seconds(work: Callable[[], object]) -> float:
    """Of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    work()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def memory_mib(field: str) -> float:
    """VmRSS, the memory now, or VmHWM, its peak since it was reset."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 1024


def beyond_mib(replicate: Callable[[], object], size: int) -> float:
    """The peak of a first call beyond what it has received."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
    before = memory_mib("VmRSS")
    replicate()
    return memory_mib("VmHWM") - before - size / (1 << 20)


def reference_strategy(group: dist.ProcessGroup) -> Any:
    """The extension's strategy, without CUDA; None if it is not installed."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        return None
    from nvidia_resiliency_ext.checkpointing.local.replication import strategies  # noqa: PLC0415  if it is installed

    warnings.simplefilter("ignore")  # it calls what torch has deprecated
    empty = torch.empty_like
    torch.empty_like = lambda tensor, **_: empty(tensor)
    torch.Tensor.cuda = lambda tensor: tensor
    return strategies.CliqueReplicationStrategy(group)


def retrieval(strategy: Any, rank: int, tensors: int, size: int) -> Callable[[], object]:
    """Get back the state of the lost rank. Its peer holds it, and all ranks hold their own."""
    world = dist.get_world_size()
    peer = LOST ^ 1
    held = {owner: state_of(owner, tensors, size) for owner in {rank, LOST if rank == peer else rank} if rank != LOST}
    available = [set() if owner == LOST else {owner, LOST} if owner == peer else {owner} for owner in range(world)]

    def run() -> object:
        plan = strategy.retrieve_plan(available, [rank])
        return strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids()})

    return run


def measure(rank: int, tensors: int, size: int, turns: int) -> dict[str, float]:
    strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
    group = strategy.local_group
    reference = reference_strategy(group.group)
    state, flat = state_of(rank, tensors, size), torch.zeros(size, dtype=torch.uint8)
    peer = rank ^ 1

    def p2p() -> None:
        received = torch.empty(size, dtype=torch.uint8)
        for work in [dist.irecv(received, peer, group=group.group), dist.isend(flat, peer, group=group.group)]:
            work.wait()

    ways: dict[str, Callable[[], object]] = {
        "p2p": p2p,
        "replicate": lambda: strategy.replicate(state, rank),
        "retrieve": retrieval(strategy, rank, tensors, size),
    }
    if reference is not None:
        ways["extension_retrieve"] = retrieval(reference, rank, tensors, size)
    beyond = beyond_mib(ways["replicate"], size)
    rows = [{name: seconds(way) for name, way in ways.items()} for _ in range(turns)]
    result = {f"{name}_s": statistics.median(row[name] for row in rows) for name in ways}
    limit = "p2p" if reference is None else "extension_retrieve"
    result["replicate_ratio"] = statistics.median(row["replicate"] / row["p2p"] for row in rows)
    result["retrieve_ratio"] = statistics.median(row["retrieve"] / row[limit] for row in rows)
    return result | {"beyond_mib": beyond}


def run_rank(rank: int, world: int, meeting: str, cases: list[tuple[int, int, int]], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    for case in cases:
        row = measure(rank, *case)
        if rank == 0:
            results.put(row)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument("--ranks", type=int, default=4, help="even; default: 4")
    parser.add_argument("--mib", type=int, default=64, help="of each rank's state; default: 64")
    parser.add_argument("--tensors", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    cases = [(tensors, options.mib << 20, options.turns) for tensors in options.tensors]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, str(Path(folder, "meeting")), cases, queue)
        ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        results = []
        for tensors in options.tensors:
            row = {"tensors": tensors, **{name: round(value, 3) for name, value in queue.get().items()}}
            results.append(row)
            if not options.json:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        for process in ranks:
            process.join()
    if options.json:
        settings = {"cores": os.cpu_count(), "ranks": options.ranks, "mib": options.mib, "turns": options.turns}
        print(json.dumps({"benchmark": "replication", **settings, "results": results}))


if __name__ == "__main__":
    main()
