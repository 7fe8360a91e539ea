"""A spec for AWS Batch in a sandbox, and what the commands do with it, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra import ground
from tests.support.clocks import FakeClock

from skerry.infra import preflight
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.deployment import Deployment
from skerry.infra.deploy.planning import carry_out, make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.apply import Outcome, Step
    from skerry.infra.deploy.planning import Planned
    from skerry.infra.deploy.removal import Removed

DIGEST = "0123456789abcdef" * 4
IMAGE = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{DIGEST}"
GROUP = """\
  - name: b
    count: {count}
    target:
      kind: aws_batch
      region: us-east-1
      instance_types: [c7i.large]
      vcpus: 2
      memory: 1GiB
      shared_memory: 256MiB
      role: {role}
"""


def write_run(
    folder: Path,
    groups: str,
    *,
    store: str = "s3://acme-skerry/runs",
    image: str = IMAGE,
    outer: str = "{rounds: 4, sync_every: 2}",
    more: str = "limits: {max_hours: 24}\n",
) -> Path:
    """A run with code of its own. groups: the entries of `replicas`, as YAML. more: other sections."""
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "train.py").write_text("print('training')\n")
    return ground.write_spec(
        folder,
        groups,
        store=store,
        image=image,
        code="{path: train, command: [python, train.py]}",
        outer=outer,
        more=more,
    )


def write_spec(folder: Path, *, count: int = 2, role: str = "replica") -> Path:
    return write_run(folder, GROUP.format(count=count, role=role))


class Operator:
    """One person at a terminal: every command is a process of its own, so nothing is kept between them."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.environment = environment
        self.steps: list[Step] = []

    def deployment(self, *overrides: str) -> Deployment:
        spec = preflight.load_deployed(self.path, overrides)
        return Deployment(spec, FakeClock(), self.environment)

    def plan(self, *overrides: str) -> Planned:
        return make_plan(self.deployment(*overrides))

    def apply(self, *overrides: str) -> Outcome:
        deployment = self.deployment(*overrides)
        return carry_out(deployment, make_plan(deployment), self.steps.append, lambda _: None)

    def destroy(self, *, data: bool = True) -> Removed:
        deployment = self.deployment()
        removal = removing.survey(deployment)
        return removing.destroy(deployment, removal, data=data, on_step=self.steps.append, applying=lambda _: None)
