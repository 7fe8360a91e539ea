"""Draws the replicas of a run as rows: state, step, loss, rate, part in the last rounds, machine, price. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from skerry.infra.number_text import short_number
from skerry.infra.observe.replica_state_text import place, state
from skerry.runtime.log.keys import slot_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.cli.compute_cost_so_far import Spending
    from skerry.infra.observe.run_view import Mark, ReplicaView, RunView

# Character and style of a replica's part in a round, in the order of the legend.
MARKS: Final[Mapping[Mark, tuple[str, str]]] = {
    "trained": ("█", "green"),
    "cut": ("▄", "yellow"),
    "late": ("▒", "yellow"),
    "abstained": ("○", "magenta"),
    "absent": ("░", "bright_black"),
    "killed": ("X", "bold red"),
}
# Rounds in the strip: more show no detail.
_STRIP_MAX: Final = 64
_TITLE: Final = "last {} rounds"
_GAP: Final = "  "
# Columns in the order of importance, each group with the rounds of the strip that are more important.
_WANTED: Final = (
    (16, ("replica", "state", "loss", "share", "tok/s", "cloud", "$/h", "waits for", "restarts", "round", "step")),
    (24, ("where", "in", "MB up/down")),
)
_BAD: Final = frozenset({"failed", "restarts", "silent", "not seen", "killed"})
_STYLES: Final[Mapping[str, str]] = {
    "train": "green",
    "sync": "cyan",
    "wait": "cyan",
    "joining": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "left": "yellow",
}


@dataclass(frozen=True, kw_only=True)
class _Column:
    """A column of the table. number: aligned to the right."""

    name: str
    cell: Callable[[ReplicaView], str]
    number: bool = False


def is_bad(replica: ReplicaView) -> bool:
    """True if the replica needs attention."""
    text = state(replica)
    return text in _BAD or replica.silent


def state_style(replica: ReplicaView) -> str:
    """The style of the state."""
    return "bold red" if is_bad(replica) else _STYLES.get(state(replica), "")


def state_counts(replicas: Sequence[ReplicaView]) -> str:
    """The replicas by state, with the awaited ones: 3 train, 1 wait for a-2, 1 silent."""
    counts = Counter("silent" if replica.silent else state(replica) for replica in replicas)
    waits = [replica for replica in replicas if state(replica) == "wait"]
    awaited = sorted({slot for replica in waits for slot in replica.waiting_for}, key=slot_order)
    names = {"wait": f"wait for {few(awaited)}"}
    return ", ".join(f"{count} {names.get(name, name)}" for name, count in counts.most_common())


def legend() -> Text:
    """The characters of the strip and their meanings."""
    parts = [Text.assemble((glyph, style), f" {name}") for name, (glyph, style) in MARKS.items()]
    return Text("  ").join(parts)


def strip(replica: ReplicaView, width: int) -> Text:
    """The replica's part in the last rounds, at most `width` of them."""
    text = Text()
    for mark in replica.marks[-width:] if width else ():
        text.append(" " if mark is None else MARKS[mark][0], "" if mark is None else MARKS[mark][1])
    return text


def replica_rows(view: RunView, width: int, spending: Spending | None, limit: int | None) -> list[Text]:
    """The table with its header, at most `limit` lines. Replicas that need attention are shown first.

    A line below a row has the reason of an end, or a notice.
    """
    columns = _chosen(view, width, spending)
    cells = {replica.slot: [column.cell(replica) for column in columns] for replica in view.replicas}
    widths = [
        max([len(column.name), *(len(row[number]) for row in cells.values())]) for number, column in enumerate(columns)
    ]
    room = width - sum(widths) - len(_GAP) * len(columns)
    shown = min(room, _STRIP_MAX, max((len(replica.marks) for replica in view.replicas), default=0))
    title = _TITLE.format(shown) if shown else ""
    header = Text(_GAP.join(_aligned(column, column.name, size) for column, size in zip(columns, widths, strict=True)))
    header.append(_GAP + (title if len(title) <= room else ""))
    header.stylize("bold")
    blocks = [
        (replica, _block(replica, columns, cells[replica.slot], widths, shown, width)) for replica in view.replicas
    ]
    return [header, *_fitting(blocks, None if limit is None else limit - 1)]


def _fitting(blocks: Sequence[tuple[ReplicaView, list[Text]]], limit: int | None) -> list[Text]:
    """As many rows as fit: first without the lines below rows, then those that need attention before the others."""
    if limit is None or sum(len(lines) for _, lines in blocks) <= limit:
        return [line for _, lines in blocks for line in lines]
    if len(blocks) <= limit:
        spare = limit - len(blocks)
        kept: list[Text] = []
        for _, lines in blocks:
            below = lines[1 : 1 + spare]
            spare -= len(below)
            kept += [lines[0], *below]
        return kept
    urgent = sorted(blocks, key=lambda block: not is_bad(block[0]))[: max(0, limit - 1)]
    slots = {replica.slot for replica, _ in urgent}
    rest = [replica for replica, _ in blocks if replica.slot not in slots]
    more = Text(f"{len(rest)} more: {state_counts(rest)}", style="dim")
    return [*(lines[0] for replica, lines in blocks if replica.slot in slots), more][: max(0, limit)]


def _block(
    replica: ReplicaView,
    columns: Sequence[_Column],
    cells: Sequence[str],
    widths: Sequence[int],
    shown: int,
    width: int,
) -> list[Text]:
    row = Text()
    for column, cell, size in zip(columns, cells, widths, strict=True):
        style = state_style(replica) if column.name == "state" else ""
        row.append(_aligned(column, cell, size), style)
        row.append(_GAP)
    row.append_text(strip(replica, shown))
    below = _below(replica)
    indent = " " * (widths[0] + len(_GAP))
    return [row, *(Text((indent + line)[:width], style=style) for line, style in below)]


def _below(replica: ReplicaView) -> list[tuple[str, str]]:
    """Lines below the row of a replica, with their styles."""
    if replica.outcome in {"failed", "retry", "stopped"} and replica.reason:
        return [(replica.reason.splitlines()[0], "red" if replica.outcome == "failed" else "yellow")]
    if replica.silent:
        return [("no heartbeat: the process hangs, was killed, or its machine is lost", "red")]
    if replica.notice and replica.at_work:
        return [(replica.notice.splitlines()[0], "yellow")]
    return []


def _chosen(view: RunView, width: int, spending: Spending | None) -> list[_Column]:
    """The columns that fit beside a strip of some rounds, in their own order; one without any value is left out."""
    order = _columns(view, spending)
    marks = max((len(replica.marks) for replica in view.replicas), default=0)
    strip_width = max(marks, len(_TITLE.format(marks)))
    left = width
    names: set[str] = set()
    for rounds, wanted in _WANTED:
        for name in wanted:
            values = [order[name].cell(replica) for replica in view.replicas]
            size = max([len(name), *map(len, values)]) + len(_GAP)
            fits = size <= left - min(rounds, strip_width) and any(value not in {"-", "0", "0/0"} for value in values)
            if fits or name in {"replica", "state", "loss"}:
                names.add(name)
                left -= size
    return [column for name, column in order.items() if name in names]


def _columns(view: RunView, spending: Spending | None) -> dict[str, _Column]:
    """All columns in the order of the table."""
    columns = (
        _Column(name="replica", cell=lambda replica: replica.slot),
        _Column(name="state", cell=state),
        _Column(name="round", cell=lambda replica: "-" if replica.round is None else f"{replica.round}", number=True),
        _Column(name="step", cell=lambda replica: _step(replica, view.steps_per_round), number=True),
        _Column(
            name="loss", cell=lambda replica: "-" if replica.loss is None else short_number(replica.loss), number=True
        ),
        _Column(name="tok/s", cell=_rate, number=True),
        _Column(name="share", cell=lambda replica: _share(replica, view.steps_per_round), number=True),
        _Column(name="in", cell=lambda replica: f"{replica.in_rounds}/{replica.of_rounds}", number=True),
        _Column(name="restarts", cell=lambda replica: str(max(0, replica.starts - 1)), number=True),
        _Column(name="waits for", cell=lambda replica: few(replica.waiting_for)),
        _Column(name="cloud", cell=_cloud),
        _Column(name="where", cell=_where),
        _Column(
            name="$/h", cell=lambda replica: "-" if spending is None else spending.an_hour(replica.machine), number=True
        ),
        _Column(name="MB up/down", cell=_traffic, number=True),
    )
    return {column.name: column for column in columns}


def _aligned(column: _Column, text: str, size: int) -> str:
    return text.rjust(size) if column.number else text.ljust(size)


def _step(replica: ReplicaView, steps: int) -> str:
    if replica.step is None or not replica.at_work:
        return "-"
    return f"{replica.step}/{steps}" if steps else str(replica.step)


def _rate(replica: ReplicaView) -> str:
    return f"{replica.tokens_per_s:,.0f}" if replica.tokens_per_s is not None and replica.at_work else "-"


def _traffic(replica: ReplicaView) -> str:
    if not replica.uploaded_bytes and not replica.downloaded_bytes:
        return "-"
    return f"{replica.uploaded_bytes / 1e6:,.0f}/{replica.downloaded_bytes / 1e6:,.0f}"


def _share(replica: ReplicaView, steps: int) -> str:
    """The part of the current round that it has trained."""
    return "-" if replica.step is None or not replica.at_work or not steps else f"{100 * replica.step // steps} %"


def _cloud(replica: ReplicaView) -> str:
    cloud = None if replica.machine is None else replica.machine.cloud
    return "-" if cloud in {None, "local"} else str(cloud)


def _where(replica: ReplicaView) -> str:
    """The region and the type of its machine."""
    return "-" if replica.machine is None else place(replace(replica.machine, cloud=None))


def few(slots: Sequence[str]) -> str:
    """The first two slots by name."""
    if not slots:
        return "-"
    return ", ".join(slots[:2]) + (f" +{len(slots) - 2}" if len(slots) > 2 else "")
