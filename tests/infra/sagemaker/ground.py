"""What the tests of SageMaker need: a run to make resources of, those resources made, and a spec to deploy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skerry.infra import spec
from skerry.infra.clouds.aws.home import AwsHome
from skerry.infra.graph import Graph, as_json, resolved
from skerry.infra.handler import Made, Wanted
from skerry.infra.target import Ground
from skerry.infra.targets.sagemaker import SageMaker
from skerry.infra.targets.sagemaker.layout import Account
from skerry.infra.targets.sagemaker.resources import TrainingJob
from skerry.infra.targets.sagemaker.survey import Machine
from skerry.infra.targets.sagemaker.working import TrainingJobs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen

GOLDEN: Final = Path(__file__).parent / "golden"
EXAMPLE: Final = Path(__file__).parents[3] / "infra/examples/sagemaker.yaml"
ACCOUNT: Final = Account(number="123456789012", partition="aws")
DISKLESS: Final = Machine(type="ml.c7i.xlarge", gpus=0, own_disk=False)
SMALL: Final = Machine(type="ml.g6e.xlarge", gpus=1, own_disk=True)
IMAGE: Final = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{'1' * 64}"
REGION: Final = "us-east-1"


def ground_of(
    folder: Path,
    options: str = "",
    *,
    count: int = 2,
    instance: str = "ml.g5.xlarge",
    name: str = "sm",
    command: str = "[python, train.py]",
    more: str = "",
) -> Ground:
    """A run of one group with these options of its target."""
    text = f"""\
run: tiny
store: s3://acme/runs
image: {IMAGE}
code: {{path: ., command: {command}}}
outer: {{rounds: 40}}
replicas:
  - name: {name}
    count: {count}
    target: {{kind: sagemaker, region: us-east-1, instance: {instance}{"," if options else ""} {options}}}
{more}"""
    path = folder / "skerry.yaml"
    path.write_text(text)
    return ground_from(path)


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
    """A run in an account: what is wanted of it, what was made."""

    def __init__(self, aws: Aws, ground: Ground) -> None:
        self.ground = ground
        self.jobs = TrainingJobs(aws)
        home, self.target = AwsHome(aws), SageMaker(aws)
        self.handlers: Mapping[str, Handler] = {**home.handlers(), **self.target.handlers()}
        at_home = home.resources(ground)
        there = self.target.resources(ground, ground.spec.replicas)
        # What home and target share, both of them give.
        self.graph = Graph([*at_home, *(one for one in there if one not in at_home)])
        self.outputs: dict[str, Mapping[str, str]] = {}

    def make(self, *, jobs: bool = True) -> None:
        for resource in self.graph:
            if jobs or not isinstance(resource, TrainingJob):
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
        )

    def wanted_jobs(self) -> list[Wanted]:
        return [self.wanted(one) for one in self.graph if isinstance(one, TrainingJob)]

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

    def seen(self, one: Wanted) -> Seen:
        (seen,) = self.jobs.read([one])
        assert seen is not None
        return seen


def check_golden(name: str, value: Any) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = GOLDEN / f"{name}.json"
    told = json.dumps(value, indent=2) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(told)
    assert told == path.read_text()
