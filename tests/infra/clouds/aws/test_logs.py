"""Log groups, and reading a log stream from a cursor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.account import REGION, check_requests, wanted
from tests.infra.clouds.aws.handlers import AwsHandlerSuite

from skerry.infra.clouds.aws.logs import LogGroup, LogGroups, create_request, events, retention_request
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.provision.graph import Resource

GROUP = LogGroup(key="jobs", name="/skerry/skerry-tiny-gpt-abc123", region=REGION, retention_days=14)
STREAM: Final = "batch-0/default/1"


class TestLogGroups(AwsHandlerSuite):
    HANDLER = LogGroups
    CHANGE = ("retention_days", 30)

    def resource(self, aws: Aws) -> Resource:
        # Its name begins as the group's does.
        aws.call("logs", REGION, "create_log_group", logGroupName=f"{GROUP.name}-and-more")
        return GROUP


@pytest.fixture
def stream(aws: Aws) -> list[tuple[int, str]]:
    """Lines, three of them in the same millisecond."""
    LogGroups(aws).create(wanted(GROUP))
    aws.call("logs", REGION, "create_log_stream", logGroupName=GROUP.name, logStreamName=STREAM)
    start = int(time.time() * 1000)  # what is older than the group keeps is refused
    return [(start, "a"), (start + 5, "b1"), (start + 5, "b2"), (start + 5, "b3"), (start + 9, "c")]


def write(aws: Aws, lines: list[tuple[int, str]]) -> None:
    rows = [{"timestamp": stamp, "message": text} for stamp, text in lines]
    if rows:
        aws.call("logs", REGION, "put_log_events", logGroupName=GROUP.name, logStreamName=STREAM, logEvents=rows)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("written", range(6))
def test_reading_continues_after_any_cursor(aws: Aws, stream: list[tuple[int, str]], written: int) -> None:
    write(aws, stream[:written])
    first = list(events(aws, REGION, GROUP.name, STREAM))
    assert [(event.at_s, event.text) for event in first] == [(stamp / 1000, text) for stamp, text in stream[:written]]
    write(aws, stream[written:])
    for number, event in enumerate(first):
        rest = events(aws, REGION, GROUP.name, STREAM, event.cursor)
        assert [later.text for later in rest] == [text for _, text in stream[number + 1 :]]


def test_missing_stream_has_no_events(aws: Aws) -> None:
    assert list(events(aws, REGION, GROUP.name, STREAM)) == []
    LogGroups(aws).create(wanted(GROUP))
    assert list(events(aws, REGION, GROUP.name, STREAM)) == []


def test_malformed_cursor_is_refused(aws: Aws) -> None:
    with pytest.raises(Invalid, match="not a log cursor"):
        list(events(aws, REGION, GROUP.name, STREAM, "f/123"))


def test_requests_equal_the_golden_file() -> None:
    requests = {"CreateLogGroup": create_request(wanted(GROUP)), "PutRetentionPolicy": retention_request(wanted(GROUP))}
    check_requests("logs", "log_group", requests)
