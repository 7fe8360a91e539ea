"""Runs on a real Slurm cluster, by the command line: replicas that train, are requeued, killed and cancelled."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.command_line import invoke
from tests.support.slurmsite import SlurmSite, slurm_site, until

from skerry.runtime.log import keys
from skerry.runtime.log.records import Receipt
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.runtime.store import Store

pytestmark = pytest.mark.slow

ROOT: Final = Path(__file__).parents[4]
SPEC: Final = """\
run: tried
store: {store}
code: {{path: {root}/runtime/examples/tiny_gpt, command: [python, train.py, --width, "32", --layers, "1"]}}
outer: {{rounds: 100000, sync_every: 4}}
faults: {{min_replicas: {minimum}, grace: 10s, start_window: 120s}}
replicas:
  - {{name: hpc, count: {count}, target: {{kind: slurm, python: {python}, {target}}}}}
"""
# As sshd: a login has its own environment, and its shell runs the words after the destination as one line.
SSH: Final = """\
#!/bin/sh
while [ "$1" != -- ]; do shift; done
echo "$2" >> {folder}/logins
shift 2
exec env -i HOME={folder}/home PATH=/usr/bin:/bin SLURM_CONF={folder}/slurm.conf sh -c "$*"
"""


class Run:
    def __init__(self, folder: Path, target: str, *, count: int = 2, minimum: int = 2) -> None:
        self._folder = folder
        self._target = target
        self._minimum = minimum
        self.spec = folder / "skerry.yaml"
        self.store: Store = open_store(f"{(folder / 'store').as_uri()}/tried")
        self.write_spec(count)

    def write_spec(self, count: int) -> None:
        values = {"store": (self._folder / "store").as_uri(), "root": ROOT, "python": sys.executable}
        text = SPEC.format(**values, target=self._target, count=count, minimum=self._minimum)
        self.spec.write_text(text)

    def skerry(self, verb: str, *more: str, code: int = 0) -> str:
        result = invoke(verb, self.spec, *more)
        assert result.exit_code == code, result.output[-4000:]
        return result.output

    def jobs(self) -> Mapping[str, Mapping[str, Any]]:
        return {str(job["slot"]): job for job in json.loads(self.skerry("status", "--json").splitlines()[-1])["jobs"]}

    def closed(self) -> int:
        return len(self.store.list(keys.COMMITS))

    def until_closed(self, rounds: int) -> None:
        try:
            until(lambda: self.closed() >= rounds)
        except TimeoutError:
            pytest.fail(f"{self.closed()} of {rounds} rounds: {self.jobs()}\n{self.skerry('logs', '-v')[-8000:]}")

    def receipt_keys(self, round_number: int) -> list[str]:
        return [keys.receipt(round_number, slot) for slot in ("hpc-0", "hpc-1")]


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site() as site:
        yield site


@pytest.fixture
def cluster(site: SlurmSite, monkeypatch: pytest.MonkeyPatch) -> SlurmSite:
    for name, text in site.environment.items():
        monkeypatch.setenv(name, text)
    return site


def test_run_survives_a_requeue_a_kill_and_a_cancel_and_leaves_nothing(cluster: SlurmSite, tmp_path: Path) -> None:
    run = Run(tmp_path, "partition: main, time: 1h")
    run.skerry("apply", "--auto-approve")
    run.until_closed(1)
    first = run.jobs()
    assert [job["state"] for job in first.values()] == ["RUNNING"] * 2

    # What Slurm does a minute before the time limit; and every process of the other job dies.
    requeued = str(first["hpc-0"]["job"])
    with cluster.drained():  # it would start before a slow machine has asked
        cluster.call("scancel", "--batch", "--signal=USR1", requeued)
        cluster.kill(str(first["hpc-1"]["job"]))
        until(lambda: cluster.restarts(requeued) == 1)
        cluster.start(requeued, "now+1hour")
    why = "was requeued, and waits for its next start"
    until(lambda: run.jobs()["hpc-1"]["condition"] == "lost" and run.jobs()["hpc-0"]["why"].startswith(why))
    jobs = run.jobs()
    assert jobs["hpc-0"]["state"] == "PENDING"
    assert (jobs["hpc-1"]["exit_code"], jobs["hpc-1"]["again"]) == (137, True)
    # No round closes without both, so the next one is of their next starts.
    next_round = run.closed()
    cluster.start(requeued, "now+10")  # a node takes no job again in the five seconds after its end
    run.skerry("apply", "--auto-approve")
    run.until_closed(next_round + 1)
    jobs = run.jobs()
    assert (jobs["hpc-0"]["job"], jobs["hpc-0"]["attempt"]) == (first["hpc-0"]["job"], 2)
    assert jobs["hpc-1"]["job"] != first["hpc-1"]["job"]

    until(lambda: all(run.store.read(name) for name in run.receipt_keys(next_round)))
    receipts = [Receipt.parse(run.store.read(name) or b"", name) for name in run.receipt_keys(next_round)]
    assert len({(receipt.commit, receipt.averages, receipt.state) for receipt in receipts}) == 1
    assert receipts[0].state is not None

    run.skerry("cancel", "--replica", "hpc-1", "--auto-approve")
    job = run.jobs()["hpc-1"]
    assert (job["state"], job["condition"], job["again"], job["stopped"]) == ("CANCELLED", "lost", False, True)
    assert {line.partition("]")[0] for line in run.skerry("logs").splitlines()} >= {"[hpc-0", "[hpc-1"}
    # The last start of the killed job wrote none.
    endings = [json.loads(path.read_text()) for path in (cluster.folder / "home/.skerry").rglob("*.ending")]
    assert [(ending["job"], ending["stopped"]) for ending in endings] == [(job["job"], 1)]

    run.skerry("destroy", "--data", "--yes")
    assert not cluster.call("squeue", "--noheader", "--states=pending,running").strip()
    assert not run.store.list("")


def test_status_names_a_time_above_the_limit_of_the_partition(cluster: SlurmSite, tmp_path: Path) -> None:
    run = Run(tmp_path, "partition: short, time: 1h")
    assert "short allows 00:10:00, and time is 60 minutes: the jobs would wait for ever" in run.skerry("plan")
    run.skerry("apply", "--auto-approve")
    job = run.jobs()["hpc-0"]
    assert (job["state"], job["condition"]) == ("PENDING", "ready")
    # The second reason replaces the first once the scheduler has looked at the job.
    assert re.match("it can never start: (the partition does not allow its time|its time is more)", job["why"])
    run.skerry("destroy", "--data", "--yes")
    assert not cluster.call("squeue", "--noheader", "--states=pending,running").strip()


def test_login_by_ssh_runs_a_job_that_slurm_requeues_before_its_time_limit(
    site: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands go through a program `ssh`, as on a machine without Slurm. Slurm sends its signal as soon as the
    limit is near. A replica that is added leaves the job of the other as it is.
    """
    monkeypatch.delenv("SLURM_CONF", raising=False)
    for folder in ("bin", "operator"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bin/ssh").write_text(SSH.format(folder=site.folder))
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", f"{tmp_path}/operator")
    run = Run(tmp_path, "login: ada@login.example, partition: main, time: 1h", count=1, minimum=1)
    run.skerry("apply", "--auto-approve")
    run.until_closed(1)
    first = str(run.jobs()["hpc-0"]["job"])
    # A limit that is short from the start may be over before a slow machine has trained a round.
    site.call("scontrol", "update", f"JobId={first}", "EndTime=now+90")
    until(lambda: site.restarts(first) >= 1)
    site.call("scontrol", "update", f"JobId={first}", "TimeLimit=60")
    assert "exit code 10 of start 0; the job is requeued" in run.skerry("logs")

    run.write_spec(2)
    run.skerry("apply", "--auto-approve")
    before = run.closed()
    run.until_closed(before + 2)
    until(lambda: run.jobs()["hpc-0"]["attempt"] == 2)  # it waits some seconds for its start
    jobs = run.jobs()
    assert (str(jobs["hpc-0"]["job"]), len(jobs)) == (first, 2)
    run.skerry("destroy", "--data", "--yes")
    assert not site.call("squeue", "--noheader", "--states=pending,running").strip()
    assert set((site.folder / "logins").read_text().split()) == {"ada@login.example"}
    assert not list((tmp_path / "operator").rglob("*.log"))
