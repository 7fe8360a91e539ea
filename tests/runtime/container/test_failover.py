"""A bucket is deleted in mid-run: real replicas vote through the mirror, and go on in the run that they make of it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.kit.managers import wait_for
from tests.kit.protocol import run_record
from tests.support.container import DEADLINE_S, clean_environment

from skerry.runtime.allreduce import ObjectStoreAllReduce
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import read_run
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.run_record import FailoverSettings, MirrorSettings
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.mirrors.ballots import read_verdict
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.replica import connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.container import ContainerStarts, Signpost

    from skerry.runtime.log.run_record import Run

SLOTS = ("r-0", "r-1")
ROUNDS, LOST_AFTER = 6, 3
# In the first store it stops for good after some rounds: only the end of its process leads on.
SCRIPT = f"""
import os, signal, torch
from torchft.local_sgd import DiLoCo
from skerry.runtime.replica import connect

with connect() as replica:
    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        for step in replica.steps(inner):
            if manager.current_step() == {LOST_AFTER} and os.environ["SKERRY_RUN"] == os.environ["HOME_RUN"]:
                open(os.environ["REACHED"], "w").write("x")
                signal.pause()
            inner.zero_grad()
            model(torch.full((4, 8), 1.0 + replica.index)).square().mean().backward()
            inner.step()
"""


def failover_run(home: str, mirror: str, **changes: object) -> Run:
    return run_record(
        SystemClock(),
        slots=SLOTS,
        rounds=ROUNDS,
        sync_every=2,
        outer_momentum=0.5,
        min_replicas=2,
        store=home,
        mirrors=(MirrorSettings(uri=mirror, each_round=True),),
        failover=FailoverSettings(mirror=mirror, uri=f"{mirror}-failover", after_s=2.0),
        **changes,
    )


def replica_manager(home: str, _minimum: int) -> object:
    variables = {"SKERRY_RUN": home, "SKERRY_SLOT": "r-0", "SKERRY_INDEX": "0", "SKERRY_REPLICAS": "2"}
    return connect(variables).manager()


def own_manager(home: str, minimum: int) -> object:
    return ObjectStoreManager(open_store(home), replica_id="r-0", min_replica_size=minimum)


def foreign_manager(home: str, _minimum: int) -> object:
    return ObjectStoreManager(open_store(home), replica_id="r-2", min_replica_size=2)


def allreduce(home: str, ranks: int) -> object:
    return ObjectStoreAllReduce(home, rank=0, world_size=ranks).__enter__()


@pytest.fixture
def home(tmp_path: Path) -> str:
    """The URI of a run with failover that no replica has joined."""
    home, mirror = (tmp_path / "one" / "tiny").as_uri(), (tmp_path / "two" / "tiny").as_uri()
    open_store(home).create(keys.RUN, failover_run(home, mirror).to_bytes())
    return home


@pytest.mark.parametrize("join", [replica_manager, own_manager, allreduce])
def test_script_of_such_a_run_is_not_started_alone(join: Callable[[str, int], object], home: str) -> None:
    with pytest.raises(Invalid, match="start this script by `skerry-replica run`"):
        join(home, 2)
    assert open_store(home).list(keys.MEMBERS) == []


@pytest.mark.parametrize(
    ("join", "problem"),
    [
        (own_manager, r"its min_replicas=2 .* min_replica_size=1"),
        (allreduce, r"its min_replicas=2 .* min_replica_size=1"),
        (foreign_manager, "no slot 'r-2'; its slots are r-0, r-1"),
    ],
)
def test_script_of_such_a_run_has_no_other_quorum(
    join: Callable[[str, int], object], problem: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replicas that a majority leaves behind could close rounds."""
    monkeypatch.setenv("SKERRY_FAILOVER", "memory://mirror")
    with pytest.raises(Invalid, match=problem):
        join(home, 1)
    assert open_store(home).list(keys.MEMBERS) == []


# In a separate process, because it takes over signals. The store is away, back for one look, away, and back.
FLAPPING = """
import os
from pathlib import Path
from skerry.runtime.clock import SystemClock
from skerry.runtime.container import run as module
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import Retryable

class Clock(SystemClock):
    def pause(self, seconds, stop=None): pass

class Watch:
    mirror_uri = "memory://mirror"
    def start(self, interrupt): pass
    def stop(self): pass
    def is_lost(self, decision): return decision.code == ExitCode.RETRY
    def await_store(self): return "memory://home"

class Recorder:
    slot = "r-0"
    def __init__(self, number): self.number = number
    def read(self): return None
    def record(self, decision): return True

class Contract:
    slot, replicas = "r-0", 2
    def environment(self): return {}

attempts = []
def prepare(*arguments):
    earlier = arguments[-1]
    attempts.append(None if earlier is None else earlier.number)
    if len(attempts) == 2:
        raise Retryable("away again")
    recorder = Recorder(len(attempts))
    return module._Prepared(
        contract=Contract(), recorder=recorder, folder=Path.cwd(), until=None, secrets={}, watch=Watch(),
        peers=None, early_end=None,
    )

module._prepare = prepare
command = ["python", "-c", "import os, pathlib; ran = os.path.exists('ran'); pathlib.Path('ran').touch(); "
           "raise SystemExit(0 if ran else 10)"]
code = module.run(command, dict(os.environ), Clock())
print("ENDED", int(code), attempts)
"""


def test_store_that_is_away_again_at_the_next_start_keeps_the_claim(tmp_path: Path) -> None:
    """Without it this process could not vote, and a run of three would have lost a vote for good."""
    home = {"SKERRY_RUN": "memory://home", "SKERRY_SLOT": "r-0", "SKERRY_INDEX": "0", "SKERRY_REPLICAS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", FLAPPING],
        cwd=tmp_path,
        env=clean_environment() | home,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "ENDED 0 [None, 1, 1]" in ended.stdout, ended.stderr


@pytest.mark.slow
def test_replicas_go_on_from_the_mirror_of_a_deleted_store(
    container: ContainerStarts, signpost: Signpost, tmp_path: Path
) -> None:
    home, mirror = tmp_path / "one" / "tiny", (tmp_path / "two" / "tiny").as_uri()
    store = open_store(home.as_uri())
    store.create(keys.RUN, failover_run(home.as_uri(), mirror).to_bytes())
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"SKERRY_RUN": home.as_uri(), "HOME_RUN": home.as_uri(), "REACHED": str(signpost.path)}

    def start(slot: str, **more: str):  # noqa: ANN202  a process
        own = {"SKERRY_SLOT": slot, "SKERRY_INDEX": slot[-1], "SKERRY_REPLICAS": "2"}
        return container.start("python", "train.py", **variables, **own, **more)

    processes = [start(slot) for slot in SLOTS]
    reached = b""
    while len(reached) < len(SLOTS):
        reached += signpost.wait()
    copy = open_store(mirror)
    wait_for(lambda: find_closed(copy, 0) == LOST_AFTER and find_cut(copy).round == LOST_AFTER)
    home.rename(tmp_path / "lost")
    for process in processes:
        exit_code, output = container.finish(process)
        assert exit_code == 0, output
        assert f"r-0, r-1 have voted: the run goes on from round {LOST_AFTER}" in output
    fork = open_store(f"{mirror}-failover")
    run, verdict = read_run(fork), read_verdict(copy)
    assert run is not None
    assert run.parent is not None
    assert verdict is not None
    assert (run.parent.round, verdict.round, find_closed(fork, 0)) == (LOST_AFTER, LOST_AFTER, ROUNDS)
    # A job that its platform starts again has the old URI.
    exit_code, output = container.finish(start("r-0", SKERRY_FAILOVER=mirror))
    assert exit_code == 0, output
    assert f"the run goes on at {mirror}-failover" in output
