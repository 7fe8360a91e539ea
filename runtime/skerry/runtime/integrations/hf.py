"""DiLoCo in the Trainer of transformers: `Trainer(..., callbacks=[DiLoCoCallback(replica)])`.

For a Trainer that runs in one process on one device, and for trainers built on it. The Trainer makes the optimizer, the
schedule and the loop; the callback makes the rest. docs/recipes.md has the traps.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# transformers does not type what it gives to a callback's hooks.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from transformers import TrainerCallback
from typing_extensions import override

from skerry.runtime.integrations.framework_loop import FrameworkLoop

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from skerry.runtime.replica import Replica

# The Trainer adds them to the figures of an evaluation; they are not about the model.
_NOT_OF_THE_MODEL: Final = ("epoch", "num_input_tokens_seen", "_runtime", "_per_second", "_time", "_delta")


class DiLoCoCallback(TrainerCallback):
    """Trains a replica of a run in a Trainer: `state.global_step` is the run's inner step, also after a restart.

    The Trainer ends with the run; if the others have closed the last round meanwhile, `train` raises RunFinished, which
    ends the block of `connect` as done. So code that follows the training belongs behind that block.
    """

    def __init__(self, replica: Replica, fragments: Sequence[nn.Module] | None = None) -> None:
        """fragments: parts of the model that are exchanged in turn, as many as `outer.fragments`; None: all of it.

        Raises Invalid if their number is not the run's.
        """
        self._loop = FrameworkLoop(
            replica, fragments, 'set include_num_input_tokens_seen="all" in the TrainingArguments'
        )
        self._micro_batches = 1
        self._tokens = 0
        self._logged_step = self._steps_since_log = 0

    @override
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **_: Any,
    ) -> None:
        """Enter DiLoCo: the first hook that has the optimizer."""
        self._micro_batches = args.gradient_accumulation_steps
        self._tokens, self._logged_step = int(state.num_input_tokens_seen), state.global_step
        model.register_forward_hook(self._add_loss, with_kwargs=True)
        # Accelerate's wrappers: the optimizer's has no hooks, the schedule's counts the processes of a replica.
        inner, schedule = getattr(optimizer, "optimizer", optimizer), getattr(lr_scheduler, "scheduler", lr_scheduler)
        self._loop.begin(model, inner, schedule)

    @override
    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Follow the log, before the first micro-batch of an inner step. Raises RunFinished at the end of the run."""
        step = self._loop.next_step()
        if step is not None:
            state.global_step = step

    @override
    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Report the step before its exchange, which its tokens belong to."""
        tokens = int(state.num_input_tokens_seen)
        self._loop.add_tokens(tokens - self._tokens)
        self._tokens = tokens
        self._loop.log()

    @override
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The run decides when training is over, not max_steps."""
        self._steps_since_log += 1
        control.should_training_stop = self._loop.is_over
        self._pause_for(control)

    @override
    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The Trainer may evaluate or save at the end of an epoch."""
        self._pause_for(control)

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Correct the mean loss: the Trainer divides by the growth of global_step, which a restart makes too large."""
        if logs is None or "loss" not in logs:
            return
        grown = state.global_step - self._logged_step
        if self._steps_since_log and grown != self._steps_since_log:
            logs["loss"] *= grown / self._steps_since_log
            state.log_history[-1]["loss"] = logs["loss"]
        self._logged_step, self._steps_since_log = state.global_step, 0

    @override
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """The evaluation is over: record `eval_loss` and the other figures of the model."""
        self._loop.resume()
        of_model = {name: value for name, value in (metrics or {}).items() if not name.endswith(_NOT_OF_THE_MODEL)}
        self._loop.record_evaluation(of_model)

    @override
    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Leave DiLoCo. Raises Retryable if the Trainer has ended before the run."""
        self._loop.end()

    def _pause_for(self, control: TrainerControl) -> None:
        if control.should_evaluate or control.should_save:
            self._loop.pause()

    def _add_loss(self, model: nn.Module, inputs: object, named: dict[str, Any], output: Any) -> None:
        """Add a micro-batch's loss: the model gives its share of the step's mean, or the mean of the micro-batch."""
        del inputs
        loss: torch.Tensor | None = output.get("loss") if isinstance(output, dict) else None
        if loss is not None and model.training:
            is_share = named.get("num_items_in_batch") is not None
            self._loop.add_loss(loss if is_share else loss / self._micro_batches)
