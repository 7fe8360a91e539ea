"""A script that was written for torchft's Manager and DiLoCo. Three lines of it are changed, and marked."""

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.manager import ObjectStoreManager as Manager  # 1: was `from torchft import Manager, ...`

ROUNDS, SYNC_EVERY, BATCH = 20, 20, 64

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

manager = Manager(
    pg=None,  # 2: was `pg=ProcessGroupGloo()`; nothing connects to another replica
    min_replica_size=1,
    state_dict=model.state_dict,
    load_state_dict=model.load_state_dict,
    replica_id="train_diloco",  # as before; `skerry up` names the slot
    use_async_quorum=False,
)
with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
    while manager.current_step() < ROUNDS:
        manager.catch_up(inner)  # 3: new. A restarted replica first comes to where the others are
        x = torch.rand(BATCH, 1) * 6 - 3
        loss = nn.functional.mse_loss(model(x), x.sin())
        inner.zero_grad()
        loss.backward()
        inner.step()
manager.shutdown()
