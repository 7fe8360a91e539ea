"""A cloud in memory whose calls can be killed, denied, throttled, or lose their reply; and random graphs for it.

It is as strict as a real one: names are unique, resources in use cannot be deleted, a creation in two calls may be left
half done, and some ids are new at every creation.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from tests.kit.stores import HookedStore

from skerry.infra.provision.graph import Graph, Life, Resource, Value, as_json
from skerry.infra.provision.handler import Condition, Desired, Observed, StateRecord
from skerry.runtime.errors import Conflict, Retryable, Unauthorized
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from skerry.infra.provision.graph import Json
    from skerry.runtime.clock import Clock

RUN = "memory://cloud/run"
FAULTS = ("kill_before", "kill_after", "deny", "throttle", "lost_reply")


class ProcessKilled(BaseException):
    """The process was killed."""


@dataclass(frozen=True, kw_only=True)
class Thing(Resource):
    """Created in one call; `size` can be changed in place, `shape` cannot. Its id is new at every creation."""

    KIND: ClassVar[str] = "thing"
    FIXED: ClassVar[frozenset[str]] = frozenset({"shape"})

    size: int = 1
    shape: str = "round"
    uses: tuple[Value, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Named(Thing):
    """Created in two calls; its output is its name. A change of `uses` forces replacement."""

    KIND: ClassVar[str] = "named"
    FIXED: ClassVar[frozenset[str]] = frozenset({"shape", "uses"})


@dataclass(frozen=True, kw_only=True)
class Chest(Thing):
    """Holds data."""

    KIND: ClassVar[str] = "chest"
    LIFE: ClassVar[Life] = Life.DATA


@dataclass(frozen=True, kw_only=True)
class Common(Thing):
    """Shared with other runs."""

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


@dataclass(frozen=True, kw_only=True)
class Lone(Thing):
    """Known to others by its name alone."""

    KIND: ClassVar[str] = "lone"
    SINGLE: ClassVar[bool] = True


KINDS: tuple[type[Thing], ...] = (Thing, Named, Chest, Common, Work)


@dataclass
class Item:
    """A resource in the cloud."""

    owner: str | None
    address: str
    generation: int
    settings: dict[str, Json]
    outputs: dict[str, str]
    condition: Condition = Condition.READY

    @property
    def uses(self) -> set[str]:
        """The ids that it uses; an ended job uses none."""
        if self.condition in (Condition.DONE, Condition.LOST):
            return set()
        used = self.settings.get("uses", ())
        assert isinstance(used, list | tuple)
        return {str(value) for value in used}


@dataclass
class Cloud:
    """fault: the number of a writing call, from 0, and its fault."""

    items: dict[tuple[str, str], Item] = field(default_factory=dict)
    writes: int = 0
    reads: int = 0
    fault: tuple[int, str] | None = None
    dead: bool = False
    ids: int = 0
    after_write: Callable[[int], object] = lambda _: None
    guard: threading.RLock = field(default_factory=threading.RLock)

    def handlers(self) -> dict[str, MemoryHandler]:
        return {kind.KIND: MemoryHandler(self, kind) for kind in (*KINDS, Lone)}

    def write(self, act: Callable[[], None]) -> None:
        """Make one writing call, with the fault if it has its number."""
        with self.guard:
            self.alive()
            number, how = self.fault or (None, "")
            how = how if number == self.writes else ""
            self.writes += 1
            if how == "kill_before":
                self.die()
            if how == "deny":
                raise Unauthorized("denied")
            if how == "throttle":
                raise Retryable("throttled")
            act()
            number = self.writes
            if how == "kill_after":
                self.die()
            if how == "lost_reply":
                raise Retryable("no answer")
        self.after_write(number)

    def die(self) -> None:
        self.dead = True
        raise ProcessKilled

    def alive(self) -> None:
        if self.dead:
            raise ProcessKilled

    def revive(self) -> None:
        self.dead, self.fault, self.writes = False, None, 0

    def users_of(self, item: Item) -> list[str]:
        values = set(item.outputs.values())
        return [name for (_, name), other in self.items.items() if other is not item and values & other.uses]

    def dangling(self) -> set[tuple[str, str]]:
        """The users of missing outputs."""
        existing = {value for item in self.items.values() for value in item.outputs.values()}
        return {(name, value) for (_, name), item in self.items.items() for value in item.uses - existing}

    def drift(self, rng: random.Random) -> None:
        """Change resources as if outside of skerry: delete, recreate, break, change or finish some."""
        for (kind, name), item in list(self.items.items()):
            if item.owner != RUN or rng.random() < 0.6:
                continue
            job, chest = kind == Work.KIND, kind == Chest.KIND
            match rng.choice(("gone", "another", "unfit", "changed")):
                case "gone":
                    del self.items[kind, name]
                case "another" if kind == Thing.KIND:
                    self.ids += 1
                    item.outputs = {"id": f"{name}/{self.ids}"}
                case "unfit" if not chest:
                    item.condition = rng.choice(
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

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        with self.cloud.guard:
            self.cloud.alive()
            self.cloud.reads += 1
            return [self._seen(desired.name) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        def make() -> None:
            assert (self.kind.KIND, desired.name) not in self.cloud.items, f"made twice: {desired.name}"
            self.cloud.ids += 1
            outputs = {"id": desired.name if self.kind is Named else f"{desired.name}/{self.cloud.ids}"}
            first = {"shape": as_json(desired.settings["shape"])} if self.kind is Named else _plain(desired)
            self.cloud.items[self.kind.KIND, desired.name] = Item(
                owner=None if self.kind is Common else desired.run,
                address=desired.resource.address,
                generation=desired.generation,
                settings=first,
                outputs=outputs,
            )

        existing = self.cloud.items.get((self.kind.KIND, desired.name))
        if existing is None:
            self.cloud.write(make)
        elif existing.owner != desired.run and self.kind is not Common:
            raise Conflict(f"{desired.name} is not ours")
        if self.kind is Named:
            self.update(desired, ())
        return self.cloud.items[self.kind.KIND, desired.name].outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        assert not set(changed) & self.kind.FIXED, "asked to change what cannot be changed"

        def change() -> None:
            self.cloud.items[self.kind.KIND, desired.name].settings = _plain(desired)

        self.cloud.write(change)
        return self.cloud.items[self.kind.KIND, desired.name].outputs

    def delete(self, state_record: StateRecord) -> None:
        item = self.cloud.items.get((state_record.kind, state_record.name))
        if item is None:
            return
        if users := self.cloud.users_of(item):
            raise Conflict(f"{state_record.name} is in use by {users}")

        def drop() -> None:
            del self.cloud.items[state_record.kind, state_record.name]

        self.cloud.write(drop)

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        del regions
        for (kind, name), item in self.cloud.items.items():
            if kind == self.kind.KIND and item.owner == run:
                yield StateRecord(
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

    def _seen(self, name: str) -> Observed | None:
        item = self.cloud.items.get((self.kind.KIND, name))
        if item is None:
            return None
        # The settings of a job cannot be read back.
        settings = (
            {} if self.kind is Work else {"size": None, "shape": None, "uses": None, "region": ""} | item.settings
        )
        return Observed(outputs=item.outputs, settings=settings, owner=item.owner, condition=item.condition)


def _plain(desired: Desired) -> dict[str, Json]:
    return {name: as_json(value) for name, value in desired.settings.items()}


def process_store(cloud: Cloud, clock: Clock) -> Retrying:
    """A store that rejects writes of a killed process."""

    def reject(verb: str, _key: str) -> None:
        if verb == "create":
            cloud.alive()

    return Retrying(HookedStore(reject), clock)


def random_graph(rng: random.Random, size: int) -> Graph:
    """`size` resources that use some of the earlier ones; no resource uses a job."""
    resources: list[Resource] = []
    for number in range(size):
        kind = rng.choice(KINDS)
        usable = [other for other in resources if not isinstance(other, Work)]
        used = rng.sample(usable, min(len(usable), rng.randrange(3)))
        # A chest references no replaceable resource, like a bucket.
        uses = () if kind in (Chest, Common) else tuple(other.ref("id") for other in used)
        resource = _resource(kind, f"r{number}", rng.randrange(3), rng.choice(("round", "flat")), uses)
        if usable and kind is not Chest and rng.random() < 0.2:
            resource = replace(resource, after=(rng.choice(usable).address,))
        resources.append(resource)
    return Graph(resources)


def changed_graph(rng: random.Random, graph: Graph) -> Graph:
    """The graph with changed settings, without some resources, and with new ones. Data stays."""
    gone = {resource.address for resource in graph if rng.random() < 0.2 and not isinstance(resource, Chest)}
    resources: list[Resource] = []
    for resource in graph:
        assert isinstance(resource, Thing)
        if resource.address in gone or resource.needs() & gone:
            gone.add(resource.address)
            continue
        size = rng.randrange(3) if rng.random() < 0.5 else resource.size
        shape = rng.choice(("round", "flat")) if rng.random() < 0.3 else resource.shape
        shape = resource.shape if isinstance(resource, Chest) else shape
        name = resource.name
        if not isinstance(resource, Chest | Common) and rng.random() < 0.1:
            name += "-moved"
        resources.append(replace(resource, name=name, size=size, shape=shape))
    for number in range(rng.randrange(3)):
        usable = [other for other in resources if not isinstance(other, Work)]
        used = rng.sample(usable, min(len(usable), 1))
        resources.append(_resource(Thing, f"new{number}", 1, "round", tuple(other.ref("id") for other in used)))
    return Graph(resources)


def random_part(rng: random.Random, graph: Graph) -> Graph:
    """One or two of its resources, and the ones they need."""
    addresses = [resource.address for resource in graph]
    return graph.part(rng.sample(addresses, min(len(addresses), rng.randrange(1, 3))))


def _resource(kind: type[Thing], key: str, size: int, shape: str, uses: tuple[Value, ...]) -> Thing:
    return kind(key=key, name=f"{kind.KIND}-{key}", region="", size=size, shape=shape, uses=uses)
