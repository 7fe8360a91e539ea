"""Describes this process as the holder of the state's lock, and detects a holder that has certainly ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.infra.local.workspace import boot_id, operator_name, process_start
from skerry.infra.provision.state import Holder

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock


def this_process(doing: str, clock: Clock) -> Holder:
    """This process as a holder of the lock. doing: the command, for people."""
    return Holder(
        token=clock.nonce(),
        who=operator_name(),
        host=_machine(),
        doing=doing,
        since=clock.utc_text(),
        pid=os.getpid(),
        started=process_start(os.getpid()) or 0,
        boot=boot_id(),
    )


def abandoned(holder: Holder) -> bool:
    """True if the holder ran on this machine and has ended. Of another machine or container nothing is known."""
    if holder.host != _machine():
        return False
    return holder.boot != boot_id() or process_start(holder.pid) != holder.started


def _machine() -> str:
    """Identifies this machine, and this container on it: the scope in which a process id has a meaning."""
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = boot_id()  # without a machine id, another boot cannot be recognised as the same machine
    pid_namespace = Path("/proc/self/ns/pid").readlink()
    return f"{socket.gethostname()} {machine_id} {pid_namespace}"
