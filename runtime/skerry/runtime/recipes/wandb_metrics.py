"""The plain loop with metrics in Weights & Biases. Replace model, data and loss by yours."""

import torch
import wandb
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64

with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
    tracked = wandb.init(
        project="skerry",
        group=run.name,  # all replicas of the run
        id=f"{run.name}-{run.nonce[:8]}-{replica.slot}",  # the same after a restart, and another if the run begins anew
        name=replica.slot,
        resume="allow",
    )

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner)  # this replica's own state, retained over a restart
    with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner):
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            inner.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=BATCH)
            # With its step, W&B leaves out a step that is trained again after a restart.
            tracked.log({"loss": loss.item(), "round": manager.current_step()}, step=step)
            inner.step()
    tracked.finish()
    print(f"{replica.slot} ends at round {manager.current_step()}")
