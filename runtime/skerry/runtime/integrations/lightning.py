"""DiLoCo in the Trainer of Lightning: `Trainer(..., callbacks=[DiLoCoCallback(replica)])`.

For a Trainer with one device, and a module with one optimizer that Lightning steps by itself. docs/recipes.md has the
traps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from skerry.runtime.errors import Invalid
from skerry.runtime.integrations.framework_loop import FrameworkLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from skerry.runtime.replica import Replica


class DiLoCoCallback(Callback):
    """Trains a replica of a run in a Trainer, which then ends with the run: set max_epochs=-1.

    If the others have closed the last round meanwhile, `fit` raises RunFinished, which ends the block of `connect` as
    done. So code that follows the training belongs behind that block.
    """

    def __init__(
        self,
        replica: Replica,
        fragments: Sequence[nn.Module] | None = None,
        tokens: Callable[[Any], int] | None = None,
    ) -> None:
        """fragments: parts of the module that are exchanged in turn, as many as `outer.fragments`; None: all of it.

        tokens: counts the tokens of a batch; None counts none. Raises Invalid if the number of fragments is not the
        run's.
        """
        super().__init__()
        self._loop = FrameworkLoop(replica, fragments, "give the callback tokens=lambda batch: ...")
        self._tokens_of = tokens
        self._before_validation: dict[str, torch.Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enter DiLoCo: the optimizers exist, and the sanity check is over. Raises Invalid for several optimizers."""
        if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
            raise Invalid(
                "DiLoCo needs a module with one optimizer that Lightning steps: "
                f"optimizers={len(trainer.optimizers)} "
                f"automatic_optimization={pl_module.automatic_optimization}"
            )
        # A schedule of epochs does not count inner steps.
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs if config.interval == "step"]
        self._loop.begin(pl_module, trainer.optimizers[0], schedules[0] if schedules else None)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Follow the log, before the first micro-batch of an inner step. Raises RunFinished at the end of the run."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._loop.next_step()
        if self._tokens_of is not None:
            self._loop.add_tokens(self._tokens_of(batch))

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Add the micro-batch's share of the step's loss."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._loop.add_loss(loss if scaler is None else loss / scaler.get_scale())

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Report the step before its exchange, which its tokens belong to."""
        self._loop.log()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The run decides when training is over."""
        if self._loop.is_over:
            trainer.should_stop = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation is no training time."""
        if not trainer.sanity_checking:
            self._loop.pause()
            self._before_validation = dict(trainer.callback_metrics)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation is over: record what the module has logged in it, such as `val_loss`."""
        self._loop.resume()
        if not trainer.sanity_checking:
            # Lightning has one dictionary for training and validation, and a validation puts new tensors into it.
            before, self._before_validation = self._before_validation, {}
            after = trainer.callback_metrics.items()
            self._loop.record_evaluation({name: value.item() for name, value in after if before.get(name) is not value})

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave DiLoCo. Raises Retryable if the Trainer has ended before the run."""
        self._loop.end()
