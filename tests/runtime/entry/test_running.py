"""`skerry-replica run` from an empty container to an exit code, in processes of its own."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.clocks import FakeClock
from tests.support.entry import ROOT, Container, Signpost, batch, sagemaker, surroundings

from skerry.runtime import keys
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.entry.place import Job, Orders, orders_of, settle
from skerry.runtime.entry.running import SETTLED_S, command_of, first_read
from skerry.runtime.entry.unpacking import unpack
from skerry.runtime.errors import Corrupt, Invalid, Unauthorized
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.store import Span, Store

COMMAND = json.dumps(["python", "train.py"])


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as one:
        yield one


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for entry, content in members:
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


def link() -> tarfile.TarInfo:
    entry = tarfile.TarInfo("train.py")
    entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return entry


HOSTILE = {
    "a path out of the folder": packed((tarfile.TarInfo("../escaped"), b"x")),
    "an absolute path": packed((tarfile.TarInfo("/tmp/escaped-by-skerry-test"), b"x")),  # noqa: S108  must not be made
    "a link": packed((link(), b"")),
    "twice the same file": packed((tarfile.TarInfo("a"), b"x"), (tarfile.TarInfo("a"), b"y")),
    "too much": gzip.compress(bytes(120 << 20), mtime=0),
    "no archive": b"nothing",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_of_code_that_is_not_what_pack_makes_nothing_is_unpacked(tmp_path: Path, case: str) -> None:
    data = HOSTILE[case]
    with pytest.raises(Corrupt, match="packed code"):
        unpack(data, hashlib.sha256(data).hexdigest(), tmp_path / "in" / "code")
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_code_that_is_not_what_pack_makes_is_refused_for_good(container: Container, case: str) -> None:
    data = HOSTILE[case]
    digest = hashlib.sha256(data).hexdigest()
    container.store.create(keys.code(digest), data)
    ended, said = container.finish(container.start(SKERRY_CODE=digest, SKERRY_COMMAND=COMMAND, cloud=sagemaker()))
    assert ended == 20, said
    assert container.outcome().reason.startswith("Corrupt: packed code")
    assert container.failure.read_text().startswith("skerry: exit code 20: Corrupt: packed code")
    assert not [path for path in container.folder.rglob("*") if path.name.startswith("escaped")]


def test_damaged_code_is_not_run(container: Container) -> None:
    digest = container.pack("print('RAN')")
    store = open_store(container.uri)
    data = bytearray(store.read(keys.code(digest)) or b"")
    data[-1] ^= 1
    store.delete(keys.code(digest))
    store.create(keys.code(digest), bytes(data))
    ended, said = container.finish(container.start(SKERRY_CODE=digest, SKERRY_COMMAND=COMMAND))
    assert (ended, "RAN" in said) == (20, False)
    assert "sha256 is not" in container.outcome().reason


def test_the_code_is_the_working_folder_and_its_scripts_keep_their_mode(container: Container) -> None:
    script = tarfile.TarInfo("run.sh")
    script.mode = 0o755
    data = packed((script, b"#!/bin/sh\necho FOUND $(ls)\n"), (tarfile.TarInfo("inner/module.py"), b""))
    digest = hashlib.sha256(data).hexdigest()
    container.store.create(keys.code(digest), data)
    ended, said = container.finish(container.start("./run.sh", SKERRY_CODE=digest))
    assert ended == 0, said
    assert "FOUND inner run.sh" in said


def test_without_a_run_under_the_prefix_it_gives_up(container: Container, tmp_path: Path) -> None:
    elsewhere = container.start("true", SKERRY_RUN=(tmp_path / "elsewhere").as_uri())
    ended, said = container.finish(elsewhere)
    assert (ended, "no run under" in said) == (20, True)


class Guarded:
    """A store that lets nobody in until a time of the clock."""

    def __init__(self, container: Container, clock: FakeClock, until: float) -> None:
        self._store = container.store
        self._clock = clock
        self._until = until

    def read(self, key: str, span: Span | None = None) -> memoryview | None:
        if self._clock.now() < self._until:
            raise Unauthorized("the store refuses these credentials")
        return self._store.read(key, span)


def test_a_role_that_was_just_made_is_waited_for(container: Container, capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    run = first_read(cast("Store", Guarded(container, clock, clock.now() + SETTLED_S)), clock)
    assert run is not None
    said = capsys.readouterr().err
    assert said.count("the store refuses these credentials; asking for 120 s more") == 1
    began = clock.now()
    with pytest.raises(Unauthorized):
        first_read(cast("Store", Guarded(container, clock, float("inf"))), clock)
    assert clock.now() - began == SETTLED_S


def test_a_stop_is_heard_while_the_store_is_away(container: Container) -> None:
    # Nobody listens on port 1; the client needs keys before it asks anybody.
    away = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    started = container.start("true", SKERRY_RUN="s3://bucket/run", **away)
    clock = SystemClock()
    begun = Backoff(first=0.05, cap=0.05)
    wait_until(clock, lambda: "no cloud's job" in container.said(started) or None, clock.now() + 60, begun)
    started.send_signal(signal.SIGTERM)  # the retries go on for a minute, and a stop ends them at once
    ended, said = container.finish(started)
    assert (ended, "stopped by a signal before it was started" in said) == (10, True)


MISTAKEN = [
    ({"SKERRY_COMMAND": "python train.py"}, "SKERRY_COMMAND is not JSON"),
    ({"SKERRY_COMMAND": "[]"}, "must be a list of strings"),
    ({}, "no command"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_CODE": "latest"}, "SKERRY_CODE must be the sha256"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_INDEX": "one"}, "SKERRY_INDEX='one' is not a whole number"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_INDEX": "7"}, "SKERRY_INDEX=7 is not below SKERRY_REPLICAS=3"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_MAX_HOURS": "nan"}, "SKERRY_MAX_HOURS='nan' is not a number of hours"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_SLOT": "a/b"}, "not a slot name"),
    ({"SKERRY_COMMAND": COMMAND, "SKERRY_RUN": ""}, "not told which run"),
]


@pytest.mark.parametrize(("told", "complaint"), MISTAKEN)
def test_orders_that_cannot_be_are_told(told: dict[str, str], complaint: str) -> None:
    place = {"SKERRY_RUN": "file:///run", "SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
    nowhere = Job(platform=None, facts={}, index=None)
    with pytest.raises(Invalid, match=re.escape(complaint)):
        settle(orders_of(place | told, ml=ROOT / "no-such-folder"), nowhere, ("r-0", "r-1", "r-2"))


@pytest.mark.slow
@pytest.mark.parametrize(("told", "complaint"), MISTAKEN)
def test_orders_that_cannot_be_are_told_and_given_up(
    container: Container, told: dict[str, str], complaint: str
) -> None:
    ended, said = container.finish(container.start(cloud=sagemaker(), **told))
    assert (ended, complaint in said) == (20, True), said
    assert complaint in container.failure.read_text()


def test_sagemakers_hyperparameters_are_read_where_the_environment_is_silent(container: Container) -> None:
    cloud = sagemaker()
    words = ["python", "-c", "import os; print('SLOT', os.environ['SKERRY_SLOT'])"]
    told = {"SKERRY_COMMAND": json.dumps(words), "SKERRY_SLOT": "r-9", "SKERRY_INDEX": "2", "epochs": "3"}
    cloud.files["input/config/hyperparameters.json"] = told
    ended, said = container.finish(container.start(cloud=cloud, without=("SKERRY_INDEX",)))
    assert (ended, "SLOT r-1" in said) == (0, True), said


@pytest.mark.slow
def test_an_array_within_one_group_of_the_spec(container: Container) -> None:
    words = ["python", "-c", "import os; print('PLACE', os.environ['SKERRY_SLOT'], os.environ['SKERRY_INDEX'])"]
    missing = ("SKERRY_SLOT", "SKERRY_INDEX")
    started = container.start(*words, cloud=batch(2), without=missing, SKERRY_GROUP="r")
    assert "PLACE r-2 2" in container.finish(started)[1]
    # moto and others set no index; the child's id ends in it.
    unset = batch(0)
    del unset.environment["AWS_BATCH_JOB_ARRAY_INDEX"]
    assert "PLACE r-0 0" in container.finish(container.start(*words, cloud=unset, without=missing))[1]
    alone = container.start(*words, cloud=batch(None), without=missing)
    ended, said = container.finish(alone)
    assert (ended, "not told which replica" in said) == (20, True)


@pytest.mark.slow
def test_a_real_replica_writes_its_own_outcome_and_it_stands(container: Container) -> None:
    script = (ROOT / "tests/support/script.py").read_text()
    code = container.pack(script)
    started = container.start(
        "python",
        "train.py",
        "invalid",
        SKERRY_CODE=code,
        PYTHONPATH=os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT)]),
        cloud=sagemaker(),
    )
    ended, said = container.finish(started)
    outcome = container.outcome()
    assert (ended, outcome.status, outcome.reason) == (20, "failed", "Invalid: this will never work"), said
    assert container.failure.read_text() == "skerry: exit code 20: Invalid: this will never work"


RANKS = """
import os, signal, sys
print("RANK", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ["SKERRY_SLOT"], sys.argv[1:], flush=True)
if len(sys.argv) > 1:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with open(os.environ["REACHED"], "w") as reached:
        reached.write("x")
    signal.sigwait([signal.SIGTERM])
    print("FLUSHED", flush=True)
    sys.exit(30)
"""


@pytest.mark.slow
def test_a_run_that_has_had_its_hours_starts_nothing_more(container: Container) -> None:
    # The container's run.json was written just now, and a microsecond is less than just now.
    code, said = container.finish(container.start("python", "-c", "print('TRAINED')", SKERRY_MAX_HOURS="1e-9"))
    assert code == 30
    assert "the run has had its max_hours" in said
    assert "TRAINED" not in said


def test_several_ranks_are_started_with_torchrun(container: Container) -> None:
    started = container.start(SKERRY_CODE=container.pack(RANKS), SKERRY_COMMAND=COMMAND, SKERRY_RANKS="2")
    ended, said = container.finish(started)
    assert ended == 0, said
    assert all(f"RANK {rank} of 2 r-1 []" in said for rank in range(2))


@pytest.mark.slow
def test_a_stop_of_several_ranks_is_a_stop_whatever_torchrun_says(container: Container, tmp_path: Path) -> None:
    signpost = Signpost(tmp_path)
    command = json.dumps(["python", "train.py", "wait"])
    started = container.start(
        SKERRY_CODE=container.pack(RANKS), SKERRY_COMMAND=command, SKERRY_RANKS="2", REACHED=str(signpost.path)
    )
    heard = b""
    while len(heard) < 2:
        heard += signpost.wait()
    started.send_signal(signal.SIGTERM)
    ended, said = container.finish(started)
    signpost.close()
    assert (ended, said.count("FLUSHED")) == (10, 2), said
    assert "stopped by a signal; the command ended with exit code 1" in said


def orders(*command: str, ranks: int | None = None) -> Orders:
    return Orders(
        run_uri="memory://", slot="a", index=0, replicas=1, group=None, code=None, command=command, ranks=ranks
    )


def test_torchrun_comes_with_several_gpus_and_not_otherwise() -> None:
    assert command_of(orders("python", "train.py"), 0).words == (sys.executable, "train.py")
    assert command_of(orders("python", "train.py"), 1).ranks == 1
    assert command_of(orders("sh", "run.sh", ranks=1), 8).words == ("sh", "run.sh")
    words = command_of(orders("python", "train.py", "--steps", "3"), 8).words
    assert words[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert words[-3:] == ("train.py", "--steps", "3")
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert "--module" in command_of(orders("python", "-m", "train"), 2).words
    for command in (("sh", "run.sh"), ("python", "-u", "train.py"), ("python",)):
        with pytest.raises(Invalid, match="ranks need a Python script"):
            command_of(orders(*command), 2)


@pytest.mark.slow
def test_the_command_line_is_the_same_program(tmp_path: Path) -> None:
    with Container(tmp_path) as one:
        place = {"SKERRY_RUN": one.uri, "SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
        for verb in ("run", "train"):
            words = [sys.executable, "-m", "skerry.runtime", verb, "--", sys.executable, "-c", "raise SystemExit(30)"]
            ended = subprocess.run(words, env={**surroundings(), **place}, capture_output=True, check=False, timeout=60)
            assert ended.returncode == 30, ended.stderr
