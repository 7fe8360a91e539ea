"""Finds the jobs that replicas have started again, and lets them take the places of the recorded ones in the state.

The state in the bucket is written only by a command that holds its lock. So each command sees such a job as if it were
recorded, and one that changes something notes it first.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from skerry.infra.provision.state import Entry
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.handler import Handler, RevivableJobHandler, StateRecord
    from skerry.infra.provision.state import State
    from skerry.infra.provision.state_store import LockedState


def is_revivable(record: StateRecord) -> bool:
    """True for a job that other replicas may start again."""
    environment = record.settings.get("environment")
    return isinstance(environment, dict) and contract.REVIVE in environment


def revivable_handler(handlers: Mapping[str, Handler], record: StateRecord) -> RevivableJobHandler:
    """The handler of a job for which `is_revivable` is true."""
    return cast("RevivableJobHandler", handlers[record.kind])


def with_revived(run: str, handlers: Mapping[str, Handler], state: State | None) -> State | None:
    """The state, with the newest revived job of each slot instead of all its earlier ones. Changes nothing.

    run: its URI. handlers: by kind of resource. Asks only the services of jobs that replicas may start again. Raises
    what they raise.
    """
    if state is None:
        return None
    newest: dict[str, StateRecord] = {}
    for _, entry in sorted(state.by_id().items()):
        if is_revivable(entry.record):
            newest[entry.record.address] = entry.record
    revived: dict[str, StateRecord] = {}
    for kind in {record.kind for record in newest.values()}:
        records = [record for record in newest.values() if record.kind == kind]
        revived |= revivable_handler(handlers, records[0]).list_revived(run, records)
    if not revived:
        return state
    others = (entry for entry in state.entries if entry.record.address not in revived)
    return dataclasses.replace(state, entries=(*others, *(Entry(record=record) for record in revived.values())))


def note_revived(hold: LockedState, state: State | None) -> None:
    """Write the revived jobs of `with_revived` into the locked state."""
    entries: Mapping[str, Entry] = {} if state is None else {entry.record.address: entry for entry in state.entries}
    for address, entry in entries.items():
        if is_revivable(entry.record) and hold.entry(entry.id) is None:
            for earlier in hold.generations(address):
                hold.note(earlier.id, None)
            hold.note(entry.id, entry)
