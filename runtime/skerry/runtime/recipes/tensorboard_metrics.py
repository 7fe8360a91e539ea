"""The plain loop with metrics in TensorBoard. Replace model, data and loss by yours."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64
FOLDER = Path("tensorboard").absolute()  # below the folder of the code; in a cloud it goes with the machine

with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
    writer = None

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner)  # this replica's own state, retained over a restart
    with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner):
            # After a restart some steps are trained again; purge_step hides those that were written before.
            writer = writer or SummaryWriter(str(FOLDER / run.name / replica.slot), purge_step=step)
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            inner.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=BATCH)
            writer.add_scalar("loss", loss.item(), step)
            writer.add_scalar("round", manager.current_step(), step)
            writer.flush()  # a killed process writes nothing more
            inner.step()
    print(f"{replica.slot} ends at round {manager.current_step()}: tensorboard --logdir {FOLDER}")
