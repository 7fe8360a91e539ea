"""Log events of the runtime: a stable event name plus fields, through the `skerry` logger.

Names are frozen in `NAMES` because tools filter on them. No event contains a secret. Attaches no handler by itself:
`replica` and `manager` call `log_to_stderr`.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping
    from io import TextIOWrapper

Name: TypeAlias = Literal[
    "abstained",  # this replica contributes nothing to a round
    "stray_records",  # commits of rounds that are not reached, which no contributions back: ignored
    "averages_differ",  # a commit names another average than this replica holds: receipts tell which is right
    "always_late",  # several rounds in a row closed without this replica: raise faults.grace, or upload less
    "artifact_saved",
    "catch_up_missing",  # the script never calls catch_up, so this replica can neither rejoin at the head nor end early
    "caught_up",  # this replica followed the log to its head
    "reduced_unit_refused",  # a member's part of an average is damaged: it is made again from the contributions
    "checkpoint_failed",  # a background checkpoint was aborted; training continues
    "checkpoint_loaded",
    "checkpoint_saved",
    "contributed",
    "contribution_refused",  # a contribution cannot be used: slot and reason
    "decided",  # an exchange has its decision
    "diverged",  # this replica's state is not what the majority has, or what the log gives: it heals
    "early_contribution_failed",  # while the script evaluates; the round's own exchange contributes
    "ended",
    "garbage_collected",  # unneeded objects were deleted; held_by: the replica that still needs older ones
    "garbage_collection_failed",  # a collection was aborted; the next one deletes the rest
    "healed",  # after `diverged`: the receipts agree again
    "heartbeat_failed",
    "initial_model_loaded",  # the model of another run, from which this run starts
    "joined",  # this incarnation owns its slot
    "local_copy_failed",  # a copy on a machine of the replica could not be written or read; the bucket has the state
    "local_copy_saved",
    "local_state_failed",  # this replica's own state could not be saved or loaded; training continues
    "local_state_loaded",
    "local_state_missing",  # a restarted replica has no saved state of its own
    "local_state_saved",
    "mirror_behind",  # a mirror of the run could not be brought up to date: why; it is tried again
    "mirrored",  # rounds or a checkpoint were copied to a mirror
    "mount_remembers_absence",  # an NFS mount without lookupcache=positive: files of others are seen late
    "payload_mended",  # a damaged or missing payload of this slot was put back from a mirror
    "payload_not_mended",  # no mirror has it whole, or the store refuses: why
    "payload_read_from_copy",  # one of another slot is read from a mirror; `skerry doctor --repair` puts it back
    "receipt_failed",
    "receipts_differ",  # replicas have different averages or states after a round; which are right, if known
    "roll_up_failed",  # a roll-up could not be written; readers read the single records
    "rolled_up",  # what readers need of many rounds is in one object
    "round_closed",
    "round_ended_early",  # the other replicas wait: this one contributes the steps it has completed
    "round_failed",  # should_commit was False
    "rounding_drift",  # this replica rounds differently (unlike hardware); logged once, corrected every time
    "settings_applied",  # the outer loop of a round is another than run.json's: first round of each change
    "slots_changed",  # the run has other replicas than in the round before, by its log
    "stop_requested",
    "store_recovered",
    "store_retry",
    "unfinished_round_dropped",  # a saved unfinished round cannot be used: why
    "unfinished_round_failed",  # an unfinished round could not be saved or loaded; training continues
    "unfinished_round_resumed",  # this incarnation continues the round that the previous one had begun
    "unfinished_round_saved",
    "unit_check_failed",  # a spot check could not be made: it disputes nothing
    "unit_disputed",  # a spot check: the contributions do not give a member's part of an average
]
NAMES: Final[tuple[str, ...]] = get_args(Name)
Field: TypeAlias = str | int | float | bool | None

_LOGGER = logging.getLogger("skerry")
_LINE: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \S+ (INFO|WARNING|ERROR) ([a-z_]+)(?: |$)")


def line_format(replica: str) -> str:
    """The format of an event as a line of a replica's log, for `logging.Formatter`; `level_of` reads such lines."""
    return f"%(asctime)s {replica} %(levelname)s %(message)s"


def log_to_stderr(replica: str) -> None:
    """Write the runtime's events to stderr, unless the script has configured logging itself.

    From then on `print` writes whole lines. Python without buffers (PYTHONUNBUFFERED, as in the image) writes a text
    and its end of line in two calls, and an event of another thread came between them.
    """
    if getattr(sys.stdout, "write_through", False):
        cast("TextIOWrapper", sys.stdout).reconfigure(line_buffering=True, write_through=False)
    if _LOGGER.hasHandlers():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(line_format(replica)))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)


def level_of(line: str) -> int | None:
    """The level of an event in a replica's log; None for any other line, such as one that the script printed."""
    match = _LINE.match(line)
    return None if match is None or match[2] not in NAMES else logging.getLevelNamesMapping()[match[1]]


def emit(
    name: Name, fields: Mapping[str, Field], *, level: int = logging.INFO, error: BaseException | None = None
) -> None:
    """Log one event: `name key=value ...` as text, and `event` and `fields` on the record for tools."""
    if not _LOGGER.isEnabledFor(level):
        return
    text = " ".join([name, *(f"{key}={_format(value)}" for key, value in fields.items())])
    # `exc_info` keeps the cause chain; the record's own attributes let a JSON handler skip parsing.
    _LOGGER.log(level, text, exc_info=error, extra={"event": name, "fields": dict(fields)})


def _format(value: Field) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return repr(text) if " " in text else text
