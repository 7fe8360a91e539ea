"""The bill of materials of an image (CycloneDX): every Python package and every package of Debian's in it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from skerry.infra.engine import Bind, EngineFailed, Wanted
from skerry.infra.image.source import BUILD, RECIPE
from skerry.runtime.errors import Retryable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.infra.engine import Engine

_TOOL: Final = "/bill-tool"
_RECIPE: Final = "/bill"


def write(engine: Engine, root: Path, reference: str, tell: Callable[[str], None]) -> Path:
    """The bill of an image as a file in build/image; one that says the same already is left, and costs nothing."""
    path = root / BUILD / f"{reference.replace(':', '-')}.bill.json"
    stamp = path.with_suffix(".made-of")
    # Our own layer is one package, and what a bill says of it stands in pyproject.toml.
    layers: list[str] = engine.images.inspect(reference)["RootFS"]["Layers"][:-1]
    files = (root / "pyproject.toml", root / RECIPE / "bill.py", root / RECIPE / "bill.lock")
    made_of = "\n".join([*layers, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)])
    if not (path.is_file() and stamp.is_file() and stamp.read_text() == made_of):
        path.write_text(bill_of(engine, root, reference, tell))
        stamp.write_text(made_of)
    return path


def bill_of(engine: Engine, root: Path, reference: str, tell: Callable[[str], None]) -> str:
    """The bill as JSON text. The tool is fetched by its lock, runs in a container without network, and is not in it.

    Raises EngineFailed with what the tool said.
    """
    tool = _tool(root, tell)
    wanted = Wanted(
        image=reference,
        # The base's own Python runs the tool: it must not find itself in the environment that it lists.
        entrypoint=["python3", f"{_RECIPE}/bill.py", reference],
        environment={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "TOOL": _TOOL,
            # The tool dates its bill by this, so that equal images have equal bills.
            "SOURCE_DATE_EPOCH": "1700000000",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        binds=[
            Bind(source=str(tool), target=_TOOL, writable=False),
            Bind(source=str(root / RECIPE), target=_RECIPE, writable=False),
        ],
        network="none",
    )
    code, said = engine.containers.run(wanted)
    if code:
        raise EngineFailed(f"no bill of {reference}: {said.strip()[-2000:]}")
    return said


def _tool(root: Path, tell: Callable[[str], None]) -> Path:
    folder, lock = root / BUILD / "bill-tool", (root / RECIPE / "bill.lock").read_text()
    stamp = folder / ".lock"
    if stamp.is_file() and stamp.read_text() == lock:
        return folder
    tell("fetching the tool that lists what is in an image")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
    pip += ["--disable-pip-version-check", "--target", str(folder), "--requirement", str(root / RECIPE / "bill.lock")]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise Retryable(f"the tool cannot be fetched: {ended.stderr.strip()[-2000:]}")
    stamp.write_text(lock)
    return folder
