"""Writes the bill of materials (CycloneDX) of an image: its Python and Debian packages."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from skerry.infra.image.source import BUILD, RECIPE
from skerry.infra.local.docker_engine import Bind, ContainerRequest, EngineFailed
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine

_TOOL: Final = "/bill-tool"
_RECIPE: Final = "/bill"


def write(engine: Engine, root: Path, reference: str, on_line: Callable[[str], None]) -> Path:
    """Write the bill of an image to build/image, unless it is up to date; return the file."""
    path = root / BUILD / f"{reference.replace(':', '-')}.bill.json"
    stamp = path.with_suffix(".made-of")
    # The last layer is skerry alone, and its entry in the bill depends on pyproject.toml only.
    layers: list[str] = engine.images.inspect(reference)["RootFS"]["Layers"][:-1]
    files = (root / "pyproject.toml", root / RECIPE / "bill.py", root / RECIPE / "bill.lock")
    made_of = "\n".join([*layers, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)])
    if not (path.is_file() and stamp.is_file() and stamp.read_text() == made_of):
        path.write_text(bill_of(engine, root, reference, on_line))
        stamp.write_text(made_of)
    return path


def bill_of(engine: Engine, root: Path, reference: str, on_line: Callable[[str], None]) -> str:
    """The bill as JSON text. The locked tool runs in a container of the image without a network.

    Raises EngineFailed with the output of the tool.
    """
    tool = _tool(root, on_line)
    request = ContainerRequest(
        image=reference,
        # The base's own Python runs the tool, so that it does not list itself.
        entrypoint=["python3", f"{_RECIPE}/bill.py", reference],
        environment={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TOOL": _TOOL,
            # The date in the bill, so that equal images have equal bills.
            "SOURCE_DATE_EPOCH": "1700000000",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        binds=[
            Bind(source=str(tool), target=_TOOL, writable=False),
            Bind(source=str(root / RECIPE), target=_RECIPE, writable=False),
        ],
        network="none",
    )
    code, output = engine.containers.run(request)
    if code:
        raise EngineFailed(f"listing {reference} failed: {output.strip()[-2000:]}")
    return output


def _tool(root: Path, on_line: Callable[[str], None]) -> Path:
    folder, lock = root / BUILD / "bill-tool", (root / RECIPE / "bill.lock").read_text()
    stamp = folder / ".lock"
    if stamp.is_file() and stamp.read_text() == lock:
        return folder
    on_line("downloading the tool that lists the contents of an image")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    pip += ["--disable-pip-version-check", "--target", str(folder), "--requirement", str(root / RECIPE / "bill.lock")]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise Retryable(f"downloading the tool failed: {ended.stderr.strip()[-2000:]}")
    stamp.write_text(lock)
    return folder
