"""Writes the locks of the replica image: what `skerry[runtime]` needs, every wheel by its sha256.

    torch.cpu.lock, torch.gpu.lock   torch and its closure: a layer of their own, renewed when torch is
    rest.lock                        everything else; the same for both variants
    bill.lock                        the tool that lists what is in an image; never in it

Versions are those of constraints.txt. For Python 3.11 on x86-64 Linux. The sha256 of a wheel is the same wherever it
lies. Run by `scripts/image lock`; needs an index that has torch's CPU wheels for the CPU variant, e.g. with
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
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
BILL: Final = ["cyclonedx-bom>=7.5,<8"]
HEAD: Final = "# Written by `scripts/image lock` from pyproject.toml and constraints.txt. Python 3.11, x86-64 Linux.\n"


def main() -> int:
    """Write the three files; 1 if the variants disagree on what is not torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["runtime"], *EXTRA]
    rests: dict[str, str] = {}
    for variant, pin in {"cpu": "torch=={}+cpu", "gpu": "torch==={}"}.items():
        result = resolve([*wanted, pin.format(_pinned("torch"))])
        torch = closure(result, TORCH)
        (HERE / f"torch.{variant}.lock").write_text(HEAD + lines(result, torch))
        rests[variant] = HEAD + lines(result, set(result) - torch)
        sys.stdout.write(f"{variant}: {len(torch)} wheels of torch's, {len(result) - len(torch)} others\n")
    (HERE / "rest.lock").write_text(rests["cpu"])
    bill = resolve(BILL, constrained=False)
    (HERE / "bill.lock").write_text(HEAD + lines(bill, set(bill)))
    if rests["cpu"] != rests["gpu"]:
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
    """One pinned, hashed requirement a line."""
    pins = {
        name: (result[name]["metadata"]["version"], result[name]["download_info"]["archive_info"]["hashes"]["sha256"])
        for name in names
    }
    return "".join(f"{name}=={version} --hash=sha256:{digest}\n" for name, (version, digest) in sorted(pins.items()))


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
