"""Tests the installs of a user: the wheel, alone and without torch, and the editable install of the scripts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def ended(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program that has run without our packages in its environment."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without our packages in its environment and return its output."""
    result = ended(*command, cwd=cwd)
    assert result.returncode == 0, f"{command}:\n{result.stdout[-4000:]}{result.stderr[-4000:]}"
    return result.stdout


def environment_of(folder: Path) -> Path:
    """The interpreter of a new, empty environment; the pip of ours fills it, so that it need not be fetched."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def install(python: Path, *what: str | Path) -> None:
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
    )
    run(*pip, *what, cwd=python.parent)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def torch_free(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and what it requires, and no extras."""
    python = environment_of(tmp_path_factory.mktemp("torch-free") / "venv")
    install(python, wheel)
    return python


def test_the_wheel_holds_both_packages_their_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        path.relative_to(ROOT / root).as_posix()
        for root in ("runtime", "infra")
        for path in (ROOT / root / "skerry").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = {name for name in names if not re.match(r"skerry-[^/]+\.dist-info/", name)}
    assert packed == sources
    assert {"skerry/runtime/py.typed", "skerry/infra/py.typed"} <= packed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_without_torch_the_command_line_and_the_stores_work(torch_free: Path, tmp_path: Path) -> None:
    scripts = torch_free.parent
    assert "DiLoCo" in run(scripts / "skerry", "--help", cwd=tmp_path)
    run(scripts / "skerry", "init", cwd=tmp_path)
    assert "is valid" in run(scripts / "skerry", "validate", cwd=tmp_path)
    result = run(scripts / "skerry-replica", "check", (tmp_path / "store").as_uri(), cwd=tmp_path)
    assert '"ok": true' in result
    code = "import skerry.infra, skerry.runtime.store, importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(torch_free, "-c", code, cwd=tmp_path) == "None\n"


def test_up_without_torch_names_the_extra_and_starts_nothing(torch_free: Path, tmp_path: Path) -> None:
    skerry = torch_free.parent / "skerry"
    run(skerry, "init", cwd=tmp_path)
    before = sorted(tmp_path.rglob("*"))
    result = ended(skerry, "up", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(
        rf"\S*skerry\.yaml:\d+:\d+: code\.command: runs here with {re.escape(str(torch_free))}, which lacks "
        r"torch, torchft, numpy; install the extra of the runtime: pip install 'skerry\[runtime\]'\n",
        result.stderr,
    ), result.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_installed_fits_together(torch_free: Path, tmp_path: Path) -> None:
    assert "No broken requirements" in run(sys.executable, "-m", "pip", "--python", torch_free, "check", cwd=tmp_path)


def test_manager_without_torch_names_the_missing_package(torch_free: Path, tmp_path: Path) -> None:
    code = "try:\n import skerry.runtime.manager\nexcept ModuleNotFoundError as error:\n print(error.name)"
    assert run(torch_free, "-c", code, cwd=tmp_path) == "torch\n"


def test_an_editable_install_imports_both_packages_from_the_checkout(tmp_path: Path) -> None:
    python = environment_of(tmp_path / "venv")
    # Without its requirements: what is tested is where skerry is found.
    install(python, "--no-deps", "--build-constraint", ROOT / "constraints.txt", "--editable", ROOT)
    code = "import skerry.infra, skerry.runtime; print(skerry.infra.__file__); print(skerry.runtime.__file__)"
    expected = [ROOT / root / "skerry" / root / "__init__.py" for root in ("infra", "runtime")]
    assert run(python, "-c", code, cwd=tmp_path).splitlines() == [str(path) for path in expected]


def test_one_source_folder_joins_both() -> None:
    assert list(ROOT.glob("*/skerry/__init__.py")) == [ROOT / "runtime/skerry/__init__.py"]
