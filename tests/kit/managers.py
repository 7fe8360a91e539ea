"""Real managers in one process: one thread for each replica, one memory store, torchft's own wrappers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.checkpointing.local_copies_interface import Kind
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import Record
from skerry.runtime.log.records import Commit, Contribution, Decision, Receipt
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.ranks.interface import RankLost
from tests.kit.fragments import originals_in
from tests.kit.protocol import run_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import pytest

    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

T = TypeVar("T")
R = TypeVar("R", bound=Record)

_OPEN: list[ObjectStoreManager] = []


# Replicas.


def begin_run(store: Store, slots: Iterable[str], /, *, minimum: int = 1, **changes: object) -> Run:
    """Create run.json. Round 0 then waits for these slots. changes: other values of any fields."""
    run = run_record(SystemClock(), slots=tuple(slots), min_replicas=minimum, **changes)
    assert store.create(keys.RUN, run.to_bytes())
    return run


def manager_of(
    store: Store, slot: str | None, *, minimum: int = 2, grace_s: float = 10.0, **more: object
) -> ObjectStoreManager:
    settings: dict[str, object] = {
        "timeout": timedelta(seconds=20),
        "heartbeat_interval": timedelta(milliseconds=50),
        "grace": Grace(floor_s=grace_s, cap_s=grace_s),
        "max_retries": 2,
    }
    manager = ObjectStoreManager(store, replica_id=slot, min_replica_size=minimum, **(settings | more))  # type: ignore[arg-type]
    _OPEN.append(manager)
    return manager


def stop_managers() -> None:
    """Stop every manager of `manager_of` that a test has left open."""
    for manager in _OPEN:
        manager.request_stop()
    while _OPEN:
        with suppress(RankLost):
            _OPEN.pop().shutdown()


def exchange(manager: ObjectStoreManager, *tensors: torch.Tensor) -> bool:
    """One round with one burst of allreduces. Returns whether it is closed."""
    manager.start_quorum()
    works = [manager.allreduce(tensor) for tensor in tensors]
    assert all(work.wait() for work in works)
    return manager.should_commit()


class Island:
    """One replica that trains a small model of one or more linear layers with DiLoCo."""

    def __init__(
        self,
        store: Store,
        slot: str,
        *,
        fragments: int = 1,
        sync_every: int = 2,
        seed: int = 0,
        lr: float = 0.1,
        features: int = 4,
        wrapper: Mapping[str, Any] | None = None,
        **more: object,
    ) -> None:
        """fragments: layers, which are exchanged in turn. sync_every: inner steps of a round. features: of a layer.

        wrapper: other arguments of torchft's DiLoCo. more: of the manager.
        """
        torch.manual_seed(seed)
        layers = [nn.Linear(features, features if fragments > 1 else 3) for _ in range(fragments)]
        self.model = layers[0] if fragments == 1 else nn.Sequential(*layers)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=lr)
        state: dict[str, object] = {
            "state_dict": self.model.state_dict,
            "load_state_dict": self.model.load_state_dict,
        }
        self.manager = manager_of(store, slot, **(state | more))  # type: ignore[arg-type]
        self.diloco = DiLoCo(
            self.manager,
            list(layers),
            self.inner,
            [torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True) for layer in layers],
            sync_every=fragments * sync_every,
            **(wrapper or {}),
        )
        self.generator = torch.Generator().manual_seed(seed + 100)
        self.features = features
        self.steps = 0

    @property
    def originals(self) -> dict[str, torch.Tensor]:
        """The shared parameters: the result of the last outer step of each fragment."""
        fragments = originals_in(self.diloco)
        if len(fragments) == 1:
            return fragments[0]
        return {f"{number}.{name}": tensor for number, part in enumerate(fragments) for name, tensor in part.items()}

    def step(self) -> None:
        x = torch.randn(8, self.features, generator=self.generator)
        self.inner.zero_grad()
        (self.model(x) ** 2).sum().backward()
        self.inner.step()
        self.steps += 1

    def train(self, rounds: int, *, close: bool = True) -> Self:
        """Train until `rounds` rounds are closed. close: then shut the manager down."""
        with self.diloco:
            while self.manager.current_step() < rounds:
                self.manager.catch_up(self.inner)
                if self.manager.current_step() < rounds:
                    self.step()
        if close:
            self.manager.shutdown()
        return self

    def join(self) -> int:
        """Reach the head, without an inner step. Returns the number of rounds that it followed."""
        with self.diloco:
            return self.manager.catch_up(self.inner)

    def take(self, steps: int) -> Self:
        """Take inner steps, and look at the log before and after each. Every save within the round is complete.

        The manager stays open, as that of a process that hangs.
        """
        with self.diloco:
            for remaining in range(steps, -1, -1):
                self.manager.catch_up(self.inner)
                unfinished = self.manager.lifecycle.log_follower.unfinished
                wait_for(lambda saves=unfinished: not saves.is_saving)
                if remaining:
                    self.step()
        return self

    def stop(self) -> None:
        """End as a replica does that was asked to stop."""
        self.manager.request_stop()
        self.manager.shutdown()


def islands_of(store: Store, slots: Iterable[str], **settings: object) -> list[Island]:
    """A replica for each slot, each with a seed of its own."""
    return [Island(store, slot, seed=seed, **settings) for seed, slot in enumerate(slots)]  # type: ignore[arg-type]


def join_at_head(store: Store, slot: str = "late") -> tuple[Island, int]:
    """A new replica joins, without an inner step. Returns it, and the number of rounds that it followed."""
    island = Island(store, slot, seed=9, minimum=1)
    followed = island.join()
    island.manager.shutdown()
    assert island.steps == 0
    return island, followed


def fail_next_exchange(manager: ObjectStoreManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next exchange fails before anything is uploaded."""
    averager = manager.session.averager
    run, failed = averager.run, list[bool]()

    def fail_once(*args: object, **more: object) -> object:
        if not failed:
            failed.append(True)
            raise TimeoutError("the store was away")
        return run(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(averager, "run", fail_once)


# Several at once.


def together(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run all at the same time. Returns their results, or raises the first error."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(300) for future in [pool.submit(work) for work in works]]


def train_all(islands: Sequence[Island], rounds: int, *, close: bool = True) -> None:
    """Train all replicas at the same time until `rounds` rounds are closed."""
    together([lambda island=island: island.train(rounds, close=close) for island in islands])


def assert_same_parameters(islands: Sequence[Island]) -> None:
    first, *others = [island.originals for island in islands]
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition is true. The limit only ends a test that hangs. Raises TimeoutError."""
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + 300.0, Backoff(first=0.001, cap=0.02))


def wait_until_saved(island: Island) -> None:
    """Wait until the checkpoint that this replica writes in the background is stored."""
    recorder = island.manager.lifecycle.log_follower.recorder
    wait_for(lambda: not recorder.is_saving)


def wait_for_copies(manager: ObjectStoreManager) -> None:
    """Wait until the copies of its state that this rank saves on its machine are complete."""
    near = manager.lifecycle.log_follower.recorder.near
    wait_for(lambda: near is None or not any(map(near.is_saving, get_args(Kind))))


def train_and_save_each(islands: Sequence[Island], rounds: int, *, close: bool = True) -> None:
    """As `train_all`, but no checkpoint is skipped because another one is still being written."""
    for number in range(1, rounds):
        train_all(islands, number, close=False)
        for island in islands:
            island.join()
            wait_until_saved(island)
    train_all(islands, rounds, close=close)


def train_saved_run(store: Store, rounds: int) -> list[Island]:
    """Begin a run of "a" and "b", stop it after so many rounds, and return them; the last checkpoint is stored."""
    begin_run(store, "ab", minimum=2, rounds=None)
    islands = islands_of(store, "ab", grace_s=60.0)
    train_and_save_each(islands, rounds, close=False)
    for island in islands:
        wait_until_saved(island)
    stop_managers()
    return islands


class Pace:
    """Lets the fast replicas close a round only when the slow one has taken its steps for it."""

    def __init__(self) -> None:
        self._allowed = 0
        self._changed = threading.Condition()

    def allow(self, rounds: int) -> None:
        with self._changed:
            self._allowed = max(self._allowed, rounds)
            self._changed.notify_all()

    def wait_for_look(self) -> None:
        """Wait as long as one heartbeat of `manager_of`: a replica looks at the others no more often."""
        with self._changed:
            self._changed.wait(0.05)

    def until(self, round_number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._allowed > round_number, timeout=300)


# Records in the store.


def _parsed(store: Store, prefix: str, kind: type[R]) -> list[R]:
    return [kind.parse(store.read(entry.key) or b"", entry.key) for entry in store.list(prefix)]


def decisions(store: Store) -> list[Decision]:
    return _parsed(store, keys.EXCHANGES, Decision)


def members(store: Store) -> list[list[str]]:
    """The slots in each decision."""
    return [[share.slot for share in decision.members] for decision in decisions(store)]


def weights(store: Store) -> list[dict[str, float]]:
    """The weights in each decision, by slot."""
    return [{share.slot: share.weight for share in decision.members} for decision in decisions(store)]


def commits(store: Store) -> list[Commit]:
    return _parsed(store, keys.COMMITS, Commit)


def contributions(store: Store) -> list[Contribution]:
    return _parsed(store, keys.CONTRIBUTIONS, Contribution)


def receipts(store: Store, round_number: int) -> dict[str, Receipt]:
    """The receipts of one round, by slot."""
    return {receipt.slot: receipt for receipt in _parsed(store, keys.receipts_prefix(round_number), Receipt)}


def states(store: Store, round_number: int) -> set[str | None]:
    """The different states that receipts of a round report."""
    return {receipt.state for receipt in receipts(store, round_number).values()}
