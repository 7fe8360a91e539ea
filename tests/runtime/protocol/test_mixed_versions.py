"""Replicas of this version in a run that older ones share: no record has a field that those do not know."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import create_model
from tests.kit.protocol import INDEX, measure, run_record, start_replica
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Contribution, Link
from skerry.runtime.log.run_record import Run
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from skerry.runtime.store import Store


def without(kind: type[Record], *names: str) -> type[Record]:
    """The strict schema of a version that does not know these fields."""
    known: dict[str, Any] = {
        name: (field.annotation, field) for name, field in kind.model_fields.items() if name not in names
    }
    return create_model(kind.__name__, __base__=Record, **known)


OLDER_RUN, OLDER_CONTRIBUTION = without(Run, "links"), without(Contribution, "link")


def contribute(store: Store, *, links: bool | None) -> list[Link | None]:
    """Two replicas with measured links contribute, and one of them proposes. Returns the links that it chooses by."""
    clock, chosen = FakeClock(), list[list[Link | None]]()
    run = run_record(clock, links=links)
    members = [start_replica(Retrying(store, clock), clock, slot, run=run) for slot in ("a", "b")]
    for replica in members:
        measure(replica, 1e6, 0.03)
        replica.contribute(b"x")
    proposer = members[0]
    proposer.exchange.decide(
        proposer.exchange_id, INDEX, reduction=lambda known: chosen.append(list(known)) or "all_gather"
    )
    return chosen[0]


def test_older_replica_reads_what_is_recorded_in_a_run_of_before_links() -> None:
    store = MemoryStore()
    assert contribute(store, links=None) == [None, None]
    assert OLDER_RUN.parse(store.read(keys.RUN) or b"", keys.RUN)
    for slot in ("a", "b"):
        key = keys.contribution(0, 0, slot)
        data = bytes(store.read(key) or b"")
        assert "link" not in json.loads(data)
        assert OLDER_CONTRIBUTION.parse(data, key)


def test_run_with_links_is_refused_by_older_replicas_at_its_first_record() -> None:
    store = MemoryStore()
    assert all(contribute(store, links=True))
    with pytest.raises(Corrupt, match="kind=Run links: Extra inputs"):
        OLDER_RUN.parse(store.read(keys.RUN) or b"", keys.RUN)
    key = keys.contribution(0, 0, "a")
    with pytest.raises(Corrupt, match="kind=Contribution link: Extra inputs"):
        OLDER_CONTRIBUTION.parse(store.read(key) or b"", key)
