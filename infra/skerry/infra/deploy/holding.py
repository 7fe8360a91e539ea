"""Who we are, for the state's lock, and whether a holder of it is certainly gone."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.infra.state import Holder
from skerry.infra.workspace import boot_id, operator, started_at

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock


def holder(doing: str, clock: Clock) -> Holder:
    """This process."""
    return Holder(
        token=clock.nonce(),
        who=operator(),
        host=_machine(),
        doing=doing,
        since=clock.utc_text(),
        pid=os.getpid(),
        started=started_at(os.getpid()) or 0,
        boot=boot_id(),
    )


def abandoned(other: Holder) -> bool:
    """Whether it ran on this machine and does not any more. Of another machine or container nothing is known."""
    if other.host != _machine():
        return False
    return other.boot != boot_id() or started_at(other.pid) != other.started


def _machine() -> str:
    """What tells this machine, and this container on it, from all others: within it process ids mean something."""
    try:
        known = Path("/etc/machine-id").read_text().strip()
    except OSError:
        known = boot_id()  # of a machine without an id, no other boot is known to be its own
    within = Path("/proc/self/ns/pid").readlink()
    return f"{socket.gethostname()} {known} {within}"
