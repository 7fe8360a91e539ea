"""What jobs have written, as Cloud Logging keeps it.

A reader's place is the time and the id of the last entry: entries of one time are told in the order of their ids. What
arrives late, with a time before that place, is not read any more; Logging gives no order of arrival.
A project may ask some 60 times a minute (Cloud Logging, "Quotas"): whoever follows pauses between.
Source: the discovery document of logging v2; Cloud Logging, "Logging query language".
"""

from __future__ import annotations

import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from skerry.infra.clouds.google.session import Absent
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.clouds.google.session import Google

_PAGE: Final = 1000
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?Z")


class Event(NamedTuple):
    """One entry. at_s: seconds since the epoch. cursor: where to go on reading after it."""

    at_s: float
    text: str
    cursor: str


def request(project: str, where: str, cursor: str | None = None) -> dict[str, Any]:
    """The body of entries.list. where: a filter. cursor: from its time on; what it has is told again."""
    since = "" if cursor is None else f' AND timestamp >= "{_place(cursor)[0]}"'
    return {
        "resourceNames": [f"projects/{project}"],
        "filter": f"{where}{since}",
        "orderBy": "timestamp asc",
        "pageSize": _PAGE,
    }


def events(google: Google, where: str, cursor: str | None = None) -> Iterator[Event]:
    """The entries that a filter finds, oldest first, after `cursor` only; nothing if the service is off."""
    last = None if cursor is None else _order(*_place(cursor))
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
    told: Mapping[str, Any] = entry.get("jsonPayload") or {}
    # What a container writes is under "message", with fields of Logging's own around it.
    return str(told["message"]).rstrip("\n") if "message" in told else json.dumps(told, sort_keys=True)


def _place(cursor: str) -> tuple[str, str]:
    stamp, space, number = cursor.partition(" ")
    if not space or _TIME.fullmatch(stamp) is None:
        raise Invalid(f"not a place in a log: {cursor!r}")
    return stamp, number


def _order(stamp: str, number: str) -> tuple[dt.datetime, int, str]:
    """Times have up to nine digits, and come without those that are zero."""
    found = _TIME.fullmatch(stamp)
    if found is None:
        raise Invalid(f"not a time of Cloud Logging: {stamp!r}")
    return dt.datetime.fromisoformat(f"{found[1]}+00:00"), int((found[2] or "").ljust(9, "0")), number
