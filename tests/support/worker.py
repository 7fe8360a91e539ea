"""One replica as a real process: unmodified torchft consumers on an ObjectStoreManager. One JSON line a case.

python tests/support/worker.py --store URI --slot r-0 --consumer diloco --rounds 6 ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from tests.kit.fragments import originals_in
from torch import nn
from torchft.data import DistributedSampler
from torchft.ddp import DistributedDataParallel
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.optim import OptimizerWrapper

from skerry.runtime.errors import RunFinished
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--slot", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--minimum", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=["diloco/1/0/0"], help="consumer/fragments/delay/alpha, in turn")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sync-every", type=int, default=4)
    parser.add_argument("--codec", choices=["none", "bf16", "int8"], default="none")
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--heartbeat", type=float, default=0.2, help="seconds")
    parser.add_argument("--die-at", type=int, default=None, help="SIGKILL myself before this inner step")
    parser.add_argument("--nan-at", type=int, default=None, help="poison the parameters before this inner step")
    return parser.parse_args()


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def digest(tensors: list[torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


class Training:
    """A loop over random but seeded batches, different for each replica."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        # A seed of its own for each replica: only the shared checkpoint 0 makes them equal.
        self.model = model_of(1000 + options.index)
        self.inner: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.manager = ObjectStoreManager(
            options.store,
            replica_id=options.slot,
            min_replica_size=options.minimum,
            state_dict=self.state,
            load_state_dict=self.load,
            timeout=timedelta(seconds=60),
            max_retries=3,
            codec=options.codec,
            grace=Grace(floor_s=options.grace, cap_s=options.grace),
            heartbeat_interval=timedelta(seconds=options.heartbeat),
        )
        data = torch.arange(4096)
        sampler = DistributedSampler(data, options.index, options.replicas, group_rank=0, num_replicas=1, shuffle=False)
        self.samples = list(sampler)
        self.steps = 0
        self.digests: dict[int, str] = {}
        self.shared: list[torch.Tensor] = []
        self.participants: list[int] = []

    def state(self) -> dict[str, object]:
        return {"model": self.model.state_dict(), "inner": self.inner.state_dict()}

    def load(self, state: dict[str, dict[str, object]]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def batch(self) -> torch.Tensor:
        sample = self.samples[self.steps % len(self.samples)]
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(sample))

    def loss(self, module: nn.Module) -> torch.Tensor:
        x = self.batch()
        return ((module(x) - x.roll(1, dims=1)) ** 2).mean()

    def before_step(self) -> None:
        if self.options.die_at == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.options.nan_at == self.steps:
            with torch.no_grad():
                next(self.model.parameters()).fill_(float("nan"))

    def after_step(self) -> None:
        self.steps += 1
        done = self.manager.current_step()
        if done and done not in self.digests:
            self.digests[done] = digest(self.shared)
            self.participants.append(self.manager.num_participants())

    def local(self) -> None:
        """DiLoCo and LocalSGD: wrappers on the optimizer's hooks."""
        with self.wrapper():
            while self.manager.current_step() < self.options.rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() >= self.options.rounds:
                    break
                self.before_step()
                self.inner.zero_grad()
                self.loss(self.model).backward()
                self.inner.step()
                self.after_step()

    def wrapper(self) -> AbstractContextManager[object]:
        options = self.options
        if options.consumer == "local_sgd":
            self.shared = list(self.model.parameters())
            return LocalSGD(self.manager, self.model, self.inner, sync_every=options.sync_every)
        size = len(self.model) // options.fragments
        fragments = [self.model[i * size : (i + 1) * size] for i in range(options.fragments)]
        outer = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
        diloco = DiLoCo(
            self.manager,
            fragments,
            self.inner,
            outer,
            sync_every=options.sync_every,
            fragment_sync_delay=options.delay,
            fragment_update_alpha=options.alpha,
        )
        self.shared = [tensor for originals in originals_in(diloco) for tensor in originals.values()]
        return diloco

    def synchronous(self) -> None:
        """DDP: every step is a round."""
        module = DistributedDataParallel(self.manager, self.model)
        optimizer = OptimizerWrapper(self.manager, self.inner)
        self.shared = list(self.model.parameters())
        while self.manager.current_step() < self.options.rounds:
            self.before_step()
            try:
                optimizer.zero_grad()
            except RunFinished:  # joined when all rounds were closed
                return
            self.loss(module).backward()
            optimizer.step()
            self.after_step()


def run(options: argparse.Namespace, case: str) -> dict[str, object]:
    consumer, fragments, delay, alpha = case.split("/")
    options = argparse.Namespace(**vars(options))
    options.consumer, options.fragments, options.delay, options.alpha = (
        consumer,
        int(fragments),
        int(delay),
        float(alpha),
    )
    options.store = f"{options.store}/{case.replace('/', '-')}"
    training = Training(options)
    if consumer == "ddp":
        training.synchronous()
    else:
        training.local()
    manager = training.manager
    report: dict[str, object] = {
        "case": case,
        "slot": options.slot,
        "incarnation": manager.presence.incarnation,
        "digests": training.digests,
        "final": digest(training.shared),
        "steps": training.steps,
        "batches": manager.batches_committed(),
        "participants": training.participants,
        "loss": training.loss(training.model).item(),
    }
    manager.shutdown()
    return report


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    for case in options.cases:
        sys.stdout.write(json.dumps(run(options, case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
