"""Packs the training code into an archive that has the same bytes on every machine, named by its sha256.

Which files go: git decides, then `.skerryignore`, then the check for secrets.

1. A file in a git repository goes, with its present content, if the innermost repository that contains it tracks it,
   and no outer one ignores that repository. So submodules and cloned repositories go with what they track. Without a
   repository every file goes that no `.gitignore` in the folder names.
2. A line of `.skerryignore` leaves out the files and folders that it matches. The last line that matches decides;
   a line `!path` takes one back that an earlier line left out.
3. A file that looks like a secret is refused, unless a line `!path` allows it, because the archive goes to the bucket
   and to every replica.

Files that only step 1 leaves out are reported, unless git ignores them. If git is needed and fails, nothing is packed.
Times, owners and directory order are ignored, so equal code has an equal digest. `unpack` verifies the archive; it is
also used by replicas in their containers.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from skerry.runtime.container.code_archive import MAX_BYTES, MAX_FILES, unpack
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ALWAYS_IGNORED", "IGNORE_FILE", "Bundle", "CodeFiles", "pack", "select", "takes", "unpack"]

IGNORE_FILE: Final = ".skerryignore"
ALWAYS_IGNORED: Final = (
    *(".git", ".hg", ".venv", "venv", "__pycache__", "*.pyc", ".skerry", ".DS_Store"),
    # Caches of pytest, ruff, mypy: each has a .gitignore of its own, which must not make git necessary.
    ".*_cache",
)
# Names under which tools keep credentials; compared without case, with the name and with the path.
SECRETS: Final = (
    *(".env", ".env.*", ".envrc", ".netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.p12", "*.pfx", "*.keystore", "*.tfstate", "*.tfstate.*"),
    *("*.ssh/*", "*.aws/*", "*.azure/*", "*.kube/*", "*.docker/config.json", "*.config/gcloud/*"),
    *("application_default_credentials.json", "service-account*.json", "service_account*.json"),
)
_SAMPLES: Final = (".example", ".sample", ".template", ".dist")
# The beginning of a file is enough to find a private key in PEM, also inside a service account's JSON.
_HEAD_BYTES: Final = 4096
# A key's first line, header lines (RFC 1421, 4880), base64. In JSON a line ends with a backslash and an n.
_PRIVATE_KEY: Final = re.compile(
    rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY( BLOCK)?-----"
    rb"(\s|\\+[rn])+([A-Za-z-]+: [^\n\\]*(\s|\\+[rn])+)*[A-Za-z0-9+/]{32}"
)
_GITLINK: Final = "160000 "
"""The mode of a submodule in git's index."""
_GITIGNORE: Final = ".gitignore"
# Number of files named in an error or a note.
_NAMED: Final = 5
_LEAVE_OUT: Final = f"or list it in {IGNORE_FILE}"


@dataclass(frozen=True, kw_only=True)
class CodeFiles:
    """The files that `pack` includes: their sizes in bytes, by sorted path with `/`.

    untracked: files that are left out only because git does not track them.
    """

    files: Mapping[str, int]
    untracked: Sequence[str] = ()

    @property
    def note(self) -> str | None:
        """A line for people about the untracked files; None if there are none."""
        if not self.untracked:
            return None
        return f"not in the code, because git does not track them: {_first(self.untracked)}"


@dataclass(frozen=True, kw_only=True)
class Bundle(CodeFiles):
    """A packed code folder. digest: sha256 of `data`, in hex."""

    data: bytes
    digest: str


def select(folder: Path) -> CodeFiles:
    """The files of `folder` that `pack` includes. Links to files inside the folder are followed.

    Raises Invalid if the folder is missing or unreadable, if git is needed and fails, if a link leaves the folder, if a
    file looks like a secret, if no file is left, or if the folder exceeds the limits, with its largest files.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise Invalid(f"{what}: {folder}; write the folder that holds the training code")
    root = folder.resolve()
    rules = _read_rules(root)
    try:
        listed = {name: tracked for name, tracked in _listed(root, "", rules) if _exists(root / name)}
        names = sorted(name for name, tracked in listed.items() if tracked)
        for name in names:
            _check_file(root, name)
    except PermissionError as error:
        raise Invalid(f"unreadable: {error.filename}; change its rights, {_LEAVE_OUT}") from error
    untracked = sorted(listed.keys() - set(names))
    if not names:
        why = f"git tracks none of its files ({_first(untracked)}); `git add` them" if untracked else "write the code"
        raise Invalid(f"no files to pack in {folder}: {why}, or correct {IGNORE_FILE} and {_GITIGNORE}")
    if secrets := [name for name in names if _is_secret(root, name) and not rules.allow(name)]:
        raise Invalid(
            f"looks like a secret: {', '.join(secrets[:_NAMED])}; every replica and every reader of the bucket would "
            f"get it: move it out of the folder, {_LEAVE_OUT}; if it is no secret, add the line !{secrets[0]} there"
        )
    sizes = {name: (root / name).stat().st_size for name in names}
    if len(names) > MAX_FILES or sum(sizes.values()) > MAX_BYTES:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED]
        raise Invalid(
            f"too much to pack: {len(names)} files, {_mib(sum(sizes.values()))}; the limits are {MAX_FILES} files, "
            f"{_mib(MAX_BYTES)}; largest: {', '.join(f'{name} ({_mib(sizes[name])})' for name in largest)}; "
            f"list what replicas do not need in {IGNORE_FILE}"
        )
    return CodeFiles(files=sizes, untracked=untracked)


def pack(folder: Path) -> Bundle:
    """`folder` as a tar.gz. Raises Invalid as `select` does."""
    selected = select(folder)
    plain = io.BytesIO()
    sizes: dict[str, int] = {}
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in selected.files:
            path = folder / name
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = sizes[name] = len(content)
            # Only the executable bit is part of the code; other mode bits depend on the checkout.
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    data = gzip.compress(plain.getvalue(), compresslevel=6, mtime=0)
    return Bundle(data=data, digest=hashlib.sha256(data).hexdigest(), files=sizes, untracked=selected.untracked)


def takes(folder: Path, path: Path) -> bool:
    """True if no rule and no `.gitignore` leaves out a file at `path`, which need not exist; both paths resolved.

    Raises Invalid as `select` does.
    """
    if not path.is_relative_to(folder):
        return False
    name = path.relative_to(folder).as_posix()
    return not _read_rules(folder).leave_out(name) and name not in _ignored_by_git(folder, [name])


@dataclass(frozen=True, kw_only=True)
class _Rules:
    """The lines of the ignore file. Each matches a name or a path; the last one that matches decides."""

    lines: Sequence[str]

    def leave_out(self, name: str) -> bool:
        """True if the rules leave out this path, or a folder that contains it."""
        path = PurePosixPath(name)
        return any(self._last_match(step) is False for step in (path, *path.parents[:-1]))

    def allow(self, name: str) -> bool:
        """True if a line `!path` names this very file."""
        return self._last_match(PurePosixPath(name)) is True

    def _last_match(self, path: PurePosixPath) -> bool | None:
        """True: a line takes it. False: a line leaves it out. None: no line matches."""
        for line in reversed(self.lines):
            glob = line.removeprefix("!")
            if fnmatch.fnmatchcase(path.name, glob) or fnmatch.fnmatchcase(path.as_posix(), glob):
                return line != glob
        return None


def _read_rules(folder: Path) -> _Rules:
    path = folder / IGNORE_FILE
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    except (UnicodeDecodeError, OSError) as error:
        raise Invalid(f"{IGNORE_FILE} is unreadable: {error}; write it as UTF-8 text") from error
    own = (line.rstrip("/") for line in lines if line and not line.startswith("#"))
    return _Rules(lines=(*ALWAYS_IGNORED, *own))


def _listed(root: Path, inner: str, rules: _Rules) -> Iterator[tuple[str, bool]]:
    """Each file in `inner` ("", or the folder of a nested repository) that nothing ignores; True if it is to go."""
    folder = root / inner
    repository = _repository(folder)
    if repository is not None:
        entries = _in_repository(repository)
    else:
        names = list(_walk(root, root, rules))
        entries = dict.fromkeys(set(names) - _ignored_by_git(root, names), True)
    for name, tracked in entries.items():
        path = inner + name
        if rules.leave_out(path):
            continue
        if not name.endswith("/"):
            yield path, tracked
        elif os.path.lexists(root / path / ".git"):
            yield from _listed(root, path, rules)
        else:
            raise Invalid(f"submodule without its files: {path}; run `git submodule update --init`, {_LEAVE_OUT}")


def _in_repository(git: _Git) -> dict[str, bool]:
    """The files that git tracks (True) or neither tracks nor ignores (False). A nested repository ends with `/`."""
    entries = dict.fromkeys(git.names("ls-files", "-z", "--others", "--exclude-standard"), False)
    for entry in git.names("ls-files", "-z", "--stage"):
        mode, _, name = entry.partition("\t")
        entries[f"{name}/" if mode.startswith(_GITLINK) else name] = True
    return entries


def _walk(root: Path, folder: Path, rules: _Rules) -> Iterator[str]:
    """The files of a folder in no repository. A nested repository is one name that ends with `/`."""
    for entry in folder.iterdir():
        name = entry.relative_to(root).as_posix()
        if rules.leave_out(name):
            continue
        if not entry.is_dir() or entry.is_symlink():
            yield name
        elif os.path.lexists(entry / ".git"):
            yield f"{name}/"
        else:
            yield from _walk(root, entry, rules)


def _ignored_by_git(folder: Path, names: Sequence[str]) -> set[str]:
    """Those of `names` that a `.gitignore` names. Needs no git if there is neither a repository nor such a file."""
    check = ("check-ignore", "-z", "--stdin")
    repository = _repository(folder)
    if repository is not None:
        return set(repository.names(*check, given=names))
    places = {parent for name in names for parent in PurePosixPath(name).parents}
    source = next((path for place in sorted(places) if (path := folder / place / _GITIGNORE).is_file()), None)
    if source is None:
        return set()
    with tempfile.TemporaryDirectory() as empty:
        variables = {"GIT_DIR": f"{empty}/.git", "GIT_WORK_TREE": str(folder)}
        git = _Git(folder=folder, source=source, variables=variables)
        git.names("init", "--quiet", "--template=")
        # The operator's own file of ignored names must not change the digest.
        return set(git.names("-c", f"core.excludesFile={os.devnull}", *check, given=names))


def _repository(folder: Path) -> _Git | None:
    """The innermost repository that contains `folder`; None if there is none."""
    for parent in (folder, *folder.parents):
        if os.path.lexists(parent / ".git"):
            return _Git(folder=folder, source=parent / ".git")
    return None


@dataclass(frozen=True, kw_only=True)
class _Git:
    """Runs git in `folder`, but no program that a repository names.

    source: the `.git` or `.gitignore` that makes git necessary.
    """

    folder: Path
    source: Path
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    def names(self, *command: str, given: Sequence[str] | None = None) -> list[str]:
        """The names that a command prints, separated by zeros. given: names for its input. Raises Invalid."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        safe = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false")
        try:
            done = subprocess.run(  # noqa: S603  a constant command
                ["git", *safe, *command],  # noqa: S607  the git of the user's PATH
                cwd=self.folder,
                env={**inherited, "LC_ALL": "C", "GIT_DISCOVERY_ACROSS_FILESYSTEM": "1", **self.variables},
                input=b"".join(os.fsencode(name) + b"\0" for name in given or ()),
                capture_output=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise Invalid(f"cannot read {self.source}: git is not installed; install git, or remove it") from error
        # With names as input, 1 means that none of them is ignored.
        if done.returncode > (given is not None):
            text = "; ".join(done.stderr.decode(errors="replace").splitlines())
            raise Invalid(f"cannot read {self.source}: git reports: {text}; repair it, or remove it")
        return [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]


def _exists(path: Path) -> bool:
    """False for a tracked file that was deleted, or replaced by a folder."""
    return path.is_symlink() or (os.path.lexists(path) and not path.is_dir())


def _check_file(root: Path, name: str) -> None:
    """Raises Invalid if the path is no readable file inside of the code folder."""
    path = root / name
    try:
        target = path.resolve()
    except (RuntimeError, OSError) as error:  # Python 3.11 and 3.12 raise RuntimeError for a loop
        raise Invalid(f"broken link: {name}; remove it, {_LEAVE_OUT}") from error
    if not target.is_relative_to(root):
        raise Invalid(f"link leaves the code folder: {name}; copy its target, {_LEAVE_OUT}")
    if target.is_dir():
        raise Invalid(f"link to a folder: {name}; copy the folder, {_LEAVE_OUT}")
    if not target.is_file():
        raise Invalid(f"not a file: {name}; remove it, {_LEAVE_OUT}")
    if not os.access(path, os.R_OK):
        raise Invalid(f"unreadable: {name}; change its rights, {_LEAVE_OUT}")


def _is_secret(root: Path, name: str) -> bool:
    lowered = name.lower()
    if lowered.endswith(_SAMPLES):
        return False
    parts = (lowered, lowered.rpartition("/")[2])
    if any(fnmatch.fnmatchcase(part, glob) for part in parts for glob in SECRETS):
        return True
    with (root / name).open("rb") as file:
        return _PRIVATE_KEY.search(file.read(_HEAD_BYTES)) is not None


def _first(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"
