"""The rungs of the ladder, from the cheapest proof to the dearest: what each one runs, what it lacks, what it may cost.

No cost is above `LIMIT_USD` in all. Three things hold that: a run's `max_cost_usd`, the time limit of each job, and the
ladder, which starts no rung whose cap is above what is left.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.cloud.place import CLOUDS, KINDS, MAX_HOURS, NAME, Place, lacking, priced

from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.cloud.settings import Settings

LIMIT_USD: Final = 20.0
"""What a ladder may cost in all."""
# Requests, and objects of some megabytes for minutes: a cent or two.
_WITHOUT_JOBS_USD: Final = 0.10
# Counted for a run in a service without prices: two small replicas for two hours cost less on any machine that fits.
_UNPRICED_USD: Final = 1.0
_FILE: Final = "tests/cloud/test_{}.py::{}"
_RUN: Final = _FILE.format("runs", "test_a_run_trains_to_its_end_and_is_the_same_everywhere[{}]")
_SPOT: Final = _FILE.format("runs", "test_a_run_on_spot_machines_trains_to_its_end")
HANDLERS: Final = {
    "aws": ("TestS3Buckets", "TestRoles", "TestLogGroups", "TestEcrRepositories"),
    "google": (
        "TestGoogleBuckets",
        "TestServiceAccounts",
        "TestBucketBindings",
        "TestPools",
        "TestProviders",
        "TestArtifactRepositories",
    ),
}
STORES: Final = {"aws": "TestS3", "google": "TestGoogle"}
_SCHEMES: Final = {"aws": "s3://", "google": "gs://"}
_IN_CLOUD: Final = {"aws": "aws_batch", "google": "vertex"}
# A cluster of one's own first, then by the price of an hour.
_SERVICES: Final = ("kubernetes", "slurm", "hf_jobs", "modal", "aws_batch", "sagemaker", "vertex")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rung:
    """tests: arguments of pytest. lacks: what to set before it can run; None if it can.

    kinds: the services in which it starts a job each; none without jobs. limit_usd: of its cost.
    """

    name: str
    does: str
    tests: Sequence[str]
    lacks: str | None
    limit_usd: float
    kinds: Sequence[str] = ()
    spot: bool = False

    def cap_usd(self, settings: Settings) -> tuple[float, str]:
        """The most that it can cost, and why. Reads prices."""
        if not self.kinds:
            return self.limit_usd, "no job is started"
        if not priced(self.kinds):
            return self.limit_usd, f"no price is known, and its jobs end after {MAX_HOURS} h: counted as this"
        place = Place.spelled(settings, f"{NAME}price", self.kinds, 1, spot=self.spot)
        hourly = None
        with contextlib.suppress(SkerryError):  # the run itself fails with it, in full words
            hourly = place.usd_per_hour()
        shutil.rmtree(place.spec.parent)
        if hourly is None:
            return self.limit_usd, "its price is unknown: the max_cost_usd of the run"
        if hourly * MAX_HOURS > self.limit_usd:
            return self.limit_usd, f"the max_cost_usd of the run, at ${hourly:.2f}/h"
        return hourly * MAX_HOURS, f"{MAX_HOURS} h of ${hourly:.2f}/h, then its jobs end"


def rungs(settings: Settings) -> list[Rung]:
    """All rungs, in order, of an environment with these settings."""
    clouds = [cloud for cloud, kind in _IN_CLOUD.items() if lacking(settings, [kind], jobs=False) is None]
    with_jobs = [kind for kind in KINDS if lacking(settings, [kind]) is None]
    account = [_FILE.format("account", f"test_caller_is_known[{cloud}]") for cloud in clouds]
    account += [_FILE.format("account", f"test_doctor_reports_no_problem[{kind}]") for kind in with_jobs]
    services = ", ".join(with_jobs) or "no service, because none has all its settings"
    result = [
        Rung(
            name="account",
            does=f"the caller, and `skerry doctor` for {services}",
            tests=account,
            lacks=None if account else lacking(settings, ["aws_batch"], jobs=False),
            limit_usd=0.0,
        )
    ]
    for cloud, kind in _IN_CLOUD.items():
        result.append(
            Rung(
                name=f"stores-{cloud}",
                does=f"the contract of a store, on {_SCHEMES[cloud]}",
                tests=[_FILE.format("stores", STORES[cloud])],
                lacks=lacking(settings, [kind], jobs=False),
                limit_usd=_WITHOUT_JOBS_USD,
            )
        )
    for cloud, kind in _IN_CLOUD.items():
        result.append(
            Rung(
                name=f"handlers-{cloud}",
                does="create, read, change, list and delete each kind of resource that costs nothing",
                tests=[_FILE.format("handlers", name) for name in HANDLERS[cloud]],
                lacks=lacking(settings, [kind], jobs=False),
                limit_usd=_WITHOUT_JOBS_USD,
            )
        )
    result += [_run(settings, kind, f"one job in {kind}", [kind]) for kind in _SERVICES]
    mixed = f"one run with a replica in each of {', '.join(CLOUDS)}"
    result.append(_run(settings, "mixed", mixed, CLOUDS))
    spot = [kind for kind in CLOUDS if kind in with_jobs] or CLOUDS
    result.append(_run(settings, "spot", f"one run on spot machines of {', '.join(spot)}", spot, spot=True))
    return result


def _run(settings: Settings, name: str, does: str, kinds: Sequence[str], *, spot: bool = False) -> Rung:
    lacks = lacking(settings, kinds)
    return Rung(
        name=name,
        does=does,
        tests=[_SPOT if spot else _RUN.format(name)],
        lacks=lacks,
        limit_usd=(settings.share_usd if priced(kinds) else _UNPRICED_USD) if lacks is None else 0.0,
        kinds=kinds,
        spot=spot,
    )
