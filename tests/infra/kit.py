"""What tests of more than one cloud need: wanted resources, a run's scene, specs, golden files, and an end by kill."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from skerry.infra import spec
from skerry.infra.graph import Graph, Life, as_json, resolved
from skerry.infra.handler import Made, Wanted
from skerry.infra.target import Ground

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen
    from skerry.infra.target import Check, Home, Target


class Killed(BaseException):
    """The process ends here."""


class Listener:
    """What was asked of a cloud, and the end of its process at a chosen call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._event = ""
        self._left = 0

    def heard(self, when: str, what: str) -> None:
        """when: before, or after, when it was answered."""
        if when == "before":
            self.calls.append(what)
        if when == self._event and self._left:
            self._left -= 1
            if not self._left:
                raise Killed

    def take(self) -> list[str]:
        """What was called since this was asked last."""
        taken = list(self.calls)
        self.calls.clear()
        return taken

    @contextmanager
    def killing(self, number: int, event: str) -> Generator[None]:
        """The process ends at its call of this number: before it, or after it, when it was answered."""
        self._event, self._left = event, number
        try:
            yield
        finally:
            self._left = 0


def wanted(resource: Resource, run: str, generation: int = 0, **extra: str) -> Wanted:
    return Wanted(resource=resource, generation=generation, run=run, settings=resource.settings(), extra=extra)


def made(one: Wanted, outputs: Mapping[str, str]) -> Made:
    return Made(
        address=one.resource.address,
        kind=one.resource.KIND,
        name=one.name,
        generation=one.generation,
        region=one.resource.region,
        life=one.resource.LIFE,
        brought=one.resource.brought,
        settings={name: as_json(value) for name, value in one.settings.items()},
        outputs=outputs,
        needs=tuple(sorted(one.resource.needs())),
    )


def differing(one: Wanted, seen: Seen) -> set[str]:
    """The settings that can be compared and differ."""
    return {
        name for name, value in one.settings.items() if name in seen.settings and seen.settings[name] != as_json(value)
    }


def told(resource: Resource) -> dict[str, object]:
    """All that golden files have of it."""
    return {
        "address": resource.address,
        "name": resource.name,
        "why": resource.why,
        "brought": resource.brought,
        "needs": sorted(resource.needs()),
        "settings": {name: as_json(value) for name, value in resource.settings().items()},
    }


def plain(value: Any) -> Any:
    """A tree as JSON has it: tuples are lists."""
    return json.loads(json.dumps(value))


def check_golden(folder: Path, name: str, value: Any, *, sort_keys: bool = False) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = folder / f"{name}.json"
    told = json.dumps(value, indent=2, sort_keys=sort_keys) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(told)
    assert told == path.read_text()


def write_spec(
    folder: Path,
    groups: str,
    *,
    store: str,
    image: str,
    run: str = "tiny",
    code: str = "{path: ., command: [python, train.py]}",
    outer: str = "{rounds: 40}",
    more: str = "",
) -> Path:
    """groups: the entries of `replicas`, as YAML. more: other sections."""
    path = folder / "skerry.yaml"
    path.write_text(f"""\
run: {run}
store: {store}
image: {image}
code: {code}
outer: {outer}
{more}replicas:
{groups}""")
    return path


def ground_from(path: Path) -> Ground:
    loaded = spec.load(path)
    return Ground(
        spec=loaded.spec,
        run_uri=loaded.run_uri,
        image=loaded.spec.image or "",
        code="c" * 64,
        seats=loaded.seats,
        hours=loaded.spec.limits.max_hours,
    )


def brought(ground: Ground, **what: bool) -> Ground:
    """The same with these of the user's own."""
    byo = ground.spec.byo.model_copy(update=what)
    return replace(ground, spec=ground.spec.model_copy(update={"byo": byo}))


def checks_of(home: Home, ground: Ground) -> dict[str, Check]:
    return {check.name: check for check in home.checks(ground)}


def failing(error: Exception) -> Callable[..., NoReturn]:
    """What takes the place of a function that fails."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


class Scene:
    """A run in a cloud: what is wanted of it, what was made."""

    def __init__(self, ground: Ground, home: Home, target: Target) -> None:
        self.ground = ground
        self.handlers: Mapping[str, Handler] = {**home.handlers(), **target.handlers()}
        shared = home.resources(ground)
        own = target.resources(ground, ground.spec.replicas)
        # What both give is one thing.
        self.graph = Graph([*shared, *(one for one in own if one not in shared)])
        self.outputs: dict[str, Mapping[str, str]] = {}

    def make(self, *, jobs: bool = True) -> None:
        for resource in self.graph:
            if jobs or resource.LIFE is not Life.JOB:
                self.outputs[resource.address] = self.handlers[resource.KIND].create(self.wanted(resource))

    def wanted(self, resource: Resource) -> Wanted:
        return Wanted(
            resource=resource,
            generation=0,
            run=self.ground.run_uri,
            settings={
                name: resolved(value, lambda ref: self.outputs.get(ref.address, {}).get(ref.output))
                for name, value in resource.settings().items()
            },
            outputs=self.outputs.get(resource.address, {}),
            extra=self.ground.spec.tags,
        )

    def wanted_jobs(self) -> list[Wanted]:
        return [self.wanted(one) for one in self.graph if one.LIFE is Life.JOB]

    def made(self, address: str) -> Made:
        one = self.wanted(self._resource(address))
        return made(one, one.outputs)

    def seen(self, address: str) -> Seen | None:
        one = self.wanted(self._resource(address))
        (seen,) = self.handlers[one.resource.KIND].read([one])
        return seen

    def differing(self, address: str) -> set[str]:
        seen = self.seen(address)
        assert seen is not None
        return differing(self.wanted(self._resource(address)), seen)

    def _resource(self, address: str) -> Resource:
        resource = self.graph.get(address)
        assert resource is not None
        return resource
