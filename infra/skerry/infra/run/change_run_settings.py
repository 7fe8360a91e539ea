"""Changes the settings of a run that was started: its end, its outer loop, and its slots. Creates `settings/` only.

A record is created once, under the next number, and names its predecessor (decision 0024 of the runtime). Replicas read
it before the next round is decided; a round uses what its decision names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.spec.model import MOST_OUTER_LR
from skerry.runtime.errors import Conflict, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.run_record import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.observe.read_changed_settings import RunSettings
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
        work=_work(run, rounds),
        outer_lr=run.outer_lr if wanted.outer_lr is None else wanted.outer_lr,
        outer_momentum=run.outer_momentum if wanted.outer_momentum is None else wanted.outer_momentum,
        by=by,
        created=now,
        slots=settings.changes[-1].slots if settings.changes else None,
    )
    if not store.create(keys.settings(record.number), record.to_bytes()):
        raise Conflict(f"the settings of {store.uri} were changed at the same time; look at them and run it again")
    return record


def expect_slots(
    store: Store, settings: RunSettings, slots: Sequence[str], *, removes: bool, by: str, now: str
) -> tuple[str, ...]:
    """Store which slots the run expects from now on, if others than before; all of them, in the order of their numbers.

    Slots that were expected before keep their order, so that they keep their numbers. removes: those that are not in
    `slots` are expected no longer. by, now: for people.
    """
    while True:
        settings = settings.read_newer(store)
        run = settings.now
        kept = [slot for slot in run.slots if slot in slots or not removes]
        expected = (*kept, *(slot for slot in slots if slot not in kept))
        if expected == run.slots:
            return expected
        if run.failover is not None:
            raise Invalid(
                "a run with failover: automatic keeps its replicas, because a majority of them decides when it leaves "
                f"its store: {', '.join(run.slots)}"
            )
        earliest = settings.changes[-1].from_round if settings.changes else 0
        record = Settings(
            run=run.nonce,
            number=len(settings.changes) + 1,
            previous=settings.last_digest,
            from_round=max(find_closed(store, 0), earliest),
            rounds=run.rounds,
            work=run.work,
            outer_lr=run.outer_lr,
            outer_momentum=run.outer_momentum,
            by=by,
            created=now,
            slots=expected,
        )
        if store.create(keys.settings(record.number), record.to_bytes()):
            return expected


def _work(run: Run, rounds: int | None) -> float | None:
    """The work that is due after so many rounds: those that are added count with the replicas of now."""
    if run.work is None or rounds is None or run.rounds is None:
        return None
    return run.work + float((rounds - run.rounds) * len(run.slots))


def _check(run: Run, settings: RunSettings, wanted: WantedChange, closed: int) -> None:
    earliest = settings.changes[-1].from_round if settings.changes else 0
    changed = {
        name
        for name in ("rounds", "outer_lr", "outer_momentum")
        if (value := getattr(wanted, name)) is not None and value != getattr(run, name)
    }
    if not changed:
        raise Invalid(f"nothing would change: {shown(run)}; name --rounds, --outer-lr or --outer-momentum")
    lr, momentum = wanted.outer_lr, wanted.outer_momentum or 0.0
    if not (lr is None or 0 < lr <= MOST_OUTER_LR) or not 0 <= momentum < 1:
        raise Invalid(f"--outer-lr must be above 0 and at most {MOST_OUTER_LR}, and --outer-momentum from 0 to below 1")
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
