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

from skerry.infra import render
from skerry.infra.executor import Ending, ReplicaHandle
from skerry.infra.policy import Fate
from skerry.infra.reports import (
    Ended,
    Killing,
    Lines,
    LostSight,
    Remains,
    ReplicaResult,
    Report,
    Restarting,
    Started,
    Stopping,
    Summary,
    Untracked,
)
from skerry.infra.view import Agreement, ReplicaView, RunView

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


class Shown:
    """What a screen shows."""

    def __init__(self, *, terminal: bool, term: str = "xterm", quiet: bool = False) -> None:
        self.out = io.StringIO()
        self.clock = FakeClock()
        environment = {"TERM": term}
        console = Console(
            file=self.out,
            force_terminal=terminal,
            width=120,
            color_system=None,
            legacy_windows=False,
            _environ=environment,
        )
        self.screen = render.screen(console, self.clock, quiet=quiet)

    def __call__(self, *values: Report | RunView) -> str:
        with self.screen:
            for value in values:
                if isinstance(value, RunView):
                    self.screen.view(value)
                else:
                    self.screen.report(value)
        return self.out.getvalue()


def rendered(view: RunView, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, force_terminal=True, width=width, color_system=None, legacy_windows=False).print(
        render.status(view, width)
    )
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()).splitlines()]


def test_the_run_in_lines() -> None:
    assert render.plain(VIEW) == [
        "tiny: round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
        "store: s3://b/tiny",
        "receipts: round 11, 2 replicas: average equal, state DIFFERENT",
        "a-0 state=sync round=12 step=240 loss=2.5000 tok/s=1,500 waiting_for=a-1 up_MB=12.3 down_MB=0.0",
        ('a-1 state="train, silent 61 s" round=11 step=- loss=3.5000 tok/s=100 waiting_for=- up_MB=0.0 down_MB=0.0'),
        'a-2 state="not seen" round=- step=- loss=- tok/s=- waiting_for=- up_MB=0.0 down_MB=0.0',
    ]


def test_what_is_made_up_for_is_told_beside_the_rounds() -> None:
    more = replace(VIEW, closed=41, work=157.5, due=160.0)
    assert render.progress(more).startswith("round 41/40 closed, 98.4 % trained, 2 of 3 replicas")
    more = replace(more, work=159.99)
    assert render.progress(more).startswith("round 41/40 closed, 99.9 % trained, "), "it is not over"
    more = replace(more, closed=42, work=161.0)
    assert render.progress(more).startswith("round 42/40 closed, 100.0 % trained, ")


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_and_now_and_then_the_run() -> None:
    shown = Shown(terminal=False)
    shown(Lines(slot="a-0", lines=("[bold]x[/]", "y")), VIEW)
    later = replace(VIEW, closed=13)
    shown(later)
    shown.clock.advance(10)
    assert shown(later, later).splitlines() == [
        "[a-0] [bold]x[/]",
        "[a-0] y",
        "skerry: round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
        "skerry: round 13/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,500 tokens/s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_leaves_out_what_replicas_write_and_nothing_else(*, terminal: bool) -> None:
    text = Shown(terminal=terminal, quiet=True)(Lines(slot="a-0", lines=("chatter",)), LostSight(error="away"))
    assert "chatter" not in text
    assert "away" in text


def test_on_a_terminal_there_is_a_table_of_every_replica() -> None:
    text = Shown(terminal=True)(VIEW, Lines(slot="a-0", lines=("hello",)))
    assert "[a-0] hello" in text
    last = text[text.rindex("replica ") :]
    for word in ("step", "tok/s", "waiting for", "down MB", "train, silent 61 s", "12.3"):
        assert word in last


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert "\x1b" not in Shown(terminal=True, term="dumb")(VIEW, VIEW)


@pytest.mark.parametrize(
    ("width", "dropped"),
    [
        (120, set[str]()),
        (80, {"waiting for"}),
        (70, {"waiting for", "down MB"}),
        (60, {"waiting for", "down MB", "up MB"}),
    ],
)
def test_a_narrow_terminal_drops_columns_and_breaks_no_name_and_no_header(width: int, dropped: set[str]) -> None:
    lines = rendered(VIEW, width)
    [header] = [line for line in lines if "replica " in line and "state" in line]
    names = ["replica", "state", "round", "step", "loss", "tok/s", "waiting for", "up MB", "down MB"]
    assert re.findall("|".join(names), header) == [name for name in names if name not in dropped]
    assert [line.split()[0] for line in lines if re.match(r" *a-\d ", line)] == ["a-0", "a-1", "a-2"]
    assert any("train, silent 61 s" in line for line in lines)
    assert "…" not in "".join(lines)


def test_below_60_columns_and_where_names_are_long_there_are_lines() -> None:
    assert rendered(VIEW, 50)[-1].endswith("down_MB=0.0")
    long = replace(VIEW, replicas=(ReplicaView(slot="x" * 60 + "-0"),))
    assert "x" * 60 + "-0" in "".join(rendered(long, 80))


def test_a_screen_outlives_the_reader_of_its_pipe_and_says_so() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    gone: list[bool] = []
    with os.fdopen(writer, "w", buffering=1) as out:
        console = Console(file=out, width=100)
        console.on_broken_pipe = lambda: (_ for _ in ()).throw(SystemExit(1))  # rich's own closes pytest's stdout
        screen = render.EnduringScreen(render.screen(console, FakeClock()), console, lambda: gone.append(True))
        with screen:
            screen.report(LostSight(error="away"))
            screen.view(VIEW)
            screen.report(LostSight(error="away"))
    assert gone == [True]


def test_every_report_has_its_line() -> None:
    handle = ReplicaHandle(slot="a-0", index=0, attempt=0, job="77")
    again = ReplicaHandle(slot="a-0", index=0, attempt=1, job="78")
    reports: list[Report] = [
        Started(handle=handle),
        Started(handle=again),
        Restarting(slot="a-0", ending=Ending(signal=9), delay_s=1.25),
        Ended(slot="a-0", fate=Fate.DONE, reason="done"),
        Stopping(reason="on request", budget_s=25.0),
        Killing(reason="asked again"),
        LostSight(error="away"),
        Untracked(error="full"),
    ]
    assert [line.plain for report in reports for line in render.lines_of(report)] == [
        "skerry: a-0 started: process 77",
        "skerry: a-0 started again (start 2): process 78",
        "skerry: a-0 ended with signal SIGKILL; starting it again in 1.2 s",
        "skerry: a-0 done: done",
        "skerry: stopping all replicas on request; they have 25 s; Ctrl-C again kills at once",
        "skerry: killing what is left: asked again",
        "skerry: cannot read the store, the replicas go on: away",
        "skerry: cannot note which processes run, they go on: full",
    ]


def test_a_summary_tells_each_fate_and_the_next_step() -> None:
    results = (
        ReplicaResult(slot="a-0", fate=Fate.DONE, reason="done", restarts=1),
        ReplicaResult(slot="a-2", fate=Fate.FAILED, reason="exit code 20", restarts=0, last_line="ImportError: x"),
    )
    lines = render.summary_lines(Summary(ok=False, view=VIEW, results=results, wall_s=3.0))
    assert lines[1:] == [
        "  a-0: done, loss 2.5000, 12.3 MB up, 0.0 MB down, restarted 1 times (done)",
        "  a-2: failed: ImportError: x (exit code 20)",
        "not done after 3.0 s; `skerry up` continues it, `skerry logs` tells why",
    ]
    assert "nothing was started" in render.summary_lines(Summary(ok=True, view=VIEW, results=(), wall_s=0.0))[-1]


def test_a_summary_tells_that_nothing_was_trained_or_that_the_end_was_not_seen() -> None:
    results = (ReplicaResult(slot="a-0", fate=Fate.DONE, reason="done", restarts=0),)
    lines = render.summary_lines(Summary(ok=False, view=replace(VIEW, closed=0), results=results, wall_s=3.0))
    assert "replicas ended with 0 but 0 of 40 rounds are closed; does the script call connect()?" in lines
    blind = render.summary_lines(Summary(ok=False, view=VIEW, results=results, wall_s=3.0, unseen="away"))
    assert "the store could not be read at the end, this is how it was before: away" in blind
    assert not any("connect()" in line for line in blind)


def test_json_holds_enums_and_paths_as_text() -> None:
    result = ReplicaResult(slot="a-0", fate=Fate.DONE, reason="done", restarts=0)
    parsed = json.loads(render.as_json(Summary(ok=True, view=VIEW, results=(result,), wall_s=1.0)))
    assert parsed["results"][0]["fate"] == "done"
    assert parsed["view"]["replicas"][0]["waiting_for"] == ["a-1"]
    remains = Remains(uri="u", objects=1, size_bytes=2, processes=0, folder=Path("/x"))
    assert json.loads(render.as_json(remains))["folder"] == "/x"
