"""Changes the settings of a run that was started: its end and its outer loop. Creates records in `settings/` only.

A record is created once, under the next number, and names its predecessor (decision 0024 of the runtime). Replicas read
it before the next round is decided; a round uses what its decision names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.runtime.errors import Conflict, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from skerry.infra.observe.run_settings import RunSettings
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store


@dataclass(frozen=True, kw_only=True)
class WantedChange:
    """The values to change; None keeps one. at: the first round with this outer loop; None: the next one."""

    rounds: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    at: int | None = None


def change(store: Store, settings: RunSettings, wanted: WantedChange, closed: int, *, by: str, now: str) -> Settings:
    """Store the change, and return its record. closed: rounds that are closed. by, now: for people.

    Raises Invalid if it is none, or cannot be made, Conflict if another one was stored meanwhile.
    """
    run = settings.now
    _check(run, settings, wanted, closed)
    rounds = run.rounds if wanted.rounds is None else wanted.rounds
    earliest = settings.changes[-1].from_round if settings.changes else 0
    record = Settings(
        run=run.nonce,
        number=len(settings.changes) + 1,
        previous=settings.last_digest,
        from_round=max(closed, earliest) if wanted.at is None else wanted.at,
        rounds=rounds,
        work=None if run.work is None or rounds is None else float(rounds * len(run.slots)),
        outer_lr=run.outer_lr if wanted.outer_lr is None else wanted.outer_lr,
        outer_momentum=run.outer_momentum if wanted.outer_momentum is None else wanted.outer_momentum,
        by=by,
        created=now,
    )
    if not store.create(keys.settings(record.number), record.to_bytes()):
        raise Conflict(f"the settings of {store.uri} were changed at the same time; look at them and run it again")
    return record


def _check(run: Run, settings: RunSettings, wanted: WantedChange, closed: int) -> None:
    earliest = settings.changes[-1].from_round if settings.changes else 0
    changed = {
        name
        for name in ("rounds", "outer_lr", "outer_momentum")
        if (value := getattr(wanted, name)) is not None and value != getattr(run, name)
    }
    if not changed:
        raise Invalid(f"nothing would change: {shown(run)}; name --rounds, --outer-lr or --outer-momentum")
    if not (wanted.outer_lr is None or 0 < wanted.outer_lr < math.inf) or not 0 <= (wanted.outer_momentum or 0.0) < 1:
        raise Invalid("--outer-lr must be a number above 0, and --outer-momentum one from 0 to below 1")
    if "rounds" in changed and (run.rounds is None or (wanted.rounds or 0) < run.rounds):
        raise Invalid(
            f"a run can only become longer: rounds={run.rounds} wanted={wanted.rounds}; stop it to end it before"
        )
    if wanted.at is not None and wanted.at < max(closed, earliest):
        first = f"{closed} rounds are closed" if closed >= earliest else f"an earlier change begins in round {earliest}"
        raise Invalid(f"--at {wanted.at} is too early: {first}; name round {max(closed, earliest)} or a later one")
    if wanted.at is not None and changed == {"rounds"}:
        raise Invalid("--at is the first round of another outer loop; rounds are added at once: leave it out")


def shown(run: Run) -> str:
    """The settings that can be changed, for people."""
    return f"rounds={run.rounds} outer_lr={run.outer_lr:g} outer_momentum={run.outer_momentum:g}"
