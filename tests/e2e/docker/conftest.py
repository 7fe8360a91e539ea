"""What these tests need of a machine: a Docker engine, the CPU image of this checkout, and a registry on loopback.

Without them the tests are skipped, and say how to have them. SKERRY_TEST_DOCKER=required makes that a failure.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from skerry.infra.engine import Engine
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import SkerryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[3]
IMAGE: Final = "skerry:cpu"
# Of one container's or one run's way to where it shall come; two cores import torch in 4 s for each replica.
DEADLINE_S: Final = 240.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)


def lacking(what: str) -> None:
    if os.environ.get("SKERRY_TEST_DOCKER") == "required":
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="session")
def engine() -> Engine:
    try:
        return Engine()
    except SkerryError as error:
        lacking(f"no Docker engine ({error}); as root: scripts/image engine --install")
        raise


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    if not engine.images.has(IMAGE):
        lacking(f"no image {IMAGE}; as root: scripts/image base && scripts/image build --variant cpu")
    return IMAGE


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty registry."""
    program = shutil.which("docker-registry")
    if program is None:
        lacking("no docker-registry; as root: apt-get install --no-install-recommends docker-registry")
    folder = tmp_path_factory.mktemp("registry")
    address = f"127.0.0.1:{free_port()}"
    settings = folder / "registry.yml"
    settings.write_text(
        "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: {address}}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(program), "serve", str(settings)], stdout=log, stderr=log)
    try:
        clock = SystemClock()
        wait_until(clock, lambda: answers(address) or None, clock.now() + 20, Backoff(first=0.05, cap=0.2))
        yield address
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], object]) -> None:
    clock = SystemClock()
    wait_until(clock, lambda: condition() or None, clock.now() + DEADLINE_S, Backoff(first=0.1, cap=0.5))


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
