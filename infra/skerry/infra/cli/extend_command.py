"""The command `extend`: changes the end or the outer loop of a run that was started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.infra.cli.common import DEFAULT_SPEC, AsJson, Overrides, RunName, errors_as_exit_codes, to_json
from skerry.infra.cli.open_run import open_run
from skerry.infra.local.workspace import operator_name
from skerry.infra.observe.observer import Observer
from skerry.infra.run import change_run_settings
from skerry.infra.run.change_run_settings import WantedChange
from skerry.infra.run.run_record import require_settings
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from skerry.infra.observe.run_view import RunView


@dataclass(frozen=True, kw_only=True)
class _Extended:
    """The settings of a run after the change. ended: slots whose replica has ended, and that `up` starts again."""

    number: int
    from_round: int
    rounds: int | None
    outer_lr: float
    outer_momentum: float
    ended: tuple[str, ...]
    ok: bool = True


def extend(
    run: RunName = str(DEFAULT_SPEC),
    overrides: Overrides = None,
    *,
    rounds: Annotated[int | None, typer.Option(min=1, help="All rounds of the run: more than before.")] = None,
    outer_lr: Annotated[float | None, typer.Option(help="The learning rate of the outer optimizer.")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="Its momentum.")] = None,
    at: Annotated[
        int | None, typer.Option("--at", metavar="ROUND", min=0, help="The first round with this outer loop.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add rounds to a run, or change its outer learning rate and momentum, also after its end."""
    with errors_as_exit_codes(as_json=as_json):
        clock = SystemClock()
        store = open_run(run, overrides or (), clock).store
        settings = require_settings(store)
        view = Observer(store, settings, clock).view()
        wanted = WantedChange(rounds=rounds, outer_lr=outer_lr, outer_momentum=outer_momentum, at=at)
        by, now = operator_name(), clock.utc_text()
        stored = change_run_settings.change(store, settings, wanted, view.closed, by=by, now=now)
        extended = _Extended(
            number=stored.number,
            from_round=stored.from_round,
            rounds=stored.rounds,
            outer_lr=stored.outer_lr,
            outer_momentum=stored.outer_momentum,
            ended=_ended(view),
        )
        typer.echo(to_json(extended) if as_json else _text(extended, view))


def _ended(view: RunView) -> tuple[str, ...]:
    return tuple(replica.slot for replica in view.replicas if replica.outcome is not None)


def _text(extended: _Extended, view: RunView) -> str:
    outer = f"outer_lr={extended.outer_lr:g} outer_momentum={extended.outer_momentum:g}"
    lines = [
        f"settings {extended.number} of run {view.run}: {view.closed} of {extended.rounds} rounds are closed",
        f"{outer} from round {extended.from_round} on, if that is not decided yet, else from the next one on",
    ]
    if extended.ended:
        lines.append(
            f"ended: {', '.join(extended.ended)}; start them again with `skerry up`, in a cloud with `skerry apply`"
        )
    return "\n".join(lines)
