"""Builders for records that replicas write beside the exchange: receipts, outcomes, commits, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from skerry.runtime.log import keys
from skerry.runtime.log.records import (
    GENESIS,
    CheckpointManifest,
    Commit,
    Decision,
    Member,
    Outcome,
    Part,
    Receipt,
    Share,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Store


def receipt(slot: str, round_number: int, **changes: object) -> Receipt:
    """A receipt of a commit "c...", an average "a..." and a state "b...". changes: other values of any fields."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "round": round_number,
        "slot": slot,
        "incarnation": 0,
        "commit": "c" * 64,
        "averages": ("a" * 32,),
        "state": "b" * 32,
        "scope": "fragments",
        "contributed": True,
        "uploaded_bytes": 1,
        "downloaded_bytes": 1,
        "requests": 1,
        "seconds": {},
    }
    return Receipt(**(fields | changes))  # type: ignore[arg-type]


def member(slot: str, incarnation: int = 0, **changes: object) -> Member:
    """A start of a replica. changes: other values of any fields."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "slot": slot,
        "incarnation": incarnation,
        "nonce": "b" * 32,
        "host": "h",
        "process": 1,
        "created": "2026-01-01T00:00:00",
    }
    return Member(**(fields | changes))  # type: ignore[arg-type]


def outcome(slot: str, incarnation: int = 0, **changes: object) -> Outcome:
    """The outcome of a replica that has done all of its rounds."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "slot": slot,
        "incarnation": incarnation,
        "status": "done",
        "exit_code": 0,
        "reason": "all rounds are closed",
        "round": 3,
        "inner_step": 30,
        "tokens": 99,
        "loss_first": 4.0,
        "loss_last": 1.0,
        "ended": "now",
    }
    return Outcome(**(fields | changes))  # type: ignore[arg-type]


def commit(round_number: int, **changes: object) -> Commit:
    """A commit of one exchange and two participants."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "round": round_number,
        "exchanges": ("e" * 64,),
        "participants": 2,
        "work": 2.0,
        "previous": GENESIS,
    }
    return Commit(**(fields | changes))  # type: ignore[arg-type]


def decision(round_number: int, slots: Sequence[str], **changes: object) -> Decision:
    """The decision for the contributions of these slots, proposed by the first."""
    fields: dict[str, object] = {
        "run": "a" * 32,
        "round": round_number,
        "exchange": 0,
        "base": GENESIS,
        "index": "1" * 32,
        "reduction": "all_gather",
        "members": tuple(Share(slot=slot, contribution="d" * 64, weight=1.0) for slot in slots),
        "proposer": slots[0],
        "nonce": "e" * 32,
    }
    return Decision(**(fields | changes))  # type: ignore[arg-type]


def write_checkpoint(store: Store, round_number: int, **changes: object) -> None:
    """A complete checkpoint of one part, which holds a few bytes and no tensors."""
    body = f"state {round_number}".encode()
    part = Part(digest=xxhash.xxh3_128_hexdigest(body), header_bytes=0, total_bytes=len(body))
    fields: dict[str, object] = {
        "run": "a" * 32,
        "round": round_number,
        "commit": GENESIS,
        "members": (),
        "batches": 0,
        "index": "1" * 32,
        "parts": (part,),
        "tree": "{}",
        "writer": "a",
        "nonce": "2" * 32,
    }
    manifest = CheckpointManifest(**(fields | changes))  # type: ignore[arg-type]
    assert store.create(keys.checkpoint_part(round_number, part.digest), body)
    assert store.create(keys.checkpoint_manifest(round_number), manifest.to_bytes())
