"""Screens, and the texts of runs and reports."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.support.clocks import FakeClock

from skerry.infra.cli import common, event_text, run_text, screens
from skerry.infra.cli.job_text import job_lines
from skerry.infra.local.up_destroy_events import (
    Event,
    KillingReplicas,
    Leftovers,
    LogLines,
    ReplicaRestarting,
    ReplicaResult,
    ReplicaStarted,
    StoppingReplicas,
    StoreUnreadable,
    Summary,
    UntrackedProcess,
)
from skerry.infra.observe.run_view import Agreement, ReplicaView, RunView
from skerry.infra.provision.handler import Condition
from skerry.infra.provision.target import JobView
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


def show(screen: screens.Screen, *values: Event | RunView) -> None:
    with screen:
        for value in values:
            if isinstance(value, RunView):
                screen.view(value)
            else:
                screen.report(value)


def shown(console: Console, *values: Event | RunView, quiet: bool = False) -> str:
    show(screens.open_screen(console, FakeClock(), quiet=quiet), *values)
    return output_of(console)


def rendered(view: RunView, width: int) -> list[str]:
    console = console_of(width)
    console.print(run_text.status(view, width))
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", output_of(console)).splitlines()]


def test_plain_lists_the_run_and_its_replicas() -> None:
    assert run_text.plain(VIEW) == [
        "tiny: round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
        "store: s3://b/tiny",
        "receipts: round 11, 2 replicas: average equal, state DIFFERENT",
        "a-0 state=sync round=12 step=240 loss=2.5000 tok/s=1,500 waiting_for=a-1 up_MB=12.3 down_MB=0.0",
        ('a-1 state="train, silent 61 s" round=11 step=- loss=3.5000 tok/s=100 waiting_for=- up_MB=0.0 down_MB=0.0'),
        'a-2 state="not seen" round=- step=- loss=- tok/s=- waiting_for=- up_MB=0.0 down_MB=0.0',
    ]


def test_progress_shows_the_share_of_work_with_make_up() -> None:
    more = replace(VIEW, closed=41, work=157.5, due=160.0)
    assert run_text.progress(more).startswith("round 41/40 closed, 98.4 % trained, 2 of 3 replicas")
    more = replace(more, work=159.99)
    assert run_text.progress(more).startswith("round 41/40 closed, 99.9 % trained, "), "it is not over"
    more = replace(more, closed=42, work=161.0)
    assert run_text.progress(more).startswith("round 42/40 closed, 100.0 % trained, ")


def test_plain_screen_prints_reports_and_periodic_progress() -> None:
    console, clock, later = console_of(terminal=False), FakeClock(), replace(VIEW, closed=13)
    screen = screens.open_screen(console, clock)
    show(screen, LogLines(slot="a-0", lines=("[bold]x[/]", "y")), VIEW, later)
    clock.advance(10)
    show(screen, later, later)
    assert output_of(console).splitlines() == [
        "[a-0] [bold]x[/]",
        "[a-0] y",
        "skerry: round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
        "skerry: round 13/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_screen_leaves_out_replica_lines_only(*, terminal: bool) -> None:
    chatter = LogLines(slot="a-0", lines=("chatter",))
    text = shown(console_of(terminal=terminal), chatter, StoreUnreadable(error="away"), quiet=True)
    assert "chatter" not in text
    assert "away" in text


def test_terminal_shows_a_table_of_all_replicas() -> None:
    text = shown(console_of(), VIEW, LogLines(slot="a-0", lines=("hello",)))
    assert "[a-0] hello" in text
    last = text[text.rindex("replica ") :]
    for word in ("step", "tok/s", "waiting for", "down MB", "train, silent 61 s", "12.3"):
        assert word in last


def test_dumb_terminal_gets_plain_lines() -> None:
    assert "\x1b" not in shown(console_of(term="dumb"), VIEW, VIEW)


@pytest.mark.parametrize(
    ("width", "missing"),
    [
        (120, set[str]()),
        (80, {"waiting for"}),
        (70, {"waiting for", "down MB"}),
        (60, {"waiting for", "down MB", "up MB"}),
    ],
)
def test_narrow_table_drops_columns_and_wraps_nothing(width: int, missing: set[str]) -> None:
    lines = rendered(VIEW, width)
    [header] = [line for line in lines if "replica " in line and "state" in line]
    names = ["replica", "state", "round", "step", "loss", "tok/s", "waiting for", "up MB", "down MB"]
    assert re.findall("|".join(names), header) == [name for name in names if name not in missing]
    assert [line.split()[0] for line in lines if re.match(r" *a-\d ", line)] == ["a-0", "a-1", "a-2"]
    assert any("train, silent 61 s" in line for line in lines)
    assert "…" not in "".join(lines)


def test_very_narrow_table_becomes_lines() -> None:
    assert rendered(VIEW, 50)[-1].endswith("down_MB=0.0")
    long = replace(VIEW, replicas=(ReplicaView(slot="x" * 60 + "-0"),))
    assert "x" * 60 + "-0" in "".join(rendered(long, 80))


def test_enduring_screen_survives_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone: list[bool] = []
    with os.fdopen(writer, "w", buffering=1) as out:
        console = Console(file=out, width=100)
        console.on_broken_pipe = lambda: (_ for _ in ()).throw(SystemExit(1))  # rich's own closes pytest's stdout
        screen = screens.EnduringScreen(screens.open_screen(console, FakeClock()), console, lambda: gone.append(True))
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
        DONE,
        StoppingReplicas(reason="on request", budget_s=25.0),
        KillingReplicas(reason="asked again"),
        StoreUnreadable(error="away"),
        UntrackedProcess(error="full"),
    ]
    assert [line.plain for report in reports for line in event_text.lines_of(report)] == [
        "skerry: a-0 started: process 77",
        "skerry: a-0 started again (start 2): process 78",
        "skerry: a-0 ended with signal SIGKILL; restarting it in 1.2 s",
        "skerry: a-0 done: done",
        "skerry: stopping all replicas on request; they have 25 s; Ctrl-C again kills them at once",
        "skerry: killing the replicas that are left: asked again",
        "skerry: cannot read the store, the replicas keep running: away",
        "skerry: cannot record which processes run, they keep running: full",
    ]


def test_summary_lists_each_fate_and_the_next_step() -> None:
    failed = ReplicaResult(
        slot="a-2", fate=ReplicaFate.FAILED, reason="exit code 20", restarts=0, last_line="ImportError: x"
    )
    results = (replace(DONE, restarts=1), failed)
    lines = run_text.summary_lines(Summary(ok=False, view=VIEW, results=results, wall_s=3.0))
    assert lines[1:] == [
        "  a-0: done, loss 2.5000, 12.3 MB up, 0.0 MB down, restarted 1 times (done)",
        "  a-2: failed: ImportError: x (exit code 20)",
        "the replicas that were missing in rounds are not known, because the log could not be read",
        "not done after 3.0 s; `skerry up` continues it, `skerry logs` shows why",
    ]
    assert "nothing was started" in run_text.summary_lines(Summary(ok=True, view=VIEW, results=(), wall_s=0.0))[-1]


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
    parsed = json.loads(common.to_json(Summary(ok=True, view=VIEW, results=(DONE,), wall_s=1.0)))
    assert parsed["results"][0]["fate"] == "done"
    assert parsed["view"]["replicas"][0]["waiting_for"] == ["a-1"]
    remains = Leftovers(uri="u", objects=1, size_bytes=2, processes=0, folder=Path("/x"))
    assert json.loads(common.to_json(remains))["folder"] == "/x"


def test_job_lines_show_state_attempt_exit_code_and_reason() -> None:
    jobs = [
        JobView(slot="b-0", job="1", state="FAILED", condition=Condition.LOST, exit_code=20, attempt=2),
        JobView(slot="b-1", job="2", state="RUNNABLE", condition=Condition.READY, why="no machine yet"),
    ]
    assert [line.plain for line in job_lines(jobs)] == [
        "  b-0: failed attempt 2 exit code 20",
        "  b-1: runnable: no machine yet",
    ]
