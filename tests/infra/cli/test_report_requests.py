"""The requests of `skerry report` and `skerry status` for a run that is in roll-ups.

Those of 10,000 rounds and 64 replicas are computed from two smaller runs: drawing it would take a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.observe.rolled_up_run import RolledUpRun
from tests.support.command_line import invoke

from skerry.infra.cli import open_run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def requests(rolled_up: RolledUpRun, page: Path, patch: pytest.MonkeyPatch, *options: str) -> tuple[int, str]:
    """The requests of one command, and the page that it writes."""
    patch.setattr(open_run, "open_store", lambda *_, **__: rolled_up.store)
    rolled_up.store.forget()
    result = invoke("report", "s3://bucket/run", "-o", page, *options)
    assert result.exit_code == 0, result.output
    return rolled_up.store.requests, page.read_text()


def test_report_of_a_long_run_costs_under_300_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "run.html"
    long, _ = requests(RolledUpRun(3000, 2, restarts=20), page, monkeypatch)
    wide, text = requests(RolledUpRun(300, 64, restarts=5), page, monkeypatch)
    fixed = long - 30 - 2 * 2
    assert wide == 3 + 2 * 64 + fixed, "a request for each roll-up, and two for each replica"
    assert 100 + 2 * 64 + fixed < 300
    assert "missing in 3 of 300 rounds (96, 196, 296)" in text
    assert "300 rounds are drawn from roll-ups, so their records were not examined: skerry doctor memory" in text


def test_full_report_of_a_long_run_reads_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "run.html"
    rolled_up = RolledUpRun(100, 2)
    count, text = requests(rolled_up, page, monkeypatch, "--full")
    assert count > 3 * 6, "the records of the three rounds that have any"
    assert "are drawn from roll-ups" not in text


def test_status_of_a_long_run_reads_missing_rounds_from_roll_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    rolled_up = RolledUpRun(3000, 2)
    monkeypatch.setattr(open_run, "open_store", lambda *_, **__: rolled_up.store)
    result = invoke("status", "s3://bucket/run")
    assert result.exit_code == 0, result.output
    assert "missing in 30 of 3000 rounds" in result.output
    assert rolled_up.store.requests < 2 * (30 + 2 * 2 + 7) + 60, "the history twice, and one look"
