"""Writes the locks of the replica image: what `skerry[runtime]` needs, every wheel by its sha256.

    torch.cpu.lock, torch.gpu.lock   torch and its closure: a layer of their own, renewed when torch is
    rest.lock                        everything else; the same for both variants
    build.lock                       what builds skerry's own wheel; never in the image
    bill.lock                        the tool that lists what is in an image; never in it

Versions are those of constraints.txt. For Python 3.11 on x86-64 Linux. The sha256 of a wheel is the same in every
index; its size in bytes, packed and unpacked, is beside it. Run by `scripts/image lock [VARIANT...]`; needs an index
that has torch's wheels for the variant, e.g. with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu (or cu126).
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import zipfile
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
HERE: Final = ROOT / "images/replica"
# numpy belongs to torch's layer: torch works without it but is never used so.
TORCH: Final = ("torch", "numpy")
# pip installs in the build and stays for images built on this one.
EXTRA: Final = ("pip",)
BUILD: Final = ["hatchling", "hatch-vcs"]
BILL: Final = ["cyclonedx-bom>=7.5,<8"]
VARIANTS: Final = {"cpu": "torch=={}+cpu", "gpu": "torch==={}", "cu12": "torch=={}+cu126"}
"""cu12 is for drivers that are too old for CUDA 13, which `gpu` has. Its wheels are on PyTorch's own index only."""
HEAD: Final = "# Written by `scripts/image lock` from pyproject.toml and constraints.txt. Python 3.11, x86-64 Linux.\n"


def main() -> int:
    """Write the locks of the variants, by default cpu and gpu; 1 if they disagree on what is not torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["runtime"], *EXTRA]
    rests: set[str] = set()
    for variant in sys.argv[1:] or ("cpu", "gpu"):
        result = resolve([*wanted, VARIANTS[variant].format(_pinned("torch"))])
        torch = closure(result, TORCH)
        (HERE / f"torch.{variant}.lock").write_text(HEAD + lines(result, torch))
        rests.add(HEAD + lines(result, set(result) - torch))
        sys.stdout.write(f"{variant}: {len(torch)} wheels of torch's, {len(result) - len(torch)} others\n")
    (HERE / "rest.lock").write_text(rests.pop())
    for name, requirements, constrained in (("build", BUILD, True), ("bill", BILL, False)):
        tool = resolve(requirements, constrained=constrained)
        (HERE / f"{name}.lock").write_text(HEAD + lines(tool, set(tool)))
    if rests:
        sys.stderr.write("the variants need different versions beside torch: one rest.lock cannot serve both\n")
        return 1
    return 0


def resolve(requirements: list[str], *, constrained: bool = True) -> dict[str, dict[str, Any]]:
    """Return the packages that pip would install into an empty environment, by canonical name, from its report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        pip += ["--only-binary", ":all:", "--report", str(report)]
        pip += ["--constraint", str(_constraints(Path(folder)))] if constrained else []
        subprocess.run([*pip, *requirements], check=True, env=os.environ | {"PIP_NO_INPUT": "1"})  # noqa: S603
        installed = json.loads(report.read_text())["install"]
    return {canonicalize_name(item["metadata"]["name"]): item for item in installed}


def closure(result: dict[str, dict[str, Any]], roots: tuple[str, ...]) -> set[str]:
    """`roots` and all that they need, directly or not, of what was found."""
    reached: set[str] = set()
    left = [Requirement(name) for name in roots]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if name not in result or name in reached:
            continue
        reached.add(name)
        for text in result[name]["metadata"].get("requires_dist", ()):
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                left.append(needed)
    return reached


def lines(result: dict[str, dict[str, Any]], names: set[str]) -> str:
    """One pinned, hashed requirement a line, with its sizes: `# 12 34` are bytes packed and unpacked."""
    written: list[str] = []
    for name in sorted(names):
        version, download = result[name]["metadata"]["version"], result[name]["download_info"]
        digest = download["archive_info"]["hashes"]["sha256"]
        packed, unpacked = sizes(download["url"])
        written.append(f"{name}=={version} --hash=sha256:{digest}  # {packed} {unpacked}\n")
    return "".join(written)


def sizes(url: str) -> tuple[int, int]:
    """Bytes of a wheel and of its files, from the list of its files at its end."""
    with Remote(url) as file, zipfile.ZipFile(file) as wheel:
        return file.size, sum(entry.file_size for entry in wheel.infolist())


class Remote(io.RawIOBase):
    """A file at a URL, of which only the parts that are read are fetched."""

    def __init__(self, url: str) -> None:
        self._url, self._at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as head:  # noqa: S310  pip's own
            self.size = int(head.headers["Content-Length"])

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As in a file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        """As in a file."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fetch what comes next, up to the length of the buffer."""
        end = min(self._at + len(buffer), self.size)
        if end <= self._at:
            return 0
        part = urllib.request.Request(self._url, headers={"Range": f"bytes={self._at}-{end - 1}"})  # noqa: S310  same
        with urllib.request.urlopen(part) as answer:  # noqa: S310  same
            content: bytes = (
                answer.read() if answer.status == HTTPStatus.PARTIAL_CONTENT else answer.read()[self._at : end]
            )
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def _pinned(name: str) -> str:
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return next(version for pinned, version in pins if canonicalize_name(pinned) == name)


def _constraints(folder: Path) -> Path:
    """constraints.txt without torch, whose pin has a local part here."""
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept))
    return path


if __name__ == "__main__":
    sys.exit(main())
