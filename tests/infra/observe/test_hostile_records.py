"""A compromised replica stores records with names and numbers that no key can have: no reader ends by them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.observe.damaged_log import LAST, OTHER, SLOTS, Log

from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.observe.history import read_history
from skerry.infra.observe.live_replicas import live_replicas
from skerry.infra.run.run_record import require_settings
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        (keys.heartbeat("a-1"), "slot", "a/1"),
        (keys.heartbeat("a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.contribution(LAST, 0, "a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.receipt(LAST, "a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.decision(LAST, 0), "members", [{"slot": "a/1", "contribution": OTHER, "weight": 1.0}]),
        (keys.commit(LAST), "exchanges", [OTHER] * (keys.MAX_EXCHANGE + 2)),
    ],
)
def test_record_that_names_what_has_no_key_is_unreadable(tmp_path: Path, key: str, field: str, value: object) -> None:
    log = Log(tmp_path)
    log.change(key, **{field: value})
    for on_progress in (None, lambda *_: None):
        findings = examine_store(log.store, on_progress).findings
        assert [finding.key for finding in findings if finding.kind == "unreadable"] == [key]
    read_history(log.store)
    live_replicas(log.store, require_settings(log.store).now, log.clock, SLOTS)
