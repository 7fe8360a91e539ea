"""The state of a deployment: where it is stored, its lock, and its recovery when it is lost."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import Operator, delete_state, skerry

from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.lock_owner_identity import abandoned, this_process
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.read_clouds import read_state
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Conflict

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox


def test_state_can_be_stored_outside_the_bucket(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    elsewhere = f"state={(tmp_path / 'state').as_uri()}"
    skerry("apply", spec, "--auto-approve", "--set", elsewhere)
    skerry("plan", spec, "--detailed-exitcode", "--set", elsewhere)
    assert list((tmp_path / "state").rglob("*.json"))
    skerry("destroy", spec, "--yes", "--data", "--set", elsewhere)
    assert skerry_sandbox.inventory() == {}
    assert not list((tmp_path / "state").rglob("*.json"))


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_destroy_of_a_uri_refuses_a_run_with_jobs_in_a_cloud(
    *, is_elsewhere: bool, spec: str, tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    elsewhere = ("--set", f"state={(tmp_path / 'state').as_uri()}") if is_elsewhere else ()
    skerry("apply", spec, "--auto-approve", *elsewhere)
    before = skerry_sandbox.inventory()
    assert "job" in before
    for data in ((), ("--data",)):
        refused = skerry("destroy", "s3://acme-skerry/runs/tiny", "--yes", *data, code=2).stderr
        assert "was created by `skerry apply`: name its spec, so that its jobs are removed too" in refused
    assert skerry_sandbox.inventory() == before
    s3 = skerry_sandbox.client("s3")
    assert s3.get_object(Bucket="acme-skerry", Key="runs/tiny/run.json")["Body"].read()
    skerry("destroy", spec, "--yes", "--data", *elsewhere)
    assert skerry_sandbox.inventory() == {}


def test_lost_state_is_recovered_from_names_and_tags(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    assert before["job"][0].endswith("-g1")
    delete_state(skerry_sandbox)
    output = skerry("plan", spec).output
    assert "to adopt" in output
    assert "to create" not in output
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory() == before
    skerry("plan", spec, "--detailed-exitcode")
    skerry("destroy", spec, "--yes", "--data")
    assert skerry_sandbox.inventory() == {}


def test_error_for_a_damaged_state_names_what_to_remove(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    before = skerry_sandbox.inventory()
    s3 = skerry_sandbox.client("s3")
    newest = s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    state = s3.get_object(Bucket="acme-skerry", Key=newest)["Body"].read()
    commands = (
        ("plan", spec),
        ("status", spec),
        ("apply", spec, "--auto-approve"),
        ("up", spec, "--auto-approve"),
        ("unlock", spec, "--auto-approve"),
        ("destroy", spec, "--yes", "--data"),
    )
    damage = (b"", b"{", state[: len(state) // 2], bytes(range(256)), state.replace(b'"a', b'"\xe4'), b"[]", b"{}")
    for number, body in enumerate(damage):
        s3.put_object(Bucket="acme-skerry", Key=newest, Body=body)
        for command in commands if number == 2 else commands[:1]:
            error = skerry(*command, code=1).stderr
            assert "`aws s3 rm --recursive s3://acme-skerry/runs/tiny/state/`" in error, command
    assert skerry_sandbox.inventory() == before
    delete_state(skerry_sandbox)
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory() == before
    skerry("plan", spec, "--detailed-exitcode")
    # What must not wait is done by names and tags.
    newest = s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    s3.put_object(Bucket="acme-skerry", Key=newest, Body=b"{")
    assert f"stopped: {before['job'][0]}" in skerry("cancel", spec, "--auto-approve", code=1).output
    assert "job" not in skerry_sandbox.inventory()


def test_first_apply_after_a_deleted_bucket_works(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (tmp_path / "train" / "train.py").write_text("print('mended')\n")
    skerry("apply", spec, "--auto-approve")
    assert skerry_sandbox.inventory()["job"][0].endswith("-g1")
    s3 = skerry_sandbox.client("s3")
    for entry in s3.list_objects_v2(Bucket="acme-skerry")["Contents"]:
        s3.delete_object(Bucket="acme-skerry", Key=entry["Key"])
    s3.delete_bucket(Bucket="acme-skerry")
    skerry("apply", spec, "--auto-approve")
    # The job is started again, because the store that it was started with is gone.
    assert len(skerry_sandbox.inventory()["job"]) == 1
    skerry("plan", spec, "--detailed-exitcode")


def test_unlock_names_the_holder_of_the_state(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    assert "the state is not locked" in skerry("unlock", spec).output
    # An apply on another machine was killed.
    s3 = skerry_sandbox.client("s3")
    newest = s3.list_objects_v2(Bucket="acme-skerry", Prefix="runs/tiny/state/")["Contents"][-1]["Key"]
    state = json.loads(s3.get_object(Bucket="acme-skerry", Key=newest)["Body"].read())
    holder = {
        "token": "x",
        "who": "ann@elsewhere",
        "host": "elsewhere",
        "doing": "apply",
        "since": "noon",
        "pid": 1,
        "started": 1,
        "boot": "b",
    }
    locked = json.dumps(state | {"serial": state["serial"] + 1, "holder": holder}).encode()
    s3.put_object(Bucket="acme-skerry", Key=f"runs/tiny/state/{state['serial'] + 1:08d}.json", Body=locked)
    output = skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2", code=1).stderr
    assert "apply by ann@elsewhere (pid 1) since noon" in output
    assert "unlocked; it was locked by apply by ann@elsewhere" in skerry("unlock", spec, "--auto-approve").output
    skerry("apply", spec, "--auto-approve", "--set", "replicas[0].count=2")


def test_destroy_is_refused_while_the_state_is_locked(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    first = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    second = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    removal = removing.plan_removal(first)
    before = skerry_sandbox.inventory()
    with second.open_state().hold(this_process("apply", second.clock), read_state(second), second.run):
        with pytest.raises(Conflict, match="the state is locked: apply by"):
            removing.destroy(first, removal, data=True, on_step=lambda _: None, on_begin=lambda _: None)
        assert skerry_sandbox.inventory() == before


def test_apply_is_refused_while_data_is_deleted(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    first = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    second = Operator(tmp_path / "skerry.yaml", skerry_sandbox.environment).deployment()
    planned = make_plan(second)
    refused: list[str] = []
    remove = first.open_state().remove

    def apply_meanwhile() -> None:
        try:
            apply_plan(second, make_plan(second), lambda _: None, lambda _: None)
        except Conflict as error:
            refused.append(str(error))
        remove()

    first.open_state().remove = apply_meanwhile  # type: ignore[method-assign]
    removed = removing.destroy(
        first, removing.plan_removal(first), data=True, on_step=lambda _: None, on_begin=lambda _: None
    )
    assert planned.plan.empty
    assert removed.ok
    assert len(refused) == 1
    assert skerry_sandbox.inventory() == {}


def test_holder_on_another_machine_is_not_abandoned() -> None:
    holder = this_process("apply", SystemClock())
    assert not abandoned(holder)
    ended = dataclasses.replace(holder, started=holder.started + 1)
    assert abandoned(ended)
    elsewhere = dataclasses.replace(ended, host=holder.host.replace("pid:", "pid:9"))
    assert not abandoned(elsewhere)
