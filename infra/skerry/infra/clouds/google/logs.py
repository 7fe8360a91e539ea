"""Reads the log entries of jobs from Cloud Logging.

A cursor is the time and the id of the last entry; entries of one time are ordered by id. An entry that arrives late,
with a time before the cursor, is not read, because Logging returns no order of arrival.
A project may send some 60 requests a minute (Cloud Logging, "Quotas"), so a caller that follows a log must pause.
Source: the discovery document of logging v2; Cloud Logging, "Logging query language".
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import Absent, Event
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.clouds.google.session import Google

_PAGE: Final = 1000
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


def request(project: str, where: str, cursor: str | None = None) -> dict[str, Any]:
    """The body of entries.list. where: a filter. cursor: entries from its time on, the read ones included."""
    since = "" if cursor is None else f' AND timestamp >= "{_position(cursor)[0]}"'
    return {
        "resourceNames": [f"projects/{project}"],
        "filter": f"{where}{since}",
        "orderBy": "timestamp asc",
        "pageSize": _PAGE,
    }


def events(google: Google, where: str, cursor: str | None = None) -> Iterator[Event]:
    """The entries of a filter after `cursor`, oldest first; none if the service is disabled."""
    last = None if cursor is None else _order(*_position(cursor))
    body = request(google.project, where, cursor)
    try:
        for entry in google.pages("logging", "v2/entries:list", "entries", body=body):
            stamp, number = str(entry.get("timestamp", "")), str(entry.get("insertId", ""))
            order = _order(stamp, number)
            if last is None or order > last:
                last = order
                yield Event(order[0].timestamp() + order[1] / 1e9, _text(entry), f"{stamp} {number}")
    except Absent:
        return


def _text(entry: Mapping[str, Any]) -> str:
    if "textPayload" in entry:
        return str(entry["textPayload"]).rstrip("\n")
    payload: Mapping[str, Any] = entry.get("jsonPayload") or {}
    # The output of a container is under "message", beside fields of Logging's own.
    return str(payload["message"]).rstrip("\n") if "message" in payload else json.dumps(payload, sort_keys=True)


def _position(cursor: str) -> tuple[str, str]:
    stamp, space, number = cursor.partition(" ")
    if not space or _TIME.fullmatch(stamp) is None:
        raise Invalid(f"not a log cursor: {cursor!r}")
    return stamp, number


def _order(stamp: str, number: str) -> tuple[dt.datetime, int, str]:
    """The sort key of an entry. Times have up to nine digits, trailing zeros omitted."""
    match = _TIME.fullmatch(stamp)
    if match is None:
        raise Invalid(f"not a time of Cloud Logging: {stamp!r}")
    return dt.datetime.fromisoformat(f"{match[1]}+00:00"), int((match[2] or "").ljust(9, "0")), number
