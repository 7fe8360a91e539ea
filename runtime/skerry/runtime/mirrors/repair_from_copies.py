"""Replaces damaged and missing objects of a run by copies from other stores, such as its mirrors.

Only bytes with the digest that a record names are written, and an object that has it is never overwritten. So a copy
needs no trust, of which run it may be. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Conflict, Corrupt, Invalid, Retryable, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES, digest_of
from skerry.runtime.store import Span
from skerry.runtime.tensors.payload_format import check_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from skerry.runtime.log.log import RunLog
    from skerry.runtime.log.records import Part
    from skerry.runtime.store import Store

_COMPARED: Final = 1 << 20


@dataclass(frozen=True, kw_only=True)
class NamedObject:
    """An object whose bytes a record names: `part` for tensors, the sha256 `digest` for a record.

    owner: key of the record that names it, if that may be deleted; then the object is not needed either.
    """

    key: str
    part: Part | None = None
    digest: str | None = None
    owner: str | None = None

    def read(self, store: Store) -> memoryview | None:
        """The stored bytes, of a longer object as many as show that; None if it is absent."""
        longest = MAX_RECORD_BYTES if self.part is None else self.part.total_bytes
        return store.read(self.key, Span(0, longest + 1))

    def check(self, data: memoryview) -> None:
        """Raises Corrupt for other bytes than the named ones, Invalid for a payload of another version."""
        if self.part is not None:
            check_whole(data, self.part, self.key)
        elif digest_of(data) != self.digest:
            raise Corrupt(f"record is damaged: key={self.key} digest={digest_of(data)} expected={self.digest}")


@dataclass(frozen=True)
class Mended:
    """An object that was damaged or missing. uri: of the store with a copy. was: what was wrong, for people."""

    key: str
    uri: str
    was: str


class Copies:
    """Other stores that may have an object. One that does not respond or refuses is not asked again."""

    def __init__(self, stores: Sequence[Store]) -> None:
        """stores: in the order in which they are asked."""
        self._stores = list(stores)
        self._away: list[str] = []

    def find(self, wanted: NamedObject) -> tuple[memoryview, str]:
        """The whole object, verified, and the URI of its store. Raises Corrupt with each store's answer for none."""
        answers: list[str] = []
        for store in tuple(self._stores):
            try:
                data = wanted.read(store)
            except (Retryable, Unauthorized, Invalid) as error:
                self._stores.remove(store)
                self._away.append(f"{store.uri} cannot be read: {error}")
                continue
            if data is None:
                answers.append(f"{store.uri} has none")
                continue
            try:
                wanted.check(data)
            except (Corrupt, Invalid):
                answers.append(f"that of {store.uri} is damaged, or another object")
                continue
            return data, store.uri
        raise Corrupt(f"no copy of {wanted.key}: {'; '.join([*answers, *self._away]) or 'no other store is known'}")


def mend(
    store: Store,
    wanted: NamedObject,
    copies: Copies,
    *,
    overwrites: bool,
    before_write: Callable[[], None] = lambda: None,
) -> Mended | None:
    """Makes an object whole; None if it is, or is not needed any more. The whole object is in memory.

    overwrites: a damaged object is replaced by one request, which needs that right. Otherwise it is deleted, then
    created: only for payloads that the caller may create, because a refused create would leave none.
    before_write: called last; what it raises ends the attempt, with nothing written.
    Raises Corrupt without a copy, Conflict if it is damaged again at once, and what the store raises.
    """
    if _is_whole(wanted, wanted.read(store)):
        return None
    data, uri = copies.find(wanted)
    # The copy may have taken long to come.
    if wanted.owner is not None and store.read(wanted.owner) is None:
        return None
    latest = wanted.read(store)
    if _is_whole(wanted, latest):
        return None
    before_write()
    if latest is not None and overwrites:
        store.replace(wanted.key, data)
    else:
        if latest is not None:
            store.delete(wanted.key)
        store.create(wanted.key, data)
    if not _is_whole(wanted, wanted.read(store)):
        raise Conflict(f"{store.uri}/{wanted.key} is still damaged after it was replaced; run `skerry-replica check`")
    return Mended(wanted.key, uri, _damage(latest, data))


class RoundMender:
    """Finds whole payloads for a closed round that a replica cannot follow. For one thread.

    Its own slot's payloads are put back: it may create and delete them. Those of other slots stay as they are, because
    its role may refuse to create them: they are read from the copies. copies: such payloads, by key.
    """

    def __init__(
        self,
        log: RunLog,
        slot: str,
        round_number: int,
        open_copies: Callable[[], Copies],
        before_write: Callable[[], None],
    ) -> None:
        """open_copies: called for each attempt; a store that was away is asked again. before_write: as in `mend`."""
        self.copies: dict[str, Mended] = {}
        self._log, self._slot, self._round = log, slot, round_number
        self._open_copies = open_copies
        self._before_write = before_write
        self._whole: set[str] = set()

    def mend(self, is_late: Callable[[], bool]) -> tuple[list[Mended], list[Corrupt]]:
        """Verifies the round's payloads, mends this slot's, and finds copies of others.

        The errors are of those without a copy. is_late: asked before each payload; the next call goes on there. Raises
        what the run's store raises.
        """
        mended: list[Mended] = []
        failed: list[Corrupt] = []
        copies = self._open_copies()
        for slot, wanted in self._payloads():
            if wanted.key in self._whole:
                continue
            if is_late():
                return mended, failed
            self.copies.pop(wanted.key, None)
            try:
                if slot == self._slot:
                    done = mend(self._log.store, wanted, copies, overwrites=False, before_write=self._before_write)
                    mended += [] if done is None else [done]
                elif (copy := _find_copy(self._log.store, wanted, copies)) is not None:
                    self.copies[wanted.key] = copy
            except Corrupt as error:
                failed.append(error)
            else:
                self._whole.add(wanted.key)
        self._whole.clear()  # the next attempt verifies all again
        return mended, failed

    def _payloads(self) -> Iterator[tuple[str, NamedObject]]:
        """The payloads of the round's members with their slots, by records that have the digests in its commit."""
        number = self._round
        commit = self._log.read_commit(number)
        for exchange, digest in enumerate(() if commit is None else commit.record.exchanges):
            decision = self._log.read_decision(number, exchange)
            if decision is None or decision.digest != digest:
                continue
            for share in decision.record.members:
                contribution = self._log.read_contribution(number, exchange, share.slot)
                if contribution is None or contribution.digest != share.contribution:
                    continue
                for part in contribution.record.parts:
                    yield share.slot, NamedObject(key=keys.payload(number, share.slot, part.digest), part=part)


def _find_copy(store: Store, wanted: NamedObject, copies: Copies) -> Mended | None:
    """The verified copy of an object that is not whole in `store`; None if it is. Raises Corrupt without a copy.

    Both are in memory whole, as in `mend`.
    """
    present = wanted.read(store)
    if _is_whole(wanted, present):
        return None
    data, uri = copies.find(wanted)
    return Mended(wanted.key, uri, _damage(present, data))


def _is_whole(wanted: NamedObject, data: memoryview | None) -> bool:
    if data is None:
        return False
    try:
        wanted.check(data)
    except Corrupt:
        return False
    except Invalid:  # a payload of a newer version: its digest is right
        return True
    return True


def _damage(present: memoryview | None, data: memoryview) -> str:
    """The difference of the damaged bytes from the right ones, because the damaged ones are not kept."""
    if present is None:
        return "missing"
    if len(present) != len(data):
        return f"{len(present)} bytes instead of {len(data)}"
    for start in range(0, len(data), _COMPARED):
        left, right = bytes(present[start : start + _COMPARED]), bytes(data[start : start + _COMPARED])
        if left != right:
            wrong = [offset for offset, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
            return f"damaged from byte {start + wrong[0]} on"
    return "damaged, and whole when it was read again"
