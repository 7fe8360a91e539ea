"""The options and the script that sbatch gets, and what the script does on its node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.targets.slurm.kit import check_golden, jobs_of

from skerry.infra.provision.graph import Ref
from skerry.infra.targets.slurm import requests

if TYPE_CHECKING:
    from pathlib import Path

WHOLE: Final = (
    "login: ada@login, partition: gpu, account: acme, qos: high, time: 90m, gpus: 2, gpu_type: a100, cpus: 8, "
    "memory: 32GiB, attempts: 5, folder: /shared/logs, setup: ['module load cuda'], extra: ['--constraint=big mem']"
)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("plain", WHOLE),
        ("apptainer", "container: apptainer, gpus: 1"),
        ("pyxis", "container: pyxis"),
    ],
)
def test_submission_matches_the_golden_file(tmp_path: Path, name: str, target: str) -> None:
    (desired,) = jobs_of(tmp_path, target, more="data: {corpus: /shared/corpus}\nlimits: {max_hours: 24}\n")
    script = requests.script(desired)
    check_golden(name, {"sbatch": requests.sbatch(desired), "script": script.splitlines()})
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True).returncode == 0


def test_run_that_ends_sooner_shortens_the_time_of_a_start(tmp_path: Path) -> None:
    (desired,) = jobs_of(tmp_path, "time: 12h", more="limits: {max_hours: 0.5}\n")
    assert "--time=30" in requests.sbatch(desired)


@pytest.mark.parametrize("container", ["apptainer", "pyxis"])
def test_container_gets_the_folders_of_store_and_mirrors(tmp_path: Path, container: str) -> None:
    more = "replication: [{to: 'file:///back%20up/runs/'}]\n"
    target = f"container: {container}, setup: [module load cuda]"
    (desired,) = jobs_of(tmp_path, target, more=more, store="s3://acme/runs")
    assert desired.settings["mounts"] == ["/back up/runs"]
    assert desired.settings["setup"] == ["mkdir -p '/back up/runs'", "module load cuda"]
    (own,) = jobs_of(tmp_path, target, store="file:///my%20disk/runs")
    assert own.settings["mounts"] == ["/my disk/runs"]
    (plain,) = jobs_of(tmp_path, more=more, store="s3://acme/runs")
    assert (plain.settings["mounts"], plain.settings["setup"]) == ([], [])


def test_job_knows_the_regions_of_the_store_and_of_mirrors(tmp_path: Path) -> None:
    more = "replication: [{to: s3://acme-west/runs, region: us-west-2}]\n"
    (desired,) = jobs_of(tmp_path, more=more, store="s3://acme/runs", variables={"AWS_REGION": "eu-west-1"})
    environment = desired.settings["environment"]
    assert isinstance(environment, Mapping)
    region = Ref(address="aws_bucket.mirror-acme-west", output="region", before="acme-west=")
    assert (environment["AWS_REGION"], environment["SKERRY_BUCKET_REGION_0"]) == ("eu-west-1", region)


def test_next_generation_has_its_slot_name_and_files_of_its_own(tmp_path: Path) -> None:
    (desired,) = jobs_of(tmp_path)
    later = replace(desired, generation=2)
    names = [word for word in requests.sbatch(later) if word.startswith("--job-name")]
    assert names == [word for word in requests.sbatch(desired) if word.startswith("--job-name")]
    assert requests.ending_file(later) == requests.ending_file(desired).replace("hpc-0.", "hpc-0-g2.")


# A replica that runs until it is stopped: its pipe has another end for as long.
WAITS: Final = "trap 'exit 10' TERM; echo up; while :; do read -t 1 -u 9; done 9<> <(:)"


class Node:
    """Runs the script of a job with a program of the test in place of Python, and a scontrol that records its calls."""

    def __init__(self, folder: Path, replica: str, attempts: int = 3) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, text in (("replica", replica), ("scontrol", f'echo "$*" >> {folder}/scontrol; exit 1')):
            (bin_folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (bin_folder / name).chmod(0o755)
        (desired,) = jobs_of(folder, f"python: {bin_folder}/replica, attempts: {attempts}, folder: logs")
        self.ending_file = folder / requests.ending_file(desired)
        self.ending_file.parent.mkdir(parents=True)
        # Without the profile of the developer, which may set PATH.
        self.script = requests.script(desired).replace("bash -l", "bash")

    def start(self, number: int = 0) -> subprocess.Popen[str]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        environment = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(number)}
        return subprocess.Popen(
            ["bash", "-c", self.script],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def requeued(self) -> bool:
        path = self.folder / "scontrol"
        return path.exists() and path.read_text() == "requeue 7\n"

    def ending(self) -> dict[str, object]:
        return json.loads(self.ending_file.read_text())


@pytest.mark.parametrize(
    ("code", "start", "requeued"),
    [
        (0, 0, False),
        (1, 0, True),
        (10, 0, True),
        (10, 1, True),
        (10, 2, False),
        (20, 0, False),
        (30, 0, False),
        (126, 0, False),
        (127, 0, False),
        (137, 1, True),
    ],
)
def test_script_requeues_after_an_error_below_the_attempts(
    tmp_path: Path, code: int, start: int, *, requeued: bool
) -> None:
    node = Node(tmp_path, f"exit {code}")
    with node.start(start) as process:
        assert process.wait() == code
    assert node.requeued() is requeued
    assert node.ending() == {"job": "7", "start": start, "code": code, "stopped": 0}


def test_script_requeues_before_the_time_limit_after_any_number_of_starts(tmp_path: Path) -> None:
    node = Node(tmp_path, WAITS, attempts=1)
    with node.start(50) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 10
    assert node.requeued()


def test_stopped_job_is_not_requeued_by_its_script(tmp_path: Path) -> None:
    node = Node(tmp_path, WAITS)
    with node.start() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for number in (signal.SIGCONT, signal.SIGTERM):  # what scancel sends, to every process of the job
            os.killpg(process.pid, number)
        assert process.wait() == 10
    assert not node.requeued()
    assert node.ending() == {"job": "7", "start": 0, "code": 10, "stopped": 1}
