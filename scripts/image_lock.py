"""Writes the locks of the replica image: what `skerry[runtime]` needs, every wheel by its sha256.

torch.VARIANT.lock has torch and its closure, a layer of their own; rest.lock everything else, for all variants;
build.lock what builds skerry's own wheel, and is never in the image.
Versions are those of constraints.txt, chosen by pip for this machine: Python 3.11 on x86-64 Linux. The sha256 of a
wheel is the same in every index; its size in bytes, packed and unpacked, is beside it. `scripts/image lock [VARIANT]`
needs an index with torch's wheels, e.g. with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import fsspec
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[1]
HERE: Final = ROOT / "images/replica"
# torch's pin has a local part here.
PINS: Final = re.findall(r"^(?!torch==)[\w.-]+==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
[VERSION] = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
VARIANTS: Final = {"cpu": f"torch=={VERSION}+cpu", "gpu": f"torch==={VERSION}", "cu12": "torch===2.10.0"}
"""cu12 is for drivers that are too old for CUDA 13, which `gpu` has: the last torch on PyPI that brings CUDA 12."""
HEAD: Final = "# Written by `scripts/image lock` from pyproject.toml and constraints.txt. Python 3.11, x86-64 Linux.\n"


def main() -> None:
    """Write the locks of the variants, by default all; fails if they disagree on what is not torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # pip installs in the build and stays for images built on this one.
    needed = [*project["dependencies"], *project["optional-dependencies"]["runtime"], "pip"]
    others: set[str] = set()
    for variant in sys.argv[1:] or VARIANTS:
        # numpy belongs to torch's layer: torch works without it but is never used so.
        torch = resolve([VARIANTS[variant], "numpy"])
        write(f"torch.{variant}", torch)
        others.add("".join(sorted(resolve([*needed, VARIANTS[variant]]) - torch)))
    write("rest", set(others.pop().splitlines(keepends=True)))
    write("build", resolve(["hatchling", "hatch-vcs"]))
    if others:
        sys.exit("the variants need different versions beside torch: one rest.lock cannot serve both")


def resolve(requirements: list[str]) -> set[str]:
    """The packages that pip would install into an empty environment: lines of a lock, with a URL for the sizes."""
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    pip += ["--only-binary", ":all:", "--constraint", "/dev/stdin", *requirements]
    report = subprocess.run(pip, input="\n".join(PINS), stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603
    return {
        f"{canonicalize_name(item['metadata']['name'])}=={item['metadata']['version']} "
        f"--hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}  # {item['download_info']['url']}\n"
        for item in json.loads(report)["install"]
    }


def write(name: str, packages: set[str]) -> None:
    """Write one lock. A wheel lists its files at its end, and only that is fetched."""
    lines = [HEAD]
    for line in sorted(packages, key=lambda line: line.partition("==")[0]):
        requirement, _, url = line.strip().partition("# ")
        with fsspec.open(unquote(url) if url.startswith("file:") else url) as file, zipfile.ZipFile(file) as wheel:
            lines.append(f"{requirement}# {file.size} {sum(entry.file_size for entry in wheel.infolist())}\n")
    (HERE / f"{name}.lock").write_text("".join(lines))


if __name__ == "__main__":
    main()
