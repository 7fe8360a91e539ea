"""Prepares the sources of an image: a checkout of skerry, its commit, its wheels, and the build context.

Writes only below build/image/ of the checkout. The context contains locked, hashed wheels that this machine downloads,
so that the build itself needs no network.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Literal, TypeAlias

from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Variant: TypeAlias = Literal["cpu", "gpu"]
RECIPE: Final = Path("images/replica")
BUILD: Final = Path("build/image")
# The files that the Dockerfile reads, wheels excepted.
_FILES: Final = ("Dockerfile", "layer", "strip.py", "rest.lock", "torch.cpu.lock", "torch.gpu.lock")
# The time of every file in the context; the engine's cache compares content and mode only.
_EPOCH: Final = 1700000000
# Environment variables that name a machine's own certificates.
_CERTIFICATES: Final = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


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
    words = _git(root, "log", "-1", "--format=%H %ct").split()
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=normal").strip())
    return Commit(revision=words[0], seconds=int(words[1]), dirty=dirty)


def fetch_wheels(root: Path, variant: Variant, on_line: Callable[[str], None]) -> None:
    """Download every locked wheel of a variant to build/image/wheels, verified by sha256, unless it is there."""
    folder = root / BUILD / "wheels"
    for lock, into in ((f"torch.{variant}.lock", f"torch-{variant}"), ("rest.lock", "rest")):
        wheels = folder / into
        stamp = wheels / ".lock"
        content = (root / RECIPE / lock).read_text()
        if stamp.is_file() and stamp.read_text() == content:
            continue
        on_line(f"downloading the wheels of {lock}")
        shutil.rmtree(wheels, ignore_errors=True)
        wheels.mkdir(parents=True)
        pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        _python(root, *pip, "--dest", str(wheels), "--requirement", str(root / RECIPE / lock))
        stamp.write_text(content)


def build_wheel(root: Path) -> Path:
    """Build this project's own wheel from the files of the checkout. Equal files give an equal wheel."""
    folder = root / BUILD / "wheels" / "own"
    shutil.rmtree(folder, ignore_errors=True)
    _python(root, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(root))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip_wheel(root: Path) -> Path:
    """The wheel of the locked pip, which installs inside the build, because a base may not have pip."""
    folder = root / BUILD / "wheels" / "pip"
    lock = (root / RECIPE / "rest.lock").read_text()
    pin = next(line for line in lock.splitlines() if line.startswith("pip=="))
    wheels = list(folder.glob(f"pip-{pin.partition('==')[2].split()[0]}-*.whl"))
    if not wheels:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        requirement = folder / "requirement"
        requirement.write_text(pin)
        pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
        _python(root, *pip, "--requirement", str(requirement))
        requirement.unlink()
        wheels = list(folder.glob("pip-*.whl"))
    return wheels[0]


def context(root: Path, variant: Variant, environment: Mapping[str, str], *, online: bool) -> IO[bytes]:
    """The build context as a tar archive; equal content gives equal bytes. Includes the wheels unless online.

    online: includes this machine's certificates for pip, which stay in the build stages.
    """
    archive = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in _FILES:
            _add(tar, name, root / RECIPE / name)
        wheels = root / BUILD / "wheels"
        # Folders in a COPY must exist, even if they are empty.
        for name in ("pip", "wheels", "wheels/torch", "wheels/rest", "wheels/own"):
            _add_folder(tar, name)
        _add(tar, f"pip/{pip_wheel(root).name}", pip_wheel(root))
        if online:
            certificates = next((environment[name] for name in _CERTIFICATES if environment.get(name)), None)
            if certificates is not None:
                _add(tar, "pip/ca.crt", Path(certificates))
        else:
            for name, folder in (("torch", wheels / f"torch-{variant}"), ("rest", wheels / "rest")):
                for path in sorted(folder.glob("*.whl")):
                    _add(tar, f"wheels/{name}/{path.name}", path)
        for path in sorted((wheels / "own").glob("*.whl")):
            _add(tar, f"wheels/own/{path.name}", path)
    archive.seek(0)
    return archive


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = path.stat().st_size, 0o644, _EPOCH
    with path.open("rb") as file:
        tar.addfile(entry, file)


def _add_folder(tar: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.mtime = tarfile.DIRTYPE, 0o755, _EPOCH
    tar.addfile(entry, io.BytesIO())


def _python(root: Path, *arguments: str) -> None:
    """Run this interpreter. Raises Retryable with the output if it fails."""
    command = [sys.executable, *arguments]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ended = subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        output = (ended.stderr or ended.stdout).strip()
        raise Retryable(f"{' '.join(_summary(arguments))} failed: {output[-2000:]}")


def _summary(arguments: Sequence[str]) -> Sequence[str]:
    """The program in a command, for messages."""
    return arguments[1:3] if arguments[:1] == ("-m",) else arguments[:1]


def _git(root: Path, *arguments: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise Invalid("git not found; install it, because the image is labelled with its commit")
    command = [git, "-C", str(root), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise Invalid(f"git failed in {root}: {ended.stderr.strip()}")
    return ended.stdout
