"""Checks at start-up that a store honours conditional writes, on which the whole protocol depends.

Several servers and proxies accept `If-None-Match: *` and ignore it. With them, two replicas would both believe that
their decision was stored. The probe finds such a store before training begins. It does not find a store that honours
the condition without being atomic: only the conformance suite, with racing writers, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid
from skerry.runtime.store.parallel import run_parallel

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.store.interface import Store

PREFIX: Final = "probe/"
"""Equal to `skerry.runtime.log.keys.PROBE`, which is in a higher layer; a test compares them."""
ABANDONED_S: Final = 3600.0
"""A probe makes five requests, each retried for two minutes at most. An object that is an hour older than one just
written, both by the store's clock, belongs to a process that was killed."""
# A clock of a file server may jump. Then a probe may lose its object to another one, and takes a fresh key.
_TRIES: Final = 3


def probe(store: Store, clock: Clock) -> None:
    """Returns if the second of two creates of one key loses, the first body stays, and a listing contains the key.

    Writes and deletes one small object under a fresh name. Also deletes those of probes that were killed. Raises
    Invalid naming the broken guarantee, and what the verbs raise, which also reveals missing rights.
    """
    problem: str | None = None
    for _ in range(_TRIES):
        key = f"{PREFIX}{clock.nonce()}"
        problem = _find_problem(store, key)
        store.delete(key)
        if problem is None:
            return
    raise Invalid(
        f"cannot use this store for a run: {store.uri}: {problem}; use a store that honours conditional writes "
        "(S3, Google Cloud Storage, Azure Blob, R2, recent MinIO or Ceph), without a proxy that drops them"
    )


def _find_problem(store: Store, key: str) -> str | None:
    first, second = b"first " + key.encode(), b"second " + key.encode()
    if not store.create(key, first):
        return f"a create of the fresh key {key} was refused"
    if store.create(key, second):
        return f"two creates of the key {key} both succeeded, so it ignores If-None-Match"
    stored = store.read(key)
    if stored is None or bytes(stored) != first:
        return f"the create that lost changed the object {key}"
    entries = store.list(PREFIX)
    mine = next((entry for entry in entries if entry.key == key), None)
    if mine is None:
        return f"a listing after the write does not contain {key}"
    abandoned = [entry.key for entry in entries if mine.modified - entry.modified >= ABANDONED_S]
    run_parallel(store, len(abandoned), lambda number: store.delete(abandoned[number]))
    return None
