"""Log entries: found by a filter, in order, page by page, and a while after they were written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.testing.google.kit import JOBS, good, job_of, refused

if TYPE_CHECKING:
    from tests.support.clocks import FakeClock

    from skerry.testing.google import GoogleSandbox

LIST = "/v2/entries:list"
WHERE = ["projects/skerry-sandbox"]
GLOBAL = {"type": "global", "labels": {}}


def write(google: GoogleSandbox, *texts: str, **more: Any) -> None:
    entries = [{"textPayload": text, **more} for text in texts]
    good(google, "POST", "/v2/entries:write", {
        "logName": "projects/skerry-sandbox/logs/x", "resource": GLOBAL, "labels": {"run": "a"}, "entries": entries,
    })  # fmt: skip


def listed(google: GoogleSandbox, text: str = "", **more: Any) -> Any:
    return good(google, "POST", LIST, {"resourceNames": WHERE, "filter": text, **more})


def texts(google: GoogleSandbox, text: str = "", **more: Any) -> list[str]:
    return [item["textPayload"] for item in listed(google, text, **more).get("entries", [])]


def test_entries_are_sorted_by_their_own_time(google: GoogleSandbox) -> None:
    write(google, "late", timestamp="2026-01-01T00:00:05Z")
    write(google, "early", timestamp="2026-01-01T00:00:01Z")
    assert texts(google, 'timestamp>="2026-01-01T00:00:00Z"') == ["early", "late"]
    assert texts(google, orderBy="timestamp desc") == ["late", "early"]
    assert texts(google, 'timestamp>"2026-01-01T00:00:01Z"') == ["late"]
    assert texts(google, 'labels.run="a" AND logName="projects/skerry-sandbox/logs/x"') == ["early", "late"]
    assert texts(google, 'labels.run="b"') == []


def test_filter_without_a_time_covers_the_last_day(google: GoogleSandbox, clock: FakeClock) -> None:
    write(google, "old", timestamp="2026-01-01T00:00:00Z")
    clock.advance(2 * 24 * 3600.0)
    assert texts(google, 'labels.run="a"') == []
    assert texts(google, 'labels.run="a" AND timestamp>="2025-01-01T00:00:00Z"') == ["old"]


def test_pages_belong_to_their_filter(google: GoogleSandbox) -> None:
    write(google, *"abcde")
    page = listed(google, "", pageSize=2)
    rest = listed(google, "", pageSize=9, pageToken=page["nextPageToken"])
    assert [item["textPayload"] for item in page["entries"] + rest["entries"]] == list("abcde")
    assert "nextPageToken" not in rest
    body = {"resourceNames": WHERE, "filter": "severity>=INFO", "pageToken": page["nextPageToken"]}
    assert refused(google, "POST", LIST, body)[0] == 400


def test_new_entry_is_visible_after_the_settling_time(google: GoogleSandbox) -> None:
    google.settling = 2
    write(google, "x")
    assert [texts(google) for _ in range(3)] == [[], [], ["x"]]


@pytest.mark.parametrize(
    "body",
    [
        {"filter": ""},
        {"resourceNames": ["skerry-sandbox"]},
        {"resourceNames": WHERE, "pageSize": 1001},
        {"resourceNames": WHERE, "orderBy": "severity"},
        {"resourceNames": WHERE, "projectIds": ["x"]},
        {"resourceNames": WHERE, "filter": "resource.typ=x"},
        {"resourceNames": WHERE, "filter": "text AND"},
    ],
)
def test_invalid_listing_is_refused(google: GoogleSandbox, body: dict[str, Any]) -> None:
    assert refused(google, "POST", LIST, body)[0] == 400


def test_logs_of_another_project_are_refused(google: GoogleSandbox) -> None:
    assert refused(google, "POST", LIST, {"resourceNames": ["projects/others"]})[0] == 403


def test_output_of_a_job_is_logged_under_its_number(google: GoogleSandbox) -> None:
    first, second = (good(google, "POST", JOBS, job_of())["name"] for _ in range(2))
    google.jobs.write(first, "hello")
    google.jobs.write(second, "others")
    number = first.rpartition("/")[2]
    (entry,) = listed(google, f'resource.type="ml_job" AND resource.labels.job_id="{number}"')["entries"]
    assert entry["jsonPayload"]["message"] == "hello\n"
    assert entry["logName"] == "projects/skerry-sandbox/logs/workerpool0-0"
    assert entry["resource"]["labels"]["task_name"] == "workerpool0-0"
