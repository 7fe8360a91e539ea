"""The seams to where a run lives: its home (the store's cloud), and targets, where groups of replicas run as jobs.

The core knows clouds by this alone, and never by a name. Does no I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from skerry.runtime import contract

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Condition, Handler, Made, Seen, Wanted
    from skerry.infra.spec import Replicas, Seat, Spec

# With the digest and the longest part that a resource adds, a name stays below the 64 characters of an IAM role.
_READABLE: Final = 20
_NOT_A_NAME: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What every target is told of a run.

    run_uri: its prefix in the store. image: as jobs shall run it, if their group names no other. code: digest of the
    packed training code. hours: how long the run may take from its first apply, all attempts together; None is without
    end.
    """

    spec: Spec
    run_uri: str
    image: str
    code: str
    seats: tuple[Seat, ...]
    hours: float | None = None

    @property
    def stem(self) -> str:
        """What the names of all its resources begin with; runs of the same name in other stores differ in it."""
        return stem_of(self.run_uri)

    @property
    def firm_prices(self) -> bool:
        """Whether a limit of time is made of prices: with prices of now it would move, and with it every job."""
        return self.spec.limits.max_cost_usd is not None

    @property
    def images(self) -> Mapping[str, str]:
        """What jobs run: the run's as "image", and what a group has of its own as "image-{group}"."""
        return {self._image_key(group): self.image_of(group) for group in self.spec.replicas}

    def images_in(self, cloud: str) -> Mapping[str, str]:
        """Those of them that jobs in one cloud run."""
        return self.images_of([group for group in self.spec.replicas if cloud == group.target.CLOUD])

    def images_of(self, groups: Sequence[Replicas]) -> Mapping[str, str]:
        """Those that these groups run and no group before them in the same cloud, so that each is looked at once."""
        first: dict[tuple[str | None, str], Replicas] = {}
        for group in self.spec.replicas:
            first.setdefault((group.target.CLOUD, self._image_key(group)), group)
        return {key: self.image_of(group) for (_, key), group in first.items() if group in groups}

    def image_of(self, group: Replicas) -> str:
        """What the jobs of one group run."""
        return group.image or self.image

    @staticmethod
    def _image_key(group: Replicas) -> str:
        return "image" if group.image is None else f"image-{group.name}"

    def seats_of(self, group: Replicas) -> tuple[Seat, ...]:
        """The seats of one group of the spec, in order."""
        start = 0
        for other in self.spec.replicas:
            if other is group:
                return self.seats[start : start + group.count]
            start += other.count
        raise LookupError(group.name)

    def regions(self, cloud: str) -> tuple[str, ...]:
        """Where the run's groups are in this cloud, in the order of the spec."""
        found = [getattr(group.target, "region", "") for group in self.spec.replicas if cloud == group.target.CLOUD]
        return tuple(dict.fromkeys(region for region in found if region))

    def variables(self, group: Replicas) -> dict[str, str]:
        """What every replica of a group finds in its environment, wherever it runs: the run, its code, its time."""
        found = {
            contract.RUN_URI: self.run_uri,
            contract.REPLICAS: str(len(self.seats)),
            contract.CODE: self.code,
            contract.COMMAND: json.dumps(self.spec.code.command),
            contract.GROUP: group.name,
        }
        if self.hours is not None:
            # A change here starts every replica anew: digits that nobody can see are no reason.
            found[contract.MAX_HOURS] = f"{self.hours:.6g}"
        return found


def stem_of(run: str) -> str:
    """`Ground.stem` of the run that lies at this URI, whose last part is its name."""
    readable = _NOT_A_NAME.sub("-", run.rpartition("/")[2].lower())[:_READABLE].strip("-")
    return f"skerry-{readable}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


@dataclass(frozen=True, kw_only=True)
class JobView:
    """What a replica's job is doing. state: in the target's own word. why: in ours; what to do, if somebody must.

    attempt: from 1; 0 before the first. started_s, ended_s: seconds since the epoch, if known. again: it is lost, its
    cloud does not start it again, nobody asked for its end, and another start may help. stopped: by `skerry cancel`, so
    that only an apply starts it.
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


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """One line that a replica wrote. at_s: seconds since the epoch. cursor: where to go on reading after it."""

    slot: str
    at_s: float
    text: str
    cursor: str


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What some replicas cost while they run. per_hour: US dollars for all of them together; None is unknown.

    what: as a reader wants it told. source: the table's name and date, or why it is unknown. cap_hours: the longest
    they may run, all attempts together; None is without end. each_start: that is for one start, and `skerry up` may
    start again what was lost. A target tells what its own options allow; a limit of the run is laid over that.
    """

    group: str
    what: str
    count: int
    per_hour: float | None
    source: str
    cap_hours: float | None
    each_start: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing looked at before anything is made. ok: None if it could not be looked at. advice: what to do."""

    name: str
    ok: bool | None
    text: str
    advice: str = ""


class Home(Protocol):
    """The cloud that holds the run's store. Thread-safe. What asks it may raise Retryable, Unauthorized or Invalid."""

    def identity(self) -> Mapping[str, str]:
        """Whose cloud this is, by the cloud's name: {"aws": "123456789012"}. A plan is bound to it."""
        ...

    def resources(self, ground: Ground) -> Sequence[Resource]:
        """The bucket first, and the image's repository if it lies in the same cloud. Asks nothing.

        The bucket is made in the first of `ground.regions` of this cloud.
        """
        ...

    def environment(self, ground: Ground) -> Mapping[str, str]:
        """What a process that opens the store needs in its environment besides credentials."""
        ...

    def handlers(self) -> Mapping[str, Handler]:
        """Who makes them, by kind."""
        ...

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """Mark what is there, and is nobody's, as this run's. Raises Invalid for a kind that cannot be taken over."""
        ...

    def checks(self, ground: Ground) -> Iterator[Check]:
        """What can be known beforehand of what would fail later: the bucket's name, rights, the image's digest.

        The credentials first: without them nothing else is asked.
        """
        ...


class Target(Protocol):
    """One kind of place. Thread-safe. Methods that ask the cloud may raise Retryable, Unauthorized or Invalid."""

    def identity(self) -> Mapping[str, str]:
        """Whose cloud this is, by the cloud's name: {"aws": "123456789012"}. A plan is bound to it."""
        ...

    def resources(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Resource]:
        """What the run needs there besides its store; the jobs among them. Asks the cloud, changes nothing.

        What several targets of a cloud share has one address, and each of them gives it equally.
        """
        ...

    def handlers(self) -> Mapping[str, Handler]:
        """Who makes them, by kind."""
        ...

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        """Mark what is there, and is nobody's, as this run's. Raises Invalid for a kind that cannot be taken over."""
        ...

    def rates(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Rate]:
        """What the replicas cost while they run. With `ground.firm_prices`, by prices that still hold tomorrow."""
        ...

    def checks(self, ground: Ground, groups: Sequence[Replicas]) -> Iterator[Check]:
        """What can be known beforehand of what would fail later: quotas, offers, the image, rights."""
        ...

    def jobs(self, made: Sequence[Made]) -> Sequence[JobView]:
        """What these jobs are doing, in the order asked."""
        ...

    def logs(self, made: Made, cursor: str | None) -> Iterator[LogLine]:
        """What this job's attempts have written, oldest first; after `cursor` only."""
        ...
