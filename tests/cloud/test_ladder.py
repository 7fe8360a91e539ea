"""The decisions of the ladder: what may start, what is a surprise, what is counted, where it goes on."""

from __future__ import annotations

import inspect
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cloud import ladder, rungs, test_handlers, test_stores, transcript
from tests.cloud import settings as names
from tests.cloud.ladder import Ladder, Recorder, cost, interrupts, prepare, surprises
from tests.cloud.rungs import LIMIT_USD, Rung
from tests.cloud.transcript import CaseResult, Journal

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

DIGEST = f"@sha256:{'1' * 64}"
ALL = {
    **dict.fromkeys(names.MEANINGS, "acme"),
    **dict.fromkeys((names.AWS_IMAGE, names.GOOGLE_IMAGE, names.IMAGE), f"ghcr.io/acme/skerry{DIGEST}"),
    names.AWS_REGION: "us-east-1",
    names.GOOGLE_REGION: "us-central1",
    names.GOOGLE_PROJECT: "acme-diloco",
    names.SAGEMAKER_USD: "0.115",
    names.MAX_USD: "20",
}
JOB = Rung(name="job", does="one job", tests=["t.py"], lacks=None, limit_usd=2.0, kinds=["modal"])
FREE = Rung(name="free", does="no job", tests=["t.py"], lacks=None, limit_usd=0.1)


def recorded(*cases: CaseResult, interrupted: bool = False) -> Recorder:
    return Recorder(cases={case.name: case for case in cases}, interrupted=interrupted)


def passed(name: str = "t.py::test_a", usd_per_hour: float | None = None, output: str = "") -> CaseResult:
    return CaseResult(name=name, seconds=1800, usd_per_hour=usd_per_hour, output=output)


class Climb:
    """A ladder of rungs whose tests are not run."""

    def __init__(self, folder: Path, steps: Mapping[Rung, Recorder], budget_usd: float = LIMIT_USD) -> None:
        self.started: list[str] = []
        self.lines: list[str] = []
        self.steps = steps
        self.journal = Journal(path=folder / "ladder.json", day="2026-11-28", rehearsal=False, budget_usd=budget_usd)
        self.settings = names.Settings({names.FOLDER: str(folder)})
        self.ladder = Ladder(
            settings=self.settings,
            rungs=list(steps),
            journal=self.journal,
            folder=folder,
            say=self.lines.append,
            run=self._run,
        )

    def _run(self, rung: Rung) -> Recorder:
        self.started.append(rung.name)
        return self.steps[rung]

    def page(self) -> str:
        return self.journal.page(self.settings, [rung.name for rung in self.steps], {})


def named(rung: Rung, name: str) -> Rung:
    return replace(rung, name=name)


def test_all_rungs_together_cost_at_most_twenty_dollars(tmp_path: Path) -> None:
    all_rungs = rungs.rungs(names.Settings({**ALL, names.FOLDER: str(tmp_path)}))
    assert {rung.lacks for rung in all_rungs} == {None}
    assert sum(rung.limit_usd for rung in all_rungs) <= LIMIT_USD == 20
    assert all(rung.limit_usd > 0 for rung in all_rungs[1:])


def test_rungs_cover_every_service_and_every_suite() -> None:
    given = names.Settings({})
    tests = {word for rung in rungs.rungs(given) for word in rung.tests}
    for module in (test_handlers, test_stores):
        name = module.__name__.rpartition(".")[2]
        suites = [key for key, item in vars(module).items() if key.startswith("Test") and inspect.isclass(item)]
        own = [key for key in suites if vars(module)[key].__module__ == module.__name__]
        assert {word for word in tests if f"/{name}.py" in word} == {f"tests/cloud/{name}.py::{key}" for key in own}
    for kind in (*rungs.KINDS, "mixed"):
        assert any(word.endswith(f"[{kind}]") for word in tests)


def test_rung_that_lacks_a_setting_is_named_and_not_passed(tmp_path: Path) -> None:
    lacking = replace(named(FREE, "no-bucket"), lacks="set X to a bucket")
    climb = Climb(tmp_path, {named(FREE, "first"): recorded(passed()), lacking: recorded(passed())})
    assert climb.ladder.climb() == ladder.OK
    assert climb.started == ["first"]
    assert "rung 2 of 2, no-bucket: not configured: set X to a bucket" in climb.lines
    assert "| no-bucket | not configured: set X to a bucket |" in climb.page()
    assert "1 passed, 1 not configured" in climb.page()


def test_rung_that_costs_more_than_is_left_does_not_start(tmp_path: Path) -> None:
    first, second = named(JOB, "first"), named(JOB, "second")
    climb = Climb(tmp_path, {first: recorded(passed()), second: recorded(passed())}, budget_usd=2.9)
    assert climb.ladder.climb() == ladder.SURPRISE
    assert climb.started == ["first"]
    assert any("$1.90 of $2.90 are left" in line for line in climb.lines)
    assert "stopped: what is left does not pay for it" in climb.lines[-1]
    assert "| second | not started |" in climb.page()


@pytest.mark.parametrize("text", ["20.01", "100", "nan", "inf", "0", "-1", "ten", "1e9"])
def test_amount_above_the_limit_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Invalid, match=r"SKERRY_CLOUD_MAX_USD=.*a ladder may cost \$20 at most"):
        prepare({**ALL, names.MAX_USD: text}, tmp_path, None)


@pytest.mark.parametrize(
    ("given", "start", "message"),
    [
        ({}, None, "nothing is configured: set SKERRY_CLOUD_AWS_REGION"),
        ({"PYTEST_ADDOPTS": "-k x"}, None, "PYTEST_ADDOPTS is set, and may leave tests out"),
        ({names.AWS_REGION: "us-east-1", names.SAGEMAKER_USD: "cheap"}, None, "SAGEMAKER_USD is no price"),
        ({names.AWS_REGION: "us-east-1"}, "moon", "no such rung: moon; there are account, stores-aws"),
        ({names.AWS_REGION: "us-east-1"}, "stores-aws", "no ladder to go on with"),
        ({"SKERRY_CLOUD_REGION": "x"}, None, "no such setting"),
    ],
)
def test_wrong_usage_is_refused_before_a_cloud_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], start: str | None, message: str
) -> None:
    monkeypatch.setenv(names.FOLDER, "")  # is put back
    monkeypatch.setenv(ladder.PRICES, "")
    with pytest.raises(Invalid, match=message):
        prepare(given, tmp_path, start)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            CaseResult(name="t", outcome="failed", text="AssertionError: 2 rounds"),
            "t failed:\nAssertionError: 2 rounds",
        ),
        (CaseResult(name="t", outcome="skipped", text="Skipped: no quota"), "t was skipped: Skipped: no quota"),
        (
            passed(output="ok\nskerry: warning: b-0 restarts\n"),
            "t.py::test_a passed with a skerry: warning: b-0 restarts",
        ),
        (passed(output="warning: right: cannot be checked"), "passed with a warning: right"),
    ],
    ids=["failed", "skipped", "warning of a watch", "warning of a plan"],
)
def test_anything_unexpected_stops_the_ladder(tmp_path: Path, case: CaseResult, message: str) -> None:
    first, second = named(FREE, "first"), named(FREE, "second")
    climb = Climb(tmp_path, {first: recorded(passed("t.py::test_b"), case), second: recorded(passed())})
    assert climb.ladder.climb() == ladder.SURPRISE
    assert climb.started == ["first"]
    assert "stopped at rung first by a surprise:" in climb.lines
    assert any(message in line for line in climb.lines)
    assert climb.lines[-1] == "when it is mended:  scripts/test --cloud --ladder --from first"
    assert message.rpartition("\n")[2] in climb.page()
    assert "| second | not started |" in climb.page()


def test_rung_in_which_no_test_passes_is_a_surprise() -> None:
    assert surprises(FREE, recorded(), 0.1, 0.1, []) == ["no test has passed"]


def test_what_is_left_is_a_surprise_with_its_command(tmp_path: Path) -> None:
    spec = tmp_path / "skerry-cloud-test-0a1b2c.x y" / "skerry.yaml"
    climb = Climb(tmp_path, {FREE: recorded(passed())})
    spec.parent.mkdir()
    spec.touch()
    assert climb.ladder.climb() == ladder.SURPRISE
    assert f"take it away:  skerry destroy '{spec}' --yes --data && rm -r '{spec.parent}'" in climb.lines
    assert "0a1b2c" not in climb.page()


def test_nothing_starts_before_what_an_earlier_ladder_has_left(tmp_path: Path) -> None:
    spec = tmp_path / "skerry-cloud-test-0a1b2c.xyz" / "skerry.yaml"
    spec.parent.mkdir()
    spec.touch()
    with pytest.raises(Invalid, match=f"skerry destroy {spec} --yes --data && rm -r {spec.parent}"):
        prepare({names.AWS_REGION: "us-east-1"}, tmp_path, None)


@pytest.mark.parametrize(("is_left", "words"), [(False, "nothing is left"), (True, "something may still run")])
def test_ctrl_c_reports_what_may_still_run(tmp_path: Path, is_left: bool, words: str) -> None:  # noqa: FBT001
    climb = Climb(tmp_path, {FREE: recorded(passed(), interrupted=True), JOB: recorded(passed())})
    spec = tmp_path / "skerry-cloud-test-0a1b2c.xyz" / "skerry.yaml"
    if is_left:
        spec.parent.mkdir()
        spec.touch()
    assert climb.ladder.climb() == ladder.INTERRUPTED
    command = f"take it away:  skerry destroy {spec} --yes --data && rm -r {spec.parent}"
    assert climb.lines[2:] == [
        f"interrupted in rung free; {words}",
        *([command] if is_left else []),
        "to go on:  scripts/test --cloud --ladder --from free",
    ]
    assert "| free | interrupted | 1 passed |" in climb.page()


def test_signal_is_heard_although_it_was_caught() -> None:
    with interrupts() as heard:
        assert not heard()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert heard()


def test_cost_above_what_was_expected_is_a_surprise() -> None:
    dear = recorded(passed(usd_per_hour=3.0))
    assert cost(JOB, dear, 2.0) == 1.5
    (text,) = surprises(JOB, dear, 2.0, 1.5, [])
    assert text == "its machines cost $1.50 in the time that it took, and $1.00 was expected at most"


def test_unknown_cost_is_counted_by_the_cap() -> None:
    assert cost(JOB, recorded(passed()), 2.0) == 1.0
    assert surprises(JOB, recorded(passed()), 2.0, 1.0, []) == []
    failed = CaseResult(name="t", outcome="failed", usd_per_hour=0.1)
    assert cost(JOB, recorded(failed), 2.0) == 2.0
    assert cost(JOB, recorded(passed(usd_per_hour=0.1), interrupted=True), 2.0) == 2.0


def test_mended_ladder_goes_on_with_what_it_has_spent(tmp_path: Path) -> None:
    first, second, third = (named(JOB, name) for name in ("first", "second", "third"))
    failed = CaseResult(name="t", outcome="failed")
    steps = {first: recorded(passed()), second: recorded(failed), third: recorded(passed())}
    before, after = Climb(tmp_path, steps), Climb(tmp_path, {**steps, second: recorded(passed())})
    assert before.ladder.climb() == ladder.SURPRISE
    with pytest.raises(Invalid, match="second comes before third and has not passed; use --from second"):
        ladder.continued(before.journal.path, "third", ["first", "second", "third"], rehearsal=False)
    with pytest.raises(Invalid, match="was no rehearsal"):
        ladder.continued(before.journal.path, "second", ["first", "second", "third"], rehearsal=True)
    journal = ladder.continued(before.journal.path, "second", ["first", "second", "third"], rehearsal=False)
    after.journal = after.ladder.journal = journal
    assert after.ladder.climb("second") == ladder.OK
    # The first rung checks the account, and is cheap.
    assert after.started == ["first", "second", "third"]
    assert journal.spent_usd == 1 + 2 + 1 + 1 + 1
    assert "3 passed" in after.page()
    assert journal.path.stat().st_mode & 0o77 == 0


def test_killed_ladder_has_counted_the_rung_that_ran(tmp_path: Path) -> None:
    climb = Climb(tmp_path, {JOB: recorded(passed())})

    def killed(_: Rung) -> Recorder:
        raise SystemExit

    climb.ladder.run = killed
    with pytest.raises(SystemExit):
        climb.ladder.climb()
    saved = Journal.load(climb.journal.path)
    assert (saved.rungs[0].result, saved.spent_usd) == ("interrupted", 2.0)


def test_journal_is_whole_after_a_write_that_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    climb = Climb(tmp_path, {JOB: recorded(passed())})
    assert climb.ladder.climb() == ladder.OK
    spent, write = climb.journal.spent_usd, Path.write_text

    def cut_short(path: Path, text: str) -> int:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        climb.journal.save()
    assert Journal.load(climb.journal.path).spent_usd == spent


def test_page_has_no_id_that_a_test_has_recorded(tmp_path: Path) -> None:
    recorder = recorded(passed(output="modal: acme-ml-team\nas Grace Hopper of 210987654321 ``` <b>\x1b[1mbold\x1b[0m"))
    recorder.properties = [("modal-account", "acme-ml-team"), ("principal", "arn:aws:iam::210987654321:user/Grace")]
    climb = Climb(tmp_path, {FREE: recorder})
    assert climb.ladder.climb() == ladder.OK
    page = climb.page()
    assert "modal: <modal-account-1>\nas <principal-1> Hopper of <aws-account-1> ''' <b>bold" in page
    assert "Id(" not in page


def test_page_with_an_id_left_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    climb = Climb(tmp_path, {FREE: recorded(passed())})
    monkeypatch.setattr(ladder, "prepare", lambda *_: climb.ladder)
    monkeypatch.setattr(transcript, "remove_ids", refused)
    monkeypatch.setattr(ladder.signal, "signal", lambda *_: None)
    (tmp_path / "2026-11-28-services.md").write_text("of an earlier day")
    assert ladder.main(["--folder", str(tmp_path)]) == ladder.SURPRISE
    assert "ids are left in it: host in line 1" in capsys.readouterr().out
    assert not (tmp_path / "2026-11-28-services.md").exists()


def refused(*_: object) -> str:
    raise Invalid("not written, because ids are left in it: host in line 1")


def test_page_of_a_real_account_can_be_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    climb = Climb(tmp_path, {FREE: recorded(passed())})
    monkeypatch.setattr(ladder, "prepare", lambda *_: climb.ladder)
    monkeypatch.setattr(ladder.signal, "signal", lambda *_: None)
    assert ladder.main(["--folder", str(tmp_path)]) == ladder.OK
    page = tmp_path / "2026-11-28-services.md"
    assert page.read_text().startswith("# Services on real accounts, 2026-11-28\n")
    assert f"publish it:  cp {page} docs/verified/" in capsys.readouterr().out
