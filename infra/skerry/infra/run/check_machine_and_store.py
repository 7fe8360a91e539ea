"""Checks this machine and the store against a spec before a start: code, work folder, store. Leaves no files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra.run import code_archive
from skerry.infra.spec import env_secrets_and_data, model, store_uri
from skerry.infra.spec_and_store_errors import in_short
from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.log import keys
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import TEMPORARY
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from skerry.infra.spec.model import SpecFile
    from skerry.infra.spec.target_kinds import TargetKinds
    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem
    from skerry.runtime.clock import Clock

_PATH: Where = ("code", "path")
_COMMAND: Where = ("code", "command")
_KIND: Where = ("replicas", 0, "target", "kind")
_STORE: Where = ("store",)
_RUN: Where = ("run",)
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_SHELLS: Final = ("bash", "sh", "dash", "zsh")
# Options of the interpreter whose value is a separate word.
_WITH_VALUE: Final = ("-X", "-W", "--check-hash-based-pycs")
_STORE_EXAMPLE: Final = "name a writable store, e.g. store: file://.skerry/store"
# What a script with `skerry.runtime.replica` imports, beyond what the command line needs.
RUNTIME_PACKAGES: Final = ("torch", "torchft", "numpy")
# Replaces a missing or invalid run name, so that its store is checked as well.
_NAMELESS: Final = "skerry-check"
# A person waits for this check; a store that responds more slowly is unusable for training.
STORE_DEADLINE_S: Final = 10.0


def load(path: Path, kinds: TargetKinds, overrides: Sequence[str], clock: Clock) -> SpecFile:
    """`spec.load`, plus all checks of this machine and the store. Raises SpecInvalid with all problems."""
    folder = path.absolute().parent

    def store(document: Document) -> Iterator[Problem]:
        return store_problems(document, folder, clock)

    # The store comes last, because it may be slow: a Ctrl-C must not lose the other problems.
    return model.load(path, kinds, overrides, checks=(_checks_here(folder), interpreter_problems, store))


def load_offline(path: Path, kinds: TargetKinds, overrides: Sequence[str]) -> SpecFile:
    """`spec.load`, plus the checks that ask no store and no cloud, and create nothing."""
    return model.load(path, kinds, overrides, checks=(_checks_here(path.absolute().parent),))


def load_deployed(path: Path, kinds: TargetKinds, overrides: Sequence[str]) -> SpecFile:
    """`spec.load` for a deployment, plus the checks of the code; the plan checks the clouds."""
    folder = path.absolute().parent
    return model.load(path, kinds, overrides, checks=(lambda document: code_problems(document, folder),))


def _checks_here(folder: Path) -> Callable[[Document], Iterator[Problem]]:
    def here(document: Document) -> Iterator[Problem]:
        yield from code_problems(document, folder)
        yield from place_problems(document, folder)
        yield from env_secrets_and_data.missing_folders(document, folder)

    return here


def code_problems(document: Document, folder: Path) -> Iterator[Problem]:
    """Finds a missing code folder, code that cannot be packed, and a command whose script is missing."""
    written = document.value(_PATH)
    if not isinstance(written, str) or not written:
        return
    path = folder / written
    try:
        files = code_archive.select(path).files
    except (Invalid, OSError) as error:
        yield document.problem(_PATH, str(error))
        return
    # Programs in an image cannot be checked; the script in the code folder can.
    here = document.value(_KIND) in {"local", None}
    command = [word for word in document.entries(_COMMAND) if isinstance(word, str)]
    try:
        wrong = _command_problem(command, path, files, here=here)
    except OSError as error:
        wrong = str(error)
    if wrong is not None:
        yield document.problem(_COMMAND, wrong)


def interpreter_problems(document: Document) -> Iterator[Problem]:
    """Finds that this interpreter, which runs the scripts of local replicas, lacks what `skerry.runtime` imports."""
    command = [word for word in document.entries(_COMMAND) if isinstance(word, str)]
    if document.value(_KIND) not in {"local", None} or command[:1] not in (["python"], ["python3"]):
        return
    if missing := [name for name in RUNTIME_PACKAGES if importlib.util.find_spec(name) is None]:
        text = f"runs here with {sys.executable}, which lacks {', '.join(missing)}; install the extra of the runtime"
        yield document.problem(_COMMAND, f"{text}: pip install 'skerry[runtime]'")


def place_problems(document: Document, folder: Path) -> Iterator[Problem]:
    """Finds a folder for the work or the store that cannot be written, and a store inside of the work or the code."""
    run = document.value(_RUN)
    run = run if isinstance(run, str) and model.is_name(run) else _NAMELESS
    work = folder / model.WORK_FOLDER / run
    if (reason := _unwritable(work)) is not None:
        yield document.problem(_RUN, f"needs the work folder {work}, but {reason}")
    store = _store_folder(document, folder)
    if store is None:
        return
    if (reason := _unwritable(store)) is not None:
        yield document.problem(_STORE, f"is unusable: {reason}; {_STORE_EXAMPLE}")
        return
    try:
        store_path, work_path = (store / run).resolve(), work.resolve()
        code = folder / str(document.value(_PATH))
        packed = code.is_dir() and code_archive.takes(code.resolve(), store_path / keys.PROBE / "x")
    except (Invalid, OSError, RuntimeError):  # reported as a problem of the code, or of the store
        return
    if store_path.is_relative_to(work_path) or work_path.is_relative_to(store_path):
        text = f"is in {model.WORK_FOLDER}/{run}, the work folder of the run itself"
        yield document.problem(_STORE, f"{text}; write e.g. store: file://{model.WORK_FOLDER}/store")
    elif packed:
        ignore = f"list it in .gitignore or {code_archive.IGNORE_FILE}"
        text = f"is in the code folder {code}, where nothing ignores it, so it can get into the code"
        yield document.problem(
            _STORE,
            f"{text}; write e.g. store: file://{model.WORK_FOLDER}/store, or {ignore}",
        )


def store_problems(document: Document, folder: Path, clock: Clock) -> Iterator[Problem]:
    """Finds a store that cannot be written, or lacks a required guarantee."""
    written, run = document.value(_STORE), document.value(_RUN)
    if not isinstance(written, str):
        return
    run = run if isinstance(run, str) and model.is_name(run) else _NAMELESS
    store = _store_folder(document, folder)
    if store is not None and _unwritable(store) is not None:  # `place_problems` reports it
        return
    try:
        uri = store_uri.run_uri(folder, store_uri.as_store(written), run)
        with _temporary_folders(uri):
            probe(open_store(uri, clock=clock, deadline_s=STORE_DEADLINE_S), clock)
    except Retryable as error:
        yield document.problem(_STORE, f"cannot reach {written} ({in_short(error)}); {_STORE_EXAMPLE}")
    except Exception as error:  # noqa: BLE001  a client's error about a wrong configuration is for the user
        yield document.problem(_STORE, f"is unusable: {in_short(error)}; {_STORE_EXAMPLE}")


def _command_problem(command: Sequence[str], code: Path, files: Mapping[str, int], *, here: bool) -> str | None:
    if not command:
        return None
    program = Path(command[0])
    if program.is_absolute() or "/" not in command[0]:
        # `python` is the interpreter of this process.
        if here and command[0] not in ("python", "python3") and shutil.which(command[0]) is None:
            return f"no such program on this machine: {command[0]}; write e.g. [python, train.py]"
        script = _script(command)
        return None if script is None else _script_problem(script, code, files)
    wrong = _script_problem(command[0], code, files)
    if wrong is None and not os.access(code / program, os.X_OK):
        return f"{command[0]} is not executable; write [python, {program.name}], or `chmod +x` it"
    return wrong


def _script_problem(script: str, code: Path, files: Mapping[str, int]) -> str | None:
    path = Path(script)
    if path.is_absolute():
        return None if path.exists() else f"no such file on this machine: {script}"
    if {path.as_posix(), (path / "__main__.py").as_posix()} & set(files):
        return None
    if (code / path).is_file():
        return f"{script} is in {code}, but is not packed: git does not track it, or an ignore file names it"
    return f"{script} is not among the {len(files)} files of {code}; write the name of a script in that folder"


def _script(command: Sequence[str]) -> str | None:
    """The script in an interpreter's command; None for other commands."""
    name = Path(command[0]).name
    words = iter(command[1:])
    if name in _SHELLS:
        first = next(words, "-")
        return None if first.startswith(("-", "+")) else first
    if _PYTHON.fullmatch(name) is None:
        return None
    for word in words:
        if word in ("-m", "-c", "-") or word.startswith(("-m", "-c")):
            return None
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _unwritable(folder: Path) -> str | None:
    """The reason why `folder` cannot be created and written; None if it can."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            return f"{existing} is not a folder; move it away"
    except OSError as error:
        return f"{folder} cannot be reached: {error.strerror}"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable; copy the spec to a writable folder"
    return None


def _store_folder(document: Document, folder: Path) -> Path | None:
    written = document.value(_STORE)
    try:
        uri = store_uri.store_uri(folder, store_uri.as_store(written)) if isinstance(written, str) else ""
    except ValueError:
        return None
    return Path(unquote(uri.removeprefix(store_uri.FILE))) if uri.startswith(store_uri.FILE) else None


@contextlib.contextmanager
def _temporary_folders(uri: str) -> Generator[None]:
    """Create the folder of a file:// store, and afterwards remove every folder that did not exist before.

    Creating it here raises at once an error that the store would retry: a parent that cannot contain it.
    """
    if not uri.startswith(store_uri.FILE):
        yield
        return
    run = Path(unquote(uri.removeprefix(store_uri.FILE)))
    created = {path for leaf in (run / keys.PROBE, run / TEMPORARY) for path in (leaf, *leaf.parents)}
    missing = [path for path in created if not path.exists()]
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in sorted(missing, key=lambda path: -len(path.parts)):
            # A folder that is not empty is in use by another process.
            with contextlib.suppress(OSError):
                path.rmdir()
