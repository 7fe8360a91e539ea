"""Cloud Logging: entries written, and listed by a filter, page by page.

A new entry is hidden from the first `settling` lists. Entries are ordered by timestamp, not by arrival. Source: REST
reference of entries.list, "Logging query language".
"""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.google import list_filters
from skerry.testing.google.refusals import Refusal, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google.shared_state import Handler, Project, SandboxRequest

_MOST: Final = 1000
_KNOWN: Final = re.compile(
    r"timestamp|receiveTimestamp|severity|insertId|logName|log_name|textPayload|resource\.type|"
    r"(resource\.labels|labels|jsonPayload)\.(\"[^\"]+\"|[\w.-]+)"
)


@dataclass(kw_only=True)
class _Entry:
    entry: dict[str, Any]
    at: dt.datetime
    unseen: int


class Logs:
    """The entries of a project."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self._entries: list[_Entry] = []

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by method id."""
        return {"logging.entries.list": self._list, "logging.entries.write": self._write}

    def add(self, entry: Mapping[str, Any], at: dt.datetime | None = None) -> None:
        """Add an entry written by a Google service."""
        at = at or self._project.now()
        number = self._project.next_number()
        stored = {
            "insertId": f"{number:012x}",
            "severity": "DEFAULT",
            **entry,
            "timestamp": self._project.text(at),
            "receiveTimestamp": self._project.text(),
        }
        self._entries.append(_Entry(entry=stored, at=at, unseen=self._project.settling()))

    def clear(self) -> None:
        """Delete all entries."""
        self._entries.clear()

    def _write(self, request: SandboxRequest) -> Mapping[str, Any]:
        body = request.body
        for entry in body.get("entries", ()):
            name = entry.get("logName") or body.get("logName")
            resource = entry.get("resource") or body.get("resource")
            if not name or not resource:
                raise invalid("an entry has a log name and a resource", "entries")
            self._check_resource(str(name).partition("/logs/")[0])
            labels = {**body.get("labels", {}), **entry.get("labels", {})}
            at = entry.get("timestamp")
            if not body.get("dryRun"):
                stored = {**entry, "logName": name, "resource": resource, "labels": labels}
                self.add(stored, None if at is None else dt.datetime.fromisoformat(at))
        return {}

    def _list(self, request: SandboxRequest) -> Mapping[str, Any]:
        body = request.body
        for name in body.get("resourceNames") or [""]:
            self._check_resource(name)
        if body.get("projectIds"):
            raise invalid("projectIds is deprecated; use resourceNames", "project_ids")
        order = body.get("orderBy", "timestamp asc")
        if order not in {"timestamp asc", "timestamp desc", "timestamp"}:
            raise invalid(f"unknown order: {order}", "order_by")
        matches = list_filters.parse_filter(body.get("filter", ""), lambda name: _KNOWN.fullmatch(name) is not None)
        if "timestamp" not in body.get("filter", ""):
            # "Queries without a timestamp look at the last day"; a run lasts longer.
            since = self._project.now() - dt.timedelta(days=1)
        else:
            since = dt.datetime.min.replace(tzinfo=dt.UTC)
        matching: list[_Entry] = []
        for entry in self._entries:
            if entry.unseen > 0:
                entry.unseen -= 1
            elif entry.at >= since and matches(entry.entry):
                matching.append(entry)
        matching.sort(key=lambda stored: (stored.at, stored.entry["insertId"]), reverse=order.endswith("desc"))
        return self._page(body, [stored.entry for stored in matching], order)

    def _page(self, body: Mapping[str, Any], matching: list[dict[str, Any]], order: str) -> Mapping[str, Any]:
        size = body.get("pageSize", 50)
        if not 0 < size <= _MOST:
            raise invalid(f"a page has between 1 and {_MOST} entries", "page_size")
        start = 0
        if token := body.get("pageToken"):
            start, _, asked_for = str(token).partition("|")
            if asked_for != f"{body.get('filter', '')}|{order}":
                raise invalid("page_token doesn't match arguments from the request", "page_token")
            start = int(start)
        response: dict[str, Any] = {}
        if page := matching[start : start + size]:
            response["entries"] = page
        if start + size < len(matching):
            response["nextPageToken"] = f"{start + size}|{body.get('filter', '')}|{order}"
        return response

    def _check_resource(self, name: str) -> None:
        parts = name.split("/")
        if len(parts) != 2 or parts[0] != "projects":
            raise invalid(f"the sandbox supports only logs of projects, not of {name!r}", "resource_names")
        if not self._project.is_mine(parts[1]):
            raise Refusal(403, f"Permission 'logging.logEntries.list' denied on {name} (or it may not exist).")
