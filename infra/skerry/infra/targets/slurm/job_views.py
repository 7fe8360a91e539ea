"""Describes jobs of Slurm, with the reason why they wait or ended, and reads their logs.

A job's own script requeues it after an error or before the time limit, at most `attempts` times after errors. So a lost
job has used its attempts, or was ended from outside; the next apply submits another.
Sources: squeue(1), "JOB REASON CODES" and "JOB STATE CODES"; the contract's exit codes.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Final

from skerry.infra.provision.target_and_store_interfaces import JobView, LogLine
from skerry.infra.targets.shared.job_view_helpers import (
    AGAIN,
    EXIT_CODES,
    exit_text,
    slot_of,
    unknown_job,
)
from skerry.infra.targets.slurm import requests, responses
from skerry.infra.targets.slurm.jobs import described
from skerry.infra.targets.slurm.responses import CANCELLED
from skerry.runtime.contract import ExitCode, may_succeed_again
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.infra.provision.handler import StateRecord
    from skerry.infra.targets.slurm.cluster import Cluster
    from skerry.infra.targets.slurm.responses import Row

_NEVER: Final = "it can never start"
# The meaning of a reason of Slurm, by a pattern of the whole; the first that matches counts.
_REASONS: Final = (
    (r"Resources|Nodes_required.*|None|", "waits for free nodes"),
    (r"Priority", "waits behind jobs of higher priority"),
    (r"Dependency|DependencyNeverSatisfied", "waits until the earlier job of its slot has ended"),
    (r"BeginTime", "was requeued, and waits for its next start; by default Slurm waits two minutes"),
    (
        r"PartitionTimeLimit",
        f"{_NEVER}: its time is more than the partition allows; write a shorter `time`, or another partition",
    ),
    # A new job has this reason also because of its time, until the scheduler has looked at it.
    (
        r"PartitionNodeLimit|PartitionConfig",
        f"{_NEVER}: the partition does not allow its time, or something else that it asks for",
    ),
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs now; see `sinfo`"),
    (r"BadConstraints", f"{_NEVER}: no node has what it asks for; see `sinfo`"),
    (r"InvalidAccount|InvalidQOS", f"{_NEVER}: the account or QOS is not valid here"),
    (r"JobHeldUser", "is held; `scontrol release ID` lets it go"),
    (r"JobHeldAdmin", "is held by an administrator of the cluster"),
    (r"JobHoldMaxRequeue", "is held, because it was requeued too often; `scontrol release ID` lets it go"),
    (
        r"(launch_failed|job_requeued|user_env_retrieval_failed).*",
        "is held, because a node could not start it; `scontrol release ID` lets it go",
    ),
    (r"ReqNodeNotAvail.*|NodeDown", "waits for nodes that are down, drained or reserved"),
    (r"Reservation|ReservationDeleted", "waits for its reservation"),
    (r"Licenses", "waits for a license"),
    (r"(QOS|Assoc|Max|Grp|Account).*", "a limit of the account or QOS is used up"),
)
_STATES: Final = {
    "CONFIGURING": "its nodes are being prepared",
    "COMPLETING": "it is being ended",
    "RUNNING": "",
    "SUSPENDED": "it is suspended",
    "REQUEUE_HOLD": "is held; `scontrol release ID` lets it go",
    "SPECIAL_EXIT": "is held; `scontrol release ID` lets it go",
}
_ENDED: Final = {
    "BOOT_FAIL": f"its node did not start; {AGAIN}",
    "CANCELLED": f"it was stopped; {AGAIN}",
    "DEADLINE": "its deadline was over before it could run",
    "NODE_FAIL": f"its node was lost; {AGAIN}",
    "OUT_OF_MEMORY": "it used more memory than it asked for; write more `memory`",
    "PREEMPTED": f"another job took its node; {AGAIN}",
    "REVOKED": f"another cluster of the federation took it; {AGAIN}",
    "TIMEOUT": f"its time limit was reached before the replica had stopped; {AGAIN}",
}
# Ends that another start may mend. A stop is wanted, and too little memory stays too little.
_PASSING: Final = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"})
_EXIT_CODES: Final = {
    **EXIT_CODES,
    int(ExitCode.RETRY): f"an outside failure; {AGAIN}",
    126: "its `python`, or its container program, cannot be run on the node",
    127: "its `python`, or its container program, is missing on the node",
    137: "killed, often because memory was short",
}
_NO_PROGRAM: Final = (126, 127)
# From $2 on, so that a long log is not sent again; its first line is the time of the last write. The bytes as they are.
_TAIL: Final = 'stat -c %Y -- "$1" && tail -c "+$2" -- "$1" | base64'


def views(cluster_of: Callable[[str], Cluster], state_records: Sequence[StateRecord]) -> list[JobView]:
    """Return the views of these jobs, in their order. One listing for each cluster."""
    rows: dict[int, Row | None] = {}
    for region in {record.region for record in state_records}:
        at = [number for number, record in enumerate(state_records) if record.region == region]
        found_rows = described(cluster_of(region), [state_records[number] for number in at])
        rows |= dict(zip(at, found_rows, strict=True))
    return [view(record, rows[number]) for number, record in enumerate(state_records)]


def view(state_record: StateRecord, row: Row | None) -> JobView:
    """Describe a job. row: None if nothing is known of it. Pure."""
    job = state_record.outputs.get("id", state_record.name)
    if row is None:
        why = f"Slurm has no record of it, and it left none: it was stopped, or its node was lost; {AGAIN}"
        return unknown_job(state_record, job, why)
    never_ran = row.started_s is None and row.starts_before == 0 and row.exit_code is None
    return JobView(
        slot=slot_of(state_record),
        job=job,
        state=row.state,
        condition=row.condition,
        why=_why(row),
        attempt=0 if never_ran else row.starts_before + (0 if row.state == "PENDING" else 1),
        exit_code=row.exit_code,
        started_s=row.started_s,
        ended_s=row.ended_s,
        again=_may_succeed_again(row),
        stopped=row.state == CANCELLED,
    )


def lines(cluster: Cluster, state_record: StateRecord, cursor: str | None) -> Iterator[LogLine]:
    """Return the log lines of a job, oldest first, after `cursor` only. Raises Invalid if it was never submitted.

    A file has no times, so each line gets that of the last write. The cursor is a number of bytes.
    """
    if not state_record.outputs.get("id"):
        raise Invalid(f"no logs of {state_record.name}: its job was never submitted; run `skerry apply` again")
    if cursor is not None and not cursor.isdecimal():
        raise Invalid(f"not a place in a job's log: {cursor!r}")
    offset = int(cursor or 0)
    try:
        written, _, text = cluster.call(
            _TAIL, [requests.path_of(state_record.settings, state_record.name, "log"), str(offset + 1)]
        ).partition("\n")
    except Invalid as error:
        if "No such file" in str(error):  # it has not run yet
            return
        raise
    for line in base64.b64decode(text).split(b"\n")[:-1]:  # the last one is still being written
        offset += len(line) + 1
        shown = line.decode(errors="replace").rstrip("\r")
        yield LogLine(slot=slot_of(state_record), at_s=float(written), text=shown, cursor=str(offset))


def _why(row: Row) -> str:
    if row.state == responses.DONE:
        return "done"
    if row.state == "PENDING":
        meaning = next((text for pattern, text in _REASONS if re.fullmatch(pattern, row.reason)), "waits")
        return f"{meaning.replace('ID', row.id)} ({row.reason})" if row.reason else meaning
    if row.live:
        return _STATES.get(row.state, row.reason).replace("ID", row.id)
    if row.exit_code is not None:
        return exit_text(row.exit_code, _EXIT_CODES)
    return _ENDED.get(row.state, row.state.lower())


def _may_succeed_again(row: Row) -> bool:
    """Return whether the job failed and another start may succeed."""
    if row.state != "FAILED":
        return row.state in _PASSING
    return row.exit_code is None or (row.exit_code not in _NO_PROGRAM and may_succeed_again(row.exit_code))
