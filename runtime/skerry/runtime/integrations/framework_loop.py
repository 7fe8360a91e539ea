"""DiLoCo in a training loop that a framework owns: what the callbacks of all frameworks do at its hooks.

The framework calls `begin` once its optimizer exists, `next_step` before each inner step, `end` after the last. Nothing
here knows a framework.
"""
# pyright: reportUnknownMemberType=false, reportArgumentType=false
# Some of torch's types are unknown, and DiLoCo's signature requires torchft's own Manager class.

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchft.local_sgd import DiLoCo

from skerry.runtime.errors import Invalid, Retryable, RunFinished
from skerry.runtime.log.records import MAX_METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from skerry.runtime.manager import ObjectStoreManager
    from skerry.runtime.replica import Replica

# Under these names the record has the training loss and its tokens.
_TRAINING: Final = frozenset({"loss", "tokens"})


class FrameworkLoop:
    """One replica's training in a framework's loop."""

    def __init__(self, replica: Replica, fragments: Sequence[nn.Module] | None, count_tokens: str) -> None:
        """fragments: parts of the model that are exchanged in turn; None exchanges the whole model.

        count_tokens: how to count tokens with this framework, for the error if they are weights and none were counted.
        Raises Invalid if the number of fragments is not the run's.
        """
        count = 1 if fragments is None else len(fragments)
        if count != replica.run.fragments:
            raise Invalid(
                f"the run exchanges {replica.run.fragments} fragments, the callback has {count}: "
                "give it as many modules as outer.fragments, DiLoCoCallback(replica, fragments=[...])"
            )
        self._replica = replica
        self._fragments = fragments
        self._count_tokens = count_tokens
        self._manager: ObjectStoreManager | None = None
        self._steps: Iterator[int] = iter(())
        self._diloco, self._evaluation = ExitStack(), ExitStack()
        self._loss: torch.Tensor | None = None
        self._tokens = 0

    def begin(self, model: nn.Module, inner: torch.optim.Optimizer, schedule: object) -> None:
        """Enter DiLoCo around the framework's optimizer. schedule: advanced to each step, if it counts inner steps."""
        replica, run = self._replica, self._replica.run
        parts = [model] if self._fragments is None else list(self._fragments)
        outer = [
            torch.optim.SGD(part.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
            for part in parts
        ]
        self._manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        own: dict[str, Any] = {"inner": inner}
        counts_steps = isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau)
        if isinstance(schedule, (LRScheduler, ReduceLROnPlateau)):
            own["schedule"] = schedule
        replica.keep(**own, random=True)
        self._diloco.enter_context(DiLoCo(self._manager, parts, inner, outer, sync_every=run.sync_every))
        self._steps = replica.steps(inner, schedule if counts_steps else None)

    def next_step(self) -> int | None:
        """Follow the log to its head. Returns the number of the inner step that follows; None after a stop request.

        A framework cannot skip a step that has begun. So this raises RunFinished if the others have closed the last
        round, which `connect` takes as the end of the script.
        """
        self.resume()
        step = next(self._steps, None)
        if step is None and not self._replica.stopping:
            raise RunFinished("all rounds are closed")
        return step

    def add_loss(self, share: torch.Tensor) -> None:
        """Add a micro-batch's share of the step's loss."""
        self._loss = share.detach() if self._loss is None else self._loss + share.detach()

    def add_tokens(self, tokens: int) -> None:
        """Add tokens of the inner step."""
        self._tokens += tokens

    def log(self) -> None:
        """Report the inner step, before its optimizer steps. Raises Invalid if tokens are weights and missing."""
        if self._replica.run.weighting == "tokens" and self._tokens == 0:
            raise Invalid(f"outer.weighting is tokens, and the trainer counts none: {self._count_tokens}")
        self._replica.log(loss=None if self._loss is None else float(self._loss), tokens=self._tokens)
        self._loss, self._tokens = None, 0

    def record_evaluation(self, metrics: Mapping[str, object]) -> None:
        """Record what the framework has measured on held-out data, in the round that begins or with the run's end.

        Under the framework's names, except that `loss` becomes `val_loss`. Only numbers, and losses first: what is
        beyond 24 figures is left out, because the script does not choose it. The other eight that a round can have
        are for what the script logs itself. Nothing before `begin`.
        """
        numbers = [(name, float(value)) for name, value in metrics.items() if isinstance(value, (int, float))]
        for name, value in sorted(numbers, key=lambda item: "loss" not in item[0].lower())[: MAX_METRICS - 8]:
            if self._manager is not None:
                with suppress(Invalid):  # too many, or too long a name
                    self._manager.report_metrics({f"val_{name}" if name in _TRAINING else name: value})

    @property
    def is_over(self) -> bool:
        """The framework's loop must end: all rounds are closed, or a stop was requested."""
        return self._replica.stopping or (self._manager is not None and self._manager.finished)

    def pause(self) -> None:
        """The framework evaluates or saves, until `resume` or the next step."""
        self.resume()
        self._evaluation.enter_context(self._replica.evaluating())

    def resume(self) -> None:
        """The framework trains again. Idempotent."""
        self._evaluation.close()

    def end(self) -> None:
        """Evaluate the final model, and leave DiLoCo. Raises Retryable if the framework has ended before the run."""
        self.resume()
        if self.is_over:
            next(self._steps, None)
        self._diloco.close()
        if not self.is_over:
            raise Retryable(
                "the trainer ended before the run: raise its max_steps or epochs; to end this replica on purpose, call "
                "replica.request_stop. Its next start continues the run"
            )
