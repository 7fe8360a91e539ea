"""Injects flips, truncations and absences into copies of a state, and counts what the shipped code makes of them.

    memory      copies of a rank's state in the memory of two ranks: CliqueReplicationStrategy
    shm, disk   saves of two ranks on their machines and at the peer: LocalCheckpoints, in /dev/shm and in a folder
    checkpoint  the two newest checkpoints of a store: manifest and parts
    mirror      records, payloads and parts of a run and of its two mirrors: `mend`, as replicas and the operator use it

In each case at least one copy is damaged, sometimes all. A case is served if the result is the right state, refused if
no copy was used, and wrong otherwise. Refused is right only if no whole copy was left.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS, CheckpointManifest, Commit, Contribution, Decision
from skerry.runtime.mirrors.repair_from_copies import Copies, NamedObject, mend
from skerry.runtime.replication import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    NoReplicasAvailableError,
)
from skerry.runtime.replication.local_and_peer_checkpoints import LocalCheckpoints, LocalCopies
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore
from tests.kit.managers import train_saved_run
from tests.kit.ranks import on_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.runtime.store import Store

LAYERS: Final = ("memory", "shm", "disk", "checkpoint", "mirror")
KINDS: Final = ("flip", "truncation", "absence")
RUN: Final = "0123456789abcdef" * 2
RANKS: Final = 2


@dataclass
class Figures:
    """The outcomes of one layer. injected: by kind of damage; a case may have several."""

    injected: Counter[str] = field(default_factory=Counter)
    served: int = 0
    refused: int = 0
    wrong: int = 0
    needlessly_refused: int = 0

    def count(self, *, right: bool | None, has_copy: bool) -> None:
        """right: None if nothing was served. has_copy: a whole copy was left."""
        if right is None:
            self.refused += 1
            self.needlessly_refused += has_copy
        elif right:
            self.served += 1
        else:
            self.wrong += 1

    @property
    def cases(self) -> int:
        """So many were counted."""
        return self.served + self.refused + self.wrong

    @property
    def is_sound(self) -> bool:
        """No wrong bytes were used, and a whole copy was used wherever there was one."""
        return not self.wrong and not self.needlessly_refused

    def with_outcomes_of(self, other: Figures) -> Figures:
        """Also those of another rank, for which the same damage was done."""
        return replace(
            self,
            served=self.served + other.served,
            refused=self.refused + other.refused,
            wrong=self.wrong + other.wrong,
            needlessly_refused=self.needlessly_refused + other.needlessly_refused,
        )


def harmed(data: bytes, kind: str, chance: random.Random) -> bytes | None:
    """The bytes with one bit flipped, cut off, or None."""
    if kind == "absence" or not data:
        return None
    if kind == "truncation":
        return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def put(store: Store, key: str, data: bytes | None) -> None:
    """Stores the bytes; None deletes the object."""
    if data is None:
        store.delete(key)
    else:
        store.replace(key, data)


def state_of(number: int) -> dict[str, Any]:
    """A state with tensors of several sizes, and values that are no tensors."""
    weights = torch.arange(4_000.0) + number
    return {"weights": weights, "moments": [weights[:200].view(10, 20) / 3, torch.tensor(number)], "lr": number / 7}


def is_same(state: Any, number: int) -> bool:
    return checkpoint.state_digest(state) == checkpoint.state_digest(state_of(number))


# Ranks.


def in_memory(injections: int, seed: int) -> Figures:
    """Rank 0 has lost nothing or its own copy; the copies of its state at both ranks may be bad."""

    def work(rank: int) -> Figures:
        figures, chance = Figures(), random.Random(f"memory {seed}")  # the same on both ranks
        strategy = CliqueReplicationStrategy.from_replication_params(1, RANKS)
        while figures.injected.total() < injections:
            number = figures.cases
            states, ids = strategy.replicate(BasicTensorAwareStateDict(state_of(number + rank)), rank)
            held: dict[int, Any] = dict(zip(ids, states, strict=True))
            bad = {holder: chance.choice(KINDS) for holder in range(RANKS) if chance.random() < 0.6} or {0: "flip"}
            for holder, kind in bad.items():
                figures.injected[kind] += 1
                where = chance.randrange(1 << 30)
                if holder == rank:
                    _harm_state(held, kind, where)
            available = [[0, 1], [0, 1]]
            plan = strategy.retrieve_plan(available, [0] if rank == 0 else [])
            try:
                received = strategy.retrieve_execute(plan, held)
            except NoReplicasAvailableError:
                right = None
            else:
                right = rank != 0 or is_same(received[0].state_dict, number)
            figures.count(right=right, has_copy=len(bad) < RANKS)
        return figures

    return on_ranks(RANKS, work, timeout_s=600.0)[0]


def _harm_state(held: dict[int, Any], kind: str, where: int) -> None:
    """Harms the copy of rank 0's state, and only that copy."""
    if kind == "absence":
        del held[0]
        return
    held[0] = copy.deepcopy(held[0])  # with its seal
    tensors = held[0].pop_tensors()
    tensor = tensors[where % 2]
    if kind == "flip":
        tensor.view(torch.uint8).view(-1)[where % tensor.nbytes] ^= 1 << where % 8
    else:
        tensors[where % 2] = tensor[: where % len(tensor)].clone()
    held[0].insert_tensors(tensors)


def on_machines(injections: int, seed: int, root: Path) -> Figures:
    """Both ranks load a save after copies of it were harmed in the folders of both machines."""

    def work(rank: int) -> Figures:
        figures, chance, clock = Figures(), random.Random(f"machine {seed}"), SystemClock()
        folder = root / f"machine{rank}"
        group = _Together(rank)
        copies = LocalCheckpoints.open(LocalCopies(folder=folder, apart=1), RUN, "a", clock, group)  # type: ignore[arg-type]
        while figures.injected.total() < injections:
            number = figures.cases
            copies.save("unfinished", number, GENESIS, state_of(number + rank))
            while copies.is_saving("unfinished"):
                clock.pause(0.001)
            dist.barrier()
            bad = _choose_bad(chance)
            for (holder, owner), kind in bad.items():
                figures.injected[kind] += 1
                salt = chance.randrange(1 << 30)
                if holder == rank:
                    _harm_save(DirectoryStore(folder / RUN / "a"), owner, number, kind, random.Random(salt))
            dist.barrier()
            loaded = copies.load("unfinished", number)
            right = None if loaded is None else is_same(loaded.state, number + rank)
            figures.count(right=right, has_copy=sum(owner == rank for _, owner in bad) < RANKS)
        copies.close(wait=True)
        return figures

    first, second = on_ranks(RANKS, work, timeout_s=600.0)
    return first.with_outcomes_of(second)


def _choose_bad(chance: random.Random) -> dict[tuple[int, int], str]:
    """Holder and owner of each copy to harm; at least one."""
    pairs = [(holder, owner) for holder in range(RANKS) for owner in range(RANKS)]
    bad = {pair: chance.choice(KINDS) for pair in pairs if chance.random() < 0.5}
    return bad or {chance.choice(pairs): chance.choice(KINDS)}


def _harm_save(place: Store, owner: int, number: int, kind: str, chance: random.Random) -> None:
    """Harms one file of a save."""
    stored = place.list(f"{keys.local_prefix('unfinished', owner)}{number:08d}/")
    key = chance.choice(stored).key
    put(place, key, harmed(bytes(place.read(key) or b""), kind, chance))


class _Together:
    """The ranks of a gloo job as the group of one replica."""

    size = RANKS

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def channel(self, _: str) -> _Together:
        return self


# Stores.


def in_checkpoints(injections: int, seed: int) -> Figures:
    """A store with two checkpoints: what cannot be loaded is skipped for the older one."""
    figures, chance = Figures(), random.Random(f"checkpoint {seed}")
    sound = MemoryStore()
    for number in (1, 2):
        checkpoint.save(
            sound,
            run=RUN,
            round_number=number,
            commit=GENESIS,
            members=("a",),
            batches=number,
            writer="a",
            nonce=RUN,
            state=state_of(number),
        )
    whole = {entry.key: bytes(sound.read(entry.key) or b"") for entry in sound.list("")}
    while figures.injected.total() < injections:
        store = MemoryStore()
        for key, data in whole.items():
            store.create(key, data)
        bad = {number for number in (1, 2) if chance.random() < 0.6} or {2}
        for number in bad:
            kind = chance.choice(KINDS)
            key = chance.choice([key for key in whole if f"/{number:08d}/" in key])
            put(store, key, harmed(whole[key], kind, chance))
            figures.injected[kind] += 1
        right: bool | None = None
        for number in checkpoint.complete(store):
            try:
                manifest = checkpoint.manifest(store, number)
                if manifest is None:
                    continue
                state = checkpoint.load(store, manifest)
            except Corrupt:
                continue
            right = number not in bad and manifest.batches == number and is_same(state, number)
            break
        figures.count(right=right, has_copy=len(bad) < 2)
    return figures


def in_mirrors(injections: int, seed: int, folder: Path) -> Figures:
    """A run and two mirrors of it, one of them a folder. Each case harms one object, and its copies or not."""
    figures, chance, objects = Figures(), random.Random(f"mirror {seed}"), _small_run()
    stores: Sequence[Store] = (MemoryStore(), MemoryStore(), DirectoryStore(folder))
    for store in stores:
        for key, data in objects.items():
            store.create(key, data)
    named = list(_named(objects))
    while figures.injected.total() < injections:
        wanted = chance.choice(named)
        right = objects[wanted.key]
        bad = {0, *(number for number in (1, 2) if chance.random() < 0.5)}
        for number in bad:
            kind = chance.choice(KINDS)
            put(stores[number], wanted.key, harmed(right, kind, chance))
            figures.injected[kind] += 1
        before = stores[0].read(wanted.key)
        try:
            done = mend(stores[0], wanted, Copies(stores[1:]), overwrites=chance.random() < 0.5)
        except Corrupt:
            # Nothing was written, so nothing could be used.
            figures.count(right=None if stores[0].read(wanted.key) == before else False, has_copy=len(bad) < 3)
        else:
            figures.count(right=done is not None and stores[0].read(wanted.key) == right, has_copy=True)
        for number in bad:
            put(stores[number], wanted.key, right)
    return figures


def _small_run() -> dict[str, bytes]:
    """The objects of a run of two replicas after three rounds."""
    store = MemoryStore()
    train_saved_run(store, 3)
    return {entry.key: bytes(store.read(entry.key) or b"") for entry in store.list("")}


def _named(objects: Mapping[str, bytes]) -> list[NamedObject]:
    """All objects of a run whose bytes its log names."""
    named: list[NamedObject] = []
    for key, data in objects.items():
        if key.startswith(keys.COMMITS):
            commit = Commit.parse(data, key)
            named += [
                NamedObject(key=keys.decision(commit.round, number), digest=digest)
                for number, digest in enumerate(commit.exchanges)
            ]
            if commit.round:
                named.append(NamedObject(key=keys.commit(commit.round - 1), digest=commit.previous))
        elif key.startswith(keys.EXCHANGES):
            decision = Decision.parse(data, key)
            named += [
                NamedObject(key=keys.contribution(decision.round, 0, share.slot), digest=share.contribution)
                for share in decision.members
            ]
        elif key.startswith(keys.CONTRIBUTIONS):
            contribution = Contribution.parse(data, key)
            at = [keys.payload(contribution.round, contribution.slot, part.digest) for part in contribution.parts]
            named += [NamedObject(key=at, part=part) for at, part in zip(at, contribution.parts, strict=True)]
        elif key.startswith(keys.CHECKPOINTS) and key.endswith(keys.MANIFEST):
            number = keys.round_of(key)
            parts = CheckpointManifest.parse(data, key).parts
            named += [NamedObject(key=keys.checkpoint_part(number, part.digest), part=part) for part in parts]
    return [wanted for wanted in named if wanted.key in objects]


def inject(layer: str, injections: int, seed: int, folder: Path) -> Figures:
    """The outcomes of at least so many injections in one of LAYERS. folder: empty, for files."""
    if layer == "memory":
        return in_memory(injections, seed)
    if layer == "checkpoint":
        return in_checkpoints(injections, seed)
    if layer == "mirror":
        return in_mirrors(injections, seed, folder)
    if layer == "disk":
        return on_machines(injections, seed, folder)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        return on_machines(injections, seed, Path(memory))
