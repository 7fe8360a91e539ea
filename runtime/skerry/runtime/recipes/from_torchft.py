"""A script that was written for torchft's Manager and DiLoCo. It needs changes 1 to 3; the others apply the spec."""

import os

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.manager import ObjectStoreManager as Manager  # 1: was `from torchft import Manager, ...`

BATCH = 64

torch.manual_seed(0)  # all replicas start with the same weights
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)

manager = Manager(
    pg=None,  # 2: was `pg=ProcessGroupGloo()`; nothing connects to another replica
    min_replica_size=1,
    state_dict=model.state_dict,
    load_state_dict=model.load_state_dict,
    replica_id="train_diloco",  # as before; `skerry up` names the slot
    use_async_quorum=False,
)
run = manager.run  # was constants of the script; now `outer:` of the spec
outer = torch.optim.SGD(model.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
batches = torch.Generator().manual_seed(int(os.environ["SKERRY_INDEX"]))  # was REPLICA_GROUP_ID: each has its own data
with DiLoCo(manager, [model], inner, outer, sync_every=run.sync_every):
    while not manager.finished:  # was `manager.current_step() < ROUNDS`; now `skerry extend` adds rounds
        manager.catch_up(inner)  # 3: new. A restarted replica first comes to where the others are
        x = torch.rand(BATCH, 1, generator=batches) * 6 - 3
        loss = nn.functional.mse_loss(model(x), x.sin())
        inner.zero_grad()
        loss.backward()
        manager.report_metrics({"loss": loss.item()})  # new, for `skerry watch` and `skerry report`
        inner.step()
manager.shutdown()
