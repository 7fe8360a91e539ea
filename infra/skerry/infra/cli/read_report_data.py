"""Reads what a report is computed from: the history of a run, its view, settings, code, findings and dollars."""

from __future__ import annotations

import os
from importlib import metadata
from typing import TYPE_CHECKING

from skerry.infra.cli.compute_cost_so_far import read_prices, read_traffic_prices, spending
from skerry.infra.cli.estimate_command import estimate_of
from skerry.infra.cli.watch_command import settled_view
from skerry.infra.deploy.read_clouds import read_rates
from skerry.infra.observe.doctor.examine import examine_history, examine_store
from skerry.infra.observe.doctor.read_log import read_log
from skerry.infra.observe.doctor.valid_records import valid_records
from skerry.infra.observe.history import build_history, read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.replica_state_text import place
from skerry.infra.report.build_facts import Sources
from skerry.infra.report.facts import Costs, Estimate, MachineCost
from skerry.infra.run.run_record import require_settings
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import list_roll_ups

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.cli.compute_cost_so_far import Spending
    from skerry.infra.cli.open_run import OpenedRun
    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.history import RunHistory
    from skerry.infra.observe.run_view import Machine, RunView
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store


def read_sources(
    opened: OpenedRun, clock: Clock, parameters: str | None, on_step: Callable[[str], None], *, full: bool
) -> Sources:
    """Read the run. parameters: of the model, for the estimate. on_step: called with what is done next.

    full: read every record, also of a run that has roll-ups. Raises SkerryError if there is no run, and what the store
    raises.
    """
    store = opened.store
    on_step(f"reading the history of {store.uri}")
    settings = require_settings(store)
    examined = full or not list_roll_ups(store)
    history, findings = _examined(store, on_step) if examined else _from_roll_ups(store)
    on_step("reading the state of the replicas")
    view = settled_view(Observer(store, settings, clock, history, reread=0), clock)
    return Sources(
        history=history,
        view=view,
        settings=settings,
        codes=[(code, entry.modified) for entry in store.list(keys.CODE) if (code := keys.digest_of_code(entry.key))],
        findings=findings,
        examined=examined,
        costs=_costs(view, opened.deployment, parameters, history),
        versions=_versions(opened.deployment),
    )


def _from_roll_ups(store: Store) -> tuple[RunHistory, tuple[Finding, ...]]:
    """The history, and the findings that it shows: the records of a long run are a million requests."""
    history = read_history(store)
    return history, examine_history(history)


def _examined(store: Store, on_step: Callable[[str], None]) -> tuple[RunHistory, tuple[Finding, ...]]:
    """The history and doctor's findings, from one reading of the log."""
    log = read_log(store)
    if log.run is None:
        return read_history(store), ()  # raises, with the reason
    history = build_history(valid_records(log), log.run)
    on_step("examining the log")
    return history, examine_store(store, log=log).findings


def _costs(view: RunView, deployment: Deployment | None, parameters: str | None, history: RunHistory) -> Costs:
    routes = read_traffic_prices(deployment)
    money = spending(view, read_prices(), routes)
    requests = sum(replica.requests for item in history.rounds for replica in item.replicas)
    write = None if routes is None else routes.write
    return Costs(
        machines=tuple(
            MachineCost(
                machine="unknown" if time.machine is None else place(time.machine),
                hours=time.hours,
                running=time.running,
                usd_an_hour=_hourly(money, time.machine),
            )
            for time in view.machine_times
        ),
        usd=money.so_far,
        to_come=money.to_come,
        complete=money.complete and money.so_far is not None,
        traffic_usd=None if money.traffic is None else money.traffic.known,
        unpriced=() if money.traffic is None else money.traffic.missing,
        requests_usd=None if write is None else requests * write,
        estimate=None if deployment is None else _estimate(deployment, parameters),
    )


def _hourly(money: Spending, machine: Machine | None) -> float | None:
    price = None if machine is None else money.hourly.get(machine)
    return None if price is None else price.usd


def _estimate(deployment: Deployment, parameters: str | None) -> Estimate:
    """The estimate of a spec; if its clouds cannot be asked, the reason. A report does not fail for it."""
    try:
        estimated = estimate_of(deployment, read_rates(deployment), os.environ, parameters)
    except SkerryError as error:
        return Estimate(note=f"The estimate is unknown: {in_short(error)}.")
    upkeep = estimated.upkeep
    known = parameters is not None and upkeep is not None
    volume = upkeep.volume if known and upkeep is not None else None
    return Estimate(
        usd_an_hour=estimated.per_hour,
        usd_limit=estimated.cap,
        bytes_a_round=None
        if volume is None
        else sum(volume.sent_bytes(group) + volume.read_bytes(group) for group in volume.groups),
        usd_traffic_a_round=upkeep.per_round.usd if known and upkeep is not None else None,
    )


def _versions(deployment: Deployment | None) -> tuple[tuple[str, str], ...]:
    versions = [("skerry, of this page", metadata.version("skerry")), ("protocol of the log", "1")]
    if deployment is not None:
        images = {"image of the spec": deployment.spec.spec.image}
        images |= {f"image of {group.name}": group.image for group in deployment.spec.spec.replicas}
        versions += [(name, image) for name, image in images.items() if image]
    return tuple(versions)
