"""The log group that a run's jobs write to, and what they have written.

A reader's place is a time and a count of lines of that millisecond: the service's own tokens end after a day.
Source: CloudWatch Logs API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from skerry.infra.clouds.aws.handling import found, owner_of
from skerry.infra.clouds.handling import VISIBLE_S, Absent, check_owner, differing, each, waited
from skerry.infra.graph import Resource
from skerry.infra.handler import Seen
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.handler import Made, Wanted

_STEM: Final = "skerry"


@dataclass(frozen=True, kw_only=True)
class LogGroup(Resource):
    """A log group whose lines go after retention_days (one of those that CloudWatch knows). Outputs: name, arn."""

    KIND: ClassVar[str] = "aws_log_group"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    retention_days: int = 30


class Event(NamedTuple):
    """One line of a log stream. at_s: seconds since the epoch. cursor: where to go on reading after it."""

    at_s: float
    text: str
    cursor: str


def create_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of CreateLogGroup."""
    return {"logGroupName": wanted.name, "tags": wanted.tags}


def retention_request(wanted: Wanted) -> dict[str, Any]:
    """Parameters of PutRetentionPolicy."""
    return {"logGroupName": wanted.name, "retentionInDays": wanted.settings["retention_days"]}


class LogGroups:
    """Makes log groups. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        """See Handler.read."""
        return each(self._read, wanted)

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        """See Handler.create."""
        changed: Collection[str] = {"retention_days"}
        try:
            self._call(wanted.resource.region, "create_log_group", **create_request(wanted))
        except Conflict:
            seen = self._seen(wanted)
            check_owner(seen, wanted, "log group", "delete it if it is not needed")
            changed = differing(wanted, seen)
        return self.update(wanted, changed)

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if "retention_days" in changed:
            self._call(wanted.resource.region, "put_retention_policy", **retention_request(wanted))
        return dict(self._seen(wanted).outputs)

    def delete(self, made: Made) -> None:
        """See Handler.delete. Its lines go with it.

        Looked for first: whose right hangs on a tag is denied what is not there.
        """
        if self._group(made.region, made.name) is None:
            return
        try:
            self._call(made.region, "delete_log_group", logGroupName=made.name)
        except Absent:
            return

    def owned(self, run: str, regions: Collection[str]) -> Iterable[Made]:
        """See Handler.owned. What we make has our name in its own, which spares the account's other groups."""
        for region in sorted(regions):
            groups = self._aws.pages("logs", region, "describe_log_groups", "logGroups", logGroupNamePattern=_STEM)
            for group in groups:
                tags = self._tags(region, _arn(group)) if _STEM in group["logGroupName"] else {}
                if owner_of(tags) == run:
                    name = str(group["logGroupName"])
                    outputs = {"name": name, "arn": _arn(group)}
                    yield found(LogGroup, name=name, region=region, tags=tags, outputs=outputs)

    def _read(self, wanted: Wanted) -> Seen | None:
        region = wanted.resource.region
        group = self._group(region, wanted.name)
        if group is None:
            return None
        return Seen(
            outputs={"name": wanted.name, "arn": _arn(group)},
            settings={"region": region, "retention_days": int(group.get("retentionInDays", 0))},
            owner=owner_of(self._tags(region, _arn(group))),
        )

    def _group(self, region: str, name: str) -> Mapping[str, Any] | None:
        groups = self._aws.pages("logs", region, "describe_log_groups", "logGroups", logGroupNamePrefix=name)
        return next((group for group in groups if group["logGroupName"] == name), None)

    def _seen(self, wanted: Wanted) -> Seen:
        deadline = self._aws.clock.now() + VISIBLE_S
        what = f"the log group {wanted.name} can be read"
        return waited(self._aws.clock, what, deadline, lambda: self._read(wanted))

    def _tags(self, region: str, arn: str) -> dict[str, str]:
        try:
            told = self._call(region, "list_tags_for_resource", resourceArn=arn).get("tags", {})
        except Absent:
            return {}
        return {str(key): str(value) for key, value in told.items()}

    def _call(self, region: str, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("logs", region, operation, **parameters)


def events(aws: Aws, region: str, group: str, stream: str, cursor: str | None = None) -> Iterator[Event]:
    """What a stream has, oldest first, after `cursor` only; nothing if there is no such stream (yet)."""
    from_ms, skip = _place(cursor)
    at_ms, count = from_ms, 0
    following: dict[str, Any] = {}
    while True:
        try:
            page = aws.call(
                "logs",
                region,
                "get_log_events",
                logGroupName=group,
                logStreamName=stream,
                startTime=from_ms,
                startFromHead=True,
                **following,
            )
        except Absent:
            return
        for event in page["events"]:
            stamp = int(event["timestamp"])
            count = count + 1 if stamp == at_ms else 1
            at_ms = stamp
            if stamp > from_ms or count > skip:
                yield Event(stamp / 1000, str(event["message"]), f"{stamp}:{count}")
        token = page["nextForwardToken"]
        # A stream's end is told by the token that was sent.
        if token == following.get("nextToken"):
            return
        following = {"nextToken": token}


def _place(cursor: str | None) -> tuple[int, int]:
    """The millisecond to read from, and how many of its lines were read."""
    if cursor is None:
        return 0, 0
    stamp, colon, count = cursor.partition(":")
    if not (colon and stamp.isdigit() and count.isdigit()):
        raise Invalid(f"not a place in a log: {cursor!r}")
    return int(stamp), int(count)


def _arn(group: Mapping[str, Any]) -> str:
    # describe_log_groups ends it in ":*", which is a pattern for policies and no ARN of anything.
    return str(group["arn"]).removesuffix(":*")
