"""A user's script for torchrun: a rank of a replica that calls `connect()` and trains a model sharded by FSDP2.

On success it appends a JSON line to OUT/{slot}-{rank}.jsonl. Arguments: OUT [RANK:STEP [copies]].

RANK:STEP: kill itself there, once. copies: each rank keeps copies of every step in a folder of its own, as on a machine
of its own, and of its peer's state; the rank that kills itself removes its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.kit.fragments import originals_in
from tests.kit.managers import wait_for_copies
from tests.support.ranked import model_of
from tests.support.worker import digest
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import Replica, connect
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCopies
from skerry.runtime.tensors.dtensor import local_shard


def train(replica: Replica, out: Path, die_at: str | None, *, keeps_copies: bool) -> dict[str, object]:
    model = model_of(1000 + replica.index)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    timeout = timedelta(seconds=60)
    machine, died = out / f"machine-{replica.rank}", out / "died"
    manager = replica.manager(
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        timeout=timeout,
        local_copies=LocalCopies(folder=machine, apart=1, every=timedelta(microseconds=1)) if keeps_copies else None,
    )
    replica.keep(inner=inner)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    digests: dict[int, str] = {}
    shard = replica.shard(range(1000))
    steps: list[int] = []
    with DiLoCo(manager, [model], inner, [outer], replica.run.sync_every) as diloco:
        for step in replica.steps(inner):
            wait_for_copies(manager)
            if die_at == f"{replica.rank}:{step}" and not died.exists():
                died.touch()
                shutil.rmtree(machine, ignore_errors=True)
                os.kill(os.getpid(), signal.SIGKILL)
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(shard[step % len(shard)]))
            inner.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            replica.log(loss=loss.item(), tokens=32)
            inner.step()
            steps.append(step)
            momenta = [state["momentum_buffer"] for state in outer.state.values()]
            shared = [*originals_in(diloco)[0].values(), *map(local_shard, momenta)]
            digests.setdefault(manager.current_step(), digest(shared))
    return {
        "slot": replica.slot,
        "rank": replica.rank,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "incarnation": manager.presence.incarnation,
        "rounds": manager.current_step(),
        "steps": steps,
        "digests": digests,
    }


def main() -> None:
    torch.set_num_threads(1)
    out, die_at, *more = Path(sys.argv[1]), *(sys.argv[2:] or [None])
    with connect() as replica:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        report = train(replica, out, die_at, keeps_copies=bool(more))
        with (out / f"{replica.slot}-{replica.rank}.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
