"""Prepares the sources of an image: a checkout of skerry, its commit, and for a build without a network its wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable

Variant: TypeAlias = Literal["cpu", "gpu", "cu12"]
RECIPE: Final = Path("images/replica")
BUILD: Final = Path("build/image")
WHEELS: Final = RECIPE / "wheels"
"""The Dockerfile copies this folder into the build if it exists, and pip then uses no index."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The commit of a checkout. dirty: files were changed since, so the commit does not identify the build."""

    revision: str
    seconds: int
    dirty: bool

    def __str__(self) -> str:
        return f"{self.revision}-dirty" if self.dirty else self.revision


def checkout(start: Path) -> Path:
    """The checkout that contains `start`. Raises Invalid outside of one, because an image is built from sources."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / RECIPE / "Dockerfile").is_file():
            return folder
    raise Invalid(f"not in a checkout of skerry: {start}; change to one, because an image is built from sources")


def commit_of(root: Path) -> Commit:
    """The commit of a checkout, and whether files were changed. Raises Invalid outside of a git repository."""
    git = shutil.which("git")
    if git is None:
        raise Invalid("git not found; install it, because the image is labelled with its commit")

    def run(*arguments: str) -> str:
        command = [git, "-C", str(root), *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if ended.returncode:
            raise Invalid(f"git failed in {root}: {ended.stderr.strip()}")
        return ended.stdout

    revision, seconds = run("log", "-1", "--format=%H %ct").split()
    dirty = bool(run("status", "--porcelain", "--untracked-files=normal").strip())
    return Commit(revision=revision, seconds=int(seconds), dirty=dirty)


def locks(root: Path, variant: Variant) -> list[Path]:
    """The locks of what is in the image. Raises Invalid for a variant that was not resolved."""
    paths = [root / RECIPE / f"{name}.lock" for name in (f"torch.{variant}", "rest")]
    if not paths[0].is_file():
        raise Invalid(
            f"no {paths[0]}; resolve it with `scripts/image lock {variant}` where PyTorch's index is reachable"
        )
    return paths


def sizes(root: Path, variant: Variant) -> tuple[int, int]:
    """Bytes of all wheels of a variant, packed and unpacked, as the locks have them."""
    entries = [line.split() for lock in locks(root, variant) for line in lock.read_text().splitlines()[1:]]
    return sum(int(words[-2]) for words in entries), sum(int(words[-1]) for words in entries)


def fetch_wheels(root: Path, variant: Variant, on_line: Callable[[str], None]) -> None:
    """Download every locked wheel of a variant, verified by sha256, unless it is there."""
    all_locks = [*locks(root, variant), root / RECIPE / "build.lock"]
    folder = root / WHEELS
    stamp, content = folder / ".locks", "".join(lock.read_text() for lock in all_locks)
    if stamp.is_file() and stamp.read_text() == content:
        return
    on_line(f"downloading {sizes(root, variant)[0] / 1e6:.0f} MB of wheels")
    shutil.rmtree(folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder)]
    pip += [word for lock in all_locks for word in ("--requirement", str(lock))]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise Retryable(f"pip download failed: {ended.stderr.strip()[-2000:]}")
    stamp.write_text(content)
