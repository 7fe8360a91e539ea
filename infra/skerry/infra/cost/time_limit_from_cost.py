"""Converts the limit of a run's cost to a time limit, at the prices of its machines. Pure."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

from skerry.infra.cost.prices import ADVICE, rounded
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.provision.target_and_store_interfaces import Rate
    from skerry.infra.spec.model import Limits, Spec

_SHORTEST_H: Final = 1 / 60


def limits_of(spec: Spec) -> Limits:
    """The limits of the machines: of the run's cost limit, that of each mirror is set aside."""
    limits, mirrors = spec.limits, sum(line.max_usd or 0.0 for line in spec.replication)
    if limits.max_cost_usd is None or not mirrors:
        return limits
    return limits.model_copy(update={"max_cost_usd": max(0.0, limits.max_cost_usd - mirrors)})


def hours_allowed(limits: Limits, rates: Sequence[Rate]) -> float | None:
    """The time limit of the replicas from the run's start; None is unlimited.

    rates: of all groups of the run. Raises Invalid if max_cost_usd is set and a price is unknown, or if it is used up
    within a minute.
    """
    if limits.max_cost_usd is None:
        return limits.max_hours
    unknown = [f"{rate.group} ({rate.source})" for rate in rates if rate.per_hour is None]
    if unknown:
        raise Invalid(
            f"limits.max_cost_usd cannot be enforced: unknown price of {', '.join(unknown)}; {ADVICE}, or "
            "set limits.max_hours instead"
        )
    total = sum(rate.per_hour or 0.0 for rate in rates)
    if not total:
        return limits.max_hours
    hours = limits.max_cost_usd / total
    if hours < _SHORTEST_H:
        raise Invalid(
            f"limits.max_cost_usd is used up after {hours * 3600:.0f} s at {rounded(total)}/h; raise it, or use "
            "fewer or cheaper machines"
        )
    return hours if limits.max_hours is None else min(hours, limits.max_hours)


def within(hours: float | None, rates: Sequence[Rate]) -> tuple[Rate, ...]:
    """The rates with the time limit of the whole run, if it has one; it includes all restarts of a job."""
    if hours is None:
        return tuple(rates)
    return tuple(dataclasses.replace(rate, cap_hours=hours, each_start=False) for rate in rates)


def cost_problem(limits: Limits, rates: Sequence[Rate]) -> str | None:
    """The reason that max_cost_usd cannot be enforced; None if it can, or is not set."""
    try:
        hours_allowed(limits, rates)
    except Invalid as error:
        return str(error)
    return None
