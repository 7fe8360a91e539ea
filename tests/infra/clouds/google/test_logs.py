"""Reading log entries in order, from a cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.clouds.google.kit import check_golden, check_request

from skerry.infra.clouds.google.logs import events, request
from skerry.infra.clouds.google.session import Google
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.testing.google import GoogleSandbox

WHERE = 'resource.type="ml_job" AND resource.labels.job_id="7"'
T = "2026-11-22T01:02:03"


def entry(stamp: str, number: str, text: str = "", **more: Any) -> dict[str, Any]:
    resource = {"type": "ml_job", "labels": {"job_id": "7"}}
    payload = {"textPayload": text} if text else {}
    return {"timestamp": stamp, "insertId": number, "resource": resource, **payload, **more}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Entries as Logging returns them: from the filter's time on, by time and then by id, three a page."""
    stored: list[dict[str, Any]] = []

    def call(_self: Google, _service: str, _method: str, _path: str, **given: Any) -> dict[str, Any]:
        body = given["body"]
        since = body["filter"].partition('timestamp >= "')[2].rstrip('"')
        ordered = sorted(stored, key=lambda row: (_whole(row["timestamp"]), row["insertId"]))
        listed = [row for row in ordered if not since or _whole(row["timestamp"]) >= _whole(since)]
        start = int(body.get("pageToken", "0"))
        more = {"nextPageToken": str(start + 3)} if start + 3 < len(listed) else {}
        return {"entries": listed[start : start + 3], **more}

    monkeypatch.setattr(Google, "call", call)
    return stored


def _whole(stamp: str) -> str:
    plain, _, digits = stamp.rstrip("Z").partition(".")
    return f"{plain}.{digits.ljust(9, '0')}"


def read(google: Google, cursor: str | None = None) -> list[tuple[str, str]]:
    return [(event.text, event.cursor) for event in events(google, WHERE, cursor)]


def test_reading_continues_after_any_cursor(google: Google, entries: list[dict[str, Any]]) -> None:
    for stamp, number in ((f"{T}Z", "b"), (f"{T}.5Z", "a"), (f"{T}.500000001Z", "c"), (f"{T}.5Z", "d"), (f"{T}Z", "a")):
        entries.append(entry(stamp, number, f"{stamp} {number}\n"))
    everything = read(google)
    assert [text for text, _ in everything] == [
        f"{T}Z a",
        f"{T}Z b",
        f"{T}.5Z a",
        f"{T}.5Z d",
        f"{T}.500000001Z c",
    ]
    for count, (_, cursor) in enumerate(everything, start=1):
        assert read(google, cursor) == everything[count:]


def test_later_entries_are_read_after_the_cursor(google: Google, entries: list[dict[str, Any]]) -> None:
    entries.append(entry(f"{T}.1Z", "a", "first"))
    ((_, cursor),) = read(google)
    assert read(google, cursor) == []
    entries.append(entry(f"{T}.10Z", "b", "second"))
    entries.append(entry(f"{T}.2Z", "a", "third"))
    assert [text for text, _ in read(google, cursor)] == ["second", "third"]


def test_event_text_is_the_output_of_the_container(google: Google, entries: list[dict[str, Any]]) -> None:
    entries.append(entry(f"{T}.1Z", "a", jsonPayload={"message": "said\n", "levelname": "INFO"}))
    entries.append(entry(f"{T}.2Z", "a", jsonPayload={"round": 3}))
    entries.append(entry(f"{T}.3Z", "a"))
    stored = list(events(google, WHERE))
    assert [event.text for event in stored] == ["said", '{"round": 3}', "{}"]
    assert stored[0].at_s == pytest.approx(1795309323.1)


def test_events_are_read_from_the_sandbox(google: Google, sandbox: GoogleSandbox) -> None:
    assert read(google) == []
    entry = {
        "logName": f"projects/{sandbox.project}/logs/workerpool0-0",
        "resource": {"type": "ml_job", "labels": {"job_id": "7", "project_id": sandbox.project}},
        "textPayload": "said\n",
    }
    google.call("logging", "POST", "v2/entries:write", body={"entries": [entry]})
    ((text, cursor),) = read(google)
    assert text == "said"
    assert read(google, cursor) == []


def test_malformed_cursor_is_refused(google: Google) -> None:
    for cursor in ("", "5", "2026-11-22 x", f"{T}Z"):
        with pytest.raises(Invalid, match="not a log cursor"):
            read(google, cursor)


def test_request_equals_the_golden_file() -> None:
    body = request("acme", WHERE, f"{T}.5Z abc")
    check_request("logging.v2", "POST", "v2/entries:list", body)
    check_golden("log_entries", body)
