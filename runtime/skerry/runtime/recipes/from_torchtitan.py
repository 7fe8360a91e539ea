"""torchtitan's semi-synchronous training: its TorchFTManager, optimizers and DiLoCo, with the bucket below them.

Needs torchtitan and what its import needs: see docs/recipes.md.
"""

from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import default_adamw
from torchtitan.experiments.torchft.config import FaultTolerance
from torchtitan.experiments.torchft.manager import TorchFTManager, maybe_semi_sync_training
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from skerry.runtime.replica import Replica, connect

BATCH = 64


class SkerryManager(TorchFTManager):
    """Replaces the line in which torchtitan's manager creates torchft's. Needs no process group."""

    def __init__(self, replica: Replica) -> None:
        self._manager: Any = replica.manager()
        self.use_async_quorum = False
        self.group_size, self.replica_id = replica.replicas, replica.index  # torchtitan shards its data by these


with connect() as replica:
    run = replica.run
    torch.manual_seed(0)  # all replicas start with the same weights
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    config = FaultTolerance(
        enable=True, semi_sync_method="diloco", sync_steps=run.sync_every, num_fragments=run.fragments
    )
    ft_manager = SkerryManager(replica)
    ft_manager.manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
    optimizers = TorchFTOptimizersContainer.Config(
        param_groups=default_adamw(lr=3e-3).param_groups, implementation="for-loop"
    ).build(model_parts=[model], ft_manager=ft_manager)
    replica.keep(inner=optimizers.optimizers[0])  # the container's own state_dict is empty

    with maybe_semi_sync_training(config, ft_manager, model, 0, optimizers):  # its outer step has lr 0.7, momentum 0.9
        for step in replica.steps(optimizers):
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            optimizers.zero_grad()
            loss.backward()
            replica.log(loss=loss.item(), tokens=BATCH)
            optimizers.step()
    print(f"{replica.slot} ends at round {ft_manager.manager.current_step()}")
