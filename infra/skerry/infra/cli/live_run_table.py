"""Screens that show a running run: a live table on a terminal, plain lines in files and pipes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from rich.live import Live
from rich.text import Text

from skerry.infra.cli.run_screen import RunScreen
from skerry.infra.cli.run_text import progress
from skerry.infra.cli.supervisor_output_text import lines_of, note
from skerry.infra.local.up_destroy_events import Event, LogLines

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from skerry.infra.cli.compute_cost_so_far import Spending
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.clock import Clock

# A person looks at the progress about this often; the replicas' own lines are printed in between.
_PROGRESS_S = 10.0
# A lower drawing has no room for the replicas.
_MIN_HEIGHT = 14


class Screen(Protocol):
    """Shows the reports and views of a supervisor. Not thread-safe."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def report(self, report: Event) -> None:
        """Show one report."""
        ...

    def view(self, view: RunView) -> None:
        """Show the run as it is now."""
        ...


class PlainScreen:
    """Prints a line for every report and, every few seconds, one for the run: for files, pipes and logs.

    quiet: leave out the lines that replicas write. verbose: show the protocol's events among them.
    """

    def __init__(self, console: Console, clock: Clock, *, quiet: bool = False, verbose: bool = False) -> None:
        self._console = console
        self._clock = clock
        self._quiet = quiet
        self._verbose = verbose
        self._printed: tuple[str, float] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, report: Event) -> None:
        """Print it."""
        _print(self._console, report, quiet=self._quiet, verbose=self._verbose)

    def view(self, view: RunView) -> None:
        """Print a line if the text has changed and the last line is some seconds old."""
        text, now = progress(view), self._clock.now()
        if self._printed is None or (text != self._printed[0] and now - self._printed[1] >= _PROGRESS_S):
            self._printed = text, now
            self._console.print(note(text, "bold"), soft_wrap=True)


class TableScreen:
    """Draws the run below all printed lines: for terminals."""

    def __init__(
        self,
        console: Console,
        *,
        quiet: bool = False,
        verbose: bool = False,
        money_of: Callable[[RunView], Spending] | None = None,
    ) -> None:
        self._console = console
        self._quiet = quiet
        self._verbose = verbose
        self._money_of = money_of
        self._live = Live(console=console, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def report(self, report: Event) -> None:
        """Print it above the table."""
        _print(self._console, report, quiet=self._quiet, verbose=self._verbose)

    def view(self, view: RunView) -> None:
        """Redraw the screen, below the lines of the replicas."""
        money = None if self._money_of is None else self._money_of(view)
        self._live.update(RunScreen(view=view, spending=money, height=_height(self._console.height)))


class EnduringScreen:
    """Wraps a screen so that a closed terminal or pipe raises nothing: `on_gone` is called, and output is dropped."""

    def __init__(self, screen: Screen, console: Console, on_gone: Callable[[], None]) -> None:
        self._screen = screen
        self._console = console
        self._on_gone = on_gone

    def __enter__(self) -> Self:
        with self._enduring():
            self._screen.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with self._enduring():
            self._screen.__exit__(*error)

    def report(self, report: Event) -> None:
        """Show it, if the output is still open."""
        with self._enduring():
            self._screen.report(report)

    def view(self, view: RunView) -> None:
        """Show it, if the output is still open."""
        with self._enduring():
            self._screen.view(view)

    @contextlib.contextmanager
    def _enduring(self) -> Generator[None]:
        try:
            yield
        except (OSError, SystemExit):  # rich raises SystemExit on a broken pipe
            self._console.quiet = True
            # Buffered output is flushed at exit, so the descriptor must stay writable.
            with contextlib.suppress(OSError), Path(os.devnull).open("w") as null:
                os.dup2(null.fileno(), self._console.file.fileno())
            self._on_gone()


def open_screen(
    console: Console,
    clock: Clock,
    *,
    quiet: bool = False,
    verbose: bool = False,
    money_of: Callable[[RunView], Spending] | None = None,
) -> Screen:
    """The screen for this console: a table on a terminal, lines elsewhere. money_of: the dollars of a view."""
    if console.is_terminal and not console.is_dumb_terminal:
        return TableScreen(console, quiet=quiet, verbose=verbose, money_of=money_of)
    return PlainScreen(console, clock, quiet=quiet, verbose=verbose)


def _height(lines: int) -> int:
    """The height of the drawing: a third of the terminal is left for printed lines, if it is high enough."""
    return max(_MIN_HEIGHT, lines * 2 // 3)


def _print(console: Console, report: Event, *, quiet: bool, verbose: bool) -> None:
    if quiet and isinstance(report, LogLines):
        return
    if lines := lines_of(report, verbose=verbose):
        # One print for all lines: on a terminal each print redraws the table.
        console.print(Text("\n").join(lines), soft_wrap=True)
