"""A spec for AWS Batch in a sandbox, and an operator that runs commands on it, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra import kit
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.run import check_machine_and_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from click.testing import Result

    from skerry.infra.deploy.plan_and_apply import Planned
    from skerry.infra.deploy.removal import Removed
    from skerry.infra.provision.apply import Outcome, Step
    from skerry.testing.sandbox import Sandbox

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
    """Write a spec and its training code. groups: the entries of `replicas`, as YAML. more: other sections."""
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "train.py").write_text("print('training')\n")
    return kit.write_spec(
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


def skerry(*words: str, code: int = 0) -> Result:
    """Run a command in this process, with the process's environment; check its exit code."""
    result = invoke(*words)
    assert result.exit_code == code, result.output + result.stderr + repr(result.exception)
    return result


def queue_of(sandbox: Sandbox) -> str:
    (name,) = sandbox.inventory()["job queue"]
    return name


def delete_state(sandbox: Sandbox) -> None:
    s3 = sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=entry["Key"])


class Operator:
    """Runs commands; each one prepares the deployment anew, like a process of its own."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self.environment = environment
        self.steps: list[Step] = []

    def deployment(self, *overrides: str) -> Deployment:
        spec = check_machine_and_store.load_deployed(self.path, targets.kinds(), overrides)
        return prepare(spec, FakeClock(), self.environment)

    def plan(self, *overrides: str) -> Planned:
        return make_plan(self.deployment(*overrides))

    def apply(self, *overrides: str) -> Outcome:
        deployment = self.deployment(*overrides)
        return apply_plan(deployment, make_plan(deployment), self.steps.append, lambda _: None)

    def destroy(self, *, data: bool = True) -> Removed:
        deployment = self.deployment()
        removal = removing.plan_removal(deployment)
        return removing.destroy(deployment, removal, data=data, on_step=self.steps.append, on_begin=lambda _: None)
