"""The plain loop with mixed precision and gradient accumulation. Replace model, data and loss by yours."""

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH, MICRO_BATCHES = 64, 4
PRECISION = torch.bfloat16  # with torch.float16 the loss is scaled

device = "cuda" if torch.cuda.is_available() else "cpu"

with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
    scaler = torch.amp.GradScaler(device, enabled=PRECISION is torch.float16)

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner, scaler=scaler)  # this replica's own state, retained over a restart
    with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner):  # a step of the optimizer, not a micro-batch
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            batch = torch.rand(BATCH, 1, generator=generator).to(device) * 6 - 3
            inner.zero_grad()
            total = 0.0
            for x in batch.chunk(MICRO_BATCHES):
                with torch.autocast(device, PRECISION):
                    output = model(x)
                loss = nn.functional.mse_loss(output.float(), x.sin()) / MICRO_BATCHES
                scaler.scale(loss).backward()
                total += loss.item()
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            replica.log(loss=total, tokens=BATCH)
            scaler.step(inner)  # leaves out a step whose gradients overflow; it does not count as one of the round
            scaler.update()
    print(f"{replica.slot} ends at round {manager.current_step()}")
