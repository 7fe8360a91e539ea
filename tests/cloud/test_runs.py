"""One short run in each service, in two clouds, and in all of them: deployed, trained, the same everywhere, gone.

Each has one replica in each of its services.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.cloud.place import CLOUDS, KINDS, lacking, placed
from tests.cloud.settings import Settings, until
from tests.e2e.deployed import check_nothing_was_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.clock import Clock


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), CLOUDS, KINDS], ids=[*KINDS, "mixed", "everywhere"])
def test_a_run_trains_to_its_end_and_is_the_same_everywhere(
    settings: Settings,
    clock: Clock,
    kinds: Sequence[str],
    record_property: Callable[[str, object], None],
) -> None:
    train(settings, clock, kinds, record_property)


def test_a_run_on_spot_machines_trains_to_its_end(
    settings: Settings, clock: Clock, record_property: Callable[[str, object], None]
) -> None:
    """In those of the clouds' services that are set up. A machine may be taken back, and its replica comes back."""
    reasons = {kind: lacking(settings, [kind]) for kind in CLOUDS}
    kinds = [kind for kind, reason in reasons.items() if reason is None]
    if not kinds:
        pytest.skip("; ".join(dict.fromkeys(reason for reason in reasons.values() if reason is not None)))
    train(settings, clock, kinds, record_property, spot=True)


def train(
    settings: Settings,
    clock: Clock,
    kinds: Sequence[str],
    record_property: Callable[[str, object], None],
    *,
    spot: bool = False,
) -> None:
    # It fails if anything is left when it is over.
    with placed(settings, kinds, 1, spot=spot) as run:
        record_property("usd_per_hour", run.usd_per_hour())
        assert run.watch()["ok"]
        # Every round is closed; machines need a moment to say that they are done.
        until(clock, lambda: {job["condition"] for job in run.jobs().values()} == {"done"})
        check_nothing_was_lost(run.deployment.open_store(), run, killed=None if spot else ())
        assert run.speakers().keys() == set(run.slots)
