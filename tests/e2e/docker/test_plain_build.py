"""The `docker build` lines of images/README.md, as a new user types them: no Python, no script of ours on the host."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import DEADLINE_S, ROOT, WHEELS, finish_a_run, package_index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

TAG: Final = "skerry:plain"


def lines_of_the_manual() -> list[list[str]]:
    """The words of every `docker build` line of the manual."""
    text = (ROOT / "images/README.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^docker build .*", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def index() -> Iterator[str]:
    """An index of the wheels that `scripts/image build --offline` has downloaded."""
    with package_index(WHEELS) as address:
        yield address


class PlainBuild:
    """The CPU line of the manual in a fresh copy of the checkout. No registry is reached: base and index are given."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        pack = ["tar", "--create", "--null", "--files-from", "-"]
        archive = subprocess.run(pack, cwd=ROOT, input=names, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract"], cwd=folder, input=archive, check=True)
        self._folder, self._arguments = folder, arguments
        self.ended = self.run()

    def run(self, **more: str) -> subprocess.CompletedProcess[str]:
        """Build, with more build arguments. What was built before is in the engine's cache."""
        [words] = [words for words in lines_of_the_manual() if "VARIANT=cpu" in words]
        arguments = [word for item in (self._arguments | more).items() for word in ("--build-arg", "=".join(item))]
        command = [TAG if word == "skerry:cpu" else word for word in words[:-1]]
        command += ["--network", "host", *arguments, words[-1]]
        return subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, check=False, timeout=3 * DEADLINE_S
        )


@pytest.fixture(scope="module")
def plain(
    engine: Engine, base: str, image: str, index: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainBuild]:
    version = engine.images.inspect(image)["Config"]["Labels"]["org.opencontainers.image.version"]
    arguments = {"BASE_IMAGE": base, "PIP_INDEX_URL": index, "PIP_EXTRA_INDEX_URL": "", "VERSION": version}
    build = PlainBuild(tmp_path_factory.mktemp("clone"), arguments)
    assert build.ended.returncode == 0, build.ended.stdout[-3000:] + build.ended.stderr[-3000:]
    yield build
    engine.images.remove(TAG)


def test_manual_has_a_line_for_each_variant() -> None:
    gpu, cpu = lines_of_the_manual()
    assert gpu == ["docker", "build", "-t", "skerry:gpu", "-f", "images/replica/Dockerfile", "."]
    assert cpu[:6] == ["docker", "build", "-t", "skerry:cpu", "-f", "images/replica/Dockerfile"]


@pytest.mark.usefixtures("plain")
def test_plain_build_has_the_layers_of_an_offline_build(engine: Engine, image: str) -> None:
    first, second = (engine.images.inspect(name)["RootFS"]["Layers"] for name in (image, TAG))
    assert second == first


@pytest.mark.usefixtures("plain")
def test_two_containers_of_a_plain_build_finish_a_run(tmp_path: Path) -> None:
    finish_a_run(TAG, tmp_path, ROOT / "runtime/examples/tiny_gpt", ["python", "train.py", "--width", "32"], rounds=2)


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [("VARIANT", "cu11", "torch.cu11.lock"), ("TOOLCHAIN", "clang", "unknown TOOLCHAIN=clang")],
)
def test_unknown_argument_is_refused_by_name(plain: PlainBuild, argument: str, value: str, words: str) -> None:
    ended = plain.run(**{argument: value})
    assert ended.returncode != 0
    assert words in ended.stdout + ended.stderr
