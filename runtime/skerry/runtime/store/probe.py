"""Checks at start-up that a store honours conditional writes, on which the whole protocol depends.

Several servers and proxies accept `If-None-Match: *` and ignore it. With them, two replicas would both believe that
their decision was stored. The probe finds such a store before training begins. It does not find a store that honours
the condition without being atomic: only the conformance suite, with racing writers, does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.store.interface import Store

PREFIX: Final = "probe/"
"""Equal to `skerry.runtime.log.keys.PROBE`, which is in a higher layer; a test compares them."""


def probe(store: Store, clock: Clock) -> None:
    """Returns if the second of two creates of one key loses, the first body stays, and a listing contains the key.

    Writes and deletes one small object under a fresh name. Raises Invalid naming the broken guarantee, and what the
    verbs raise, which also reveals missing rights.
    """
    key = f"{PREFIX}{clock.nonce()}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    problem = _find_problem(store, key, first, second)
    store.delete(key)
    if problem is not None:
        raise Invalid(
            f"cannot use this store for a run: {store.uri}: {problem}; use a store that honours conditional writes "
            "(S3, Google Cloud Storage, Azure Blob, R2, recent MinIO or Ceph), without a proxy that drops them"
        )


def _find_problem(store: Store, key: str, first: bytes, second: bytes) -> str | None:
    if not store.create(key, first):
        return f"a create of the fresh key {key} was refused"
    if store.create(key, second):
        return f"two creates of the key {key} both succeeded, so it ignores If-None-Match"
    stored = store.read(key)
    if stored is None or bytes(stored) != first:
        return f"the create that lost changed the object {key}"
    if [entry.key for entry in store.list(key)] != [key]:
        return f"a listing after the write does not contain {key}"
    return None
