"""What the runtime tells people and tools: a stable event name plus fields, through the `skerry` logger.

Never a secret, never a print. Names are frozen in `NAMES`: a tool may filter on them. Attaching handlers is the
application's business (`skerry.runtime.replica` does it for a replica process).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

Name: TypeAlias = Literal[
    "abstained",  # this replica has nothing good to offer to a round
    "caught_up",  # followed the log to its head
    "checkpoint_failed",  # a background checkpoint was given up; training goes on
    "checkpoint_loaded",
    "checkpoint_saved",
    "contribution_refused",  # somebody's contribution cannot be used: slot and reason
    "contributed",
    "decided",  # an exchange has its decision
    "delta_brought",  # what was kept is this slot's contribution to a later round
    "delta_failed",  # what was kept could not be brought; it stays kept
    "delta_kept",  # no record counts what was trained: this replica came late
    "diverged",  # this replica holds something else than the others, by more than rounding: it heals
    "drifted",  # this replica rounds differently, as unlike hardware does; told once, removed whenever it is found
    "ended",
    "garbage_collected",  # objects that nobody needs any more are deleted; held_by: who still needs some
    "garbage_failed",  # a collection was given up; the next one takes up what it left
    "healed",  # after `diverged`: the receipts agree again
    "heartbeat_failed",
    "joined",  # this incarnation owns its slot
    "private_failed",  # this replica's own state could not be saved or loaded; training goes on
    "private_fresh",  # a restarted replica found no state of its own
    "private_loaded",
    "private_saved",
    "receipt_failed",
    "receipts_differ",  # replicas hold different averages or states after a round: which, and who counts as right
    "round_closed",
    "round_cut_short",  # the others wait, and this replica contributes what it has
    "round_failed",  # should_commit was False
    "stop_requested",
    "store_recovered",
    "store_retry",
    "unfinished_dropped",  # what an earlier incarnation began is of no use any more: why
    "unfinished_failed",  # what is trained could not be saved or loaded; training goes on
    "unfinished_resumed",  # this incarnation goes on with what the last one had trained
    "unfinished_saved",
]
NAMES: Final[tuple[str, ...]] = get_args(Name)
Field: TypeAlias = str | int | float | bool | None

_LOGGER = logging.getLogger("skerry")


def emit(
    name: Name, fields: Mapping[str, Field], *, level: int = logging.INFO, error: BaseException | None = None
) -> None:
    """Log one event: `name key=value ...` as text, and `event` and `fields` on the record for tools."""
    if not _LOGGER.isEnabledFor(level):
        return
    text = " ".join([name, *(f"{key}={_short(value)}" for key, value in fields.items())])
    # `exc_info` keeps the cause chain; the record's own attributes let a JSON handler skip parsing.
    _LOGGER.log(level, text, exc_info=error, extra={"event": name, "fields": dict(fields)})


def _short(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text else text
