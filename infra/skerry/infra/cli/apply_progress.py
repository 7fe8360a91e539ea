"""How far an apply is: a bar with the newest lines above it on a terminal, lines alone elsewhere."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skerry.infra import apply
from skerry.infra.deploy.showing import step_line

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from skerry.infra.apply import Step


@contextlib.contextmanager
def telling(console: Console, total: int) -> Generator[Callable[[Step], None]]:
    """What is to be told of each step of `total` changes, while they are made."""

    def tell(step: Step) -> None:
        if (line := step_line(step)) is not None:
            console.print(line, soft_wrap=True, highlight=False)

    if not console.is_terminal or console.is_dumb_terminal:
        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)

        def tell_and_show(step: Step) -> None:
            tell(step)
            if step.progress is apply.Progress.BEGUN:
                bar.update(task, description=step.change.address)
            else:
                bar.advance(task)

        yield tell_and_show
