"""Every row of the table of what a cloud's job sees (images/README.md): how the entry point handles it.

Rows that a container cannot see are listed with the reason.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Final

import pytest
from tests.support.container import Cloud, ContainerStarts, Signpost, batch, sagemaker, vertex
from tests.support.container import hardware as machine

from skerry.runtime.container import hardware
from skerry.runtime.container.check import warnings_of
from skerry.runtime.container.hardware import Torch
from skerry.runtime.container.identify_replica import Job, detect_job, read_settings, resolve_contract
from skerry.runtime.container.outcome import decide_exit
from skerry.runtime.container.process_tree import ProcessResult
from skerry.runtime.contract import Contract, ExitCode
from skerry.runtime.errors import Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member, Place
from skerry.runtime.store import open_store

README: Final = Path(__file__).parents[3] / "images/README.md"
CLOUDS: Final = [sagemaker(), vertex(), batch()]
SLOTS: Final = ("r-0", "r-1", "r-2")
# Before a container exists, or after its end: its launcher handles these.
NOT_VISIBLE_INSIDE: Final = {"queue limit", "quota error", "capacity error", "throttle"}
ROWS: Final = {
    "our rank": ["test_contract_variables_win_over_the_clouds_number", "test_clouds_number_selects_the_slot"],
    "native ids": ["test_job_facts_are_logged_without_secrets"],
    "job name": ["test_job_name_does_not_change_the_contract"],
    "stop notice": ["test_stop_lets_the_script_flush"],
    "spot": ["test_restart_after_an_interruption_is_the_next_incarnation"],
    "retries": ["test_exit_code_follows_from_how_the_command_ended"],
    "exit detail": ["test_failure_reason_is_in_the_bucket_and_in_sagemakers_file"],
    "max run": ["test_platform_time_limit_is_a_stop"],
    "logs": ["test_output_of_the_script_is_unbuffered_and_unchanged"],
    "/dev/shm": ["test_shared_memory_is_measured_and_logged"],  # noqa: S108  a row of the table
    "GPU": ["test_gpus_are_counted_by_devices_and_visibility"],
    "disk": ["test_little_free_disk_is_warned_of", "test_missing_code_ends_with_permanent"],
    "creds": ["test_credentials_reach_the_script_and_not_the_log"],
}
PRINT_ENVIRONMENT: Final = "import json, os; print('ENVIRONMENT ' + json.dumps(dict(os.environ)))"


def environment_in(output: str) -> dict[str, str]:
    (line,) = re.findall(r"ENVIRONMENT (\{.*\})", output)
    return json.loads(line)


def resolve(cloud: Cloud, folder: Path, **variables: str) -> Contract:
    for name, content in cloud.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_text(json.dumps(content))
    environment = {"SKERRY_RUN": "file:///run", "SKERRY_COMMAND": '["python", "train.py"]'}
    environment |= cloud.environment | variables
    job = detect_job(environment, folder)
    assert job.platform == cloud.name
    return resolve_contract(read_settings(environment, ml=folder), job, SLOTS)


def test_every_row_of_the_table_has_a_test_or_a_reason() -> None:
    section = README.read_text().partition("## What a cloud's job sees")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)[1:]
    assert {row.strip("`") for row in rows} == ROWS.keys() | NOT_VISIBLE_INSIDE
    for names in ROWS.values():
        assert all(callable(globals().get(name)) for name in names)


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.name)
def test_contract_variables_win_over_the_clouds_number(tmp_path: Path, cloud: Cloud) -> None:
    contract = resolve(cloud, tmp_path, SKERRY_SLOT="r-2", SKERRY_INDEX="2")
    assert (contract.slot, contract.index, contract.replicas) == ("r-2", 2, 3)


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.name)
def test_clouds_number_selects_the_slot(tmp_path: Path, cloud: Cloud) -> None:
    contract = resolve(cloud, tmp_path)
    assert (contract.slot, contract.index, contract.replicas) == ("r-1", 1, 3)


def test_clouds_number_selects_the_same_slot_after_a_removal(tmp_path: Path) -> None:
    variables = {"SKERRY_RUN": "file:///run", "SKERRY_COMMAND": '["true"]'}
    settings, job = read_settings(variables, ml=tmp_path), Job(platform="batch", facts={}, index=1)
    contract = resolve_contract(settings, job, SLOTS, SLOTS[1:])
    assert (contract.slot, contract.index, contract.replicas) == ("r-1", 0, 2)
    with pytest.raises(Invalid, match=r"r-1 was removed from the run; `skerry apply` ends this job"):
        resolve_contract(settings, job, SLOTS, (SLOTS[0], SLOTS[2]))


def test_slot_of_the_log_has_its_numbers_from_there(tmp_path: Path) -> None:
    variables = {
        "SKERRY_RUN": "file:///run",
        "SKERRY_COMMAND": '["true"]',
        "SKERRY_SLOT": "r-3",
        "SKERRY_REPLICAS": "3",
    }
    job = Job(platform=None, facts={}, index=None)
    contract = resolve_contract(read_settings(variables, ml=tmp_path), job, SLOTS, (*SLOTS, "r-3"))
    assert (contract.index, contract.replicas) == (3, 4)


def test_job_name_does_not_change_the_contract(tmp_path: Path) -> None:
    renamed = sagemaker()
    renamed.environment["TRAINING_JOB_NAME"] = "tiny-gpt-sm-1-g5"
    assert resolve(renamed, tmp_path) == resolve(sagemaker(), tmp_path)


@pytest.mark.parametrize(
    ("cloud", "fact"),
    [
        (sagemaker(), "training-job/tiny-gpt-sm-1-g4"),
        (vertex(), "CLOUD_ML_JOB_ID=5551234567890"),
        (batch(), "AWS_BATCH_JOB_ID=9f3c1d2e-0000-4000-8000-000000000000:1"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_job_facts_are_logged_without_secrets(tmp_path: Path, cloud: Cloud, fact: str) -> None:
    text = str(detect_job(cloud.environment, tmp_path))
    assert text.startswith(f"{cloud.name} ")
    assert fact in text
    assert "secret" not in text


# SIGTERM stays blocked until the script waits for it, so that it may arrive at any time.
FLUSH: Final = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(os.environ["REACHED"], "w") as reached:
    reached.write("x")
signal.sigwait([signal.SIGTERM])
print("flushed", flush=True)
sys.exit(30)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_stop_lets_the_script_flush(container: ContainerStarts, signpost: Signpost, number: signal.Signals) -> None:
    script = FLUSH.replace("SIGTERM", number.name)
    process = container.start("python", "-c", script, cloud=sagemaker(), REACHED=str(signpost.path))
    signpost.wait()
    process.send_signal(number)
    exit_code, output = container.finish(process)
    assert exit_code == 30, output
    assert output.count("flushed") == 1
    assert not container.failure.exists()


@pytest.mark.slow
def test_platform_time_limit_is_a_stop(container: ContainerStarts, signpost: Signpost) -> None:
    # All three clouds end a job at its time limit as they cancel one: with SIGTERM. The shell hides the script's code.
    process = container.start("sh", "-c", f"python3 -c '{FLUSH}'; true", cloud=batch(), REACHED=str(signpost.path))
    signpost.wait()
    process.send_signal(signal.SIGTERM)
    exit_code, output = container.finish(process)
    assert (exit_code, "flushed" in output) == (10, True), output


JOIN: Final = """
import os
from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.protocol.slot_claim_and_heartbeats import Presence
from skerry.runtime.store import open_store
contract = contract.read(os.environ)
store = open_store(contract.run_uri)
print("INCARNATION", Presence(RunLog(store, read_run(store)), SystemClock(), contract.slot, 1.0).incarnation)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_restart_after_an_interruption_is_the_next_incarnation(container: ContainerStarts) -> None:
    # A managed spot restart, or a worker restart on Vertex: the same job on the same host, with the same variables.
    for number in range(2):
        exit_code, output = container.run("python", "-c", JOIN, cloud=vertex())
        assert f"INCARNATION {number}" in output
        assert exit_code == 10
        assert container.outcome(incarnation=number).reason.startswith("the command ended with signal SIGKILL")


def test_failure_reason_is_in_the_bucket_and_in_sagemakers_file(container: ContainerStarts) -> None:
    exit_code, _ = container.run("python", "-c", "raise SystemExit(20)", cloud=sagemaker())
    outcome = container.outcome()
    assert (exit_code, outcome.status, outcome.exit_code) == (20, "failed", 20)
    assert container.failure.read_text() == f"skerry: exit code 20: {outcome.reason}"
    assert container.run("no-such-program" + "x" * 4000, cloud=sagemaker())[0] == 20
    assert len(container.failure.read_text()) == 1024


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (ProcessResult(exit_code=0), ExitCode.DONE),
        (ProcessResult(exit_code=10), ExitCode.RETRY),
        (ProcessResult(exit_code=20), ExitCode.PERMANENT),
        (ProcessResult(exit_code=30), ExitCode.STOPPED),
        (ProcessResult(exit_code=1), ExitCode.RETRY),
        (ProcessResult(signal=9), ExitCode.RETRY),
        (ProcessResult(exit_code=1, stopped=True), ExitCode.RETRY),
        (ProcessResult(signal=15, stopped=True), ExitCode.RETRY),
        (ProcessResult(exit_code=30, stopped=True), ExitCode.STOPPED),  # the command's own code counts
        (ProcessResult(signal=9, stopped=True, killed=True), ExitCode.RETRY),
        (ProcessResult(signal=9, stopped=True, killed=True, expired=True), ExitCode.STOPPED),  # a restart would cost
        (ProcessResult(exit_code=10, stopped=True, expired=True), ExitCode.STOPPED),
        (ProcessResult(signal=9, leash_closed=True), ExitCode.RETRY),
    ],
    ids=str,
)
def test_exit_code_follows_from_how_the_command_ended(result: ProcessResult, code: ExitCode) -> None:
    assert decide_exit(result, None).code == code


def test_output_of_the_script_is_unbuffered_and_unchanged(container: ContainerStarts, signpost: Signpost) -> None:
    script = (
        "import os, signal, sys; print('to stdout'); sys.stderr.write('to stderr\\n'); "
        "open(os.environ['REACHED'], 'w').write('x'); signal.pause()"
    )
    process = container.start("python", "-c", script, cloud=batch(), REACHED=str(signpost.path))
    signpost.wait()
    lines = container.output(process).splitlines()
    assert "to stdout" in lines
    assert "to stderr" in lines


def test_shared_memory_is_measured_and_logged(container: ContainerStarts, tmp_path: Path) -> None:
    _, output = container.run("python", "-c", "pass", cloud=sagemaker())
    assert f"{hardware.SHARED_MEMORY} {hardware.shm_bytes() >> 20} MB" in output
    assert hardware.shm_bytes(tmp_path / "missing") == 0
    warnings = warnings_of(machine(shm_bytes=64 << 20), Torch(version="2.13.0"), None)
    assert any("shm has 64 MB" in warning for warning in warnings)


def test_gpus_are_counted_by_devices_and_visibility(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert hardware.count_gpus({}, tmp_path) == 3
    for visible, count in (("0,2", 2), ("", 0), ("-1", 0)):
        assert hardware.count_gpus({"CUDA_VISIBLE_DEVICES": visible}, tmp_path) == count
    on_cpu = warnings_of(machine(n_gpus=2), Torch(version="2.13.0+cpu"), None)
    assert on_cpu == ["2 GPUs, and torch was built without CUDA: this is the CPU image"]


def test_little_free_disk_is_warned_of() -> None:
    warnings = warnings_of(machine(disk_free_bytes=500 << 20), Torch(version="2.13.0"), None)
    assert warnings == ["500 MB of disk space are free"]


def test_start_that_fails_early_is_recorded_with_its_place(container: ContainerStarts) -> None:
    exit_code, _ = container.run("true", cloud=batch(), SKERRY_CODE="0" * 64, SKERRY_PLACE='{"cloud": "aws"}')
    key = keys.member(container.outcome().slot, 0)
    member = Member.parse(open_store(container.uri).read(key) or b"", key)
    assert (exit_code, member.place) == (20, Place(cloud="aws"))
    assert member.software is not None
    assert member.software.code == "0" * 64


def test_missing_code_ends_with_permanent(container: ContainerStarts) -> None:
    exit_code, output = container.run("true", cloud=batch(), SKERRY_CODE="0" * 64)
    assert (exit_code, "the run has no code 000000000000" in output) == (20, True)


@pytest.mark.parametrize(
    "cloud", [sagemaker(), pytest.param(batch(), marks=pytest.mark.slow)], ids=["sagemaker", "aws_batch"]
)
def test_credentials_reach_the_script_and_not_the_log(container: ContainerStarts, cloud: Cloud) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_SESSION_TOKEN": "FwoGZXIvYXdz"}
    resolved = {"SKERRY_SLOT": "r-1", "SKERRY_INDEX": "1", "SKERRY_REPLICAS": "3"}
    command = ["python", "-c", PRINT_ENVIRONMENT]
    exit_code, output = container.run(*command, cloud=cloud, without=tuple(resolved), **secrets)
    assert exit_code == 0, output
    relative = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
    assert (secrets | resolved | {relative: cloud.environment[relative]}).items() <= environment_in(output).items()
    log = "".join(line for line in output.splitlines() if not line.startswith("ENVIRONMENT "))
    assert not [secret for secret in (*secrets.values(), "proxy-secret") if secret in log]
