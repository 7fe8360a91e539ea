"""A replica in the Trainer of Lightning: a tiny network learns sin(x). Replace module and data by yours."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from skerry.runtime.integrations.lightning import DiLoCoCallback
from skerry.runtime.replica import connect

BATCH = 32


class Sine(pl.LightningModule):
    """Your module, as it is. steps: the length of its schedule."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.steps = steps

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        inner = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, self.steps)
        return {"optimizer": inner, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


x = torch.linspace(-3, 3, 10_000)[:, None]
data = TensorDataset(x, x.sin())

with connect() as replica:
    pl.seed_everything(0)
    module = Sine(replica.total_steps or 10_000)
    held_out = range(0, len(data), 100)  # no replica trains on these
    mine = Subset(data, replica.shard([place for place in range(len(data)) if place not in held_out]))
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=-1,  # the run decides when it ends
        accumulate_grad_batches=2,
        val_check_interval=5 * 2 * replica.run.sync_every,  # counts micro-batches: after five rounds
        check_val_every_n_epoch=None,
        limit_val_batches=1.0 if replica.index == 0 else 0,  # one replica is enough
        enable_checkpointing=False,  # the run has its own checkpoints
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
        # It also records the val_loss, for `skerry report`.
        callbacks=[DiLoCoCallback(replica, tokens=lambda batch: len(batch[0]))],
    )
    order = torch.Generator().manual_seed(replica.index)
    batches = DataLoader(mine, BATCH, shuffle=True, generator=order)
    trainer.fit(module, batches, DataLoader(Subset(data, held_out), BATCH))
    # `skerry export` writes the trained parameters to a file
