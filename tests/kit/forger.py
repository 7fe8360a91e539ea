"""Records that a compromised replica creates: each has the right form, and its role allows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.record_parsing import Record, digest_of
from skerry.runtime.log.records import GENESIS, Contribution, Decision, Member, Share
from tests.kit.managers import Island, begin_run, islands_of, together, wait_until_saved
from tests.kit.protocol import contribution
from tests.kit.records import commit
from tests.kit.stores import flip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.store import Store

CLOSED = 2
UNKNOWN = "f" * 64
"""The digest of a commit that no log has."""


class Forger:
    """The replica `slot` after a break-in. It creates any shared record, and contributions of its own slot only."""

    def __init__(self, store: Store, slot: str = "m") -> None:
        self.store, self.slot = store, slot
        run = read_run(store)
        assert run is not None
        self.run = run.nonce
        first = next(entry.key for entry in store.list(keys.CONTRIBUTIONS))
        self.index = Contribution.parse(store.read(first) or b"", first).index
        self._create(
            keys.member(slot, 0),
            Member(run=run.nonce, slot=slot, incarnation=0, nonce="b" * 32, host="h", process=1, created="now"),
        )

    def base(self, number: int) -> str:
        """The digest of the commit before a closed or open round."""
        return GENESIS if number == 0 else digest_of(self.store.read(keys.commit(number - 1)) or b"")

    def commit(self, number: int, base: str = UNKNOWN, decision: str = UNKNOWN, participants: int = 1) -> str:
        """Commits a round. Returns the digest."""
        record = commit(number, run=self.run, exchanges=(decision,), participants=participants, previous=base)
        return self._create(keys.commit(number), record)

    def decide(self, number: int, base: str = UNKNOWN, *members: str, exchange: int = 0) -> str:
        """Decides an exchange; without members for its own contribution alone. Returns the digest."""
        offered = contribution(self.slot, run=self.run, round=number, exchange=exchange, base=base, index=self.index)
        own = self._create(keys.contribution(number, exchange, self.slot), offered)
        # A name that no slot can have is no Share, but it can be stored.
        shares = [Share.model_construct(slot=slot, contribution=own, weight=1.0) for slot in members or (self.slot,)]
        return self._decide(number, exchange, base, shares)

    def decide_for_all(self, number: int, **changes: object) -> str:
        """Decides the first exchange of the open round, with all its contributions. Returns the digest."""
        entries = self.store.list(keys.contributions_prefix(number, 0))
        digests = {keys.slot_of(entry.key): digest_of(self.store.read(entry.key) or b"") for entry in entries}
        shares = [Share(slot=slot, contribution=digest, weight=1.0) for slot, digest in digests.items()]
        return self._decide(number, 0, self.base(number), shares, **changes)

    def contribute_nothing(self, number: int) -> None:
        """Contributes no part of any tensor."""
        record = contribution(self.slot, run=self.run, round=number, base=self.base(number), index=self.index)
        self._create(keys.contribution(number, 0, self.slot), record)

    def contribute_damaged(self, number: int, like: str = "a") -> None:
        """Contributes to the first exchange what another slot does, but its bytes have not the digest."""
        key = keys.contribution(number, 0, like)
        record = Contribution.parse(self.store.read(key) or b"", key)
        for part in record.parts:
            sound = self.store.read(keys.payload(number, like, part.digest)) or b""
            assert self.store.create(keys.payload(number, self.slot, part.digest), flip(bytes(sound)))
        own = record.model_copy(update={"slot": self.slot, "incarnation": 0})
        self._create(keys.contribution(number, 0, self.slot), own)

    def _decide(self, number: int, exchange: int, base: str, shares: Sequence[Share], **changes: object) -> str:
        record = Decision(
            run=self.run,
            round=number,
            exchange=exchange,
            base=base,
            index=self.index,
            reduction="all_gather",
            members=tuple(shares),
            proposer=self.slot,
            nonce="e" * 32,
        )
        return self._create(keys.decision(number, exchange), record.model_copy(update=changes))

    def close(self, number: int, base: str, *members: str) -> str:
        """Decides and commits a round alone. Returns the digest of the commit."""
        return self.commit(number, base, self.decide(number, base, *members), max(1, len(members)))

    def save(self, number: int, base: str) -> None:
        """A complete checkpoint of another state than that of the newest one, after so many rounds."""
        manifest = checkpoint.manifest(self.store, checkpoint.complete(self.store)[0])
        assert manifest is not None
        tree, tensors = checkpoint.flatten(checkpoint.load(self.store, manifest))
        changed = [1.5 * tensor if tensor.is_floating_point() else tensor for tensor in tensors]
        assert checkpoint.save(
            self.store,
            run=self.run,
            round_number=number,
            commit=base,
            members=(self.slot,),
            batches=number,
            writer=self.slot,
            nonce="f" * 32,
            state=checkpoint.restore(tree, changed),
        )

    def _create(self, key: str, record: Record) -> str:
        assert self.store.create(key, record.to_bytes())
        return digest_of(record.to_bytes())


def train_pair(store: Store) -> list[Island]:
    """Two replicas that need each other have closed CLOSED rounds, with checkpoints, and go on."""
    begin_run(store, "ab", minimum=2)
    islands = islands_of(store, "ab")
    together([lambda island=island: island.train(CLOSED, close=False) for island in islands])
    for island in islands:
        wait_until_saved(island)
    return islands


def take_over(forger: Forger, rounds: int, *members: str) -> None:
    """Close the rounds from CLOSED to before `rounds` alone, and save another state after them.

    members: of each decision, all with its own contribution; without any, itself.
    """
    base = forger.base(CLOSED)
    for number in range(CLOSED, rounds):
        base = forger.close(number, base, *members)
    forger.save(rounds, base)
