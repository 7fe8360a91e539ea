"""Shows the progress of an apply: a bar with the newest lines above it on a terminal, lines alone elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skerry.infra.cli.common import print_lines
from skerry.infra.cli.plan_text import step_line
from skerry.infra.provision import apply

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from skerry.infra.provision.apply import Step


@contextlib.contextmanager
def showing_steps(console: Console, total: int) -> Generator[Callable[[Step], None]]:
    """The callback that shows each step of an apply of `total` changes."""

    def show(step: Step) -> None:
        if (line := step_line(step)) is not None:
            print_lines([line], console)

    if not console.is_terminal or console.is_dumb_terminal:
        yield show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show_and_advance(step: Step) -> None:
            show(step)
            if step.progress is apply.Progress.BEGUN:
                bar.update(task, description=step.change.address)
            else:
                bar.advance(task)

        yield show_and_advance
