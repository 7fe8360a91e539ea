"""`--parallelism`: so many calls are in flight, of all threads together, in each command that has the option."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from botocore.client import BaseClient
from requests import Session
from tests.infra.deploy.account import DIGEST, skerry, write_run, write_spec
from tests.infra.deploy.test_company_rules import VERTEX
from tests.support.clocks import FakeClock

from skerry.infra import targets
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.open_cloud_sessions import CallLimit, OperatorAccess
from skerry.infra.targets.slurm.cluster import Answer, Cluster
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime.errors import SkerryError
from skerry.testing.plugin import skerry_google

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_google"]


class InFlight:
    """Counts the calls of a client in flight. waiting: the threads whose calls wait until there were two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, client: type, method: str, *, waiting: str | None) -> None:
        self.most = self.calls = self._now = 0
        self._lock = threading.Lock()
        self._two = threading.Event()
        real: Callable[..., Any] = getattr(client, method)

        def counted(*words: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
                self._now += 1
                self.most = max(self.most, self._now)
                if self._now > 1:
                    self._two.set()
            if waiting is not None and threading.current_thread().name.startswith(waiting):
                assert self._two.wait(300), "the calls of these threads are not made at the same time"
            try:
                return real(*words, **named)
            finally:
                with self._lock:
                    self._now -= 1

        monkeypatch.setattr(client, method, counted)


def test_one_call_at_a_time_is_one_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skerry_sandbox: Sandbox
) -> None:
    spec, saved, removal = str(write_spec(tmp_path, count=3)), str(tmp_path / "a.plan"), str(tmp_path / "b.plan")
    counted = InFlight(monkeypatch, BaseClient, "_make_api_call", waiting=None)
    limit = ("--parallelism", "1")
    for command in (
        ("plan", spec, "--out", saved, *limit),
        ("apply", saved, *limit),
        ("apply", spec, "--auto-approve", "--replace", "aws_batch_job.b-0", *limit),
        ("plan", spec, "--destroy", "--out", removal, *limit),
    ):
        counted.calls = 0
        skerry(*command)
        assert (counted.most, counted.calls > 10) == (1, True), command
    skerry("apply", removal, *limit, code=1)  # the bucket with the run in it is left
    assert counted.most == 1
    assert set(skerry_sandbox.inventory()) == {"bucket"}


def test_more_calls_at_a_time_are_as_many_as_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skerry_sandbox: Sandbox
) -> None:
    del skerry_sandbox
    counted = InFlight(monkeypatch, BaseClient, "_make_api_call", waiting="refresh")
    skerry("plan", str(write_spec(tmp_path, count=8)), "--parallelism", "3")
    assert 1 < counted.most <= 3


def test_one_call_at_a_time_is_one_on_google(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skerry_google: GoogleSandbox
) -> None:
    skerry_google.any_image = True
    group = VERTEX.format(project=skerry_google.project, digest=DIGEST).replace("count: 1", "count: 3")
    spec = str(write_run(tmp_path, group, store="gs://acme-skerry/runs"))
    counted = InFlight(monkeypatch, Session, "request", waiting=None)
    skerry("apply", spec, "--auto-approve", "--parallelism", "1")
    assert (counted.most, counted.calls > 10) == (1, True)


def test_sessions_of_all_targets_have_the_limit() -> None:
    access = OperatorAccess(FakeClock(), os.environ, at_once=1)
    assert isinstance(access.calls, CallLimit)
    assert isinstance(OperatorAccess(FakeClock(), os.environ).calls, nullcontext)
    for kind in sorted(targets.kinds().deployed - {"slurm"}):  # which opens a session for each cluster, later
        limited: list[object] = []
        reached(targets.open_target(kind, access), limited, set())
        assert access.calls in limited, kind


def reached(value: object, limited: list[object], seen: set[int], depth: int = 4) -> None:
    """Collect the limits that an object and its parts hold."""
    if id(value) in seen or depth == 0 or isinstance(value, OperatorAccess):
        return
    seen.add(id(value))
    parts = getattr(value, "__dict__", {})
    limited += [part for name, part in parts.items() if name in {"calls", "_calls"}]
    closed = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    for part in (*parts.values(), *closed):
        reached(part, limited, seen, depth - 1)


def test_command_on_a_cluster_of_slurm_holds_the_limit() -> None:
    limit, held = CallLimit(1), list[bool]()

    def execute(_words: object, _text: str) -> Answer:
        held.append(is_held(limit))
        return Answer(code=0, out="", err="")

    Cluster(FakeClock(), {}, None, execute, limit).call("true")
    assert held == [True]


def test_creation_by_the_client_of_google_holds_the_limit(
    skerry_google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, held, request = CallLimit(1), list[bool](), Session.request

    def observed(*words: Any, **named: Any) -> Any:
        held.append(is_held(limit))
        return request(*words, **named)

    monkeypatch.setattr(Session, "request", observed)
    google = Google(FakeClock(), os.environ, project=skerry_google.project, calls=limit)
    with pytest.raises(SkerryError):  # no machine is named
        Creator(google).create(skerry_google.project, "us-central1", {"displayName": "a"})
    assert held == [True]


def is_held(limit: CallLimit) -> bool:
    """True if another thread would have to wait for the only place."""
    taken = threading.Thread(target=limit.__enter__, daemon=True)
    taken.start()
    taken.join(0.05)
    return taken.is_alive()


def test_call_within_a_call_needs_no_further_place() -> None:
    limit = CallLimit(1)
    with limit, limit:
        pass
    inside = threading.Event()
    leave = threading.Event()

    def hold() -> None:
        with limit:
            inside.set()
            leave.wait(5)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(300)
    waiting = threading.Thread(target=limit.__enter__)
    waiting.start()
    assert waiting.is_alive()
    leave.set()
    for thread in (holder, waiting):
        thread.join(5)
        assert not thread.is_alive()
