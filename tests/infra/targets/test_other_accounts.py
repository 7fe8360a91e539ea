"""A run whose operator comes back with the credentials of another account: no command takes its jobs for ended."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, write_run
from tests.infra.targets.runs import KubernetesRun

from skerry.infra.deploy.list_and_stop_jobs import jobs_to_stop
from skerry.infra.deploy.read_clouds import accounts_to_record, read_state
from skerry.runtime.errors import Conflict
from skerry.testing.kubernetes import KubernetesSandbox

if TYPE_CHECKING:
    from pathlib import Path

    from tests.infra.targets.runs import ClusterAndAccount

pytestmark = pytest.mark.usefixtures("quick")


def check_refused(operator: Operator, message: str) -> None:
    deployment = operator.deployment()
    for command in (operator.plan, operator.destroy, lambda: jobs_to_stop(deployment)):
        with pytest.raises(Conflict, match=message):
            command()


def test_jobs_of_a_cluster_are_not_searched_in_another(kubernetes_place: ClusterAndAccount, tmp_path: Path) -> None:
    run = KubernetesRun(tmp_path, kubernetes_place)
    operator = run.operator()
    assert operator.apply().ok
    with KubernetesSandbox(keys=kubernetes_place.cluster.keys) as other:
        elsewhere = Operator(operator.path, {**operator.environment, **other.environment})
        check_refused(elsewhere, r"applied in kubernetes/train [0-9a-f-]+, and these credentials are of [0-9a-f-]+,")
        other.objects.remove(("namespaces", "", "train"))
        check_refused(elsewhere, "these credentials are of a cluster without it, .*switch back, .* remove s3://acme")
    assert run.live() == 2
    assert operator.destroy().ok


def test_buckets_that_outlive_a_destroy_bind_no_account(kubernetes_place: ClusterAndAccount, tmp_path: Path) -> None:
    operator = KubernetesRun(tmp_path, kubernetes_place).operator()
    assert operator.apply().ok
    operator.destroy(data=False)
    state = read_state(operator.deployment())
    assert state is not None
    assert "kubernetes/train" in state.accounts
    assert accounts_to_record(state, {"aws": "1"}) == {"aws": "1"}
    with KubernetesSandbox(keys=kubernetes_place.cluster.keys) as other:
        assert Operator(operator.path, {**operator.environment, **other.environment}).apply().ok


def test_state_without_accounts_binds_none(kubernetes_place: ClusterAndAccount, tmp_path: Path) -> None:
    operator = KubernetesRun(tmp_path, kubernetes_place).operator()
    assert operator.apply().ok
    deployment = operator.deployment()
    state = read_state(deployment)
    assert state is not None
    older = dataclasses.replace(state, serial=state.serial + 1, accounts={})
    deployment.open_store().create(f"state/{older.serial:08d}.json", older.to_bytes())
    assert operator.plan().plan.empty
    assert operator.destroy().ok


def test_jobs_of_a_slurm_user_are_not_searched_as_another(tmp_path: Path) -> None:
    programs = {
        "id": 'echo "$OPERATOR"',
        "scontrol": 'echo "ClusterName = hpc"',
        "sbatch": "echo 7",
        "squeue": ":",
        "sinfo": ":",
        "sacct": ":",
    }
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, line in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    path = write_run(tmp_path, "  - {name: a, count: 1, target: {kind: slurm}}\n", store=(tmp_path / "runs").as_uri())
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    ada, bob = (Operator(path, {**environment, "OPERATOR": name}) for name in ("ada", "bob"))
    assert ada.apply().ok
    check_refused(bob, "applied in slurm/localhost ada@hpc, and these credentials are of bob@hpc,")
    assert ada.destroy(data=True).ok
