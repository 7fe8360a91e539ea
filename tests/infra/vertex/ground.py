"""What the tests of Vertex AI need: a run to make resources of, those resources made, and what was asked for it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skerry.infra import spec
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.home import GoogleHome
from skerry.infra.graph import Graph, as_json, resolved
from skerry.infra.handler import Made, Wanted
from skerry.infra.target import Ground
from skerry.infra.targets.vertex import Vertex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen

GOLDEN: Final = Path(__file__).parent / "golden"
EXAMPLE: Final = Path(__file__).parents[3] / "infra/examples/vertex.yaml"
PROJECT: Final = "skerry-sandbox"
REGION: Final = "us-central1"
TARGET: Final = "machine: g2-standard-8, accelerator: nvidia-l4"


def spec_of(folder: Path, target: str, *, count: int = 2, more: str = "", store: str = "gs://acme/runs") -> Path:
    """A spec of one group `vertex` with these options of its target."""
    text = f"""\
run: tiny
store: {store}
image: us-central1-docker.pkg.dev/{PROJECT}/skerry/replica@sha256:{"1" * 64}
code: {{path: ., command: [python, train.py, --text, "it's \\"here\\" $(HOME)"]}}
outer: {{rounds: 40}}
replicas:
  - {{name: vertex, count: {count}, target: {{kind: vertex, project: {PROJECT}, region: us-central1, {target}}}}}
{more}"""
    path = folder / "skerry.yaml"
    path.write_text(text)
    return path


def ground_of(
    folder: Path, target: str = TARGET, *, count: int = 2, more: str = "", store: str = "gs://acme/runs"
) -> Ground:
    return ground_from(spec_of(folder, target, count=count, more=more, store=store))


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


class Scene:
    """A run in a project: what is wanted of it, what was made."""

    def __init__(self, google: Google, ground: Ground) -> None:
        self.ground = ground
        home, self.target = GoogleHome(google), Vertex(google, Aws(google.clock, {}))
        self.handlers: Mapping[str, Handler] = {**home.handlers(), **self.target.handlers()}
        shared = home.resources(ground)
        own = self.target.resources(ground, ground.spec.replicas)
        # What both give is one thing.
        self.graph = Graph([*shared, *(one for one in own if one not in shared)])
        self.outputs: dict[str, Mapping[str, str]] = {}

    def make(self) -> None:
        for resource in self.graph:
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

    def made(self, address: str) -> Made:
        resource = self.graph.get(address)
        assert resource is not None
        one = self.wanted(resource)
        return Made(
            address=address,
            kind=resource.KIND,
            name=one.name,
            generation=0,
            region=resource.region,
            life=resource.LIFE,
            brought=resource.brought,
            settings={name: as_json(value) for name, value in one.settings.items()},
            outputs=one.outputs,
            needs=tuple(sorted(resource.needs())),
        )

    def seen(self, address: str) -> Seen | None:
        resource = self.graph.get(address)
        assert resource is not None
        (seen,) = self.handlers[resource.KIND].read([self.wanted(resource)])
        return seen

    def differing(self, address: str) -> set[str]:
        resource, seen = self.graph.get(address), self.seen(address)
        assert resource is not None
        assert seen is not None
        settings = self.wanted(resource).settings
        return {
            name for name, value in settings.items() if name in seen.settings and seen.settings[name] != as_json(value)
        }


def check_golden(name: str, value: Any) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = GOLDEN / f"{name}.json"
    told = json.dumps(value, indent=2) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(told)
    assert told == path.read_text()
