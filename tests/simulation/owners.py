"""Owners of units that differ: slow ones, and members of another version of skerry."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, cast

import xxhash

from skerry.runtime.log import keys
from skerry.runtime.tensors.reduced_unit import HEAD_BYTES, VERSION

if TYPE_CHECKING:
    from tests.simulation.faults import Bucket, Call, Script

    from skerry.runtime.store.interface import Data, Entry, Profile, Span, Store

NEWER_FIELD: Final = "surprise"
_DIGEST_BYTES: Final = 16


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A slot that differs. slow: each unit takes `seconds` longer. version: its units are of skerry's next version.

    older: it cannot read decisions, which have a field that it does not know. before_links: it cannot read a
    contribution with a link.
    """

    slot: str
    kind: Literal["slow", "version", "older", "before_links"]
    seconds: float = 0.0


def script_of(owner: Owner, bucket: Bucket) -> Script:
    """The faults around the units of this owner."""

    def script(call: Call) -> str | None:
        is_unit = keys.exchange_of_unit(call.key) is not None and keys.slot_of(call.key) == owner.slot
        if call.verb != "create" or not is_unit:
            return None
        if owner.kind == "slow" and call.moment == "before":
            return f"delayed:{owner.seconds:g}"
        if owner.kind == "version" and call.moment == "after" and (data := bucket.engine.read(call.key)) is not None:
            call.process.world.facts["units of another version"] += 1
            bucket.engine.replace(call.key, _next_version(bytes(data)))
        return None

    return script


class NewerRecords:
    """The store of a member that is older than the others: some records have a field that it does not know."""

    def __init__(self, store: Store, owner: Owner) -> None:
        self._store = store
        self._is_before_links = owner.kind == "before_links"
        self.uri = store.uri

    @property
    def profile(self) -> Profile:
        return self._store.profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        data = self._store.read(key, span, into)
        if data is None or not key.startswith(keys.CONTRIBUTIONS if self._is_before_links else keys.EXCHANGES):
            return data
        record = cast("dict[str, object]", json.loads(bytes(data)))
        if self._is_before_links and "link" not in record:
            return data
        return memoryview(json.dumps({**record, NEWER_FIELD: 1}).encode())

    def create(self, key: str, data: Data) -> bool:
        return self._store.create(key, data)

    def replace(self, key: str, data: Data) -> None:
        self._store.replace(key, data)

    def list(self, prefix: str, after: str | None = None) -> list[Entry]:
        return [*self._store.list(prefix, after)]

    def delete(self, key: str) -> None:
        self._store.delete(key)


def _next_version(unit: bytes) -> bytes:
    """The same unit, sound, as a later skerry writes it."""
    fields = unit[:8] + (VERSION + 1).to_bytes(8, "little") + unit[16 : HEAD_BYTES - _DIGEST_BYTES]
    body = unit[HEAD_BYTES:]
    return fields + xxhash.xxh3_128_digest(fields + body) + body
