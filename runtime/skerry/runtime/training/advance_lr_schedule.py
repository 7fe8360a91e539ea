"""Advances a learning rate schedule to a step of the run: after a restart, a late join or a round that was followed.

A schedule counts its own calls. A replica that joins late, or was restarted, has made fewer of them than the run.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def advance(schedule: LRScheduler, step: int) -> None:
    """Set the learning rates to those of this inner step. Never goes back: a schedule beyond the step stays there."""
    with warnings.catch_warnings():
        # torch warns of a schedule that is stepped before its optimizer; a replica that joins late has to do that.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        while schedule.last_epoch < step:
            schedule.step()
