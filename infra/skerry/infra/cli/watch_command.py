"""The command `skerry watch`: a live screen of a run, from its bucket alone. Never writes to the run.

A view is read every few seconds; between two looks nothing is requested. The screen is redrawn when its size changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from skerry.infra.cli.common import (
    DEFAULT_SPEC,
    AsJson,
    Overrides,
    RunName,
    errors_as_exit_codes,
    print_lines,
    to_json,
)
from skerry.infra.cli.compute_cost_so_far import read_spending
from skerry.infra.cli.interrupts import on_signal
from skerry.infra.cli.live_run_table import PlainScreen
from skerry.infra.cli.open_run import open_run
from skerry.infra.cli.run_screen import MIN_WIDTH, RunScreen
from skerry.infra.cli.run_text import agreement_text, participation_lines, plain, progress
from skerry.infra.cli.supervisor_output_text import note
from skerry.infra.local.up_destroy_events import RoundsMissed
from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_participation import ParticipationFollower, read_participation
from skerry.infra.run.run_record import require_settings
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.cli.compute_cost_so_far import Spending
    from skerry.infra.observe.history import RunHistory
    from skerry.infra.observe.run_view import RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# A live replica sends a heartbeat at least every five seconds: one that sends none during all these looks is silent.
_LOOK_S: Final = 0.5
_LOOKS: Final = 14
_PATIENCE_S: Final = 6.0
# A drawing of 64 replicas takes 50 ms; after a change of the size half a second is soon enough.
_REDRAWS_PER_S: Final = 2
_LEAVING: Final = "Ctrl-C ends the watching, not the run"


def watch(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="S", min=0.2, help="Seconds between two looks.")] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Show a run live, from its bucket alone, on any machine. Ctrl-C ends the watching, not the run."""
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        opened = open_run(run, overrides or (), clock)
        store, money_of = opened.store, read_spending(opened.deployment)
        settings = require_settings(store)
        console = Console(stderr=as_json)
        history = _history(store, console)
        watching = Watching(Observer(store, settings, clock, history, sparing=True), clock, money_of, every)
        if once:
            view = settled_view(watching.observer, clock)
            _show_once(view, money_of(view), as_json=as_json)
            return
        try:
            with on_signal(_interrupt):
                watching.until_over(console, as_json=as_json)
        except KeyboardInterrupt:
            over = False
        else:
            over = True
        if watching.view is not None and not as_json:
            print_lines(_end_lines(store, watching.view, over=over), console)


def settled_view(observer: Observer, clock: Clock) -> RunView:
    """The run after as many looks as show for each working replica that it is live or silent."""
    view = observer.view()
    for _ in range(_LOOKS):
        if all(not replica.at_work or replica.silent_s == 0 for replica in view.replicas):
            break
        clock.pause(_LOOK_S)
        view = observer.view(_PATIENCE_S)
    return view


def is_over(view: RunView) -> bool:
    """True if no replica will change anything: the run is finished, or each has ended and none is to be restarted."""
    if any(replica.at_work and not replica.silent for replica in view.replicas):
        return False
    return view.finished or all(replica.outcome not in {None, "retry"} for replica in view.replicas)


class Watching:
    """Looks at a run until it is over, and shows each view."""

    def __init__(
        self, observer: Observer, clock: Clock, money_of: Callable[[RunView], Spending], every_s: float
    ) -> None:
        self.observer = observer
        self.view: RunView | None = None
        self._clock = clock
        self._money_of = money_of
        self._every_s = every_s
        self._problem = ""

    def until_over(self, console: Console, *, as_json: bool) -> None:
        """Show the run for as long as it is not over: as JSON, on a screen, or as lines."""
        if as_json:
            self._loop(
                lambda view: typer.echo(as_json_line(view, self._money_of(view))),
                lambda problem: typer.echo(problem, err=True),
            )
        elif console.is_terminal and not console.is_dumb_terminal and console.width >= MIN_WIDTH:
            with Live(
                console=console,
                screen=True,
                refresh_per_second=_REDRAWS_PER_S,
                get_renderable=lambda: self._drawn(console.height),
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live:
                self._loop(lambda _: live.refresh(), lambda _: live.refresh())
        else:
            screen, follower = PlainScreen(console, self._clock), ParticipationFollower(self.observer)

            def show(view: RunView) -> None:
                screen.view(view)
                for text in follower.look():
                    screen.report(RoundsMissed(text=text))

            self._loop(
                show,
                lambda problem: console.print(note(problem, "yellow"), soft_wrap=True),
            )

    def _loop(self, show: Callable[[RunView], None], warn: Callable[[str], None]) -> None:
        while True:
            before, self._problem = self._problem, ""
            try:
                self.view = self.observer.view()
            except SkerryError as error:
                # The last view stays on the screen; the store may answer again.
                self._problem = f"cannot read the store: {in_short(error)}; trying again"
            if self._problem:
                if self._problem != before:
                    warn(self._problem)
            elif self.view is not None:
                show(self.view)
                if is_over(self.view):
                    return
            self._clock.pause(self._every_s)

    def _drawn(self, height: int) -> RunScreen | Text:
        if self.view is None:
            return Text(self._problem or "reading the run")
        footer = self._problem or f"a look every {self._every_s:g} s; {_LEAVING}"
        return RunScreen(view=self.view, spending=self._money_of(self.view), footer=footer, height=height)


def _history(store: Store, console: Console) -> RunHistory:
    with Console(stderr=True, quiet=not console.is_terminal).status(f"reading the history of {store.uri}"):
        return read_history(store)


def _show_once(view: RunView, money: Spending, *, as_json: bool) -> None:
    console = Console()
    if as_json:
        typer.echo(as_json_line(view, money))
    elif console.is_terminal and not console.is_dumb_terminal:
        console.print(RunScreen(view=view, spending=money, height=console.height - 1))
    else:
        print_lines([*plain(view), *money.lines], console)


def as_json_line(view: RunView, money: Spending) -> str:
    """The run and its dollars as one line of JSON."""
    return to_json(view, **money.document)


def _end_lines(store: Store, view: RunView, *, over: bool) -> list[str]:
    """Lines that are left on the terminal when the screen is gone."""
    lines = [f"{view.run}: {progress(view)}", f"receipts: {agreement_text(view)}"]
    if not over:
        return [*lines, f"the run goes on without this screen: skerry watch {view.uri}"]
    return [*lines, *participation_lines(read_participation(store), view.rounds)]


def _interrupt() -> None:
    raise KeyboardInterrupt
