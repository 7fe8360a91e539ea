"""Cloud Logging: entries written, and listed by a filter, page by page.

An entry is found a while after it was written: `unseen` of the newest stay hidden for `settling` lists. Entries are
ordered by their timestamps, not by when they came. Source: REST reference of entries.list, "Logging query language".
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.testing.google import filters
from skerry.infra.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.testing.google.project import Asked, Handler, Project

_MOST: Final = 1000
_KNOWN: Final = re.compile(
    r"timestamp|receiveTimestamp|severity|insertId|logName|log_name|textPayload|resource\.type|"
    r"(resource\.labels|labels|jsonPayload)\.(\"[^\"]+\"|[\w.-]+)"
)


@dataclass(kw_only=True)
class _Entry:
    told: dict[str, Any]
    at: dt.datetime
    unseen: int


class Logs:
    """The entries of a project."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._entries: list[_Entry] = []

    def handlers(self) -> dict[str, Handler]:
        """By method."""
        return {"logging.entries.list": self._list, "logging.entries.write": self._write}

    def add(self, told: Mapping[str, Any], at: dt.datetime | None = None) -> None:
        """One entry, as a service of Google writes it."""
        at = at or self._project.now()
        number = self._project.next_number()
        made = {
            "insertId": f"{number:012x}",
            "severity": "DEFAULT",
            **told,
            "timestamp": self._project.text(at),
            "receiveTimestamp": self._project.text(),
        }
        self._entries.append(_Entry(told=made, at=at, unseen=self._project.settling()))

    def clear(self) -> None:
        """None at all."""
        self._entries.clear()

    def _write(self, asked: Asked) -> Mapping[str, Any]:
        body = asked.body
        for entry in body.get("entries", ()):
            name = entry.get("logName") or body.get("logName")
            resource = entry.get("resource") or body.get("resource")
            if not name or not resource:
                raise invalid("an entry has a log name and a resource", "entries")
            self._check_resource(str(name).partition("/logs/")[0])
            told = {**entry, "logName": name, "resource": resource}
            told["labels"] = {**body.get("labels", {}), **entry.get("labels", {})}
            at = entry.get("timestamp")
            if not body.get("dryRun"):
                self.add(told, None if at is None else dt.datetime.fromisoformat(at))
        return {}

    def _list(self, asked: Asked) -> Mapping[str, Any]:
        body = asked.body
        for name in body.get("resourceNames") or [""]:
            self._check_resource(name)
        if body.get("projectIds"):
            raise invalid("projectIds is deprecated; use resourceNames", "project_ids")
        order = body.get("orderBy", "timestamp asc")
        if order not in {"timestamp asc", "timestamp desc", "timestamp"}:
            raise invalid(f"unknown order: {order}", "order_by")
        test = filters.parsed(body.get("filter", ""), lambda name: _KNOWN.fullmatch(name) is not None)
        if "timestamp" not in body.get("filter", ""):
            # "Queries without a timestamp look at the last day": a run lasts longer.
            since = self._project.now() - dt.timedelta(days=1)
        else:
            since = dt.datetime.min.replace(tzinfo=dt.UTC)
        found: list[_Entry] = []
        for entry in self._entries:
            if entry.unseen > 0:
                entry.unseen -= 1
            elif entry.at >= since and test(entry.told):
                found.append(entry)
        found.sort(key=lambda one: (one.at, one.told["insertId"]), reverse=order.endswith("desc"))
        return self._page(body, [one.told for one in found], order)

    def _page(self, body: Mapping[str, Any], found: list[dict[str, Any]], order: str) -> Mapping[str, Any]:
        size = body.get("pageSize", 50)
        if not 0 < size <= _MOST:
            raise invalid(f"a page has between 1 and {_MOST} entries", "page_size")
        start = 0
        if token := body.get("pageToken"):
            start, _, asked_for = str(token).partition("|")
            if asked_for != f"{body.get('filter', '')}|{order}":
                raise invalid("page_token doesn't match arguments from the request", "page_token")
            start = int(start)
        told: dict[str, Any] = {}
        if page := found[start : start + size]:
            told["entries"] = page
        if start + size < len(found):
            told["nextPageToken"] = f"{start + size}|{body.get('filter', '')}|{order}"
        return told

    def _check_resource(self, name: str) -> None:
        parts = name.split("/")
        if len(parts) != 2 or parts[0] != "projects":
            raise invalid(f"this sandbox has logs of projects only, not of {name!r}", "resource_names")
        if not self._project.is_mine(parts[1]):
            raise Refusal(403, f"Permission 'logging.logEntries.list' denied on {name} (or it may not exist).")
