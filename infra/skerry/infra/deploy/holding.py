"""Who we are, for the state's lock, and whether a holder of it is certainly gone."""

from __future__ import annotations

import os
import socket
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
        host=socket.gethostname(),
        doing=doing,
        since=clock.utc_text(),
        pid=os.getpid(),
        started=started_at(os.getpid()) or 0,
        boot=boot_id(),
    )


def abandoned(other: Holder) -> bool:
    """Whether it ran on this machine and does not any more. Of another machine nothing is known."""
    if other.host != socket.gethostname():
        return False
    return other.boot != boot_id() or started_at(other.pid) != other.started
