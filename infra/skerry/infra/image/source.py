"""Where an image is built from: a checkout of skerry, its commit, and the folder that the Dockerfile is built in.

Writes below build/image/ of the checkout only. The folder is made from locked, hashed wheels that are fetched on this
machine, so that the build itself needs no network.
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
# What the Dockerfile reads, beside the wheels.
_FILES: Final = ("Dockerfile", "layer", "strip.py", "rest.lock", "torch.cpu.lock", "torch.gpu.lock")
# Of every file of the context: the engine's cache is asked by content and mode, and these never count.
_EPOCH: Final = 1700000000
# The names under which a machine's own certificates are given to its programs.
_CERTIFICATES: Final = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What was checked out. dirty: something was changed since, so the commit does not name what was built."""

    revision: str
    seconds: int
    dirty: bool

    def __str__(self) -> str:
        return f"{self.revision}-dirty" if self.dirty else self.revision


def checkout(start: Path) -> Path:
    """The checkout that `start` lies in. Raises Invalid if it lies in none: an image is built from sources."""
    for folder in (start.absolute(), *start.absolute().parents):
        if (folder / RECIPE / "Dockerfile").is_file():
            return folder
    raise Invalid(f"no checkout of skerry around {start}: an image is built from its sources; cd into one")


def commit_of(root: Path) -> Commit:
    """The commit of a checkout, and whether its files still say the same. Raises Invalid where git does not know."""
    told = _git(root, "log", "-1", "--format=%H %ct").split()
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=normal").strip())
    return Commit(revision=told[0], seconds=int(told[1]), dirty=dirty)


def fetch_wheels(root: Path, variant: Variant, tell: Callable[[str], None]) -> None:
    """Every locked wheel of a variant in build/image/wheels, checked against its sha256. Those there are kept."""
    folder = root / BUILD / "wheels"
    for lock, into in ((f"torch.{variant}.lock", f"torch-{variant}"), ("rest.lock", "rest")):
        wheels = folder / into
        stamp = wheels / ".lock"
        wanted = (root / RECIPE / lock).read_text()
        if stamp.is_file() and stamp.read_text() == wanted:
            continue
        tell(f"fetching the wheels of {lock}")
        shutil.rmtree(wheels, ignore_errors=True)
        wheels.mkdir(parents=True)
        pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
        _python(root, *pip, "--dest", str(wheels), "--requirement", str(root / RECIPE / lock))
        stamp.write_text(wanted)


def build_wheel(root: Path) -> Path:
    """This project's own wheel, from the files as they are. Equal files give an equal wheel."""
    folder = root / BUILD / "wheels" / "own"
    shutil.rmtree(folder, ignore_errors=True)
    _python(root, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(root))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pip_wheel(root: Path) -> Path:
    """The locked pip, which installs inside the build: a base need not have one."""
    folder = root / BUILD / "wheels" / "pip"
    lock = (root / RECIPE / "rest.lock").read_text()
    pin = next(line for line in lock.splitlines() if line.startswith("pip=="))
    found = list(folder.glob(f"pip-{pin.partition('==')[2].split()[0]}-*.whl"))
    if not found:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        requirement = folder / "requirement"
        requirement.write_text(pin)
        pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
        _python(root, *pip, "--requirement", str(requirement))
        requirement.unlink()
        found = list(folder.glob("pip-*.whl"))
    return found[0]


def context(root: Path, variant: Variant, environment: Mapping[str, str], *, online: bool) -> IO[bytes]:
    """The folder to build in, as a tar archive; equal content gives equal bytes. Wheels are there unless online.

    online: this machine's own certificates go along for pip, and stay in the build stages.
    """
    archive = tempfile.TemporaryFile()  # noqa: SIM115  the caller closes it
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in _FILES:
            _add(tar, name, root / RECIPE / name)
        wheels = root / BUILD / "wheels"
        # Folders that a COPY names must be there, empty or not.
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
    """Run a module of this interpreter. What it says of a failure is all that it said."""
    command = [sys.executable, *arguments]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    ended = subprocess.run(command, cwd=root, env=quiet, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        said = (ended.stderr or ended.stdout).strip()
        raise Retryable(f"{' '.join(_named(arguments))} failed: {said[-2000:]}")


def _named(arguments: Sequence[str]) -> Sequence[str]:
    """What was run, in short."""
    return arguments[1:3] if arguments[:1] == ("-m",) else arguments[:1]


def _git(root: Path, *arguments: str) -> str:
    git = shutil.which("git")
    if git is None:
        raise Invalid("needs git, to know which commit the image is of")
    command = [git, "-C", str(root), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode:
        raise Invalid(f"git does not know {root}: {ended.stderr.strip()}")
    return ended.stdout
