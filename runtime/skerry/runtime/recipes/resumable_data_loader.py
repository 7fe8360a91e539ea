"""The plain loop with a DataLoader whose position is kept over a restart. Replace the data by yours."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64


class Order(Sampler[int]):
    """This replica's items without end, shuffled anew in each epoch. Begins after those that were trained on."""

    def __init__(self, items: list[int]) -> None:
        self.items, self.trained = items, 0

    def __iter__(self) -> Iterator[int]:
        epoch, first = divmod(self.trained, len(self.items))
        while True:
            shuffled = torch.randperm(len(self.items), generator=torch.Generator().manual_seed(epoch)).tolist()
            yield from (self.items[place] for place in shuffled[first:])
            epoch, first = epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trained = state["trained"]


x = torch.linspace(-3, 3, 10_000)[:, None]
data = TensorDataset(x, x.sin())

with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)

    order = Order(replica.shard(range(len(data))))
    loader = DataLoader(data, BATCH, sampler=order, num_workers=1)
    batches = None

    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    replica.keep(inner=inner, order=order)  # this replica's own state, retained over a restart
    with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
        for _ in replica.steps(inner):
            if batches is None:  # only now, because the first step has restored the position
                batches = iter(loader)
            x, y = next(batches)
            loss = nn.functional.mse_loss(model(x), y)
            inner.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=len(x))
            inner.step()
            order.trained += len(x)  # counted here, because the loader's workers read ahead
    print(f"{replica.slot} ends at round {manager.current_step()} after {order.trained} items")
