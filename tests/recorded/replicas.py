"""Replicas in one process whose run is a pure function of its script: the same keys and bytes each time.

Time stands still; only a script moves it. So a round waits for every live slot, and only its first slot has its turn to
propose. Arithmetic is elementwise, with powers of two as factors: it has the same bits on every processor.
Uses the public surface alone; all imports of it are here.
"""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Self

import torch
from tests.kit.stores import View
from tests.support.clocks import FakeClock
from torch import nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo, LocalSGD

from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.daemon_executors import wait_for_jobs
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store import open_store
from skerry.runtime.training.exit_hook import forget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from skerry.runtime.store import Data, Store

STEPS: Final = 3  # of a round
BEAT_S: Final = 5.0
GRACE_S: Final = 10.0
TIMEOUT_S: Final = 60.0


class WatchedStore(View):
    """A store whose writes notify `changed`."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.changed = threading.Condition()

    def create(self, key: str, data: Data) -> bool:
        created = self.store.create(key, data)
        self.notify()
        return created

    def replace(self, key: str, data: Data) -> None:
        self.store.replace(key, data)
        self.notify()

    def notify(self) -> None:
        with self.changed:
            self.changed.notify_all()


class StandingClock(FakeClock):
    """Its time is what a script sets; a pause takes real time. polls: pauses that are over, without heartbeats.

    All nonces of one rank and incarnation are the same: the order in which threads ask for them is not fixed.
    """

    def __init__(self, owner: str, on_poll: Callable[[], None]) -> None:
        super().__init__()
        self.polls, self._on_poll = 0, on_poll
        self.killed = False
        self._nonce = hashlib.sha256(owner.encode()).hexdigest()[:32]

    def pause(self, seconds: float, wake: threading.Event | None = None) -> None:
        """A thread of a killed incarnation never comes back from here."""
        wake, end = wake or threading.Event(), time.monotonic() + seconds
        while not self.killed and time.monotonic() < end and not wake.wait(min(seconds, 0.01)):
            pass
        is_beat = threading.current_thread().name.startswith(("heartbeat-", "rank-"))
        if self.killed and is_beat:
            threading.Event().wait()
        if self.killed:
            raise SystemExit
        self.polls += not is_beat
        self._on_poll()

    def nonce(self) -> str:
        return self._nonce


def numbers(random: torch.Generator, shape: Sequence[int], spread: int) -> torch.Tensor:
    """From 16 / 2 ** spread up to 32. At spread 0 differences are exact, and a saved one gives back its term."""
    divisors = 1 << torch.randint(2, 3 + spread, tuple(shape), generator=random)
    return torch.randint(64, 128, tuple(shape), generator=random) / divisors


class Rank:
    """One rank of one incarnation. fragments: of DiLoCo; 0: LocalSGD."""

    def __init__(
        self,
        store: WatchedStore,
        slot: str,
        start: int,
        rank: int,
        *,
        fragments: int,
        spread: int = 12,
        **settings: object,
    ) -> None:
        self.slot, self.rank, self.steps = slot, rank, 0
        self.clock = StandingClock(f"{slot} {start} {rank}", store.notify)
        self._seed, self._spread = 10 * int(slot.removeprefix("r-")) + rank, spread
        random = torch.Generator().manual_seed(self._seed)
        shapes = [[(5,), (2, 3)]] * max(1, fragments)
        parts = [nn.ParameterList(numbers(random, shape, spread) for shape in part) for part in shapes]
        self.model = nn.ModuleList(parts)
        self._inner = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        self.manager = ObjectStoreManager(
            store,
            replica_id=slot,
            rank=rank,
            clock=self.clock,
            min_replica_size=2,
            state_dict=self.model.state_dict,
            load_state_dict=self.model.load_state_dict,
            heartbeat_interval=timedelta(seconds=BEAT_S),
            grace=Grace(floor_s=GRACE_S, cap_s=GRACE_S),
            retention=Retention(age_s=0.0),
            keep_unfinished=timedelta(0),
            **settings,  # type: ignore[arg-type]
        )
        self.manager.register_private_state("inner", self._inner.load_state_dict, self._inner.state_dict)
        self.manager.register_private_state("steps", lambda steps: setattr(self, "steps", steps), lambda: self.steps)
        outer = [torch.optim.SGD(part.parameters(), lr=0.5, momentum=0.5, nesterov=True) for part in parts]
        if fragments:
            DiLoCo(self.manager, parts, self._inner, outer, sync_every=STEPS * fragments).__enter__()  # type: ignore[arg-type]
        else:
            LocalSGD(self.manager, self.model, self._inner, sync_every=STEPS).__enter__()  # type: ignore[arg-type]

    def catch_up(self) -> None:
        self.manager.catch_up(self._inner)

    def look_again(self) -> None:
        """At the others, which takes place once for each heartbeat."""
        self.clock.time += BEAT_S + 1
        self.catch_up()

    def step(self) -> None:
        """Towards targets that are a function of the seed and of the number of the step."""
        random = torch.Generator().manual_seed(1000 * self._seed + self.steps)
        for parameter in self.model.parameters():
            parameter.grad = parameter.detach() - numbers(random, parameter.shape, self._spread)
        self.steps += 1
        self.manager.count_tokens(7)
        self._inner.step()

    def finish_round(self, number: int) -> None:
        while self.manager.current_step() == number:
            self.step()


class Run:
    """The replicas of one run, by slot. The first slot that closes a round proposes its decision."""

    def __init__(self, uri: str, *, fragments: int = 2, ranks: int = 1, every: int = 2, **settings: object) -> None:
        self.store = WatchedStore(open_store(uri))
        self._ranks, self._every = ranks, every
        self._settings = {"fragments": fragments, "checkpoint_every": every, "world_size": ranks, **settings}
        self._replicas: dict[str, list[Rank]] = {}
        self._clocks: list[StandingClock] = []
        self._failed = False
        self._servers: list[TCPStore] = []

    @property
    def round(self) -> int:
        return len(self.store.list("commits/"))

    def start(self, *slots: str) -> Self:
        """A new incarnation of each, one after the other."""
        for slot in slots:
            start, settings = len(self.store.list(f"members/{slot}/")), self._settings
            if self._ranks > 1:
                self._servers.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
                settings = settings | {"store_addr": "localhost", "store_port": self._servers[-1].port}
            ranks = [Rank(self.store, slot, start, rank, **settings) for rank in range(self._ranks)]  # type: ignore[arg-type]
            self._replicas[slot] = ranks
            self._clocks += [rank.clock for rank in ranks]
            self._each((slot,), Rank.catch_up)
            self._await_beat(slot)
        return self

    def step(self, *slots: str) -> None:
        """One inner step, not the last of the round."""
        self._each(slots, Rank.step)

    def save(self, *slots: str) -> None:
        """Save the progress of the current round. Once for each slot."""
        self._each(slots, Rank.catch_up)
        for slot in slots:
            self._until(slot, lambda slot=slot: "/manifest.json" in str(self.store.list(f"unfinished/{slot}/")))

    def kill(self, slot: str) -> None:
        for rank in self._replicas.pop(slot):
            rank.clock.killed = True
            forget(rank.manager.lifecycle)  # nothing runs at the end of a killed process

    def contribute_and_die(self, slot: str) -> None:
        """Killed while it waits for the decision."""
        pool = ThreadPoolExecutor(self._ranks)
        jobs = [pool.submit(rank.finish_round, self.round) for rank in self._replicas[slot]]
        self._await(self._contribution(slot))
        self.kill(slot)
        assert all(isinstance(job.exception(), SystemExit) for job in jobs)

    def close_round(self, *slots: str, short: str | None = None) -> None:
        """By these slots; the others are late or dead. Until all that follows is written. short: ends it early."""
        number, ranks = self.round, [rank for slot in slots for rank in self._replicas[slot]]
        contributed = [self._contribution(slot) for slot in slots if slot != short]

        def finish(rank: Rank) -> None:
            if rank.slot == short:
                self._await(*contributed)
                rank.look_again()
            rank.finish_round(number)

        def end_grace(clock: StandingClock) -> None:
            self._await(*contributed)
            seen = clock.polls + 2  # the proposer has looked once in between
            self._until("a look at the contributions", lambda: clock.polls >= seen)
            clock.time += GRACE_S + 1

        all_slots = {entry.key.split("/")[1] for entry in self.store.list("members/")}
        works = [lambda rank=rank: finish(rank) for rank in ranks]
        self._together(works + [lambda: end_grace(ranks[0].clock)] * (set(slots) < all_slots))
        self._each([slot for slot in self._replicas if slot not in slots], Rank.look_again)
        self._record(number + 1, slots)
        self._await(*(f"receipts/{number:08d}/{slot}.json" for slot in self._replicas))
        for slot in self._replicas:
            self._await_beat(slot)

    def end(self) -> dict[str, str]:
        """End every replica without an error, in order. Returns digests of the parameters."""
        digests: dict[str, str] = {}
        for slot, ranks in self._replicas.items():
            self._each((slot,), lambda rank: rank.manager.shutdown())
            for rank in ranks:
                values = [parameter.detach().numpy().tobytes() for parameter in rank.model.parameters()]
                digests[f"parameters/{slot}/{rank.rank}"] = hashlib.sha256(b"".join(values)).hexdigest()
        return digests

    def _record(self, closed: int, members: Sequence[str]) -> None:
        """The writer of a checkpoint comes last: what the others collect depends on what it writes and deletes."""
        writer = members[closed // self._every % len(members)]
        for slots in ([slot for slot in members if slot != writer], [writer]):
            self._each(slots, Rank.catch_up)
            began = time.monotonic()
            wait_for_jobs(TIMEOUT_S)
            assert time.monotonic() - began < TIMEOUT_S, "a background job hangs"
        if closed % self._every == 0:
            written = self.store.read(f"checkpoints/{closed:08d}/manifest.json")
            assert f'"writer":"{writer}"' in str(bytes(written or b"")), f"not written by {writer}"
            folders = [f"private/{rank.slot}/rank{rank.rank}" for slot in members for rank in self._replicas[slot]]
            self._await(*(f"{folder.removesuffix('/rank0')}/{closed:08d}/manifest.json" for folder in folders))

    def _contribution(self, slot: str) -> str:
        return f"contributions/{self.round:08d}-0000/{slot}.json"

    def _await_beat(self, slot: str) -> None:
        key, at_work = f"heartbeats/{slot}.json", (f'"round":{self.round},', '"phase":"train"')
        self._until(key, lambda: all(field in str(bytes(self.store.read(key) or b"")) for field in at_work))

    def _await(self, *keys: str) -> None:
        for key in keys:
            self._until(key, lambda key=key: self.store.read(key) is not None)

    def _until(self, what: str, is_there: Callable[[], bool]) -> None:
        with self.store.changed:
            self.store.changed.wait_for(lambda: self._failed or is_there(), TIMEOUT_S)
            assert is_there(), f"not there: {what}"

    def _each(self, slots: Iterable[str], work: Callable[[Rank], object]) -> None:
        self._together([lambda rank=rank: work(rank) for slot in slots for rank in self._replicas[slot]])

    def _together(self, works: Sequence[Callable[[], object]]) -> None:
        with ThreadPoolExecutor(max(1, len(works))) as pool:
            jobs = [pool.submit(work) for work in works]
            done, waiting = wait(jobs, 2 * TIMEOUT_S, FIRST_EXCEPTION)
            self._failed = bool(waiting) or any(job.exception() for job in done)
            for clock in self._clocks:
                clock.killed |= self._failed  # else the other threads wait for ever
            self.store.notify()
            for job in done:
                job.result()
        assert not waiting, "a replica hangs"
