"""Shows what `skerry doctor` checks and examines: its progress while it reads, then its findings, as table or lines."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from skerry.infra.observe.doctor import examine as examining

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.findings import Examination, PayloadAmount, Severity
    from skerry.infra.provision.target_and_store_interfaces import Check
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

_COLOURS: Final[Mapping[Severity, str]] = {"error": "red", "warning": "yellow", "info": "cyan"}
# On a narrower terminal a table is unreadable; lines wrap.
_MIN_TABLE_WIDTH: Final = 80
# A person looks at the progress about this often.
_PROGRESS_S: Final = 10.0


@contextlib.contextmanager
def showing_progress(console: Console, clock: Clock) -> Generator[Callable[[PayloadAmount, PayloadAmount], None]]:
    """The callback for what was read of the whole: shows a bar on a terminal, a line every few seconds elsewhere."""
    if console.is_terminal and not console.is_dumb_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("reading payloads and checkpoints"), *columns, console=console, transient=True) as bar:
            task = bar.add_task("reading")
            yield lambda done, whole: bar.update(task, completed=done.size_bytes, total=whole.size_bytes)
        return
    printed_at: list[float] = []

    def show(done: PayloadAmount, whole: PayloadAmount) -> None:
        if not printed_at or done == whole or clock.now() - printed_at[-1] >= _PROGRESS_S:
            printed_at.append(clock.now())
            amount = f"{done.objects} of {whole.objects} payloads and checkpoint parts"
            console.print(
                f"read {amount}, {done.size_bytes / 1e6:.1f} of {whole.size_bytes / 1e6:.1f} MB",
                highlight=False,
                soft_wrap=True,
            )

    yield show


def examine(store: Store, clock: Clock, *, deep: bool) -> Examination:
    """Examine a run's log; with `deep` also read payloads and checkpoints, showing the progress on stderr."""
    if not deep:
        return examining.examine_store(store)
    with showing_progress(Console(stderr=True), clock) as on_progress:
        return examining.examine_store(store, on_progress)


def check_lines(checks: Sequence[Check]) -> Iterator[Text]:
    """A line for each check, with what to do if it failed."""
    for check in checks:
        sign, style = {True: ("ok", "green"), False: ("wrong", "red"), None: ("unknown", "yellow")}[check.ok]
        advice = f"; {check.advice}" if check.advice and check.ok is not True else ""
        yield Text(f"  {sign:<8}{check.name}: {check.text}{advice}", style=style)


def table(examination: Examination, width: int) -> Table | Text:
    """The findings as a table for a terminal of `width` columns, or as lines."""
    if not examination.findings or width < _MIN_TABLE_WIDTH:
        return Text("\n".join(plain(examination)))
    grid = Table(
        title=summary(examination),
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
    for finding in examination.findings:
        what = Text.assemble(finding.text, "\n", (finding.key, "dim"), "\n", (finding.next, "italic"))
        grid.add_row(
            Text(finding.kind, style=_COLOURS[finding.severity]),
            "" if finding.round is None else str(finding.round),
            Text(finding.slot or ""),
            what,
        )
    return grid


def plain(examination: Examination) -> list[str]:
    """A line for every finding, then the summary."""
    lines: list[str] = []
    for finding in examination.findings:
        number = "-" if finding.round is None else str(finding.round)
        lines.append(
            f"{finding.severity}: {finding.kind} round={number} replica={finding.slot or '-'} key={finding.key}: "
            f"{finding.text}; {finding.next}"
        )
    return [*lines, summary(examination)]


def summary(examination: Examination) -> str:
    """The examination in one line."""
    counts = Counter(finding.severity for finding in examination.findings)
    parts = [
        f"{counts[severity]} {severity}{'' if counts[severity] == 1 else 's'}"
        for severity in _COLOURS
        if counts[severity]
    ]
    verdict = ", ".join(parts) or "healthy"
    name = examination.run or "a run without run.json"
    read = f"{examination.records} records"
    if examination.bodies is not None:
        size = f"{examination.bodies.size_bytes / 1e6:.1f} MB"
        read += f" and {examination.bodies.objects} payloads and checkpoint parts ({size})"
    taken = examination.participation
    rounds = f"{examination.closed} rounds closed" if taken is None else taken.headline(None)
    return f"{name}: {verdict}; {rounds}; {read} read at {examination.uri}"
