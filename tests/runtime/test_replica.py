"""connect(): the contract, the loop, and every way to end; in this process and, for signals, in real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.logs import run_record
from tests.support.managers import decisions
from tests.support.processes import ROOT
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime import keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import STOP_BUDGET_S, Contract, ExitCode
from skerry.runtime.errors import Diverged, Invalid, RunFinished, Unauthorized
from skerry.runtime.journal import Journal
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.membership import Presence
from skerry.runtime.records import Heartbeat, Outcome
from skerry.runtime.replica import Replica, connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.runtime.store import Store

SCRIPT = Path(__file__).parents[1] / "support" / "script.py"
KILLED_AFTER_ITS_CLAIM = """
import logging, os, signal

class Kill(logging.Handler):
    def emit(self, record):
        if getattr(record, "event", "") == "joined":
            os.kill(os.getpid(), signal.SIGKILL)

logging.getLogger("skerry").addHandler(Kill())
logging.getLogger("skerry").setLevel(logging.INFO)
from skerry.runtime.replica import connect
with connect() as replica:
    replica.manager()
"""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "run").as_uri()


def begin(uri: str, *, slots: int = 1, rounds: int | None = 3, minimum: int = 1) -> Store:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=tuple(f"r-{i}" for i in range(slots)), rounds=rounds, min_replicas=minimum)
    store.create(keys.RUN, run.to_bytes())
    return store


def place(uri: str, index: int = 0, replicas: int = 1) -> dict[str, str]:
    return Contract(run_uri=uri, slot=f"r-{index}", index=index, replicas=replicas).environment()


def outcome(store: Store, slot: str = "r-0", incarnation: int = 0) -> Outcome:
    key = keys.outcome(slot, incarnation)
    return Outcome.parse(store.read(key) or b"", key)


def train(replica: Replica, reclaimed_in: int | None = None) -> list[int]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    seen: list[int] = []
    with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
        for step in replica.steps(inner):
            inner.zero_grad()
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            replica.log(loss=loss.item(), tokens=10)
            inner.step()
            seen.append(step)
            if step == reclaimed_in:
                replica.request_stop("reclaimed")
    return seen


def test_a_run_to_its_end_leaves_the_outcome_done(uri: str) -> None:
    store = begin(uri, rounds=3)
    with connect(place(uri)) as replica:
        assert train(replica) == list(range(12))
    told = outcome(store)
    assert (told.status, told.exit_code, told.round, told.tokens) == ("done", 0, 3, 120)
    assert told.loss_first is not None
    assert told.loss_last is not None
    assert told.loss_last < told.loss_first
    assert Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "").phase == "finished"


def _log(replica: Replica, loss: object, tokens: object) -> None:
    manager = replica.manager()
    replica.log(loss=loss, tokens=tokens)  # type: ignore[arg-type]
    manager.presence.beat()


@pytest.mark.parametrize("number", [np.int64, np.float32, torch.tensor])
def test_numbers_of_other_libraries_are_numbers(uri: str, number: Callable[[int], object]) -> None:
    store = begin(uri)
    with connect(place(uri)) as replica:
        _log(replica, number(2), np.int64(7))
    assert (outcome(store).tokens, outcome(store).loss_last) == (7, 2.0)
    assert Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "").tokens == 7


@pytest.mark.parametrize(("loss", "tokens"), [(1.0, 0.5), ("low", 1), (torch.ones(2), 1), (1.0, "many")])
def test_what_is_no_number_ends_the_replica_by_the_rules(uri: str, loss: object, tokens: object) -> None:
    store = begin(uri)
    with pytest.raises(SystemExit), connect(place(uri)) as replica:
        _log(replica, loss, tokens)
    assert outcome(store).exit_code == ExitCode.PERMANENT
    assert "log takes" in outcome(store).reason


def test_a_replica_goes_on_within_its_round_if_the_run_says_so(uri: str) -> None:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=("r-0",), rounds=3, min_replicas=1)
    store.create(keys.RUN, run.model_copy(update={"keep_unfinished_s": 3600.0}).to_bytes())
    with pytest.raises(SystemExit), connect(place(uri)) as replica:
        train(replica, reclaimed_in=5)
    with connect(place(uri)) as replica:
        assert train(replica)[0] == 6
    assert outcome(store, incarnation=1).status == "done"


def test_a_restart_goes_on_at_the_step_where_the_run_is(uri: str) -> None:
    store = begin(uri, rounds=3)
    with pytest.raises(SystemExit), connect(place(uri)) as replica:
        _until_the_power_cut(replica)
    assert outcome(store).status == "retry"
    with connect(place(uri)) as replica:
        assert train(replica) == list(range(4, 12))  # round 0 was closed with step 3
    assert outcome(store, incarnation=1).status == "done"


def _until_the_power_cut(replica: Replica) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    with DiLoCo(manager, [model], inner, [torch.optim.SGD(model.parameters(), lr=0.7)], sync_every=4):
        for step in replica.steps(inner):
            if step == 6:
                raise OSError("power cut")
            inner.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            inner.step()


def _fail(replica: Replica, error: BaseException) -> None:
    replica.manager()
    raise error


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (OSError("disk full"), ExitCode.RETRY, "retry"),
        (RuntimeError("should_commit failed 4 times"), ExitCode.RETRY, "retry"),
        (TimeoutError("nobody came"), ExitCode.RETRY, "retry"),
        (Invalid("wrong"), ExitCode.PERMANENT, "failed"),
        (Unauthorized("no"), ExitCode.PERMANENT, "failed"),
        (Diverged("other bits"), ExitCode.PERMANENT, "failed"),
        (KeyboardInterrupt(), ExitCode.STOPPED, "stopped"),
    ],
)
def test_every_error_has_its_exit_code_and_outcome(uri: str, error: BaseException, code: ExitCode, status: str) -> None:
    store = begin(uri)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _fail(replica, error)
    assert ended.value.code == code
    told = outcome(store)
    assert (told.status, told.exit_code) == (status, code)
    assert str(error) in told.reason or status == "stopped"


def test_who_is_replaced_by_one_that_lives_is_not_started_again(uri: str) -> None:
    store = begin(uri)
    newer: list[Presence] = []

    def be_replaced(replica: Replica) -> None:
        presence = replica.manager().presence
        newer.append(Presence(Journal(store, replica.run), SystemClock(), "r-0", 0.05))
        newer[0].start()
        presence.fence()

    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        be_replaced(replica)
    newer[0].stop("left")
    assert ended.value.code == ExitCode.PERMANENT
    assert outcome(store).status == "failed"
    assert "the newer one lives, so this one is not to be started again" in outcome(store).reason


@pytest.mark.slow
def test_who_is_replaced_by_one_that_was_killed_right_after_its_claim_is_started_again(uri: str) -> None:
    """Else the slot would be empty for ever: its launcher has been told to give it up."""
    store = begin(uri, rounds=100)
    with run_script(uri, "slow") as old:
        assert old.stdout is not None
        old.stdout.readline()
        with subprocess.Popen([sys.executable, "-c", KILLED_AFTER_ITS_CLAIM], env=environment_of(uri)) as newer:
            assert newer.wait(60) == -signal.SIGKILL
        assert len(store.list(keys.members_of("r-0"))) == 2
        old.communicate(timeout=60)
    assert old.returncode == ExitCode.RETRY
    told = outcome(store)
    assert (told.status, told.exit_code) == ("retry", 10)
    assert "the newer one does not beat, so the slot is empty: start another" in told.reason
    with run_script(uri, "train") as again:
        again.communicate(timeout=60)
    assert again.returncode == ExitCode.DONE
    assert outcome(store, incarnation=2).status == "done"


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (OSError("model export failed"), ExitCode.RETRY, "retry"),
        (Diverged("other bits"), ExitCode.PERMANENT, "failed"),
        (SystemExit(3), ExitCode.PERMANENT, "failed"),
    ],
)
def test_what_fails_after_the_last_round_is_not_swallowed(
    uri: str, error: BaseException, code: ExitCode, status: str
) -> None:
    store = begin(uri, rounds=1)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _train_and_fail(replica, error)
    assert ended.value.code == code
    assert outcome(store).status == status


def _train_and_fail(replica: Replica, error: BaseException) -> None:
    train(replica)
    raise error


@pytest.mark.parametrize("code", [0, None])
def test_a_script_that_exits_with_0_is_done(uri: str, code: int | None) -> None:
    store = begin(uri, rounds=1)
    with connect(place(uri)) as replica:
        _train_and_fail(replica, SystemExit(code))
    assert outcome(store).status == "done"


def test_a_script_that_exits_with_0_because_of_a_stop_is_stopped(uri: str) -> None:
    store = begin(uri)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _stop_and_exit(replica)
    assert ended.value.code == ExitCode.STOPPED
    assert outcome(store).status == "stopped"


def _stop_and_exit(replica: Replica) -> None:
    replica.manager()
    replica.request_stop("enough")
    sys.exit(0)


@pytest.mark.parametrize("asked_first", [False, True])
def test_a_signal_alone_is_to_be_started_again_and_a_stop_that_was_asked_for_is_not(
    uri: str, monkeypatch: pytest.MonkeyPatch, *, asked_first: bool
) -> None:
    """Who is stopped by a signal says good-bye like anybody else: it waits for what is on its way to the store."""
    store, waited = begin(uri), list[bool]()
    shutdown = ObjectStoreManager.shutdown

    def watched(self: ObjectStoreManager, wait: bool = True) -> None:  # noqa: FBT001, FBT002  torchft's signature
        waited.append(wait)
        shutdown(self, wait)

    monkeypatch.setattr(ObjectStoreManager, "shutdown", watched)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _be_told_to_stop(replica, asked_first=asked_first)
    told = outcome(store)
    code = ExitCode.STOPPED if asked_first else ExitCode.RETRY
    assert (ended.value.code, told.exit_code, told.status) == (code, code, "stopped")
    assert told.reason == ("stopped on request" if asked_first else "stopped by a signal")
    assert waited == [True]


def _be_told_to_stop(replica: Replica, *, asked_first: bool, fails: bool = False) -> None:
    replica.manager()
    if asked_first:
        replica.request_stop("enough")
    signal.raise_signal(signal.SIGTERM)
    assert replica._stopping.wait(30)
    if fails:
        raise OSError("the disk is gone")


def test_what_fails_after_a_signal_is_told_and_tried_again(uri: str) -> None:
    store = begin(uri)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _be_told_to_stop(replica, asked_first=False, fails=True)
    told = outcome(store)
    assert (ended.value.code, told.status) == (ExitCode.RETRY, "stopped")
    assert told.reason == "stopped by a signal, and then OSError: the disk is gone"


def test_a_script_may_use_the_documented_codes_itself(uri: str) -> None:
    store = begin(uri)
    with pytest.raises(SystemExit) as ended, connect(place(uri)) as replica:
        _fail(replica, SystemExit(10))
    assert ended.value.code == ExitCode.RETRY
    assert outcome(store).status == "retry"


def test_handlers_that_were_not_set_from_python_do_not_break_the_end(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(uri)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with connect(place(uri)) as replica:
            monkeypatch.setattr(replica, "_handlers", dict.fromkeys((signal.SIGTERM, signal.SIGINT)))
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@pytest.mark.parametrize("setting", [None, "file:///nowhere/at/all"])
def test_a_process_that_is_no_replica_ends_with_a_line_and_the_permanent_code(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in place(setting or "file:///x").items():
        monkeypatch.setenv(name, value)
    if setting is None:
        monkeypatch.delenv("SKERRY_RUN")
    with pytest.raises(SystemExit) as ended:
        connect()
    assert ended.value.code == ExitCode.PERMANENT
    assert "skerry up" in capsys.readouterr().err


def test_tokens_are_the_weights_when_the_run_asks_for_them(uri: str) -> None:
    store = open_store(uri)
    run = run_record(SystemClock(), slots=("r-0",), rounds=2).model_copy(update={"weighting": "tokens"})
    store.create(keys.RUN, run.to_bytes())
    with connect(place(uri)) as replica:
        train(replica)
    assert [[share.weight for share in d.members] for d in decisions(store)] == [[40.0], [40.0]]


def test_the_end_of_the_run_is_not_a_failure(uri: str) -> None:
    store = begin(uri)
    with connect(place(uri)) as replica:
        replica.manager()
        raise RunFinished("all rounds are closed")
    assert outcome(store).status == "done"


def test_no_run_under_the_prefix_is_told_with_the_next_step(uri: str) -> None:
    with pytest.raises(Invalid, match="skerry up"):
        connect(place(uri))


def test_shards_are_disjoint_and_cover_everything(uri: str) -> None:
    begin(uri)
    shards = [connect(place(uri, index, 3)).shard(range(10)) for index in range(3)]
    assert sorted(item for shard in shards for item in shard) == list(range(10))


def test_a_second_manager_is_refused(uri: str) -> None:
    begin(uri)
    with pytest.raises(SystemExit), connect(place(uri)) as replica:
        [replica.manager() for _ in range(2)]


def test_handlers_of_the_caller_are_put_back(uri: str) -> None:
    begin(uri)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with connect(place(uri)):
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def environment_of(uri: str) -> dict[str, str]:
    return {**os.environ, **place(uri), "PYTHONPATH": os.pathsep.join([str(ROOT / "runtime"), str(ROOT)])}


def run_script(uri: str, what: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), what]
    return subprocess.Popen(command, env=environment_of(uri), stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("train", 0), ("crash", 10), ("invalid", 20)])
def test_a_script_ends_with_the_documented_code(uri: str, what: str, code: int) -> None:
    begin(uri, rounds=2)
    with run_script(uri, what) as process:
        process.communicate(timeout=60)
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_inner_step_and_says_so(uri: str, number: signal.Signals) -> None:
    store = begin(uri, rounds=None)
    with run_script(uri, "slow") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
    told = outcome(store)
    assert (told.status, told.exit_code, told.reason) == ("stopped", ExitCode.RETRY, "stopped by a signal")
    heartbeat = Heartbeat.parse(store.read(keys.heartbeat("r-0")) or b"", "")
    assert heartbeat.phase == "left"
    assert heartbeat.notice == f"stopping on {number.name}"


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_others_and_keeps_the_contribution(uri: str) -> None:
    store = begin(uri, slots=2, minimum=2, rounds=None)
    with run_script(uri, "train") as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        clock = SystemClock()
        deadline = clock.now() + 30
        while store.read(keys.contribution(0, 0, "r-0")) is None:
            assert clock.now() < deadline
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
    assert outcome(store).status == "stopped"
    assert store.read(keys.contribution(0, 0, "r-0")) is not None


@pytest.mark.slow
def test_a_stuck_step_is_ended_within_the_budget(uri: str) -> None:
    begin(uri, rounds=None)
    with run_script(uri, "stuck") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=STOP_BUDGET_S)
    assert process.returncode == ExitCode.RETRY
