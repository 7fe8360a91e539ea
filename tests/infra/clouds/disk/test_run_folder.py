"""A store on a shared disk as the home of a run: nothing of it is created, tagged or deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.infra.kit import ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra import clouds
from skerry.infra.clouds.disk.run_folder import folder_of
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.provision.handler import Condition, Desired
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.provision.target_and_store_interfaces import RunContext


def context_of(folder: Path, store: Path) -> RunContext:
    groups = "  - {name: hpc, count: 1, target: {kind: slurm}}\n"
    return ground_from(write_spec(folder, groups, store=store.as_uri(), image="x"))


def test_missing_folder_is_usable_and_a_file_is_not(tmp_path: Path) -> None:
    context = context_of(tmp_path, tmp_path / "shared disk" / "runs")
    home = clouds.open_home(context.run_uri, OperatorAccess(FakeClock(), {}))
    (resource,) = home.resources(context)
    assert (resource.address, resource.name, resource.brought) == (
        "disk_folder.store",
        f"{tmp_path}/shared disk/runs",
        True,
    )
    desired = Desired(resource=resource, generation=0, run=context.run_uri, settings=resource.settings())
    (seen,) = home.handlers()["disk_folder"].read([desired])
    assert seen is not None
    assert seen.condition is Condition.READY
    assert [check.ok for check in home.checks(context)] == [True]
    (tmp_path / "shared disk").write_text("a file")
    (seen,) = home.handlers()["disk_folder"].read([desired])
    assert seen is not None
    assert (seen.condition, seen.detail) == (Condition.BROKEN, f"{tmp_path}/shared disk is not a folder")
    assert [check.ok for check in home.checks(context)] == [False]


def test_delete_and_empty_leave_the_folder_as_it_is(tmp_path: Path) -> None:
    context = context_of(tmp_path, tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "of-another-run").touch()
    home = clouds.open_home(context.run_uri, OperatorAccess(FakeClock(), {}))
    (resource,) = home.resources(context)
    record = Desired(resource=resource, generation=0, run=context.run_uri, settings={}).to_record({})
    home.handlers()["disk_folder"].delete(record)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["of-another-run"]


def test_run_in_a_bucket_has_no_folder() -> None:
    with pytest.raises(Invalid, match="not on a disk: s3://acme/tiny"):
        folder_of("s3://acme/tiny")
