"""One replica of a DiLoCo run: a tiny network learns sin(x). Replace model, data and loss by yours."""

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64
HELD_OUT = torch.linspace(-3, 3, 256)[:, None]  # no replica trains on these


@torch.no_grad()
def evaluate() -> dict[str, float]:
    """The loss on held-out data. `skerry report` shows it beside the training loss."""
    return {"val_loss": nn.functional.mse_loss(model(HELD_OUT), HELD_OUT.sin()).item()}


with connect() as replica:  # this process's replica of the run; sets the exit code of the script
    run = replica.run  # the section `outer:` of the spec
    torch.manual_seed(0)  # all replicas start with the same weights
    layers = [nn.Sequential(nn.Linear(1, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1)]
    model = nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # DiLoCo exchanges `outer.fragments` parts of the model in turn, each with its own outer optimizer.
    count = run.fragments
    parts = [model[len(model) * part // count : len(model) * (part + 1) // count] for part in range(count)]
    outer = [
        torch.optim.SGD(part.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
        for part in parts
    ]

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner)  # this replica's own state, retained over a restart
    if replica.index == 0:  # one is enough: it evaluates the shared model, which all replicas have after a round
        replica.evaluate(evaluate, every=5)
    with DiLoCo(manager, parts, inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner):  # until the run is finished or stopped
            # The data depends only on the step and the replica, so a restart continues with the right data.
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            inner.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=BATCH)  # before the step, because the last of a round is its exchange
            inner.step()
    print(f"{replica.slot} ends at round {manager.current_step()}")
