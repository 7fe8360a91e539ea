from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

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
)
from skerry.infra.view import Agreement, ReplicaView, RunView

VIEW = RunView(
    run="tiny",
    uri="s3://b/tiny",
    rounds=40,
    closed=12,
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
        ReplicaView(slot="a-1", phase="train", silent_s=61.2, round=11, loss=3.5, tokens_per_s=100.0),
        ReplicaView(slot="a-2"),
    ),
    agreement=Agreement(round=11, slots=("a-0", "a-1"), average=True, state=False),
)


def shown(*values: Report | RunView, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None, legacy_windows=False)
    with render.screen(console) as screen:
        for value in values:
            if isinstance(value, RunView):
                screen.view(value)
            else:
                screen.report(value)
    return out.getvalue()


def test_the_run_in_lines() -> None:
    assert render.plain(VIEW) == [
        "tiny: round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,600 tokens/s",
        "store: s3://b/tiny",
        "receipts: round 11, 2 replicas: average equal, state DIFFERENT",
        (
            "a-0 state=sync round=12 inner_step=240 loss=2.5000 tokens/s=1,500 waiting_for=a-1 "
            "uploaded=12.3MB downloaded=0.0MB"
        ),
        (
            "a-1 state=train,silent61s round=11 inner_step=- loss=3.5000 tokens/s=100 waiting_for=- "
            "uploaded=0.0MB downloaded=0.0MB"
        ),
        "a-2 state=notseen round=- inner_step=- loss=- tokens/s=- waiting_for=- uploaded=0.0MB downloaded=0.0MB",
    ]


def test_elsewhere_than_on_a_terminal_there_are_plain_lines_and_one_per_round() -> None:
    text = shown(Lines(slot="a-0", lines=("[bold]x[/]", "y")), VIEW, VIEW, terminal=False)
    assert text.splitlines() == [
        "[a-0] [bold]x[/]",
        "[a-0] y",
        "round 12/40 closed, 2 of 3 replicas in the last, mean loss 3.0000, 1,600 tokens/s",
    ]


def test_on_a_terminal_there_is_a_table_of_every_replica() -> None:
    text = shown(VIEW, Lines(slot="a-0", lines=("hello",)), terminal=True)
    assert "[a-0] hello" in text
    last = text[text.rindex("┏") :]
    for word in ("replica", "inner step", "tokens/s", "waiting for", "downloaded", "train, silent 61 s", "12.3 MB"):
        assert word in last


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
    ]
    assert [line.plain for report in reports for line in render.lines_of(report)] == [
        "skerry: a-0 started: process 77",
        "skerry: a-0 started again (start 2): process 78",
        "skerry: a-0 ended with signal SIGKILL; starting it again in 1.2 s",
        "skerry: a-0 done: done",
        "skerry: stopping all replicas on request; they have 25 s; Ctrl-C again kills at once",
        "skerry: killing what is left: asked again",
        "skerry: cannot read the store, the replicas go on: away",
    ]


def test_a_summary_tells_each_fate_and_the_next_step() -> None:
    results = (
        ReplicaResult(slot="a-0", fate=Fate.DONE, reason="done", restarts=1),
        ReplicaResult(slot="a-2", fate=Fate.FAILED, reason="exit code 20", restarts=0),
    )
    lines = render.summary_lines(Summary(ok=False, view=VIEW, results=results, wall_s=3.0))
    assert lines[1:] == [
        "  a-0: done, loss 2.5000, 12.3 MB up, 0.0 MB down, restarted 1 times (done)",
        "  a-2: failed (exit code 20)",
        "not done after 3.0 s; `skerry up` continues it, `skerry logs` tells why",
    ]
    assert "nothing was started" in render.summary_lines(Summary(ok=True, view=VIEW, results=(), wall_s=0.0))[-1]


def test_json_holds_enums_and_paths_as_text() -> None:
    result = ReplicaResult(slot="a-0", fate=Fate.DONE, reason="done", restarts=0)
    parsed = json.loads(render.as_json(Summary(ok=True, view=VIEW, results=(result,), wall_s=1.0)))
    assert parsed["results"][0]["fate"] == "done"
    assert parsed["view"]["replicas"][0]["waiting_for"] == ["a-1"]
    remains = Remains(uri="u", objects=1, size_bytes=2, processes=0, folder=Path("/x"))
    assert json.loads(render.as_json(remains))["folder"] == "/x"
