"""How an examination looks, and how far a long one has come: a table and a bar on a terminal, lines elsewhere.

Decides nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich import box
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from rich.console import Console

    from skerry.infra.observe.findings import Bodies, Examination, Severity
    from skerry.runtime.clock import Clock

_COLOURS: Final[Mapping[Severity, str]] = {"error": "red", "warning": "yellow", "info": "cyan"}
# Narrower than this a table is a jumble; lines wrap where the terminal does.
_NARROWEST: Final = 80
# A person looks up this often.
_PROGRESS_S: Final = 10.0


@contextlib.contextmanager
def reading(console: Console, clock: Clock) -> Generator[Callable[[Bodies, Bodies], None]]:
    """Tell it what was read of what there is: a bar that goes away, or now and then a line."""
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("reading payloads and checkpoints"), *columns, console=console, transient=True) as bar:
            task = bar.add_task("reading")
            yield lambda done, whole: bar.update(task, completed=done.size_bytes, total=whole.size_bytes)
        return
    told: list[float] = []

    def tell(done: Bodies, whole: Bodies) -> None:
        if not told or done == whole or clock.now() - told[-1] >= _PROGRESS_S:
            told.append(clock.now())
            amount = f"{done.objects} of {whole.objects} payloads and checkpoint parts"
            console.print(
                f"read {amount}, {done.size_bytes / 1e6:.1f} of {whole.size_bytes / 1e6:.1f} MB",
                highlight=False,
                soft_wrap=True,
            )

    yield tell


def table(found: Examination, width: int) -> Table | Text:
    """The findings as rows of a terminal that is `width` columns wide."""
    if not found.findings or width < _NARROWEST:
        return Text("\n".join(plain(found)))
    grid = Table(
        title=summary(found),
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_lines=False,
    )
    for column in ("finding", "round", "replica", "what, where, and what to do"):
        grid.add_column(
            column, no_wrap=column in {"finding", "replica"}, justify="right" if column == "round" else "left"
        )
    for one in found.findings:
        what = Text.assemble(one.text, "\n", (one.key, "dim"), "\n", (one.next, "italic"))
        grid.add_row(
            Text(one.kind, style=_COLOURS[one.severity]),
            "" if one.round is None else str(one.round),
            Text(one.slot or ""),
            what,
        )
    return grid


def plain(found: Examination) -> list[str]:
    """A line for every finding, and one for the whole."""
    lines: list[str] = []
    for one in found.findings:
        number = "-" if one.round is None else str(one.round)
        lines.append(
            f"{one.severity}: {one.kind} round={number} replica={one.slot or '-'} key={one.key}: {one.text}; {one.next}"
        )
    return [*lines, summary(found)]


def summary(found: Examination) -> str:
    """The examination in one line."""
    counts = Counter(one.severity for one in found.findings)
    parts = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in _COLOURS
        if counts[severity]
    ]
    verdict = ", ".join(parts) or "healthy"
    name = found.run or "a run without run.json"
    read = f"{found.records} records"
    if found.bodies is not None:
        size = f"{found.bodies.size_bytes / 1e6:.1f} MB"
        read += f" and {found.bodies.objects} payloads and checkpoint parts ({size})"
    return f"{name}: {verdict}; {found.closed} rounds closed, {read} read at {found.uri}"
