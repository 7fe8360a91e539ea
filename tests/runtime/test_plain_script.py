"""Scripts that use the manager without `connect()`, and end in the middle of an exchange. Real processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.managers import begin_run, contributions, wait_for
from tests.support.forked import ForkedProcess

from skerry.runtime.contract import Contract
from skerry.runtime.log import keys
from skerry.runtime.log.records import Heartbeat
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from skerry.runtime.store import Store

pytestmark = pytest.mark.slow

SCRIPT: Final = Path(__file__).parents[1] / "support" / "plain_script.py"
TORCHFT_SCRIPT: Final = SCRIPT.with_name("torchft_script.py")
# An exchange waits half an hour; a busy machine takes seconds to end an interpreter that has torch imported.
LIMIT_S: Final = 20.0


def run_torchft_script(tmp_path: Path, *arguments: str, fresh: bool = False) -> tuple[str, str]:
    """Run it as replica r-0 of a run of three rounds to its end. Returns its output and its log."""
    uri = (tmp_path / "run").as_uri()
    begin_run(open_store(uri), ["r-0"], rounds=3)
    contract = Contract(run_uri=uri, slot="r-0", index=0, replicas=1).environment()
    output, errors = tmp_path / "output", tmp_path / "errors"
    words, environment = [str(TORCHFT_SCRIPT), *arguments], {**os.environ, **contract}
    with ForkedProcess(words, environment, output, errors=errors, fresh=fresh) as process:
        assert process.wait(300) == 0, errors.read_text()
    return output.read_text(), errors.read_text()


def last_heartbeat(store: Store) -> Heartbeat:
    key = keys.heartbeat("r-0")
    return Heartbeat.parse(store.read(key) or b"", key)


@pytest.mark.parametrize(
    ("mode", "code", "phase", "notice", "hook"),
    [
        (
            "raise",
            1,
            "failed",
            "RuntimeError: out of memory (plain_script.py",
            ["own hook: RuntimeError: out of memory"],
        ),
        ("exit", 3, "left", "the script ended without shutdown()", []),
        ("interrupt", -signal.SIGINT, "left", "KeyboardInterrupt (plain_script.py", ["own hook: KeyboardInterrupt: "]),
        ("shutdown", 1, "finished", None, ["own hook: RuntimeError: late", "own job"]),
    ],
)
def test_script_that_ends_in_an_exchange_leaves_its_slot_at_once(
    tmp_path: Path, mode: str, code: int, phase: str, notice: str | None, hook: list[str]
) -> None:
    uri = (tmp_path / "run").as_uri()
    store = open_store(uri)
    begin_run(store, ["r-0", "r-1"], minimum=2, start_window_s=3600.0)
    output, errors = tmp_path / "output", tmp_path / "errors"
    with ForkedProcess([str(SCRIPT), uri, mode], dict(os.environ), output, errors=errors, fresh=True) as process:
        wait_for(lambda: (tmp_path / "waiting").exists() or process.poll() is not None)
        assert process.poll() is None, errors.read_text()
        assert last_heartbeat(store).phase == "sync", "a forked child that ends says nothing for the replica"
        (tmp_path / "end").touch()
        if mode == "interrupt":
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == code
    beat = last_heartbeat(store)
    named = beat.notice if notice is None or beat.notice is None else re.sub(r":\d+\)$", "", beat.notice)
    assert (beat.phase, named) == (phase, notice)
    assert output.read_text().splitlines() == ["own end", *hook, "own end"]  # the child's, and the script's
    assert [contribution.slot for contribution in contributions(store)] == ["r-0"]


def test_torchft_script_takes_its_slot_from_the_contract_and_logs(tmp_path: Path) -> None:
    output, log = run_torchft_script(tmp_path, "3", "catch_up")
    assert output == "end of the script at round 3\n"
    assert " r-0 INFO round_closed round=2 slot=r-0" in log
    assert "catch_up_missing" not in log


def test_run_that_ends_before_the_loop_of_a_torchft_script_is_no_failure(tmp_path: Path) -> None:
    output, log = run_torchft_script(tmp_path, "100", "catch_up", fresh=True)
    assert output == "", "the process ended in the loop, with exit code 0"
    assert log.count("\nall 3 rounds of run test are closed\n") == 1  # a save may end after it
    assert "Traceback" not in log
    assert last_heartbeat(open_store((tmp_path / "run").as_uri())).phase == "finished"


def test_script_that_never_calls_catch_up_gets_a_hint_once(tmp_path: Path) -> None:
    _, log = run_torchft_script(tmp_path, "3", "no_catch_up")
    assert log.count("catch_up_missing") == 1
    assert "WARNING catch_up_missing slot=r-0 why='call manager.catch_up(inner_optimizer) at the top" in log
