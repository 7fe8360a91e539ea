"""Names the state of a replica and its machine in a few words. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.number_text import duration

if TYPE_CHECKING:
    from skerry.infra.observe.run_view import Machine, ReplicaView


def state(replica: ReplicaView) -> str:
    """The state of a replica in one or two words, the first of which is a kind of state."""
    if replica.outcome is not None:
        return "restarts" if replica.outcome == "retry" else replica.outcome
    if replica.phase is None:
        return "not seen"
    if replica.silent:
        return f"silent {duration(replica.silent_s or 0.0)}"
    if replica.phase == "sync" and replica.waiting_for:
        return "wait"
    return replica.phase


def place(machine: Machine | None) -> str:
    """The region and the type of a machine: us-east-1 g6e.xlarge spot."""
    if machine is None:
        return "-"
    words = [machine.region or machine.cloud, machine.machine or machine.accelerator, "spot" if machine.spot else None]
    return " ".join(word for word in words if word) or "-"
