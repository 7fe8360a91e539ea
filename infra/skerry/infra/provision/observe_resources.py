"""Reads the resources that exist now and plans against them. Changes nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.graph import Ref, resolved
from skerry.infra.provision.plan import all_desired, plan
from skerry.infra.provision.state import Entry, Id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.provision.graph import Graph
    from skerry.infra.provision.handler import Desired, Handler, Observed
    from skerry.infra.provision.planned_changes import Plan

CALLS_AT_ONCE: Final = 16
"""Calls to a cloud in flight: enough to hide its latency, few enough that it does not throttle at once."""
# Resources in one `read`: a handler needs few calls for many of a kind, and several reads run in parallel.
_READ_AT_ONCE: Final = 500


def refresh_and_plan(
    graph: Graph,
    entries: Mapping[Id, Entry],
    handlers: Mapping[str, Handler],
    run: str,
    tags: Mapping[str, str] | None = None,
    whole: Graph | None = None,
    to_replace: Collection[str] = (),
    at_once: int = CALLS_AT_ONCE,
) -> Plan:
    """The changes that are needed now. whole, to_replace: see `plan`. Raises what the handlers raise."""
    desired = all_desired(graph, entries, run, tags)
    observed = refresh(list(desired.values()), handlers, at_once)
    # A resource that exists but is not in state: those that reference it can be read once its outputs are known.
    while again := _resolve(desired.values(), observed):
        observed |= refresh(again, handlers, at_once)
        desired |= {item.resource.address: item for item in again}
    return plan(graph, entries, observed, run, whole, to_replace)


def refresh(
    desired: Sequence[Desired], handlers: Mapping[str, Handler], at_once: int = CALLS_AT_ONCE
) -> dict[Id, Observed | None]:
    """Each resource as its cloud reports it. Raises what the handlers raise."""
    kinds: dict[str, list[Desired]] = {}
    for item in desired:
        kinds.setdefault(item.resource.KIND, []).append(item)
    batches = [
        (kind, items[start : start + _READ_AT_ONCE])
        for kind, items in kinds.items()
        for start in range(0, len(items), _READ_AT_ONCE)
    ]

    def read(batch: tuple[str, list[Desired]]) -> Sequence[Observed | None]:
        return handlers[batch[0]].read(batch[1])

    with ThreadPoolExecutor(at_once, thread_name_prefix="refresh") as pool:
        return {
            Id(item.resource.address, item.generation): observed
            for (_, items), answers in zip(batches, pool.map(read, batches), strict=True)
            for item, observed in zip(items, answers, strict=True)
        }


def _resolve(desired: Iterable[Desired], observed: Mapping[Id, Observed | None]) -> list[Desired]:
    """Those that were not found, with their references resolved by observed outputs, where that adds something."""
    outputs = {key.address: resource.outputs for key, resource in observed.items() if resource is not None}

    def look_up(ref: Ref) -> str | None:
        return outputs.get(ref.address, {}).get(ref.output)

    again: list[Desired] = []
    for item in desired:
        if observed.get(Id(item.resource.address, item.generation)) is None:
            settings = {name: resolved(value, look_up) for name, value in item.settings.items()}
            if settings != item.settings:
                again.append(replace(item, settings=settings))
    return again
