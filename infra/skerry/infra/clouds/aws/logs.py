"""CloudWatch Logs: the log group that a run's jobs write to, and the lines that they wrote.

A cursor is a time and a count of lines of that millisecond, because the service's own tokens expire after a day.
Source: CloudWatch Logs API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from skerry.infra.clouds.aws.tags import owned_record, owner_of
from skerry.infra.clouds.handler_helpers import Absent, Event, check_owner, differing, each, wait_visible
from skerry.infra.provision.graph import Resource
from skerry.infra.provision.handler import Observed
from skerry.runtime.errors import Conflict, Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.handler import Desired, StateRecord

_STEM: Final = "skerry"


@dataclass(frozen=True, kw_only=True)
class LogGroup(Resource):
    """A log group. retention_days: a value that CloudWatch accepts. Outputs: name, arn."""

    KIND: ClassVar[str] = "aws_log_group"
    FIXED: ClassVar[frozenset[str]] = frozenset({"region"})

    retention_days: int = 30


def create_request(desired: Desired) -> dict[str, Any]:
    """Parameters of CreateLogGroup."""
    return {"logGroupName": desired.name, "tags": desired.tags}


def retention_request(desired: Desired) -> dict[str, Any]:
    """Parameters of PutRetentionPolicy."""
    return {"logGroupName": desired.name, "retentionInDays": desired.settings["retention_days"]}


class LogGroups:
    """Creates log groups. See Handler."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        """See Handler.read."""
        return each(self._read, all_desired)

    def create(self, desired: Desired) -> Mapping[str, str]:
        """See Handler.create."""
        changed: Collection[str] = {"retention_days"}
        try:
            self._call(desired.resource.region, "create_log_group", **create_request(desired))
        except Conflict:
            seen = self._seen(desired)
            check_owner(seen, desired, "log group", "delete it if it is not needed")
            changed = differing(desired, seen)
        return self.update(desired, changed)

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        """See Handler.update."""
        if "retention_days" in changed:
            self._call(desired.resource.region, "put_retention_policy", **retention_request(desired))
        return dict(self._seen(desired).outputs)

    def delete(self, record: StateRecord) -> None:
        """See Handler.delete. Its lines are deleted with it.

        Read first: a permission that depends on a tag is denied for a group that does not exist.
        """
        if self._group(record.region, record.name) is None:
            return
        try:
            self._call(record.region, "delete_log_group", logGroupName=record.name)
        except Absent:
            return

    def list_owned(self, run: str, regions: Collection[str]) -> Iterable[StateRecord]:
        """See Handler.list_owned. Only groups with skerry in their names are read."""
        for region in sorted(regions):
            groups = self._aws.pages("logs", region, "describe_log_groups", "logGroups", logGroupNamePattern=_STEM)
            for group in groups:
                tags = self._tags(region, _arn(group)) if _STEM in group["logGroupName"] else {}
                if owner_of(tags) == run:
                    name = str(group["logGroupName"])
                    outputs = {"name": name, "arn": _arn(group)}
                    yield owned_record(LogGroup, name=name, region=region, tags=tags, outputs=outputs)

    def _read(self, desired: Desired) -> Observed | None:
        region = desired.resource.region
        group = self._group(region, desired.name)
        if group is None:
            return None
        return Observed(
            outputs={"name": desired.name, "arn": _arn(group)},
            settings={"region": region, "retention_days": int(group.get("retentionInDays", 0))},
            owner=owner_of(self._tags(region, _arn(group))),
        )

    def _group(self, region: str, name: str) -> Mapping[str, Any] | None:
        groups = self._aws.pages("logs", region, "describe_log_groups", "logGroups", logGroupNamePrefix=name)
        return next((group for group in groups if group["logGroupName"] == name), None)

    def _seen(self, desired: Desired) -> Observed:
        return wait_visible(self._aws.clock, f"the log group {desired.name}", lambda: self._read(desired))

    def _tags(self, region: str, arn: str) -> dict[str, str]:
        try:
            tags = self._call(region, "list_tags_for_resource", resourceArn=arn).get("tags", {})
        except Absent:
            return {}
        return {str(key): str(value) for key, value in tags.items()}

    def _call(self, region: str, operation: str, **parameters: object) -> dict[str, Any]:
        return self._aws.call("logs", region, operation, **parameters)


def events(aws: Aws, region: str, group: str, stream: str, cursor: str | None = None) -> Iterator[Event]:
    """The lines of a stream after `cursor`, oldest first; none if the stream does not exist (yet)."""
    from_ms, skip = _position(cursor)
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
        # At its end a stream returns the token that was sent.
        if token == following.get("nextToken"):
            return
        following = {"nextToken": token}


def _position(cursor: str | None) -> tuple[int, int]:
    """The millisecond to read from, and the number of its lines that were read."""
    if cursor is None:
        return 0, 0
    stamp, colon, count = cursor.partition(":")
    if not (colon and stamp.isdigit() and count.isdigit()):
        raise Invalid(f"not a log cursor: {cursor!r}")
    return int(stamp), int(count)


def _arn(group: Mapping[str, Any]) -> str:
    # describe_log_groups ends it in ":*", which is a pattern for policies, not an ARN.
    return str(group["arn"]).removesuffix(":*")
