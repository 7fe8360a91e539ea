"""Builders shared by the tests of all clouds: desired resources, a run in a cloud, specs, golden files, kills."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from skerry.infra import targets
from skerry.infra.provision.graph import Graph, Life, Resource, as_json, resolved
from skerry.infra.provision.handler import Desired, StateRecord
from skerry.infra.provision.target_and_store_interfaces import RunContext
from skerry.infra.spec import model
from skerry.infra.spec_and_store_errors import SpecInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from skerry.infra.provision.handler import Handler, Observed
    from skerry.infra.provision.target_and_store_interfaces import Check, StoreCloud, Target


R = TypeVar("R", bound=Resource)


class Killed(BaseException):
    """Represents the death of the process."""


class Listener:
    """Records calls to a cloud, and raises Killed at a chosen call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._event = ""
        self._left = 0

    def heard(self, when: str, what: str) -> None:
        """Record a call. when: "before" it is sent, or "after" its reply."""
        if when == "before":
            self.calls.append(what)
        if when == self._event and self._left:
            self._left -= 1
            if not self._left:
                raise Killed

    def take(self) -> list[str]:
        """The calls since the last `take`."""
        taken = list(self.calls)
        self.calls.clear()
        return taken

    @contextmanager
    def killing(self, number: int, event: str) -> Generator[None]:
        """Raise Killed at the call of this number, before it is sent or after its reply."""
        self._event, self._left = event, number
        try:
            yield
        finally:
            self._left = 0


def record_of(kind: type[Resource], generation: int = 0) -> StateRecord:
    """The record of the job of a-0, of a kind of job."""
    return StateRecord(
        address=f"{kind.KIND}.a-0",
        kind=kind.KIND,
        name="job",
        generation=generation,
        region="us-east-1",
        life=kind.LIFE,
        brought=False,
        settings={},
        outputs={"id": "42", "name": "job", "arn": "arn:1"},
        needs=(),
    )


def wanted(resource: Resource, run: str, generation: int = 0, **extra: str) -> Desired:
    return Desired(resource=resource, generation=generation, run=run, settings=resource.settings(), extra=extra)


def differing(desired: Desired, observed: Observed) -> set[str]:
    """The settings that can be compared and differ."""
    return {
        name
        for name, value in desired.settings.items()
        if name in observed.settings and observed.settings[name] != as_json(value)
    }


def document_of(resource: Resource) -> dict[str, object]:
    """The document of a resource for golden files."""
    return {
        "address": resource.address,
        "name": resource.name,
        "why": resource.why,
        "brought": resource.brought,
        "needs": sorted(resource.needs()),
        "settings": {name: as_json(value) for name, value in resource.settings().items()},
    }


def plain(value: Any) -> Any:
    """A tree after a trip through JSON: tuples become lists."""
    return json.loads(json.dumps(value))


def check_golden(folder: Path, name: str, value: Any, *, sort_keys: bool = False) -> None:
    """Assert that `value` equals the golden file; SKERRY_TEST_GOLDEN=1 writes the file instead."""
    path = folder / f"{name}.json"
    text = json.dumps(value, indent=2, sort_keys=sort_keys) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


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
    """Write a spec. groups: the entries of `replicas`, as YAML. more: other sections."""
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


def problems_in(folder: Path, text: str) -> list[str]:
    """The problems of this spec, without their lines."""
    path = folder / "skerry.yaml"
    path.write_text(text)
    try:
        model.load(path, targets.kinds())
    except SpecInvalid as error:
        return [f"{problem.path}: {problem.text}" for problem in error.problems]
    return []


def ground_from(path: Path, *overrides: str) -> RunContext:
    loaded = model.load(path, targets.kinds(), overrides)
    return RunContext(
        spec=loaded.spec,
        run_uri=loaded.run_uri,
        image=loaded.spec.image or "",
        code="c" * 64,
        replica_slots=loaded.replica_slots,
        hours=loaded.spec.limits.max_hours,
    )


def brought(context: RunContext, **what: bool) -> RunContext:
    """The context with these resources as `byo`."""
    byo = context.spec.byo.model_copy(update=what)
    return replace(context, spec=context.spec.model_copy(update={"byo": byo}))


def checks_of(home: StoreCloud, context: RunContext) -> dict[str, Check]:
    return {check.name: check for check in home.checks(context)}


def failing(error: BaseException) -> Callable[..., NoReturn]:
    """A function that raises this error."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def of_kind(graph: Graph, kind: type[R]) -> list[R]:
    """The resources of one class."""
    return [resource for resource in graph if isinstance(resource, kind)]


class Scene:
    """A run in a cloud: its desired resources, and the outputs of those created."""

    def __init__(self, context: RunContext, home: StoreCloud, target: Target) -> None:
        self.context = context
        self.handlers: Mapping[str, Handler] = {**home.handlers(), **target.handlers()}
        shared = home.resources(context)
        own = target.resources(context, context.spec.replicas)
        # A resource that both list is the same one.
        self.graph = Graph([*shared, *(resource for resource in own if resource not in shared)])
        self.outputs: dict[str, Mapping[str, str]] = {}

    def make(self, *, jobs: bool = True) -> None:
        for resource in self.graph:
            if jobs or resource.LIFE is not Life.JOB:
                self.outputs[resource.address] = self.handlers[resource.KIND].create(self.wanted(resource))

    def wanted(self, resource: Resource) -> Desired:
        return Desired(
            resource=resource,
            generation=0,
            run=self.context.run_uri,
            settings={
                name: resolved(value, lambda ref: self.outputs.get(ref.address, {}).get(ref.output))
                for name, value in resource.settings().items()
            },
            outputs=self.outputs.get(resource.address, {}),
            extra=self.context.spec.tags,
        )

    def wanted_jobs(self) -> list[Desired]:
        return [self.wanted(resource) for resource in self.graph if resource.LIFE is Life.JOB]

    def record(self, address: str) -> StateRecord:
        desired = self.wanted(self._resource(address))
        return desired.to_record(desired.outputs)

    def seen(self, address: str) -> Observed | None:
        desired = self.wanted(self._resource(address))
        (seen,) = self.handlers[desired.resource.KIND].read([desired])
        return seen

    def differing(self, address: str) -> set[str]:
        seen = self.seen(address)
        assert seen is not None
        return differing(self.wanted(self._resource(address)), seen)

    def _resource(self, address: str) -> Resource:
        resource = self.graph.get(address)
        assert resource is not None
        return resource
