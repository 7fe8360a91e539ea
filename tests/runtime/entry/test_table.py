"""Every row of the table of what a cloud's job sees (images/README.md): what the entry point makes of it, in processes.

Rows that a container cannot see at all say so, with who sees to them.
"""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.entry import Cloud, Container, Signpost, batch, sagemaker, vertex

from skerry.runtime.contract import ExitCode
from skerry.runtime.entry import machine, preflight
from skerry.runtime.entry.ending import verdict
from skerry.runtime.entry.machine import Machine, Torch
from skerry.runtime.entry.place import job_of, orders_of, settle
from skerry.runtime.entry.processes import Ended

if TYPE_CHECKING:
    from collections.abc import Iterator

README: Final = Path(__file__).parents[3] / "images/README.md"
ALL: Final = [sagemaker(), vertex(), batch()]
# A start of the entry point takes a third of a second: one cloud stands for all in the fast suite.
CLOUDS: Final = [ALL[0], *(pytest.param(cloud, marks=pytest.mark.slow) for cloud in ALL[1:])]
# Before a container exists, or after its end: its launcher's. The row of the table says the same.
NOT_SEEN_FROM_INSIDE: Final = {"queue limit", "quota error", "capacity error", "throttle"}
ROWS: Final = {
    "our rank": [
        "test_our_own_variables_win_over_the_clouds_numbers",
        "test_without_ours_the_clouds_number_names_the_slot",
    ],
    "native ids": ["test_what_the_cloud_calls_the_job_is_told_and_no_secret_is"],
    "job name": ["test_another_name_of_the_job_changes_nothing"],
    "stop notice": ["test_a_stop_lets_the_script_flush_and_ends_with_30"],
    "spot": ["test_a_start_after_an_interruption_is_the_next_incarnation"],
    "retries": ["test_every_ending_is_one_of_the_contracts_exit_codes"],
    "exit detail": ["test_why_it_failed_stands_in_the_bucket_and_where_sagemaker_looks"],
    "max run": ["test_the_end_of_the_time_limit_is_a_stop_like_any_other"],
    "logs": ["test_all_that_is_written_goes_to_the_containers_own_output_at_once"],
    "/dev/shm": [  # noqa: S108  a row of the table
        "test_the_size_of_shared_memory_is_measured_and_told"
    ],
    "GPU": ["test_gpus_are_counted_by_their_devices_and_by_what_is_visible"],
    "disk": ["test_free_disk_is_told_and_little_is_warned_of"],
    "creds": ["test_credentials_reach_the_script_and_no_line_of_ours"],
}
TELL: Final = "import json, os; print('TOLD ' + json.dumps(dict(os.environ)))"


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    with Container(tmp_path) as one:
        yield one


@pytest.fixture
def signpost(tmp_path: Path) -> Iterator[Signpost]:
    one = Signpost(tmp_path)
    yield one
    one.close()


def by_name(cloud: Cloud) -> str:
    return cloud.name


def told(output: str) -> dict[str, str]:
    (line,) = re.findall(r"TOLD (\{.*\})", output)
    return json.loads(line)


def command(*words: str) -> str:
    return json.dumps(["python", *words])


def test_every_row_of_the_table_has_a_test_or_a_reason() -> None:
    section = README.read_text().partition("## What a cloud's job sees")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+?) \|", section, re.MULTILINE)[1:]
    assert {row.strip("`") for row in rows} == ROWS.keys() | NOT_SEEN_FROM_INSIDE
    for names in ROWS.values():
        assert all(callable(globals().get(name)) for name in names)


@pytest.mark.parametrize("cloud", CLOUDS, ids=by_name)
def test_our_own_variables_win_over_the_clouds_numbers(container: Container, cloud: Cloud) -> None:
    code = container.pack(TELL)
    with_ours = {"SKERRY_SLOT": "r-2", "SKERRY_INDEX": "2"}
    ended, said = container.finish(
        container.start(cloud=cloud, SKERRY_CODE=code, SKERRY_COMMAND=command("train.py"), **with_ours)
    )
    assert ended == 0, said
    assert {name: told(said)[f"SKERRY_{name}"] for name in ("SLOT", "INDEX", "REPLICAS")} == {
        "SLOT": "r-2",
        "INDEX": "2",
        "REPLICAS": "3",
    }


@pytest.mark.parametrize("cloud", ALL, ids=by_name)
def test_the_number_is_found_in_what_each_cloud_says(tmp_path: Path, cloud: Cloud) -> None:
    for name, content in cloud.files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_text(json.dumps(content))
    told_so = {"SKERRY_RUN": "file:///run", "SKERRY_COMMAND": command("train.py"), **cloud.environment}
    job = job_of(told_so, tmp_path)
    place = settle(orders_of(told_so, ml=tmp_path), job, ("r-0", "r-1", "r-2"))
    assert (job.platform, place.slot, place.index, place.replicas) == (cloud.name, "r-1", 1, 3)


@pytest.mark.parametrize("cloud", CLOUDS, ids=by_name)
def test_without_ours_the_clouds_number_names_the_slot(container: Container, cloud: Cloud) -> None:
    code = container.pack(TELL)
    missing = ("SKERRY_SLOT", "SKERRY_INDEX", "SKERRY_REPLICAS")
    started = container.start(cloud=cloud, without=missing, SKERRY_CODE=code, SKERRY_COMMAND=command("train.py"))
    ended, said = container.finish(started)
    assert ended == 0, said
    found = told(said)
    assert (found["SKERRY_SLOT"], found["SKERRY_INDEX"], found["SKERRY_REPLICAS"]) == ("r-1", "1", "3")


@pytest.mark.parametrize("cloud", CLOUDS, ids=by_name)
def test_what_the_cloud_calls_the_job_is_told_and_no_secret_is(container: Container, cloud: Cloud) -> None:
    ended, said = container.finish(container.start("python", "-c", "pass", cloud=cloud))
    assert ended == 0, said
    ours = "".join(line for line in said.splitlines() if line.startswith("skerry-replica:"))
    expected = {
        "sagemaker": "training-job/tiny-gpt-sm-1-g4",
        "vertex": "CLOUD_ML_JOB_ID=5551234567890",
        "aws_batch": "AWS_BATCH_JOB_ID=9f3c1d2e-0000-4000-8000-000000000000:1",
    }
    assert f"skerry-replica: {cloud.name} " in said
    assert expected[cloud.name] in ours
    assert "secret" not in ours


@pytest.mark.slow
def test_another_name_of_the_job_changes_nothing(container: Container) -> None:
    found: list[dict[str, str]] = []
    for name in ("tiny-gpt-sm-1-g4", "tiny-gpt-sm-1-g5"):
        cloud = sagemaker()
        cloud.environment["TRAINING_JOB_NAME"] = name
        _, said = container.finish(container.start("python", "-c", TELL, cloud=cloud))
        found.append({key: text for key, text in told(said).items() if key.startswith("SKERRY_")})
    assert found[0] == found[1]


# Held back until it is waited for: a handler that raises may do so where nobody hears it.
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
@pytest.mark.parametrize("cloud", CLOUDS, ids=by_name)
def test_a_stop_lets_the_script_flush_and_ends_with_30(
    container: Container, signpost: Signpost, cloud: Cloud, number: signal.Signals
) -> None:
    script = FLUSH.replace("SIGTERM", number.name)
    started = container.start("python", "-c", script, cloud=cloud, REACHED=str(signpost.path))
    signpost.wait()
    started.send_signal(number)
    ended, said = container.finish(started)
    assert ended == 30, said
    assert said.count("flushed") == 1
    assert not container.failure.exists()


@pytest.mark.slow
def test_the_end_of_the_time_limit_is_a_stop_like_any_other(container: Container, signpost: Signpost) -> None:
    # All three clouds end a job that has had its time as they end one that is cancelled: with SIGTERM.
    started = container.start("sh", "-c", f"python3 -c '{FLUSH}'; true", cloud=batch(), REACHED=str(signpost.path))
    signpost.wait()
    started.send_signal(signal.SIGTERM)
    ended, said = container.finish(started)
    assert (ended, "flushed" in said) == (10, True), said


JOIN: Final = """
import os
from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.journal import Journal, read_run
from skerry.runtime.membership import Presence
from skerry.runtime.store import open_store
place = contract.read(os.environ)
store = open_store(place.run_uri)
print("INCARNATION", Presence(Journal(store, read_run(store)), SystemClock(), place.slot, 1.0).incarnation)
"""


@pytest.mark.slow
def test_a_start_after_an_interruption_is_the_next_incarnation(container: Container) -> None:
    # The same job on the same host, with the same variables: a managed spot restart, a worker's restart on Vertex.
    joins = JOIN + "os.kill(os.getpid(), 9)"
    for number in range(2):
        ended, said = container.finish(container.start("python", "-c", joins, cloud=vertex()))
        assert f"INCARNATION {number}" in said
        assert ended == 10
        assert container.outcome(incarnation=number).reason.startswith("the command ended with signal SIGKILL")


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise ValueError('loss is nan')", 10),
        *(
            pytest.param(script, code, marks=pytest.mark.slow)
            for script, code in (
                ("pass", 0),
                ("raise SystemExit(10)", 10),
                ("raise SystemExit(20)", 20),
                ("raise SystemExit(30)", 30),
                ("raise SystemExit(1)", 10),
                ("import os; os.kill(os.getpid(), 9)", 10),
            )
        ),
    ],
)
def test_every_ending_is_one_of_the_contracts_exit_codes(container: Container, script: str, code: int) -> None:
    assert container.finish(container.start("python", "-c", script, cloud=batch()))[0] == code


def test_why_it_failed_stands_in_the_bucket_and_where_sagemaker_looks(container: Container) -> None:
    ended, _ = container.finish(container.start("python", "-c", "raise SystemExit(20)", cloud=sagemaker()))
    outcome = container.outcome()
    assert (ended, outcome.status, outcome.exit_code) == (20, "failed", 20)
    assert container.failure.read_text() == f"skerry: exit code 20: {outcome.reason}"
    long = container.start("no-such-program" + "x" * 4000, cloud=sagemaker())
    assert container.finish(long)[0] == 20
    assert len(container.failure.read_text()) == 1024


ENDINGS: Final = [
    (Ended(exit_code=0), ExitCode.DONE),
    (Ended(exit_code=10), ExitCode.RETRY),
    (Ended(exit_code=20), ExitCode.PERMANENT),
    (Ended(exit_code=30), ExitCode.STOPPED),
    (Ended(exit_code=1), ExitCode.RETRY),
    (Ended(signal=9), ExitCode.RETRY),
    (Ended(exit_code=1, stopped=True), ExitCode.RETRY),
    (Ended(signal=15, stopped=True), ExitCode.RETRY),
    (Ended(exit_code=30, stopped=True), ExitCode.STOPPED),  # the command's own word
    (Ended(signal=9, stopped=True, killed=True), ExitCode.RETRY),
    (Ended(signal=9, stopped=True, killed=True, expired=True), ExitCode.STOPPED),  # trying again would cost
    (Ended(exit_code=10, stopped=True, expired=True), ExitCode.STOPPED),
    (Ended(signal=9, cut=True), ExitCode.RETRY),
]


@pytest.mark.parametrize(("ended", "code"), ENDINGS, ids=str)
def test_what_each_ending_means(ended: Ended, code: ExitCode) -> None:
    assert verdict(ended, None).code == code


def test_all_that_is_written_goes_to_the_containers_own_output_at_once(
    container: Container, signpost: Signpost
) -> None:
    script = (
        "import os, signal, sys; print('to stdout'); sys.stderr.write('to stderr\\n'); "
        "open(os.environ['REACHED'], 'w').write('x'); signal.pause()"
    )
    started = container.start("python", "-c", script, cloud=batch(), REACHED=str(signpost.path))
    signpost.wait()
    said = container.said(started)
    assert "to stdout\n" in said
    assert "to stderr\n" in said
    assert "\nto stdout" in f"\n{said}", "a line of the script's has no prefix"


def test_the_size_of_shared_memory_is_measured_and_told(container: Container, tmp_path: Path) -> None:
    _, said = container.finish(container.start("python", "-c", "pass", cloud=sagemaker()))
    assert f"{machine.SHARED_MEMORY} {machine.shm_bytes() >> 20} MB" in said
    assert machine.shm_bytes(tmp_path / "missing") == 0
    small = preflight.warnings_of(here(shm_bytes=64 << 20), Torch(version="2.13.0"), None)
    assert any("shm has 64 MB" in text for text in small)


def test_gpus_are_counted_by_their_devices_and_by_what_is_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert machine.n_gpus({}, tmp_path) == 3
    assert machine.n_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}, tmp_path) == 2
    assert machine.n_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert machine.n_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    on_cpu = preflight.warnings_of(here(n_gpus=2), Torch(version="2.13.0+cpu"), None)
    assert on_cpu == ["2 GPUs, and torch was built without CUDA: this is the CPU image"]


def test_free_disk_is_told_and_little_is_warned_of(container: Container) -> None:
    little = preflight.warnings_of(here(disk_free_bytes=500 << 20), Torch(version="2.13.0"), None)
    assert little == ["500 MB of disk are free"]
    # Code that does not fit is a failure of the start, and leaves nothing half-made.
    missing = container.start(cloud=batch(), SKERRY_CODE="0" * 64, SKERRY_COMMAND=command("train.py"))
    ended, said = container.finish(missing)
    assert (ended, "the run has no code 000000000000" in said) == (20, True)


@pytest.mark.parametrize(
    "cloud", [sagemaker(), pytest.param(batch(), marks=pytest.mark.slow)], ids=["sagemaker", "aws_batch"]
)
def test_credentials_reach_the_script_and_no_line_of_ours(container: Container, cloud: Cloud) -> None:
    secrets = {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_SESSION_TOKEN": "FwoGZXIvYXdz"}
    ended, said = container.finish(container.start("python", "-c", TELL, cloud=cloud, **secrets))
    assert ended == 0, said
    found = told(said)
    relative = "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"
    assert found | secrets | {relative: cloud.environment[relative]} == found
    ours = "".join(line for line in said.splitlines() if not line.startswith("TOLD "))
    assert not [text for text in (*secrets.values(), "proxy-secret") if text in ours]


def here(**changes: int) -> Machine:
    """A machine with plenty of everything and no GPU."""
    plenty = {"memory_bytes": 1 << 34, "shm_bytes": 1 << 33, "disk_free_bytes": 1 << 36, "n_gpus": 0, "uid": 10001}
    return Machine(cores=4.0, gpus=(), **(plenty | changes))
