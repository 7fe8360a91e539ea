"""The Dockerfiles of images/examples on the CPU image: each is built, and two containers of it finish one round."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from tests.e2e.conftest import DEADLINE_S, ROOT, WHEELS, finish_a_run, package_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

EXAMPLES: Final = ROOT / "images/examples"
RECIPES: Final = ROOT / "runtime/skerry/runtime/recipes"
TINY: Final = ROOT / "runtime/examples/tiny_gpt"


@pytest.fixture
def build(engine: Engine) -> Iterator[Callable[..., str]]:
    """Builds an example and returns its tag."""
    tags: list[str] = []

    def run(name: str, context: Path = EXAMPLES, **arguments: str) -> str:
        tags.append(f"skerry-example:{name}")
        command = ["docker", "build", "--network", "host", "-t", tags[-1], "-f", str(EXAMPLES / f"{name}.Dockerfile")]
        command += [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
        ended = subprocess.run(
            [*command, str(context)], capture_output=True, text=True, check=False, timeout=DEADLINE_S
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
        return tags[-1]

    yield run
    for tag in tags:
        engine.images.remove(tag)


def test_stack_of_hugging_face(image: str, build: Callable[..., str], tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", str(wheels)]
    pip += ["--constraint", "constraints.txt", "--find-links", str(WHEELS), "transformers", "accelerate"]
    subprocess.run(pip, cwd=ROOT, check=True)
    with package_index(wheels) as address:
        tag = build("huggingface", SKERRY=image, PIP_INDEX_URL=address)
    (code := tmp_path / "code").mkdir()
    shutil.copy(RECIPES / "hf_trainer.py", code)
    finish_a_run(tag, tmp_path, code, ["python", "hf_trainer.py"], rounds=1)


def test_compiled_model(image: str, build: Callable[..., str], tmp_path: Path) -> None:
    model = "    model = nn.Sequential(*layers)\n"
    compiled = (RECIPES / "loop.py").read_text().replace(model, f"{model}    fast = torch.compile(model)\n")
    compiled = compiled.replace("mse_loss(model(x)", "mse_loss(fast(x)")
    assert compiled.count("fast") == 2
    (code := tmp_path / "code").mkdir()
    (code / "train.py").write_text(compiled)
    finish_a_run(build("compile", SKERRY=image), tmp_path, code, ["python", "train.py"], rounds=1)


def test_base_of_ones_own(image: str, build: Callable[..., str], tmp_path: Path) -> None:
    """The base here is our image, whose skerry it replaces: no other with torch can be had without a registry."""
    with package_index(WHEELS) as address:
        tag = build("own-base", ROOT, BASE=image, PIP_INDEX_URL=address)
    finish_a_run(tag, tmp_path, TINY, ["python", "train.py", "--width", "32", "--layers", "1"], rounds=1)
