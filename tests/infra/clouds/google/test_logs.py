"""Logs: read in order, from a place on, entries of one time too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.google.ground import check_golden, check_request

from skerry.infra.clouds.google.logs import events, request
from skerry.infra.clouds.google.session import Google
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.testing.google import GoogleSandbox

WHERE = 'resource.type="ml_job" AND resource.labels.job_id="7"'
T = "2026-11-22T01:02:03"


def entry(stamp: str, number: str, text: str, job: str = "7", **more: Any) -> dict[str, Any]:
    resource = {"type": "ml_job", "labels": {"job_id": job}}
    return {
        "timestamp": stamp,
        "insertId": number,
        "resource": resource,
        **({"textPayload": text} if text else {}),
        **more,
    }


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Entries as Logging tells them: from the filter's time on, by time and then by id, three a page."""
    found: list[dict[str, Any]] = []

    def call(_self: Google, _service: str, _method: str, _path: str, **given: Any) -> dict[str, Any]:
        body = given["body"]
        since = body["filter"].partition('timestamp >= "')[2].rstrip('"')
        ordered = sorted(found, key=lambda one: (_whole(one["timestamp"]), one["insertId"]))
        listed = [one for one in ordered if not since or _whole(one["timestamp"]) >= _whole(since)]
        start = int(body.get("pageToken", "0"))
        more = {"nextPageToken": str(start + 3)} if start + 3 < len(listed) else {}
        return {"entries": listed[start : start + 3], **more}

    monkeypatch.setattr(Google, "call", call)
    return found


def _whole(stamp: str) -> str:
    plain, _, digits = stamp.rstrip("Z").partition(".")
    return f"{plain}.{digits.ljust(9, '0')}"


def read(google: Google, cursor: str | None = None) -> list[tuple[str, str]]:
    return [(event.text, event.cursor) for event in events(google, WHERE, cursor)]


def test_reading_goes_on_after_any_line(google: Google, told: list[dict[str, Any]]) -> None:
    for stamp, number in ((f"{T}Z", "b"), (f"{T}.5Z", "a"), (f"{T}.500000001Z", "c"), (f"{T}.5Z", "d"), (f"{T}Z", "a")):
        told.append(entry(stamp, number, f"{stamp} {number}\n"))
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


def test_what_comes_later_is_read_from_where_one_was(google: Google, told: list[dict[str, Any]]) -> None:
    told.append(entry(f"{T}.1Z", "a", "first"))
    ((_, cursor),) = read(google)
    assert read(google, cursor) == []
    told.append(entry(f"{T}.10Z", "b", "second"))
    told.append(entry(f"{T}.2Z", "a", "third"))
    assert [text for text, _ in read(google, cursor)] == ["second", "third"]


def test_a_line_is_what_the_container_wrote(google: Google, told: list[dict[str, Any]]) -> None:
    told.append(entry(f"{T}.1Z", "a", "", jsonPayload={"message": "said\n", "levelname": "INFO"}))
    told.append(entry(f"{T}.2Z", "a", "", jsonPayload={"round": 3}))
    told.append(entry(f"{T}.3Z", "a", ""))
    found = list(events(google, WHERE))
    assert [event.text for event in found] == ["said", '{"round": 3}', "{}"]
    assert found[0].at_s == pytest.approx(1795309323.1)


def test_the_project_is_asked_for_real(google: Google, sandbox: GoogleSandbox) -> None:
    assert read(google) == []
    with sandbox._state.lock:
        sandbox.logs.add(
            {
                "logName": f"projects/{sandbox.project}/logs/workerpool0-0",
                "resource": {"type": "ml_job", "labels": {"job_id": "7", "project_id": sandbox.project}},
                "textPayload": "said\n",
                "timestamp": f"{T}.25Z",
            }
        )
    ((text, cursor),) = read(google)
    assert text == "said"
    assert read(google, cursor) == []


def test_a_place_that_is_none_is_refused(google: Google) -> None:
    for cursor in ("", "5", "2026-11-22 x", f"{T}Z"):
        with pytest.raises(Invalid, match="not a place in a log"):
            read(google, cursor)


def test_the_request_is_that_of_the_golden_file() -> None:
    body = request("acme", WHERE, f"{T}.5Z abc")
    check_request("logging.v2", "POST", "v2/entries:list", body)
    check_golden("log_entries", body)
