"""A run of these tests' own in an account: made by `skerry apply`, taken away by `skerry destroy`, come what may."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.cloud import settings as names
from tests.e2e.deployed import TRAINING, Deployed, skerry
from tests.support.command_line import invoke

from skerry.infra import targets
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.deploy.read_clouds import read_rates, read_state, resolve
from skerry.infra.deploy.tagged_resources import list_tagged
from skerry.infra.provision.graph import Life
from skerry.infra.run import check_machine_and_store
from skerry.runtime.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.cloud.settings import Settings

NAME: Final = "skerry-cloud-test-"
"""What every run of these tests is called begins with this."""
ROUNDS: Final = 3
MAX_HOURS: Final = 2
"""After these the jobs of a run end."""
# Machines may come half an hour apart, and a round needs every replica.
SPEC: Final = (
    """\
run: {name}
store: {store}
image: {image}
"""
    + TRAINING
    + """\
faults: {{min_replicas: {replicas}, grace: 60s, start_window: 40m}}
limits: {{max_hours: {hours}{cost}}}
byo: {{repository: true, bucket: {brought}}}
replicas:
{groups}"""
)
# Small machines of which most accounts may have some.
_BATCH: Final = """\
  - name: b
    count: {count}
    image: {image}
    target:
      kind: aws_batch
      region: {region}
      instance_types: [c7i.large]
      memory: 3GiB
      shared_memory: 256MiB
      role: group
      spot: {spot}
"""
_SAGEMAKER: Final = """\
  - name: s
    count: {count}
    image: {image}
    target: {{kind: sagemaker, region: {region}, instance: ml.m5.large, spot: {spot}}}
"""
_VERTEX: Final = """\
  - name: v
    count: {count}
    image: {image}
    target:
      kind: vertex
      project: {project}
      region: {region}
      machine: n1-standard-4
      role: group
      scheduling: {scheduling}
"""
_KUBERNETES: Final = """\
  - name: k
    count: {count}
    image: {image}
    target: {{kind: kubernetes, namespace: {namespace}, secret: {secret}, memory: 3GiB, shared_memory: 256MiB}}
"""
_SLURM: Final = """\
  - name: n
    count: {count}
    target: {{kind: slurm, python: {python}, setup: ["{setup}"], time: 2h}}
"""
_HF_JOBS: Final = f"""\
  - name: h
    count: {{count}}
    image: {{image}}
    target:
      kind: hf_jobs
      namespace: {{namespace}}
      flavor: cpu-basic
      secrets: {{{{AWS_ACCESS_KEY_ID: {names.KEY_ID}, AWS_SECRET_ACCESS_KEY: {names.SECRET_KEY}}}}}
"""
_MODAL: Final = """\
  - name: m
    count: {count}
    image: {image}
    target: {{kind: modal, environment: {environment}, secrets: [{secret}], cpu: 1}}
"""
# Of a place where no job is started.
_NO_IMAGE: Final = {
    "aws": "123456789012.dkr.ecr.{region}.amazonaws.com/skerry@sha256:" + "0" * 64,
    "google": "{region}-docker.pkg.dev/{project}/skerry/replica@sha256:" + "0" * 64,
}
_KINDS: Final = {
    "aws_batch": ("aws", _BATCH),
    "sagemaker": ("aws", _SAGEMAKER),
    "vertex": ("google", _VERTEX),
    "kubernetes": ("kubernetes", _KUBERNETES),
    "slurm": ("slurm", _SLURM),
    "hf_jobs": ("huggingface", _HF_JOBS),
    "modal": ("modal", _MODAL),
}
KINDS: Final = tuple(_KINDS)
"""The services in which these tests can run."""
CLOUDS: Final = ("aws_batch", "sagemaker", "vertex")
"""Those of the two clouds."""
_SETTINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "aws": {"region": names.AWS_REGION},
    "google": {"project": names.GOOGLE_PROJECT, "region": names.GOOGLE_REGION},
    "kubernetes": {"namespace": names.KUBERNETES_NAMESPACE, "secret": names.KUBERNETES_SECRET},
    "slurm": {"python": names.SLURM_PYTHON, "setup": names.SLURM_SETUP},
    "huggingface": {"namespace": names.HF_NAMESPACE, "key": names.KEY_ID, "value": names.SECRET_KEY},
    "modal": {"environment": names.MODAL_ENVIRONMENT, "secret": names.MODAL_SECRET},
}
_IMAGES: Final = {"aws": names.AWS_IMAGE, "google": names.GOOGLE_IMAGE}
# The others have no prices, so that no limit in dollars can be kept there.
_PRICED: Final = frozenset({"aws", "google", "huggingface"})
_LINES: Final = 60


def allowed(settings: Settings, cloud: str) -> dict[str, str]:
    """Return where resources may be created. Skips the test without such settings."""
    return {name: settings.need(variable) for name, variable in _SETTINGS[cloud].items()}


@dataclass(frozen=True, kw_only=True)
class Place(Deployed):
    """name: of the run. run_uri: its prefix, in which everything of these tests lies."""

    name: str
    run_uri: str

    @classmethod
    def spelled(
        cls,
        settings: Settings,
        name: str,
        kinds: Sequence[str],
        count: int,
        *,
        store: str = "",
        jobs: bool = True,
        spot: bool = False,
    ) -> Place:
        """A spec in a file of its own: groups of `count` replicas. store: other than its own bucket, or the one given.

        The store is in the first kind's cloud, and in S3 if that has none. jobs: it may start some, for which an image
        and a limit are needed. spot: on machines that the clouds may take back.
        """
        groups, slots = "", list[str]()
        for kind in kinds:
            cloud, group = _KINDS[kind]
            where = allowed(settings, cloud)
            if jobs and kind == "sagemaker":
                settings.need(names.SAGEMAKER_USD)
            image = "" if cloud == "slurm" else _image(settings, cloud, where, jobs=jobs)
            purchase = {"spot": str(spot).lower(), "scheduling": "spot" if spot else "standard"}
            groups += group.format(count=count, image=image, **where, **purchase)
            group_name = group.partition("name: ")[2].partition("\n")[0]
            slots += [f"{group_name}-{number}" for number in range(count)]
        home = "google" if kinds[0] == "vertex" else "aws"
        at_home = allowed(settings, home)
        scheme, given = ("s3", names.AWS_BUCKET) if home == "aws" else ("gs", names.GOOGLE_BUCKET)
        brought = not store and given in settings.given
        store = store or f"{scheme}://{settings.given.get(given, name)}"
        text = SPEC.format(
            name=name,
            store=store,
            image=_NO_IMAGE[home].format(**at_home),
            rounds=ROUNDS,
            hours=MAX_HOURS,
            replicas=len(slots),
            cost=f", max_cost_usd: {settings.share_usd:g}" if jobs and priced(kinds) else "",
            brought=str(brought).lower(),
            groups=groups,
        )
        # Not where pytest keeps things: it is needed until all is gone.
        path = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=settings.given.get(names.FOLDER))) / "skerry.yaml"
        path.write_text(text)
        return cls(spec=path, slots=slots, rounds=ROUNDS, name=name, run_uri=f"{store}/{name}")

    @functools.cached_property
    def deployment(self) -> Deployment:
        return prepare(check_machine_and_store.load_deployed(self.spec, targets.kinds(), ()), SystemClock(), os.environ)

    def make(self) -> None:
        """Everything but jobs."""
        self._apply([item.address for item in resolve(self.deployment).graph if item.LIFE is not Life.JOB])

    def make_bucket(self) -> None:
        """The store's bucket, unless it is the user's own."""
        if not self.deployment.bucket().brought:
            self._apply([self.deployment.bucket().address])

    def outputs(self) -> Mapping[str, Mapping[str, str]]:
        """Of all that was made, by address."""
        state = read_state(self.deployment)
        assert state is not None
        return {entry.record.address: entry.record.outputs for entry in state.by_id().values()}

    def usd_per_hour(self) -> float | None:
        """The price of all its machines together; None if it is unknown."""
        prices = [rate.per_hour for rate in read_rates(self.deployment)]
        return None if None in prices else sum(price or 0.0 for price in prices)

    def show(self) -> None:
        """Print the state of the run and its last lines, for a test that fails."""
        for verb in ("status", "logs"):
            result = invoke(verb, self.spec)
            lines = (result.output + result.stderr).splitlines()[-_LINES:]
            sys.stdout.write("\n".join([f"$ skerry {verb}", *lines, ""]))

    def remove(self) -> None:
        """Destroy it and look for what may be left. Fails loudly, with the command that takes the rest away."""
        try:
            text = self.destroy()
            if self.deployment.bucket().brought:
                self._empty()
            left = [f"{item.kind} {item.name}" for item in list_tagged(self.deployment, ())]
        except Exception as error:  # noqa: BLE001  whatever it is, something may be left that costs
            text, left = str(error), ["unknown resources"]
        if left:
            pytest.fail(
                f"LEFT in the account, and it may cost: {', '.join(left)}\n"
                f"take it away:  skerry destroy {self.spec} --yes --data\n{text}",
                pytrace=False,
            )
        shutil.rmtree(self.spec.parent)

    def _empty(self) -> None:
        """Delete the other objects that tests wrote into a bucket of the user's; destroy deletes only the run's."""
        store = self.deployment.open_store()
        for entry in store.list(""):
            store.delete(entry.key)

    def _apply(self, addresses: Sequence[str]) -> None:
        skerry(
            "apply",
            str(self.spec),
            "--auto-approve",
            *(word for address in addresses for word in ("--target", address)),
        )


def _image(settings: Settings, cloud: str, where: Mapping[str, str], *, jobs: bool) -> str:
    """The image of a group: one that exists if it starts jobs."""
    if jobs:
        return settings.need(_IMAGES.get(cloud, names.IMAGE))
    return _NO_IMAGE[cloud].format(**where)


def priced(kinds: Sequence[str]) -> bool:
    """True if a limit in dollars can be kept for all these services."""
    return {_KINDS[kind][0] for kind in kinds} <= _PRICED


def lacking(settings: Settings, kinds: Sequence[str], *, jobs: bool = True) -> str | None:
    """Return what to set before runs in these places are possible; None if they are."""
    try:
        place = Place.spelled(settings, f"{NAME}none", kinds, 1, jobs=jobs)
    except pytest.skip.Exception as skipped:
        return str(skipped)
    shutil.rmtree(place.spec.parent)
    return None


@contextmanager
def placed(
    settings: Settings, kinds: Sequence[str], count: int, *, jobs: bool = True, spot: bool = False
) -> Iterator[Place]:
    """A place that is gone afterwards. If the test fails, its output has what the run looked like."""
    place = Place.spelled(settings, f"{NAME}{names.suffix()}", kinds, count, jobs=jobs, spot=spot)
    try:
        yield place
    except (Exception, pytest.fail.Exception) as error:
        sys.stdout.write(f"failed, and is destroyed now: {error}\n")
        place.show()
        raise
    finally:
        place.remove()
