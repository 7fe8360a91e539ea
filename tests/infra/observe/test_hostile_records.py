"""A compromised replica stores records with names that no key can have, and with texts that are no text."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from tests.infra.observe.damaged_log import LAST, OTHER, ROUNDS, SLOTS, Log
from tests.kit.protocol import heartbeat
from tests.kit.records import outcome

from skerry.infra.cli import doctor_text
from skerry.infra.cli.common import print_lines
from skerry.infra.cli.run_screen import RunScreen
from skerry.infra.cli.run_text import participation_lines, plain
from skerry.infra.observe.doctor.examine import examine_store
from skerry.infra.observe.history import read_history
from skerry.infra.observe.live_replicas import live_replicas
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.participation import count_parts
from skerry.infra.report.build_facts import Sources, build_facts
from skerry.infra.report.page import page
from skerry.infra.run.run_record import require_settings
from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.records import MAX_FIGURE, MAX_SECONDS
from skerry.runtime.log.roll_up import RollUp
from skerry.runtime.log.run_record import Run
from skerry.runtime.log.summarize_round import RecordedRound

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        (keys.heartbeat("a-1"), "slot", "a/1"),
        (keys.heartbeat("a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.contribution(LAST, 0, "a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.contribution(LAST, 0, "a-1"), "late", 1.7e308),
        (keys.receipt(LAST, "a-1"), "incarnation", keys.MAX_INCARNATION + 1),
        (keys.decision(LAST, 0), "members", [{"slot": "a/1", "contribution": OTHER, "weight": 1.0}]),
        (keys.commit(LAST), "exchanges", [OTHER] * (keys.MAX_EXCHANGE + 2)),
    ],
)
def test_record_that_names_what_has_no_key_is_unreadable(tmp_path: Path, key: str, field: str, value: object) -> None:
    """Or whose work would make that of all rounds infinite, so that no replica could close one."""
    log = Log(tmp_path)
    log.change(key, **{field: value})
    for on_progress in (None, lambda *_: None):
        findings = examine_store(log.store, on_progress).findings
        assert [finding.key for finding in findings if finding.kind == "unreadable"] == [key]
    read_history(log.store)
    live_replicas(log.store, require_settings(log.store).now, log.clock, SLOTS)


COMMANDS = "\x1b]0;title\x07\x1b[2J\x9b2J\r\u202e"


def test_texts_of_records_are_no_commands_for_a_terminal(tmp_path: Path) -> None:
    """As the lines of a log: the operator reads them beside those of skerry."""
    log = Log(tmp_path)
    beat = heartbeat("a-0", run=log.nonce, waiting_for=("a-1",))
    log.store.replace(keys.heartbeat("a-0"), beat.to_bytes())
    log.change(keys.heartbeat("a-0"), notice=f"stops{COMMANDS}", waiting_for=[f"a-1{COMMANDS}"])
    log.store.create(keys.outcome("a-1", 0), outcome("a-1", run=log.nonce, status="failed").to_bytes())
    log.change(keys.outcome("a-1", 0), reason=f"failed{COMMANDS}")
    log.change(keys.receipt(LAST, "a-2"), disputed=f"wrong{COMMANDS}")
    log.change(keys.receipt(LAST, "a-0"), **{f"unknown{COMMANDS}": 1})
    log.change(keys.member("a-2", 0), host=f"host{COMMANDS}", software={"torch": f"2{COMMANDS}"})
    history = read_history(log.store)
    view = Observer(log.store, require_settings(log.store), log.clock, history).view()
    taken = count_parts(SLOTS, history.rounds, history.starts, history.heartbeats)
    lines = [*plain(view), *participation_lines(taken, ROUNDS), *doctor_text.plain(examine_store(log.store))]
    output = StringIO()
    console = Console(file=output, width=160, height=60)
    print_lines(lines, console)
    console.print(RunScreen(view=view, height=60))
    assert all(word in output.getvalue() for word in ("stops", "failed", "wrong", "unknown"))
    assert not {character for character in COMMANDS if not character.isprintable()} & {*output.getvalue()}


@pytest.mark.parametrize(("figure", "seconds"), [(MAX_FIGURE, MAX_SECONDS), (1.7e308, 1.0), (1.0, 1.7e308)])
def test_figures_of_records_are_too_large_for_no_reader(tmp_path: Path, figure: float, seconds: float) -> None:
    """Means and sums of them are finite, or the record does not parse."""
    log = Log(tmp_path)
    figures = {"loss": -figure, "train_s": seconds, "learning_rate": figure, "metrics": {"val_loss": figure}}
    for number in range(ROUNDS):
        for slot in SLOTS:
            log.change(keys.contribution(number, 0, slot), telemetry=figures)
            log.change(keys.receipt(number, slot), seconds={"upload": seconds, "wait": seconds, "exposed": seconds})
    history, settings = read_history(log.store), require_settings(log.store)
    view = Observer(log.store, settings, log.clock, history).view()
    assert plain(view)
    assert page(build_facts(Sources(history=history, view=view, settings=settings)))


def test_roll_up_of_rounds_to_come_closes_no_round(tmp_path: Path) -> None:
    """Otherwise `up` and `watch` would say that the run is finished."""
    log = Log(tmp_path)
    run = Run.parse(log.read(keys.RUN), keys.RUN)
    log.store.replace(keys.RUN, run.model_copy(update={"rounds": 10}).to_bytes())
    singles = list(RoundListing(log.store, log.nonce, range(ROUNDS)).read())
    real = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
    forged = [replace(item, history=replace(item.history, round=number + ROUNDS)) for number, item in enumerate(real)]
    roll_up = RollUp.of(log.nonce, "a-1", OTHER, [*real, *forged], ())
    log.store.create(keys.roll_up(0, 2 * ROUNDS - 1), roll_up.to_stored())
    history = read_history(log.store)
    assert [item.round for item in history.rounds] == [*range(ROUNDS)]
    view = Observer(log.store, require_settings(log.store), log.clock, history).view()
    assert (view.closed, view.finished) == (ROUNDS, False)
