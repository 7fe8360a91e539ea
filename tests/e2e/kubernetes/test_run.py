"""A run on Kubernetes from its spec to its end, by the command line: containers as pods, a volume as store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import DEADLINE_S, until
from tests.e2e.deployed import Deployed, check_nothing_was_lost, until_closed

from skerry.runtime.store import open_store
from skerry.testing.kubernetes import KubernetesSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

GROUP: Final = """\
  - name: k
    count: {count}
    target:
      kind: kubernetes
      namespace: train
      memory: 3GiB
      shared_memory: 256MiB
      claim: {{name: shared, path: {folder}, user: {user}}}
"""


@pytest.fixture
def cluster(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesSandbox]:
    """A cluster with a volume. The operator may be root, and the pods are not, so both may write all files of it."""
    del engine
    before = os.umask(0)
    try:
        (tmp_path / "shared").mkdir()
        with KubernetesSandbox(containers=True) as created:
            created.add_claim("shared", tmp_path / "shared")
            monkeypatch.setenv("KUBECONFIG", str(created.kubeconfig))
            yield created
            assert created.violations == []
    finally:
        os.umask(before)


def write(folder: Path, image: str, count: int, rounds: int) -> Deployed:
    volume = folder / "shared"
    group = GROUP.format(count=count, folder=volume, user=os.getuid() or 10001)
    slots = [f"k-{index}" for index in range(count)]
    return Deployed.write(
        folder, store=(volume / "runs").as_uri(), image=image, groups=group, slots=slots, rounds=rounds
    )


def succeeded(cluster: KubernetesSandbox, job: str) -> bool:
    return bool(cluster.objects.get("jobs", "train", job)["status"].get("succeeded"))


def test_run_continues_after_a_killed_and_an_evicted_pod(
    cluster: KubernetesSandbox, image: str, engine: Engine, tmp_path: Path
) -> None:
    run = write(tmp_path, image, 2, 12)
    run.plan()
    assert cluster.calls.writes == []
    run.apply()
    store = open_store((tmp_path / "shared/runs/tried").as_uri())
    jobs = dict(zip(run.slots, cluster.inventory()["job"], strict=True))
    pods = {slot: cluster.jobs.pod(job)["metadata"]["name"] for slot, job in jobs.items()}
    until_closed(store, 1)
    engine.containers.signal(cluster.jobs.container(jobs["k-1"]), "SIGKILL")
    until_closed(store, 2)
    cluster.jobs.interrupt(jobs["k-0"])

    # The cluster starts another pod for each by itself, and an eviction costs no attempt.
    until(lambda: all(succeeded(cluster, job) for job in jobs.values()))
    check_nothing_was_lost(store, run, killed={"k-0", "k-1"})
    watched = run.watch()
    assert watched["ok"]
    assert watched["run"]["agreement"]["state"]
    assert {job["slot"]: (job["job"], job["condition"], job["attempt"]) for job in watched["jobs"]} == {
        "k-0": (jobs["k-0"], "done", 1),
        "k-1": (jobs["k-1"], "done", 2),
    }
    assert all(cluster.jobs.pod(job)["metadata"]["name"] != pods[slot] for slot, job in jobs.items())
    assert run.speakers().keys() == set(run.slots)

    run.destroy()
    assert cluster.inventory() == {}
    assert [path for path in (tmp_path / "shared").rglob("*") if path.is_file()] == []


def test_image_that_cannot_be_pulled_is_the_reason_why_a_job_waits(cluster: KubernetesSandbox, tmp_path: Path) -> None:
    run = write(tmp_path, "127.0.0.1:1/skerry:missing", 1, 1)
    run.apply()
    cluster.jobs.wait(*cluster.inventory()["job"], within_s=DEADLINE_S)
    (job,) = run.jobs().values()
    advice = "its image could not be pulled: check that it exists, and `pull_secret`"
    assert job["why"] == f'{advice} (Back-off pulling image "127.0.0.1:1/skerry:missing")'
    assert job["condition"] == "ready"
    run.destroy()
    assert cluster.inventory() == {}
