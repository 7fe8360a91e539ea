"""A cloud in memory whose calls can be killed, refused, or answered into the void; and random graphs to make in it.

It is as unforgiving as a real one: names are unique, nothing in use can be deleted, what was made in two calls may be
left half-made, and some ids are new at every creation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.graph import Graph, Life, Resource, Value, as_json, generation_name
from skerry.infra.handler import Condition, Made, Seen, Wanted
from skerry.runtime.errors import Conflict, Retryable, Unauthorized
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.graph import Json

RUN = "memory://cloud/run"
FAULTS = ("kill_before", "kill_after", "deny", "throttle", "lost_reply")


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@dataclass(frozen=True, kw_only=True)
class Thing(Resource):
    """Made in one call; `size` can be changed in place, `shape` cannot. Its id is new at every creation."""

    KIND: ClassVar[str] = "thing"
    FIXED: ClassVar[frozenset[str]] = frozenset({"shape"})

    size: int = 1
    shape: str = "round"
    uses: tuple[Value, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Named(Thing):
    """Made in two calls; its one output follows from its name. What uses it cannot be changed in place."""

    KIND: ClassVar[str] = "named"
    FIXED: ClassVar[frozenset[str]] = frozenset({"shape", "uses"})


@dataclass(frozen=True, kw_only=True)
class Chest(Thing):
    """Holds data."""

    KIND: ClassVar[str] = "chest"
    LIFE: ClassVar[Life] = Life.DATA


@dataclass(frozen=True, kw_only=True)
class Common(Thing):
    """Shared with others."""

    KIND: ClassVar[str] = "common"
    LIFE: ClassVar[Life] = Life.SHARED
    FIXED: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Work(Thing):
    """A job."""

    KIND: ClassVar[str] = "work"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset({"size", "shape", "uses"})


KINDS: tuple[type[Thing], ...] = (Thing, Named, Chest, Common, Work)


@dataclass
class Item:
    """What the cloud has under a name."""

    owner: str | None
    address: str
    generation: int
    settings: dict[str, Json]
    outputs: dict[str, str]
    condition: Condition = Condition.READY

    @property
    def uses(self) -> set[str]:
        """The ids that it holds on to; a job that has ended holds on to nothing."""
        if self.condition in (Condition.DONE, Condition.LOST):
            return set()
        used = self.settings.get("uses", ())
        assert isinstance(used, list | tuple)
        return {str(value) for value in used}


@dataclass
class Cloud:
    """fault: what happens at which writing call, counted from 0."""

    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    writes: int = 0
    reads: int = 0
    fault: tuple[int, str] | None = None
    dead: bool = False
    ids: int = 0
    after_write: Callable[[int], object] = lambda _: None
    guard: threading.RLock = field(default_factory=threading.RLock)

    def handlers(self) -> dict[str, MemoryHandler]:
        return {kind.KIND: MemoryHandler(self, kind) for kind in KINDS}

    def write(self, act: object) -> None:
        """One writing call, with its fault if it is the one."""
        with self.guard:
            self.alive()
            hit = self.fault is not None and self.fault[0] == self.writes
            how = self.fault[1] if self.fault is not None and hit else ""
            self.writes += 1
            match how:
                case "kill_before":
                    self.die()
                case "deny":
                    raise Unauthorized("the cloud says no")
                case "throttle":
                    raise Retryable("slow down")
                case _:
                    pass
            assert callable(act)
            act()
            number = self.writes
            if how == "kill_after":
                self.die()
            if how == "lost_reply":
                raise Retryable("no answer")
        self.after_write(number)

    def die(self) -> None:
        self.dead = True
        raise Killed

    def alive(self) -> None:
        if self.dead:
            raise Killed

    def revive(self) -> None:
        self.dead, self.fault, self.writes = False, None, 0

    def users_of(self, item: Item) -> list[str]:
        values = set(item.outputs.values())
        return [name for (_, name), other in self.items.items() if other is not item and values & other.uses]

    def dangling(self) -> set[tuple[str, str]]:
        """Who uses what is not there."""
        there = {value for item in self.items.values() for value in item.outputs.values()}
        return {(name, value) for (_, name), item in self.items.items() for value in item.uses - there}

    def drift(self, dice: random.Random) -> None:
        """Somebody was here: what is ours is gone, another one, broken, changed, or has come to its end."""
        for (kind, name), item in list(self.items.items()):
            if item.owner != RUN or dice.random() < 0.6:
                continue
            job, chest = kind == Work.KIND, kind == Chest.KIND
            match dice.choice(("gone", "another", "unfit", "changed")):
                case "gone":
                    del self.items[kind, name]
                case "another" if kind == Thing.KIND:
                    self.ids += 1
                    item.outputs = {"id": f"{name}/{self.ids}"}
                case "unfit" if not chest:
                    item.condition = dice.choice(
                        (Condition.LOST, Condition.DONE) if job else (Condition.BROKEN, Condition.READY)
                    )
                case "changed" if not job:
                    item.settings |= {"size": 7}
                case _:
                    pass


class MemoryHandler:
    def __init__(self, cloud: Cloud, kind: type[Thing]) -> None:
        self.cloud = cloud
        self.kind = kind

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        with self.cloud.guard:
            self.cloud.alive()
            self.cloud.reads += 1
            return [self._seen(one.name) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        def make() -> None:
            assert (self.kind.KIND, wanted.name) not in self.cloud.items, f"made twice: {wanted.name}"
            self.cloud.ids += 1
            outputs = {"id": wanted.name if self.kind is Named else f"{wanted.name}/{self.cloud.ids}"}
            first = {"shape": as_json(wanted.settings["shape"])} if self.kind is Named else _plain(wanted)
            self.cloud.items[self.kind.KIND, wanted.name] = Item(
                owner=None if self.kind is Common else wanted.run,
                address=wanted.resource.address,
                generation=wanted.generation,
                settings=first,
                outputs=outputs,
            )

        there = self.cloud.items.get((self.kind.KIND, wanted.name))
        if there is None:
            self.cloud.write(make)
        elif there.owner != wanted.run and self.kind is not Common:
            raise Conflict(f"{wanted.name} is not ours")
        if self.kind is Named:
            self.update(wanted, ())
        return self.cloud.items[self.kind.KIND, wanted.name].outputs

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        assert not set(changed) & self.kind.FIXED, "asked to change what cannot be changed"

        def change() -> None:
            self.cloud.items[self.kind.KIND, wanted.name].settings = _plain(wanted)

        self.cloud.write(change)
        return self.cloud.items[self.kind.KIND, wanted.name].outputs

    def delete(self, made: Made) -> None:
        item = self.cloud.items.get((made.kind, made.name))
        if item is None:
            return
        if users := self.cloud.users_of(item):
            raise Conflict(f"{made.name} is in use by {users}")

        def drop() -> None:
            del self.cloud.items[made.kind, made.name]

        self.cloud.write(drop)

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        del regions
        for (kind, name), item in self.cloud.items.items():
            if kind == self.kind.KIND and item.owner == run:
                yield Made(
                    address=item.address,
                    kind=kind,
                    name=name,
                    generation=item.generation,
                    region="",
                    life=self.kind.LIFE,
                    brought=False,
                    settings={},
                    outputs=item.outputs,
                    needs=(),
                )

    def _seen(self, name: str) -> Seen | None:
        item = self.cloud.items.get((self.kind.KIND, name))
        if item is None:
            return None
        # A job does not tell what it was made with.
        told = {} if self.kind is Work else {"size": None, "shape": None, "uses": None, "region": ""} | item.settings
        return Seen(outputs=item.outputs, settings=told, owner=item.owner, condition=item.condition)


def _plain(wanted: Wanted) -> dict[str, Json]:
    return {name: as_json(value) for name, value in wanted.settings.items()}


class MortalStore(MemoryStore):
    """A store that a dead process cannot write to."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__()
        self.cloud = cloud

    def create(self, key: str, data: object) -> bool:
        self.cloud.alive()
        return super().create(key, data)  # type: ignore[arg-type]


def mortal_store(cloud: Cloud, clock: object) -> Retrying:
    return Retrying(MortalStore(cloud), clock)  # type: ignore[arg-type]


def random_graph(dice: random.Random, size: int) -> Graph:
    """Up to `size` resources that use some of those before them; jobs and chests are used by nobody but jobs."""
    made: list[Resource] = []
    for number in range(size):
        kind = dice.choice(KINDS)
        usable = [other for other in made if not isinstance(other, Work)]
        used = dice.sample(usable, min(len(usable), dice.randrange(3)))
        # A chest refers to nothing that may be replaced, as a bucket does not.
        uses = () if kind in (Chest, Common) else tuple(other.ref("id") for other in used)
        one = _resource(kind, f"r{number}", dice.randrange(3), dice.choice(("round", "flat")), uses)
        if usable and kind is not Chest and dice.random() < 0.2:
            one = replace(one, after=(dice.choice(usable).address,))
        made.append(one)
    return Graph(made)


def mutated(dice: random.Random, graph: Graph) -> Graph:
    """The graph with settings changed, some resources gone, and some new."""
    # What holds data goes with the run only.
    gone = {resource.address for resource in graph if dice.random() < 0.2 and not isinstance(resource, Chest)}
    made: list[Resource] = []
    for resource in graph:
        assert isinstance(resource, Thing)
        if resource.address in gone or resource.needs() & gone:
            gone.add(resource.address)
            continue
        size = dice.randrange(3) if dice.random() < 0.5 else resource.size
        shape = dice.choice(("round", "flat")) if dice.random() < 0.3 else resource.shape
        shape = resource.shape if isinstance(resource, Chest) else shape
        name = resource.name
        if not isinstance(resource, Chest | Common) and dice.random() < 0.1:
            name += "-moved"
        made.append(replace(resource, name=name, size=size, shape=shape))
    for number in range(dice.randrange(3)):
        usable = [other for other in made if not isinstance(other, Work)]
        used = dice.sample(usable, min(len(usable), 1))
        made.append(_resource(Thing, f"new{number}", 1, "round", tuple(other.ref("id") for other in used)))
    return Graph(made)


def random_part(dice: random.Random, graph: Graph) -> Graph:
    """One or two of its resources, and what they need."""
    addresses = [resource.address for resource in graph]
    return graph.part(dice.sample(addresses, min(len(addresses), dice.randrange(1, 3))))


def _resource(kind: type[Thing], key: str, size: int, shape: str, uses: tuple[Value, ...]) -> Thing:
    return kind(key=key, name=f"{kind.KIND}-{key}", region="", size=size, shape=shape, uses=uses)


def expected_name(resource: Resource, generation: int) -> str:
    return generation_name(resource.name, generation)
