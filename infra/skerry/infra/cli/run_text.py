"""Formats the state of a run: one line of progress, a table or lines of its replicas, and the summary of an `up`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from skerry.infra.run.restart_policy import ReplicaFate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.local.up_destroy_events import Leftovers, Summary
    from skerry.infra.observe.participation import Participation
    from skerry.infra.observe.run_view import ReplicaView, RunView

_COLUMNS: tuple[str, ...] = ("replica", "state", "round", "step", "loss", "tok/s", "waiting for", "up MB", "down MB")
_NUMBERS = frozenset({"round", "step", "loss", "tok/s", "up MB", "down MB"})
# Columns that a narrow terminal leaves out, in this order; names and states are never wrapped or left out.
_OPTIONAL = ("waiting for", "down MB", "up MB", "step")
# On a narrower terminal a table is unreadable; the lines of `plain` wrap.
_MIN_TABLE_WIDTH = 60


def progress(view: RunView) -> str:
    """The run in one line."""
    moving = [replica for replica in view.replicas if replica.at_work and not replica.silent]
    rates = [replica.tokens_per_s for replica in moving if replica.tokens_per_s is not None]
    losses = [replica.loss for replica in view.replicas if replica.loss is not None]
    parts = [f"round {_of(view.closed, view.rounds)} closed{_made_up(view)}"]
    if view.participants is not None:
        parts.append(f"{view.participants} of {len(view.replicas)} replicas in the last")
    if losses:
        parts.append(f"mean loss {sum(losses) / len(losses):.4f}")
    if rates:
        parts.append(f"{sum(rates):,.0f} tokens/s")
    return ", ".join(parts)


def status(view: RunView, width: int) -> Table | Text:
    """The replicas as a table for a terminal of `width` columns, or as lines if a row does not fit."""
    rows: list[dict[str, str]] = [dict(zip(_COLUMNS, _cells(replica), strict=True)) for replica in view.replicas]
    columns = list(_COLUMNS)
    for column in _OPTIONAL:
        if _width(columns, rows) > width:
            columns.remove(column)
    if width < _MIN_TABLE_WIDTH or _width(columns, rows) > width:
        return Text("\n".join(plain(view)))
    grid = Table(
        title=f"{view.run}: {progress(view)}",
        title_justify="left",
        caption=agreement_text(view),
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        grid.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*(Text(row[column]) for column in columns))
    return grid


def _width(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> int:
    """The width of a table of these columns: each has its widest cell and a space on both sides of the separator."""
    return sum(max(map(len, (column, *(row[column] for row in rows)))) + 2 for column in columns) + 1


def plain(view: RunView) -> list[str]:
    """The run and its replicas as lines: slot, then name=value; values have no spaces, except a quoted state."""
    lines = [f"{view.run}: {progress(view)}", f"store: {view.uri}", f"receipts: {agreement_text(view)}"]
    for replica in view.replicas:
        _, state, *rest = _cells(replica)
        words = (
            f"{name.replace(' ', '_')}={value.replace(' ', '')}" for name, value in zip(_COLUMNS[2:], rest, strict=True)
        )
        lines.append(" ".join([replica.slot, f'state="{state}"' if " " in state else f"state={state}", *words]))
    return lines


def agreement_text(view: RunView) -> str:
    """The newest round with receipts of two replicas, and whether their average and state are equal."""
    agreement = view.agreement
    if agreement is None:
        return "no round yet with receipts of two replicas"
    average = "equal" if agreement.average else "DIFFERENT"
    state = "" if agreement.state is None else f", state {'equal' if agreement.state else 'DIFFERENT'}"
    return f"round {agreement.round}, {len(agreement.slots)} replicas: average {average}{state}"


def summary_lines(summary: Summary) -> list[str]:
    """Describes the result of `up`: the run, each replica, and what to do next."""
    view = summary.view
    lines = [f"{view.run}: {progress(view)}; receipts: {agreement_text(view)}"]
    views = {replica.slot: replica for replica in view.replicas}
    for result in summary.results:
        replica = views.get(result.slot)
        again = f", restarted {result.restarts} times" if result.restarts else ""
        last = f": {result.last_line}" if result.fate is ReplicaFate.FAILED and result.last_line else ""
        lines.append(f"  {result.slot}: {result.fate.value}{last}{_traffic(replica)}{again} ({result.reason})")
    lines.extend(participation_lines(summary.participation))
    if summary.unseen is not None:
        lines.append(f"the store could not be read at the end; this is the last known state: {summary.unseen}")
    if not summary.results:
        lines.append("the run is already finished, so nothing was started; `skerry destroy` deletes it")
    elif summary.ok:
        but = "" if summary.by_all else ", but not by all replicas"
        lines.append(f"done in {summary.wall_s:.1f} s{but}")
    else:
        if all(result.fate is ReplicaFate.DONE for result in summary.results) and summary.unseen is None:
            closed = f"{view.closed} of {view.rounds} rounds are closed{_made_up(view)}"
            lines.append(f"replicas ended with 0 but {closed}; does the script call connect()?")
        lines.append(f"not done after {summary.wall_s:.1f} s; `skerry up` continues it, `skerry logs` shows why")
    return lines


def model_lines(view: RunView | None, export: str) -> list[str]:
    """Names the command that writes the model to a file, once the run is finished. export: its first words."""
    return [f"the trained model as a file: {export} -o model.safetensors"] if view is not None and view.finished else []


def participation_lines(taken: Participation | None) -> list[str]:
    """Lists the rounds with all replicas, and a warning for each replica that was missing, cut short or restarted."""
    if taken is None:
        return ["the replicas that were missing in rounds are not known, because the log could not be read"]
    lines = [f"{taken.rounds} rounds; all {len(taken.replicas)} replicas in {taken.complete} of them"]
    return [*lines, *(f"warning: {replica.slot}: {replica.text}" for replica in taken.replicas if replica.text)]


def to_remove(remains: Leftovers) -> str:
    """Describes in one line what `destroy` would remove."""
    parts = [f"{remains.objects} objects ({megabytes(remains.size_bytes)}) at {remains.uri}"]
    if remains.processes:
        parts.append(f"{remains.processes} processes")
    if remains.folder is not None:
        parts.append(f"the folder {remains.folder}")
    return ", ".join(parts)


def megabytes(size_bytes: int) -> str:
    """A size in megabytes: 12.3 MB."""
    return f"{size_bytes / 1e6:.1f} MB"


def _traffic(replica: ReplicaView | None) -> str:
    if replica is None or replica.loss is None:
        return ""
    first = "" if replica.loss_first is None else f"{replica.loss_first:.4f} to "
    sent, received = megabytes(replica.uploaded_bytes), megabytes(replica.downloaded_bytes)
    return f", loss {first}{replica.loss:.4f}, {sent} up, {received} down"


def _cells(replica: ReplicaView) -> tuple[str, ...]:
    return (
        replica.slot,
        _state(replica),
        "-" if replica.round is None else str(replica.round),
        "-" if replica.inner_step is None else str(replica.inner_step),
        "-" if replica.loss is None else f"{replica.loss:.4f}",
        "-" if replica.tokens_per_s is None else f"{replica.tokens_per_s:,.0f}",
        ", ".join(replica.waiting_for) or "-",
        f"{replica.uploaded_bytes / 1e6:.1f}",
        f"{replica.downloaded_bytes / 1e6:.1f}",
    )


def _state(replica: ReplicaView) -> str:
    if replica.outcome is not None:
        return replica.outcome
    if replica.phase is None:
        return "not seen"
    return f"{replica.phase}, silent {replica.silent_s:.0f} s" if replica.silent else replica.phase


def _made_up(view: RunView) -> str:
    """The share of the run's work that is done; empty if its rounds alone end it."""
    if view.due is None:
        return ""
    # Rounded down: 100 % only when the run is finished.
    share = 1.0 if view.finished else min(0.999, view.work / view.due)
    return f", {math.floor(1000 * share) / 10:.1f} % trained"


def _of(closed: int, rounds: int | None) -> str:
    return str(closed) if rounds is None else f"{closed}/{rounds}"
