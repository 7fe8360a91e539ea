"""The start-up check: does this store keep the one promise that everything rests on?

Several servers and proxies accept `If-None-Match: *` and ignore it; on those, two replicas would both believe that
their decision stands. They are found here, before training begins. It cannot find a store that honours the condition
but not atomically: only the conformance suite, with racing writers, can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.runtime.clock import Clock
    from skerry.runtime.store.interface import Store

# The folder that skerry.runtime.keys names PROBE; that module lies above this one. A test holds them together.
FOLDER: Final = "probe/"


def probe(store: Store, clock: Clock) -> None:
    """Return if a second create of one key loses, the first body stays, and a listing shows it.

    Writes and deletes one small object of a fresh name. Raises Invalid naming the broken promise, and whatever the
    verbs raise: rights that are missing show here too.
    """
    key = f"{FOLDER}{clock.nonce()}"
    first, second = b"first " + key.encode(), b"second " + key.encode()
    broken = _broken_promise(store, key, first, second)
    store.delete(key)
    if broken is not None:
        raise Invalid(
            f"this store cannot hold a run: {store.uri}: {broken}; use one that honours conditional writes "
            "(S3, Google Cloud Storage, Azure Blob, R2, recent MinIO or Ceph), without a proxy that drops them"
        )


def _broken_promise(store: Store, key: str, first: bytes, second: bytes) -> str | None:
    if not store.create(key, first):
        return f"a create of the fresh key {key} was refused"
    if store.create(key, second):
        return f"two creates of the key {key} both succeeded: it ignores If-None-Match"
    stored = store.read(key)
    if stored is None or bytes(stored) != first:
        return f"the create that lost changed the object {key}"
    if [entry.key for entry in store.list(key)] != [key]:
        return f"the object {key} is not in a listing made after its write"
    return None
