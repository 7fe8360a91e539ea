"""How an examination looks: a table on a terminal, lines elsewhere. Decides nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.observe.findings import Examination, Severity

_COLOURS: Final[Mapping[Severity, str]] = {"error": "red", "warning": "yellow", "info": "cyan"}
# Narrower than this a table is a jumble; lines wrap where the terminal does.
_NARROWEST: Final = 80


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
    return f"{name}: {verdict}; {found.closed} rounds closed, {found.records} records read at {found.uri}"
