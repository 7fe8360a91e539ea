"""What the tests of AWS Batch need: a run to make resources of, those resources made, and a recording of calls."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import batch_backends

from skerry.infra import spec
from skerry.infra.clouds.aws.home import AwsHome
from skerry.infra.graph import Graph, as_json, resolved
from skerry.infra.handler import Made, Wanted
from skerry.infra.target import Ground
from skerry.infra.targets.aws_batch import AwsBatch
from skerry.infra.targets.aws_batch.layout import Account
from skerry.infra.targets.aws_batch.machines import Machine
from skerry.infra.targets.aws_batch.survey import Terrain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.infra.aws.account import Listener

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.graph import Resource
    from skerry.infra.handler import Handler, Seen

GOLDEN: Final = Path(__file__).parent / "golden"
EXAMPLE: Final = Path(__file__).parents[3] / "infra/examples/batch.yaml"
ENVIRONMENT: Final = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
ACCOUNT: Final = Account(number="123456789012", partition="aws")
SMALL: Final = Machine(type="g6e.xlarge", vcpus=4, memory_mib=32768, gpus=1)
LARGE: Final = Machine(type="g6e.12xlarge", vcpus=48, memory_mib=393216, gpus=4)
TERRAIN: Final = Terrain(vpc="vpc-1", subnets=("subnet-1", "subnet-2"), machines=(SMALL,))


class Recorded:
    """The calls that were made, in order: batch:SubmitJob."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def take(self) -> list[str]:
        """What was called since this was asked last."""
        taken = list(self._listener.calls)
        self._listener.calls.clear()
        return taken


def ground_of(folder: Path, target: str, *, count: int = 2, more: str = "") -> Ground:
    """A run of one group `batch` with these options of its target."""
    text = f"""\
run: tiny
store: s3://acme/runs
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{"1" * 64}
code: {{path: ., command: [python, train.py, --text, "it's \\"here\\" $HOME"]}}
outer: {{rounds: 40}}
replicas:
  - {{name: batch, count: {count}, target: {{kind: aws_batch, region: us-east-1, {target}}}}}
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
        home, self.target = AwsHome(aws), AwsBatch(aws)
        self.handlers: Mapping[str, Handler] = {**home.handlers(), **self.target.handlers()}
        self.graph = Graph([*home.resources(ground), *self.target.resources(ground, ground.spec.replicas)])
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


def job_of(made: Made) -> Any:
    """The emulation's own job."""
    return batch_backends[ACCOUNT.number][made.region]._jobs[made.outputs["id"]]


def multiply(made: Made, ids: Sequence[str]) -> None:
    """The same job once more under each of these ids."""
    for name in ids:
        twin = copy.copy(job_of(made))
        twin.job_id = name
        batch_backends[ACCOUNT.number][made.region]._jobs[name] = twin


def set_status(job: str, status: str, reason: str | None = None) -> None:
    """As if Batch had come to this by itself."""
    found: Any = batch_backends[ACCOUNT.number]["us-east-1"]._jobs[job]
    found.status = found._status = status
    found.job_stopped = status in {"SUCCEEDED", "FAILED"}
    found.job_stopped_reason = reason


def check_golden(name: str, value: Any) -> None:
    """`value` is what the file says. SKERRY_TEST_GOLDEN=1 writes it instead, for a reader to look at the difference."""
    path = GOLDEN / f"{name}.json"
    told = json.dumps(value, indent=2) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN"):
        path.write_text(told)
    assert told == path.read_text()
