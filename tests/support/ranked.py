"""A program for torchrun: a rank of a replica that trains a model sharded by FSDP2, with DiLoCo between replicas.

python -m torch.distributed.run --nproc-per-node 2 tests/support/ranked.py --store URI --slot r-0 --out FOLDER ...
On success it appends a JSON line to FOLDER/{slot}-{rank}.jsonl, and rank 0 saves the whole shared model as
FOLDER/{slot}.pt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.kit.fragments import fragments_in, originals_in
from tests.support.worker import digest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchft.local_sgd import DiLoCo

from skerry.runtime.log import keys
from skerry.runtime.log.records import Contribution
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store import open_store
from skerry.runtime.tensors.dtensor import local_shard


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--minimum", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sync-every", type=int, default=3)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--die-at", help="RANK:STEP; that rank of the first start kills itself before the step")
    parser.add_argument("--until-back", help="a slot: continue until its second incarnation is in a round")
    parser.add_argument("--nan-at", help="RANK:STEP; that rank sets its shard to NaN before the step")
    return parser.parse_args()


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = model_of(1000 + options.index)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.manager = ObjectStoreManager(
            options.store,
            replica_id=options.slot,
            min_replica_size=options.minimum,
            state_dict=self.model.state_dict,
            load_state_dict=self.model.load_state_dict,
            timeout=timedelta(seconds=60),
            max_retries=3,
            grace=Grace(floor_s=options.grace, cap_s=options.grace),
            heartbeat_interval=timedelta(milliseconds=200),
        )
        self.manager.register_private_state("inner", self.inner.load_state_dict, self.inner.state_dict)
        self.generator = torch.Generator().manual_seed(10 * options.index + self.manager.rank)
        self.steps = 0
        self.digests: dict[int, str] = {}
        self.participants: dict[int, int] = {}

    def at(self, where: str | None) -> bool:
        return where == f"{self.manager.rank}:{self.steps}"

    def train(self) -> None:
        outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        options = self.options
        diloco = DiLoCo(
            self.manager, [self.model], self.inner, [outer], options.sync_every, fragment_sync_delay=options.delay
        )
        with diloco:
            while True:
                self.manager.catch_up(self.inner)
                if self.is_done():
                    break
                self.step()
                done = self.manager.current_step()
                if done not in self.digests:
                    momenta = [state["momentum_buffer"] for state in outer.state.values()]
                    shared = [*originals_in(diloco)[0].values(), *map(local_shard, momenta)]
                    self.digests[done] = digest(shared)
                    self.participants[done] = self.manager.num_participants()
        fragments_in(diloco)[0].restore_parameters()  # the model is the shared one now

    def save_model(self) -> None:
        """All ranks must call it."""
        whole = {name: parameter.full_tensor() for name, parameter in self.model.named_parameters()}
        if self.manager.rank == 0:
            torch.save(whole, self.options.out / f"{self.options.slot}.pt")

    def is_done(self) -> bool:
        """The same on all ranks, because rank 0 decides."""
        closed = self.manager.current_step()
        if closed < self.options.rounds or self.options.until_back is None:
            return closed >= self.options.rounds
        last = None
        if self.manager.rank == 0:
            last = open_store(self.options.store).read(keys.contribution(closed - 1, 0, self.options.until_back))
        return self.manager.any_rank(last is not None and Contribution.parse(last, "last").incarnation > 0)

    def step(self) -> None:
        if self.at(self.options.die_at) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.at(self.options.nan_at):
            with torch.no_grad():
                local_shard(next(self.model.parameters())).fill_(float("nan"))
        x = torch.randn(4, 8, generator=self.generator)
        self.inner.zero_grad()
        (self.model(x) ** 2).mean().backward()
        self.inner.step()
        self.steps += 1


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    training = Training(options)
    training.train()
    report = {
        "slot": options.slot,
        "rank": training.manager.rank,
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "steps": training.steps,
        "batches": training.manager.batches_committed(),
        "digests": training.digests,
        "participants": training.participants,
    }
    training.save_model()
    training.manager.shutdown()
    with (options.out / f"{options.slot}-{training.manager.rank}.jsonl").open("a") as file:
        file.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
