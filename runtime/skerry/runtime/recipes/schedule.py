"""The plain loop with a learning rate schedule over the whole run. Replace model, data and loss by yours."""

import math

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64
WARM_UP = 40  # inner steps

with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)

    total = replica.total_steps or 10_000  # a run without end has None

    def rate(step: int) -> float:
        """Warm up, then a cosine that ends at a tenth, so that rounds which are added later still train."""
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        return 0.55 + 0.45 * math.cos(math.pi * (step - WARM_UP) / max(1, total - WARM_UP))

    schedule = torch.optim.lr_scheduler.LambdaLR(inner, rate)

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner, schedule=schedule)  # both, because many schedules continue from the optimizer's rate
    with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner, schedule):  # sets it to the run's step; schedule.step() is not called here
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            inner.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=BATCH)
            inner.step()
    print(f"{replica.slot} ends at round {manager.current_step()}")
