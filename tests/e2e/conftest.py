"""Fixtures for the machine's parts: a Docker engine, the base image, the replica image, docker-registry.

Without them the tests are skipped, and say how to have them. SKERRY_TEST_DOCKER=required makes that a failure.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.testing.both_clouds import Clouds
from skerry.testing.docker_registry_process import Registry
from skerry.testing.google import GoogleSandbox
from skerry.testing.plugin import skerry_containers, skerry_registry, skerry_sandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["skerry_containers", "skerry_registry", "skerry_sandbox"]

ROOT: Final = Path(__file__).parents[2]
BASE: Final = "skerry-base:bookworm"
IMAGE: Final = "skerry:cpu"
WHEELS: Final = ROOT / "images/replica/wheels"
# Of one container's or one run's way to where it shall come; two cores import torch in 4 s for each replica.
DEADLINE_S: Final = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)


def lacking(what: str) -> None:
    if os.environ.get("SKERRY_TEST_DOCKER") == "required":
        pytest.fail(what)
    pytest.skip(what)


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + DEADLINE_S, Backoff(first=0.1, cap=0.5))


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return Engine()
    except SkerryError as error:
        lacking(f"no Docker engine ({error}); as root: scripts/image engine --install")
        raise


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """The smallest image with a Python."""
    if not engine.images.has(BASE):
        lacking(f"no image {BASE}; as root: scripts/image base")
    return BASE


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The replica image of this checkout."""
    if not engine.images.has(IMAGE):
        lacking(f"no image {IMAGE}; as root: scripts/image base && scripts/image build --variant cpu --offline")
    return IMAGE


@pytest.fixture(scope="session")
def registry() -> Iterator[str]:
    """The address of an empty registry."""
    try:
        item = Registry()
    except Invalid as error:
        lacking(str(error))
        raise
    with item:
        yield item.address


@pytest.fixture
def aws(skerry_registry: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    """An account that checks every right: what a plan grants must be enough."""
    with Sandbox(containers=True, enforce_iam=True, registry=_needed(skerry_registry)) as created:
        _surround(monkeypatch, created.environment)
        yield created


@pytest.fixture
def google(skerry_registry: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleSandbox]:
    """A project that refuses what Google does not know, and two writes of one object within a second."""
    with GoogleSandbox(containers=True, object_rate=True, registry=_needed(skerry_registry)) as created:
        _surround(monkeypatch, created.environment)
        yield created
        assert created.violations == []


@pytest.fixture
def clouds(aws: Sandbox, google: GoogleSandbox) -> Clouds:
    """Both, and each knows the other."""
    return Clouds(aws=aws, google=google)


def _needed(registry: str | None) -> str:
    if registry is None:
        lacking("no docker-registry; as root: apt-get install --no-install-recommends docker-registry")
    return registry or ""


def _surround(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@contextmanager
def package_index(folder: Path) -> Iterator[str]:
    """A package index of the wheels in a folder, on loopback; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pypiserver", "run", "-i", "127.0.0.1", "-p", str(port), "--disable-fallback"]
    with subprocess.Popen([*command, str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:

        def answers() -> bool:
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(answers)
        try:
            yield f"http://127.0.0.1:{port}/simple"
        finally:
            server.kill()


RUN_OF_TWO: Final = """
run: two
store: {store}
image: {image}
code: {{path: {code}, command: {command}}}
outer: {{rounds: {rounds}, sync_every: 4}}
faults: {{min_replicas: 2, grace: 10s, start_window: 60s}}
replicas: [{{name: c, count: 2, target: {{kind: docker}}}}]
"""


def finish_a_run(image: str, folder: Path, code: Path, command: Sequence[str], *, rounds: int) -> None:
    """Two containers of an image finish a run with equal digests."""
    store = (folder / "store").as_uri()
    spec = folder / "skerry.yaml"
    spec.write_text(
        RUN_OF_TWO.format(store=store, image=image, code=code, command=json.dumps(list(command)), rounds=rounds)
    )
    program = [sys.executable, "-c", "from skerry.infra.cli.app import main; main()", "up", str(spec), "--json"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1])["digests_equal"] is True
    assert len(open_store(f"{store}/two").list(keys.COMMITS)) == rounds
