"""Writes rows of text as an HTML table. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.report.plot import escaped, sentence

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MOST_ROWS: Final = 200
"""A longer table is no overview, and makes the file large; the export has every row."""
_LEVELS: Final = {"error": "bad", "warning": "warning", "info": "unknown", "failed": "bad"}


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[int], wide: Collection[int]
) -> str:
    """A table, cut after MOST_ROWS. numbers: columns to align right. wide: columns with sentences, which wrap."""
    style = {**dict.fromkeys(numbers, ' class="n"'), **dict.fromkeys(wide, ' class="w"')}
    head = "".join(f"<th{style.get(index, '')}>{escaped(name)}</th>" for index, name in enumerate(columns))
    body = "".join(f"<tr>{_cells(row, style)}</tr>" for row in rows[:MOST_ROWS])
    cut = f'<p class="dim">{len(rows) - MOST_ROWS:,} more rows are left out.</p>' if len(rows) > MOST_ROWS else ""
    head = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>{cut}'


def _cells(row: Sequence[str], style: dict[int, str]) -> str:
    return "".join(f"<td{style.get(index, '')}>{_level(text)}</td>" for index, text in enumerate(row))


def _level(text: str) -> str:
    level = _LEVELS.get(text)
    return sentence(text) if level is None else f'<span class="{level}">{escaped(text)}</span>'
