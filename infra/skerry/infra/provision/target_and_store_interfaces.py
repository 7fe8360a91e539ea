"""The interfaces to clouds: `StoreCloud`, which holds the run's store, and `Target`, which runs replicas as jobs.

The core uses clouds only through these interfaces and never branches on a cloud's name. Does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from skerry.infra.provision.graph import Ref, short_name
from skerry.infra.spec import store_uri
from skerry.infra.spec.check_automatic_failover import failover_line
from skerry.infra.spec.env_secrets_and_data import inputs_of
from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.provision.handler import Condition, Desired, Handler, Observed, StateRecord
    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.infra.spec.model import Replicas, ReplicaSlot, Spec
    from skerry.runtime.store import CredentialProvider

# With the digest and the longest part that a resource adds, a name stays below the 64 characters of an IAM role.
_READABLE: Final = 20
_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")
# As `graph.generation_name` writes it. A slot ends in a number without a letter.
_GENERATION: Final = re.compile(r"-g(\d+)$")


# The key of a bucket is part of the keys of permissions in it, which have at most 256 bytes with their descriptions.
_LONGEST_KEY: Final = 40


@dataclass(frozen=True, kw_only=True)
class MirrorPlace:
    """A mirror of the run in a bucket. key: of the bucket's resource. prefix: of the mirror, within the bucket.

    region: in which the bucket is created; None is that of the run's groups. brought: it is the user's own. goes_on:
    the run may go on beside it, by itself.
    """

    key: str
    bucket: str
    prefix: str
    region: str | None
    brought: bool
    goes_on: bool = False


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The facts about a run that every target needs.

    run_uri: its prefix in the store. image: of the jobs whose group names no other. code: digest of the packed training
    code. hours: the time limit from the first apply, all attempts together; None is unlimited.
    """

    spec: Spec
    run_uri: str
    image: str
    code: str
    replica_slots: tuple[ReplicaSlot, ...]
    hours: float | None = None

    @property
    def stem(self) -> str:
        """The prefix of all resource names; runs of the same name in other stores have another one."""
        return stem_of(self.run_uri)

    @property
    def firm_prices(self) -> bool:
        """True if the time limit follows from prices: with changing prices it would change, and with it every job."""
        return self.spec.limits.max_cost_usd is not None

    @property
    def images(self) -> Mapping[str, str]:
        """The images of the jobs: the run's as "image", a group's own as "image-{group}"."""
        return {self._image_key(group): self.image_of(group) for group in self.spec.replicas}

    def images_in(self, cloud: str) -> Mapping[str, str]:
        """The images of the jobs in one cloud."""
        return self.images_of([group for group in self.spec.replicas if cloud == group.target.CLOUD])

    def images_of(self, groups: Sequence[Replicas]) -> Mapping[str, str]:
        """The images that these groups are the first to use in their cloud, so that each is checked once."""
        first: dict[tuple[str | None, str], Replicas] = {}
        for group in self.spec.replicas:
            first.setdefault((group.target.CLOUD, self._image_key(group)), group)
        return {key: self.image_of(group) for (_, key), group in first.items() if group in groups}

    def image_of(self, group: Replicas) -> str:
        """The image of the jobs of one group."""
        return group.image or self.image

    @staticmethod
    def _image_key(group: Replicas) -> str:
        return "image" if group.image is None else f"image-{group.name}"

    def slots_of(self, group: Replicas) -> tuple[ReplicaSlot, ...]:
        """The replica slots of one group of the spec, in order."""
        start = 0
        for other in self.spec.replicas:
            if other is group:
                return self.replica_slots[start : start + group.count]
            start += other.count
        raise LookupError(group.name)

    def regions(self, cloud: str) -> tuple[str, ...]:
        """The regions of the run's groups in this cloud, in the order of the spec."""
        regions = [getattr(group.target, "region", "") for group in self.spec.replicas if cloud == group.target.CLOUD]
        return tuple(dict.fromkeys(region for region in regions if region))

    def mirrors(self, scheme: str) -> tuple[MirrorPlace, ...]:
        """The mirrors of the run in stores of this scheme (s3, gs), in the order of the spec."""
        places: list[MirrorPlace] = []
        for line in self.spec.replication:
            if line.to.startswith(f"{scheme}://"):
                bucket, _, prefix = f"{line.to.rstrip('/')}/{self.spec.run}".partition("://")[2].partition("/")
                key = short_name(f"mirror-{bucket}", _LONGEST_KEY)
                places.append(
                    MirrorPlace(
                        key=key,
                        bucket=bucket,
                        prefix=prefix,
                        region=line.region,
                        brought=line.brought,
                        goes_on=line is failover_line(self.spec),
                    )
                )
        return tuple(places)

    def bucket_regions(self, kind: str) -> dict[str, Text]:
        """Variables with the regions of mirrors in S3, for which clients sign. kind: of the buckets' resources."""
        return {
            f"{contract.BUCKET_REGION}{number}": Ref(
                address=f"{kind}.{place.key}", output="region", before=f"{place.bucket}="
            )
            for number, place in enumerate(self.mirrors("s3"))
        }

    def inputs(self, group: Replicas) -> Inputs:
        """The variables, secrets and data of the replicas of one group."""
        return inputs_of(self.spec, group)

    def variables(self, group: Replicas) -> dict[str, str]:
        """The environment variables of every replica of a group, at any target: the spec's, the run, its code.

        None depends on the number of replicas, so one that is added or removed restarts no other. Of secrets they hold
        the references; a job fetches the values itself. Those of a cluster are no variables here: its pods get them.
        """
        inputs = self.inputs(group)
        variables = {
            **inputs.env,
            **{
                f"{contract.SECRET}{name}": secret.reference
                for name, secret in inputs.secrets.items()
                if secret.is_fetched
            },
            **{f"{contract.DATA}{name.upper()}": uri for name, uri in inputs.data.items()},
            contract.RUN_URI: self.run_uri,
            contract.CODE: self.code,
            contract.COMMAND: json.dumps(self.spec.code.command),
            contract.GROUP: group.name,
            contract.PLACE: group.target.place.to_text(),
        }
        if (mirror := failover_line(self.spec)) is not None:
            variables[contract.FAILOVER] = store_uri.run_uri(Path("/"), mirror.to, self.spec.run)
        if self.hours is not None:
            # A change here restarts every replica, so digits that do not matter are cut off.
            variables[contract.MAX_HOURS] = f"{self.hours:.6g}"
        return variables


def stem_of(run: str) -> str:
    """`RunContext.stem` of the run at this URI, whose last part is its name."""
    readable = _NOT_A_NAME.sub("-", run.rpartition("/")[2].lower())[:_READABLE].strip("-")
    return f"skerry-{readable}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def is_named_by(run: str, name: str) -> bool:
    """True if the resource's name is one of this run's: names hold a digest of the run's URI."""
    return name.startswith(f"{stem_of(run)}-")


def named_job(run: str, name: str) -> tuple[str, int]:
    """The key and generation of a job of this run that has only its name left, as far as the name shows them."""
    part = name.removeprefix(f"{stem_of(run)}-")
    generation = _GENERATION.search(part)
    return (part, 0) if generation is None else (part[: generation.start()], int(generation[1]))


@dataclass(frozen=True, kw_only=True)
class JobView:
    """The status of a replica's job. state: the target's own word. why: the explanation, and what to do if needed.

    attempt: from 1; 0 before the first. started_s, ended_s: seconds since the epoch, if known. again: it is lost, its
    cloud does not restart it, it was not stopped on request, and another start may help. stopped: on request, so that
    only an apply starts it again. stopping: its container may still run, although its end is decided.
    """

    slot: str
    job: str
    state: str
    condition: Condition
    why: str = ""
    attempt: int = 0
    exit_code: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    again: bool = False
    stopped: bool = False
    stopping: bool = False


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line of a replica's log. at_s: seconds since the epoch. cursor: the position to continue reading after it."""

    slot: str
    at_s: float
    text: str
    cursor: str


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The cost of some replicas while they run. per_hour: US dollars for all of them together; None is unknown.

    what: the machine, for people; machine, purchase: its parts. source: the price table's name and date, or why the
    price is unknown. cap_hours: the longest time they may run, all attempts together; None is unlimited. each_start:
    the cap is for one start, and `skerry up` may restart lost jobs. Only the target's own options count here; the
    caller applies the run's limit.
    """

    group: str
    what: str
    machine: str = ""
    purchase: str = ""
    count: int
    per_hour: float | None
    source: str
    cap_hours: float | None
    each_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check before anything is created. ok: None if it could not be checked. advice: what to do.

    stops_jobs: if it failed, every job would fail, so an apply starts none.
    """

    name: str
    ok: bool | None
    text: str
    advice: str = ""
    stops_jobs: bool = False


class StoreCloud(Protocol):
    """The cloud that holds the run's store. Thread-safe. Calls to it may raise Retryable, Unauthorized or Invalid."""

    def identity(self) -> Mapping[str, str]:
        """The account, by the cloud's name: {"aws": "123456789012"}. A plan and the state are bound to it.

        What other credentials would reach by the same names belongs in it, and nothing else: a colleague is not another
        account. A cloud of several such places has a key for each: {"slurm/login.acme.org": "ada@hpc"}.
        """
        ...

    def resources(self, context: RunContext, /) -> Sequence[Resource]:
        """The bucket first, and the image's repository if it is in the same cloud. Makes no calls.

        The bucket is created in the first of `context.regions` of this cloud.
        """
        ...

    def mirrors(self, context: RunContext, /) -> Sequence[Resource]:
        """The buckets of the run's mirrors in this cloud. Makes no calls."""
        ...

    def environment(self, context: RunContext, /) -> Mapping[str, str]:
        """The environment variables, credentials excepted, of a process that opens the store."""
        ...

    def credentials(self) -> CredentialProvider | None:
        """The credentials for the client of the store in this process; None if it finds those of the environment."""
        ...

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of its resources, by kind."""
        ...

    def claim(self, desired: Desired, observed: Observed, /) -> None:
        """Tag an existing, untagged resource as this run's. Raises Invalid for a kind that cannot be imported."""
        ...

    def checks(self, context: RunContext, /) -> Iterator[Check]:
        """Checks for failures that can be predicted: the bucket's name, rights, the image's digest.

        Credentials are checked first; without them there are no other checks.
        """
        ...


class Target(Protocol):
    """A service that runs replicas as jobs. Thread-safe. Calls to it may raise Retryable, Unauthorized or Invalid."""

    def identity(self) -> Mapping[str, str]:
        """The account, by the cloud's name: {"aws": "123456789012"}. A plan and the state are bound to it.

        What other credentials would reach by the same names belongs in it, and nothing else: a colleague is not another
        account. A cloud of several such places has a key for each: {"slurm/login.acme.org": "ada@hpc"}.
        """
        ...

    def resources(self, context: RunContext, groups: Sequence[Replicas], /) -> Sequence[Resource]:
        """The run's resources in this cloud, without the store and with the jobs. Reads the cloud, changes nothing.

        A resource shared by several targets of a cloud has one address, and each target returns an equal one.
        """
        ...

    @property
    def job_kind(self) -> str:
        """The kind of its jobs."""
        ...

    def handlers(self) -> Mapping[str, Handler]:
        """The handlers of its resources, by kind. That of `job_kind` is a JobHandler."""
        ...

    def claim(self, desired: Desired, observed: Observed, /) -> None:
        """Tag an existing, untagged resource as this run's. Raises Invalid for a kind that cannot be imported."""
        ...

    def rates(self, context: RunContext, groups: Sequence[Replicas], /) -> Sequence[Rate]:
        """The cost of the replicas while they run. With `context.firm_prices`, only prices that do not vary."""
        ...

    def checks(self, context: RunContext, groups: Sequence[Replicas], /) -> Iterator[Check]:
        """Checks for failures that can be predicted: quotas, offers, the image, rights."""
        ...

    def jobs(self, records: Sequence[StateRecord], /) -> Sequence[JobView]:
        """The status of these jobs, in the order given."""
        ...

    def logs(self, record: StateRecord, cursor: str | None, /) -> Iterator[LogLine]:
        """The log lines of this job's attempts after `cursor`, oldest first."""
        ...
