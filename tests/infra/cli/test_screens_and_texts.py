"""Screens, and the texts of runs and reports."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.clocks import FakeClock

from skerry.infra.cli import common, live_run_table, run_text, supervisor_output_text
from skerry.infra.cli.job_text import job_lines
from skerry.infra.local.up_destroy_events import (
    Event,
    KillingReplicas,
    Leftovers,
    LogLines,
    ReplicaRestarting,
    ReplicaResult,
    ReplicaStarted,
    RoundsMissed,
    StoppingReplicas,
    StoreUnreadable,
    Summary,
    UntrackedProcess,
)
from skerry.infra.observe.participation import Figures, Participation, ReplicaParticipation
from skerry.infra.observe.run_view import Agreement, ReplicaView, RunEvent, RunView
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.target_and_store_interfaces import JobView
from skerry.infra.run.executor import Ending, ReplicaHandle
from skerry.infra.run.restart_policy import ReplicaFate

VIEW = RunView(
    run="tiny",
    uri="s3://b/tiny",
    rounds=40,
    closed=12,
    work=0.0,
    due=None,
    participants=2,
    replicas=(
        ReplicaView(
            slot="a-0",
            incarnation=0,
            phase="sync",
            silent_s=0.0,
            round=12,
            inner_step=240,
            loss=2.5,
            tokens_per_s=1500.4,
            waiting_for=("a-1",),
            uploaded_bytes=12_340_000,
        ),
        ReplicaView(slot="a-1", phase="train", silent_s=61.2, silent=True, round=11, loss=3.5, tokens_per_s=100.0),
        ReplicaView(slot="a-2"),
    ),
    agreement=Agreement(round=11, slots=("a-0", "a-1"), average=True, state=False),
)
DONE = ReplicaResult(slot="a-0", fate=ReplicaFate.DONE, reason="done", restarts=0)


def console_of(width: int = 120, *, terminal: bool = True, term: str = "xterm") -> Console:
    """A console that writes to a buffer."""
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": term},
    )


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show(screen: live_run_table.Screen, *values: Event | RunView) -> None:
    with screen:
        for value in values:
            if isinstance(value, RunView):
                screen.view(value)
            else:
                screen.report(value)


def shown(console: Console, *values: Event | RunView, quiet: bool = False) -> str:
    show(live_run_table.open_screen(console, FakeClock(), quiet=quiet), *values)
    return output_of(console)


def test_plain_lists_the_run_and_its_replicas() -> None:
    assert run_text.plain(VIEW) == [
        "tiny: 12 of 40 rounds done, 2 of 3 replicas in the last, mean loss 3.000, 1,500 tokens/s",
        "store: s3://b/tiny",
        "receipts: round 11, 2 replicas: average equal, state DIFFERENT",
        "a-0 state=sync round=12 step=240 loss=2.500 tok/s=1,500 waiting_for=a-1 up_MB=12.3 down_MB=0.0",
        ('a-1 state="train, silent 61 s" round=11 step=- loss=3.500 tok/s=100 waiting_for=- up_MB=0.0 down_MB=0.0'),
        'a-2 state="not seen" round=- step=- loss=- tok/s=- waiting_for=- up_MB=0.0 down_MB=0.0',
    ]


def test_progress_shows_the_share_of_work_with_make_up() -> None:
    more = replace(VIEW, closed=41, work=157.5, due=160.0)
    assert run_text.progress(more).startswith("41 of 40 rounds done, 98.4 % trained, 2 of 3 replicas")
    more = replace(more, work=159.99)
    assert run_text.progress(more).startswith("41 of 40 rounds done, 99.9 % trained, "), "it is not over"
    more = replace(more, closed=42, work=161.0)
    assert run_text.progress(more).startswith("42 of 40 rounds done, 100.0 % trained, ")


def test_plain_screen_prints_reports_and_periodic_progress() -> None:
    console, clock, later = console_of(terminal=False), FakeClock(), replace(VIEW, closed=13)
    screen = live_run_table.open_screen(console, clock)
    show(screen, LogLines(slot="a-0", lines=("[bold]x[/]", "y")), VIEW, later)
    clock.advance(10)
    show(screen, later, later)
    assert output_of(console).splitlines() == [
        "[a-0] [bold]x[/]",
        "[a-0] y",
        "skerry: 12 of 40 rounds done, 2 of 3 replicas in the last, mean loss 3.000, 1,500 tokens/s",
        "skerry: 13 of 40 rounds done, 2 of 3 replicas in the last, mean loss 3.000, 1,500 tokens/s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_screen_leaves_out_replica_lines_only(*, terminal: bool) -> None:
    chatter = LogLines(slot="a-0", lines=("chatter",))
    text = shown(console_of(terminal=terminal), chatter, StoreUnreadable(error="away"), quiet=True)
    assert "chatter" not in text
    assert "away" in text


def test_terminal_shows_the_run_below_the_lines_of_its_replicas() -> None:
    text = shown(console_of(), VIEW, LogLines(slot="a-0", lines=("hello",)))
    assert "[a-0] hello" in text
    last = text[text.rindex("round 12 of 40") :]
    for word in ("replica", "tok/s", "waits for", "a-0", "a-1", "not seen", "silent 1 m 01 s", "DIFFERENT"):
        assert word in last


def test_screen_of_up_shows_the_last_events_below_the_replicas() -> None:
    event = RunEvent(at=0.0, about="round 11", text="closed with 1 of 3; abstained: a-1 (NaN in 'w')", bad=True)
    text = shown(console_of(), replace(VIEW, events=(event,)), LogLines(slot="a-0", lines=("hello",)))
    last = text[text.rindex("round 12 of 40") :]
    assert last.index("a-2") < last.index("round 11  closed with 1 of 3; abstained: a-1 (NaN in 'w')")


def test_dumb_terminal_gets_plain_lines() -> None:
    assert "\x1b" not in shown(console_of(term="dumb"), VIEW, VIEW)


def test_enduring_screen_survives_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone: list[bool] = []
    with os.fdopen(writer, "w", buffering=1) as out:
        console = Console(file=out, width=100)
        console.on_broken_pipe = lambda: (_ for _ in ()).throw(SystemExit(1))  # rich's own closes pytest's stdout
        screen = live_run_table.EnduringScreen(
            live_run_table.open_screen(console, FakeClock()), console, lambda: gone.append(True)
        )
        with screen:
            screen.report(StoreUnreadable(error="away"))
            screen.view(VIEW)
            screen.report(StoreUnreadable(error="away"))
    assert gone == [True]


def test_every_report_has_a_line() -> None:
    handle = ReplicaHandle(slot="a-0", index=0, attempt=0, job="77")
    reports: list[Event] = [
        ReplicaStarted(handle=handle),
        ReplicaStarted(handle=replace(handle, attempt=1, job="78")),
        ReplicaRestarting(slot="a-0", ending=Ending(signal=9), delay_s=1.25),
        ReplicaRestarting(slot="a-0", ending=Ending(signal=9, why="by a test"), delay_s=1.25),
        ReplicaRestarting(slot="a-0", ending=Ending(exit_code=10), delay_s=1.25, last_line="ValueError: x"),
        ReplicaResult(slot="a-0", fate=ReplicaFate.FAILED, reason="exit code 20", restarts=0, last_line="Invalid: x"),
        DONE,
        RoundsMissed(text="a-1 is missing since round 3"),
        StoppingReplicas(reason="on request", budget_s=25.0),
        KillingReplicas(reason="asked again"),
        StoreUnreadable(error="away"),
        UntrackedProcess(error="full"),
    ]
    assert [line.plain for report in reports for line in supervisor_output_text.lines_of(report)] == [
        "skerry: a-0 started: process 77",
        "skerry: a-0 started again (start 2): process 78",
        (
            "skerry: warning: a-0: killed (signal SIGKILL); if not by a person, then out of memory: use a smaller "
            "batch or model, or a machine with more memory; restarting it in 1.2 s"
        ),
        "skerry: warning: a-0: killed (signal SIGKILL): by a test; restarting it in 1.2 s",
        "skerry: warning: a-0: exit code 10: ValueError: x; restarting it in 1.2 s",
        "skerry: warning: a-0 failed and is not restarted: exit code 20: Invalid: x",
        "skerry: a-0 is done",
        "skerry: warning: a-1 is missing since round 3",
        "skerry: stopping all replicas on request; they have 25 s; Ctrl-C again kills them at once",
        "skerry: killing the replicas that are left: asked again",
        "skerry: cannot read the store, the replicas keep running: away",
        "skerry: cannot record which processes run, they keep running: full",
    ]


def taken(**changes: object) -> Participation:
    """Two replicas of a run of 20 rounds: a-0 was in all of them, a-1 failed in round 3."""
    trained = Figures(loss_first=4.0, loss_last=1.5, tokens=12_000, uploaded_bytes=12_300_000, downloaded_bytes=100_000)
    steady = ReplicaParticipation(
        slot="a-0", of=20, last=19, missing=(), cut=0, starts=1, failed=False, reasons=(), abstained={}, figures=trained
    )
    reason = "ValueError: bad sample in shard 17 (train.py:39, round 3)"
    broken = replace(
        steady, slot="a-1", missing=tuple(range(3, 20)), starts=3, failed=True, reasons=(reason,), figures=Figures()
    )
    whole = Participation(rounds=20, complete=3, replicas=(steady, broken))
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_summary_lists_each_replica_and_the_next_step() -> None:
    failed = ReplicaResult(
        slot="a-1", fate=ReplicaFate.FAILED, reason="exit code 10; 2 of 2 restarts used", restarts=2, last_line="x"
    )
    ended = Summary(ok=True, view=replace(VIEW, rounds=20), results=(DONE, failed), wall_s=3.0, participation=taken())
    assert run_text.summary_lines(ended) == [
        (
            "tiny: 20 of 20 rounds; all 2 replicas in 3 of them; receipts: round 11, 2 replicas: average equal, state "
            "DIFFERENT"
        ),
        "  a-0: in all 20 rounds, loss 4.000 to 1.500, 12,000 tokens, 12.3 MB up, 0.1 MB down",
        (
            "warning: a-1: failed (exit code 10; 2 of 2 restarts used); missing in 17 of 20 rounds (3-19): "
            "ValueError: bad sample in shard 17 (train.py:39, round 3); 3 starts in all"
        ),
        "done in 3.0 s, but not by all replicas (exit code 3): a replica failed, or missed half or more of the rounds",
    ]
    assert not ended.by_all
    assert "nothing was started" in run_text.summary_lines(replace(ended, results=()))[-1]
    assert "not done after 3.0 s; `skerry up` continues it" in run_text.summary_lines(replace(ended, ok=False))[-1]


def test_summary_without_a_log_lists_what_failed() -> None:
    failed = ReplicaResult(
        slot="a-2", fate=ReplicaFate.FAILED, reason="exit code 20", restarts=0, last_line="ImportError: x"
    )
    ended = Summary(ok=False, view=VIEW, results=(DONE, failed), wall_s=3.0)
    assert run_text.summary_lines(ended)[1:-1] == [
        "the replicas that were missing in rounds are not known, because the log could not be read",
        "warning: a-2: failed (exit code 20): ImportError: x",
    ]


def test_status_lists_only_replicas_with_a_warning() -> None:
    headline, warning = run_text.participation_lines(taken(), 40)
    assert headline == "20 of 40 rounds; all 2 replicas in 3 of them"
    assert warning.startswith("warning: a-1: missing in 17 of 20 rounds (3-19): ValueError: bad sample")


def test_lines_are_printed_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=20, force_terminal=False)
    lines = ["KeyError: ':skull:' [/red] 12 of [bold]x[/bold] in a long line"]
    common.print_lines(lines, console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == lines


def test_run_without_a_round_counts_the_replicas_that_joined() -> None:
    steady = replace(taken().replicas[0], of=0)
    new = Participation(rounds=0, complete=0, replicas=(steady, replace(steady, slot="a-1", starts=0)))
    assert new.headline(20) == "0 of 20 rounds; 1 of 2 replicas have joined"


def test_summary_reports_missing_training_or_an_unread_end() -> None:
    lines = run_text.summary_lines(Summary(ok=False, view=replace(VIEW, closed=0), results=(DONE,), wall_s=3.0))
    assert "replicas ended with 0 but 0 of 40 rounds are closed; does the script call connect()?" in lines
    blind = run_text.summary_lines(Summary(ok=False, view=VIEW, results=(DONE,), wall_s=3.0, unseen="away"))
    assert "the store could not be read at the end; this is the last known state: away" in blind
    assert not any("connect()" in line for line in blind)


def test_finished_run_names_the_command_for_its_model_as_typed() -> None:
    typed = common.as_typed("export", Path("my runs/tiny.yaml"), ["run=two words", "outer.rounds=12"])
    command = "skerry export 'my runs/tiny.yaml' --set 'run=two words' --set outer.rounds=12 -o model.safetensors"
    assert run_text.model_lines(replace(VIEW, rounds=12), typed) == [f"the trained model as a file: {command}"]
    assert run_text.model_lines(VIEW, typed) == run_text.model_lines(None, typed) == []
    assert common.as_typed("export", common.DEFAULT_SPEC, ()) == "skerry export"


def test_json_writes_enums_and_paths_as_text() -> None:
    parsed = json.loads(common.to_json(Summary(ok=True, view=VIEW, results=(DONE,), wall_s=1.0), by_all=False))
    assert (parsed["ok"], parsed["by_all"]) == (True, False)
    assert parsed["results"][0]["fate"] == "done"
    assert parsed["view"]["replicas"][0]["waiting_for"] == ["a-1"]
    remains = Leftovers(uri="u", objects=1, size_bytes=2, processes=0, folder=Path("/x"))
    assert json.loads(common.to_json(remains))["folder"] == "/x"


def test_job_lines_show_state_attempt_exit_code_and_reason() -> None:
    jobs = [
        JobView(slot="b-0", job="1", state="FAILED", condition=Condition.LOST, exit_code=20, attempt=2),
        JobView(slot="b-1", job="2", state="RUNNABLE", condition=Condition.READY, why="no machine yet"),
        JobView(
            slot="b-2", job="3", state="FAILED", condition=Condition.LOST, exit_code=137, why="exit code 137: killed"
        ),
        JobView(slot="b-3", job="4", state="FAILED", condition=Condition.LOST, exit_code=1, why="exit code 10: x"),
    ]
    assert [line.plain for line in job_lines(jobs)] == [
        "  b-0: failed attempt 2 exit code 20",
        "  b-1: runnable: no machine yet",
        "  b-2: failed: exit code 137: killed",
        "  b-3: failed exit code 1: exit code 10: x",
    ]
