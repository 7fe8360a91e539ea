"""`skerry-replica run` in a process: from an empty container to an exit code."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest
from tests.kit.protocol import run_record
from tests.kit.stores import ForgetfulStore, HookedStore
from tests.support.clocks import FakeClock
from tests.support.container import ROOT, ContainerStarts, Signpost, batch, clean_environment, sagemaker

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.container.code_archive import fetch, unpack
from skerry.runtime.container.identify_replica import Job, ReplicaSettings, detect_job, read_settings, resolve_contract
from skerry.runtime.container.run import PERMISSIONS_TIMEOUT_S, command_of, read_run_with_new_permissions
from skerry.runtime.errors import Corrupt, Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store.retrying import Retrying

if TYPE_CHECKING:
    from pathlib import Path

COMMAND = json.dumps(["python", "train.py"])
SLOTS = ("r-0", "r-1", "r-2")


def entry(name: str, mode: int = 0o644, link: str | None = None) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode = mode
    if link is not None:
        member.type, member.linkname = tarfile.SYMTYPE, link
    return member


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(plain.getvalue(), mtime=0)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(packed((entry("../escaped"), b"x")), id="path out of the folder"),
        pytest.param(packed((entry("/tmp/escaped-by-skerry-test"), b"x")), id="absolute path"),  # noqa: S108
        pytest.param(packed((entry("train.py", link="/etc/passwd"), b"")), id="link"),
        pytest.param(packed((entry("a"), b"x"), (entry("a"), b"y")), id="same file twice"),
        pytest.param(gzip.compress(bytes(120 << 20), mtime=0), id="too large"),
        pytest.param(b"nothing", id="no archive"),
    ],
)
def test_unpack_refuses_a_hostile_archive_and_leaves_nothing(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Corrupt, match="packed code"):
        unpack(data, hashlib.sha256(data).hexdigest(), tmp_path / "in" / "code")
    assert list(tmp_path.rglob("*")) == [tmp_path / "in"]


def test_code_that_a_shared_folder_hides_at_first_is_read_again(tmp_path: Path) -> None:
    clock = FakeClock()
    store = Retrying(ForgetfulStore(clock, 3.0), clock)
    data = packed((entry("train.py"), b"x"))
    digest = hashlib.sha256(data).hexdigest()
    store.create(keys.code(digest), data)
    fetch(store, digest, tmp_path / "code")
    assert (tmp_path / "code" / "train.py").read_bytes() == b"x"
    with pytest.raises(Invalid, match="the run has no code"):
        fetch(store, hashlib.sha256(b"").hexdigest(), tmp_path / "other")


def test_damaged_code_is_not_run(container: ContainerStarts) -> None:
    digest = container.pack("print('RAN')")
    data = bytearray(container.store.read(keys.code(digest)) or b"")
    data[-1] ^= 1
    container.store.replace(keys.code(digest), data)
    exit_code, output = container.run(SKERRY_CODE=digest, SKERRY_COMMAND=COMMAND, cloud=sagemaker())
    assert (exit_code, "RAN" in output) == (20, False)
    assert "sha256 is not" in container.outcome().reason
    assert container.failure.read_text().startswith("skerry: exit code 20: Corrupt: packed code")


def test_code_is_the_working_folder_and_scripts_keep_their_mode(container: ContainerStarts) -> None:
    script = b"#!/bin/sh\necho FOUND $(ls)\n"
    data = packed((entry("run.sh", 0o755), script), (entry("inner/module.py"), b""))
    digest = hashlib.sha256(data).hexdigest()
    container.store.create(keys.code(digest), data)
    exit_code, output = container.run("./run.sh", SKERRY_CODE=digest)
    assert exit_code == 0, output
    assert "FOUND inner run.sh" in output


def test_prefix_without_a_run_ends_with_permanent(container: ContainerStarts, tmp_path: Path) -> None:
    exit_code, output = container.run("true", SKERRY_RUN=(tmp_path / "elsewhere").as_uri())
    assert (exit_code, "no run under" in output) == (20, True)


def test_run_is_read_again_while_new_permissions_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    clock = FakeClock()
    granted_at = clock.now() + PERMISSIONS_TIMEOUT_S

    def refuse(verb: str, _: str) -> None:
        if verb == "read" and clock.now() < granted_at:
            raise Unauthorized("the store refuses these credentials")

    store = HookedStore(refuse)
    store.create(keys.RUN, run_record(clock).to_bytes())
    assert read_run_with_new_permissions(store, clock) is not None
    assert capsys.readouterr().err.count("the store refuses these credentials; retrying for 120 s") == 1
    started, granted_at = clock.now(), float("inf")
    with pytest.raises(Unauthorized):
        read_run_with_new_permissions(store, clock)
    assert clock.now() - started == PERMISSIONS_TIMEOUT_S


def test_stop_ends_the_wait_for_an_unreachable_store(container: ContainerStarts) -> None:
    # No process listens on port 1; the client needs keys before it sends a request.
    unreachable = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    process = container.start("true", SKERRY_RUN="s3://bucket/run", **unreachable)
    clock, poll = SystemClock(), Backoff(first=0.05, cap=0.05)
    wait_until(clock, lambda: "no cloud job" in container.output(process) or None, clock.now() + 60, poll)
    process.send_signal(signal.SIGTERM)  # the store's retries take a minute
    exit_code, output = container.finish(process)
    assert (exit_code, "stopped by a signal before it was started" in output) == (10, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SKERRY_COMMAND": "python train.py"}, "SKERRY_COMMAND is not JSON"),
        ({"SKERRY_COMMAND": "[]"}, "must be a list of strings"),
        ({"SKERRY_COMMAND": ""}, "no command"),
        ({"SKERRY_CODE": "latest"}, "SKERRY_CODE must be the sha256"),
        ({"SKERRY_INDEX": "one"}, "SKERRY_INDEX='one' is not a whole number"),
        ({"SKERRY_INDEX": "7"}, "SKERRY_INDEX=7 is not below SKERRY_REPLICAS=3"),
        ({"SKERRY_MAX_HOURS": "nan"}, "SKERRY_MAX_HOURS='nan' is not a number of hours"),
        ({"SKERRY_SLOT": "a/b"}, "not a slot name"),
        ({"SKERRY_RUN": ""}, "no run given"),
    ],
)
def test_invalid_settings_are_refused(variables: dict[str, str], message: str) -> None:
    valid = {"SKERRY_RUN": "file:///run", "SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
    environment = valid | {"SKERRY_COMMAND": COMMAND} | variables
    job = Job(platform=None, facts={}, index=None)
    with pytest.raises(Invalid, match=re.escape(message)):
        resolve_contract(read_settings(environment, ml=ROOT / "no-such-folder"), job, SLOTS)


def test_invalid_settings_end_with_permanent(container: ContainerStarts) -> None:
    exit_code, output = container.run(cloud=sagemaker())
    assert (exit_code, "no command" in output) == (20, True), output
    assert "no command" in container.failure.read_text()


def test_environment_wins_over_sagemakers_hyperparameters(container: ContainerStarts) -> None:
    cloud = sagemaker()
    words = ["python", "-c", "import os; print('SLOT', os.environ['SKERRY_SLOT'])"]
    hyperparameters = {"SKERRY_COMMAND": json.dumps(words), "SKERRY_SLOT": "r-9", "SKERRY_INDEX": "2", "epochs": "3"}
    cloud.files["input/config/hyperparameters.json"] = hyperparameters
    exit_code, output = container.run(cloud=cloud, without=("SKERRY_INDEX",))
    assert (exit_code, "SLOT r-1" in output) == (0, True), output


def test_array_index_counts_within_the_group(tmp_path: Path) -> None:
    def slot(array_index: int | None, *, only_id: bool = False) -> str:
        environment = batch(array_index).environment | {"SKERRY_RUN": "file:///run", "SKERRY_GROUP": "r"}
        if only_id:  # as in moto: only the child's id ends in the index
            del environment["AWS_BATCH_JOB_ARRAY_INDEX"]
        job = detect_job(environment, tmp_path)
        return resolve_contract(read_settings(environment, ("true",), tmp_path), job, SLOTS).slot

    assert [slot(2), slot(0, only_id=True)] == ["r-2", "r-0"]
    with pytest.raises(Invalid, match="replica unknown"):
        slot(None)


@pytest.mark.slow
def test_outcome_that_the_replica_wrote_is_kept(container: ContainerStarts) -> None:
    code = container.pack((ROOT / "tests/support/script.py").read_text())
    exit_code, output = container.run("python", "train.py", "invalid", SKERRY_CODE=code, cloud=sagemaker())
    outcome = container.outcome()
    reason, _, line = outcome.reason.removesuffix(", round 0)").partition(" (train.py:")
    assert (exit_code, outcome.status, reason) == (20, "failed", "Invalid: this will never work"), output
    assert line.isdecimal(), outcome.reason
    assert container.failure.read_text() == f"skerry: exit code 20: {outcome.reason}"


@pytest.mark.slow
def test_run_out_of_hours_starts_no_command(container: ContainerStarts) -> None:
    exit_code, output = container.run("python", "-c", "print('TRAINED')", SKERRY_MAX_HOURS="1e-9")
    assert exit_code == 30
    assert "the run has used its max_hours" in output
    assert "TRAINED" not in output


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


def test_several_ranks_are_started_with_torchrun(container: ContainerStarts) -> None:
    exit_code, output = container.run(SKERRY_CODE=container.pack(RANKS), SKERRY_COMMAND=COMMAND, SKERRY_RANKS="2")
    assert exit_code == 0, output
    assert all(f"RANK {rank} of 2 r-1 []" in output for rank in range(2))


@pytest.mark.slow
def test_stop_of_several_ranks_is_a_stop_despite_torchruns_code(container: ContainerStarts, signpost: Signpost) -> None:
    variables = {"SKERRY_RANKS": "2", "SKERRY_CODE": container.pack(RANKS), "REACHED": str(signpost.path)}
    process = container.start("python", "train.py", "wait", **variables)
    messages = b""
    while len(messages) < 2:
        messages += signpost.wait()
    process.send_signal(signal.SIGTERM)
    exit_code, output = container.finish(process)
    assert (exit_code, output.count("FLUSHED")) == (10, 2), output
    assert "stopped by a signal; the command ended with exit code 1" in output


def settings(*command: str, ranks: int | None = None) -> ReplicaSettings:
    return ReplicaSettings(
        run_uri="memory://", slot="a", index=0, replicas=1, group=None, code=None, command=command, ranks=ranks
    )


def test_torchrun_is_used_only_for_several_ranks() -> None:
    assert command_of(settings("python", "train.py"), 0).words == (sys.executable, "train.py")
    assert command_of(settings("python", "train.py"), 1).ranks == 1
    assert command_of(settings("sh", "run.sh", ranks=1), 8).words == ("sh", "run.sh")
    words = command_of(settings("python", "train.py", "--steps", "3"), 8).words
    assert words[:3] == (sys.executable, "-m", "torch.distributed.run")
    assert words[-3:] == ("train.py", "--steps", "3")
    assert words[words.index("--nproc-per-node") + 1] == "8"
    assert "--module" in command_of(settings("python", "-m", "train"), 2).words
    for command in (("sh", "run.sh"), ("python", "-u", "train.py"), ("python",)):
        with pytest.raises(Invalid, match="ranks need a Python script"):
            command_of(settings(*command), 2)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "train"])
def test_command_line_runs_the_command(container: ContainerStarts, verb: str) -> None:
    contract = {"SKERRY_RUN": container.uri, "SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
    words = [sys.executable, "-m", "skerry.runtime", verb, "--", sys.executable, "-c", "raise SystemExit(30)"]
    result = subprocess.run(
        words, env={**clean_environment(), **contract}, capture_output=True, check=False, timeout=300
    )
    assert result.returncode == 30, result.stderr
