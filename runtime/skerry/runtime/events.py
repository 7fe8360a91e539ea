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
    "ended",
    "heartbeat_failed",
    "joined",  # this incarnation owns its slot
    "receipt_failed",
    "round_closed",
    "round_failed",  # should_commit was False
    "stop_requested",
    "store_recovered",
    "store_retry",
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
