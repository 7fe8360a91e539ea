"""A user's script that goes wrong in one replica, as its command line says.

usage: train.py [SLOT=BEHAVIOUR ...]; a slot that is not named trains all rounds.
    raise       raises an exception in round 3
    nan         its loss is NaN from step 61 on
    shape       has a wider model than the others
    kill        is killed in round 3
    memory      allocates more than the machine has, in round 3
    limit:GROUP joins this group of processes, whose memory is limited, and uses more, in round 3
    cut         evaluates within a round, after 20 steps of round 3, for longer than the others train
    evaluate    evaluates in its training loop, after every 100 steps, for longer than the others wait
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.log import keys
from skerry.runtime.replica import connect

if TYPE_CHECKING:
    from skerry.runtime.manager import ObjectStoreManager

ROUND_3 = 3
CUT_AFTER = 20
NAN_FROM = 61
EVALUATE_EVERY = 100
HELD_OUT = torch.linspace(-1.0, 1.0, 64 * 8).view(64, 8)


def load_shard(number: int) -> None:
    raise ValueError(f"bad sample in shard {number}")


def exceed_limit(group: str, manager: ObjectStoreManager) -> None:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    manager.session.presence.beat()  # as if five seconds had passed
    torch.ones(1 << 28)


def evaluate(model: nn.Module, manager: ObjectStoreManager) -> float:
    """The mean loss over as many batches as it takes the others to close the round."""
    closed, losses = keys.commit(manager.current_step()), list[float]()
    with torch.no_grad():
        while manager.session.store.read(closed) is None:
            losses += [model(batch).square().mean().item() for batch in HELD_OUT.split(4)]
    return sum(losses) / max(1, len(losses))


def main() -> None:
    torch.set_num_threads(1)
    with connect() as replica:
        behaviour = dict(argument.split("=", 1) for argument in sys.argv[1:]).get(replica.slot, "train")
        run = replica.run
        torch.manual_seed(0)
        model = nn.Linear(8, 16 if behaviour == "shape" else 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
        manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
            for step in replica.steps(inner):
                begins_round_3 = manager.current_step() == ROUND_3 and step % run.sync_every == 0
                if begins_round_3 and behaviour == "raise":
                    load_shard(17)
                if begins_round_3 and behaviour == "memory":
                    torch.empty(1 << 50)
                if begins_round_3 and behaviour == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if begins_round_3 and behaviour.startswith("limit:"):
                    exceed_limit(behaviour.removeprefix("limit:"), manager)
                if step and step % EVALUATE_EVERY == 0 and behaviour == "evaluate":
                    replica.log(val_loss=evaluate(model, manager))
                if behaviour == "cut" and step == ROUND_3 * run.sync_every + CUT_AFTER:
                    with replica.evaluating():
                        replica.log(val_loss=evaluate(model, manager))
                loss = model(torch.randn(4, 8)).square().mean()
                if behaviour == "nan" and step >= NAN_FROM:
                    loss = loss * float("nan")
                inner.zero_grad()
                loss.backward()
                replica.log(loss=loss.item(), tokens=32)
                inner.step()
        print(f"{replica.slot} is done", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
