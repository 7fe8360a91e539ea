"""What a spec needs from this machine and its store, checked before anything is started. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from skerry.infra import bundle, coherence, spec
from skerry.infra.errors import in_short
from skerry.runtime import keys
from skerry.runtime.errors import Invalid, Retryable
from skerry.runtime.store import open_store
from skerry.runtime.store.directory import TEMPORARY
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from skerry.infra.document import Document, Where
    from skerry.infra.errors import Problem
    from skerry.infra.spec import SpecFile
    from skerry.runtime.clock import Clock

_PATH: Where = ("code", "path")
_COMMAND: Where = ("code", "command")
_KIND: Where = ("replicas", 0, "target", "kind")
_STORE: Where = ("store",)
_RUN: Where = ("run",)
_PYTHON: Final = re.compile(r"python(3(\.\d+)?)?")
_SHELLS: Final = ("bash", "sh", "dash", "zsh")
# Options of the interpreter whose value is a word of its own.
_WITH_VALUE: Final = ("-X", "-W", "--check-hash-based-pycs")
# Stands for a run whose name is missing or wrong, so that its store is checked all the same.
_NAMELESS: Final = "skerry-check"
# Somebody waits for this; a store that needs longer to answer once is not one to train through.
_STORE_DEADLINE_S: Final = 10.0


def load(path: Path, overrides: Sequence[str], clock: Clock) -> SpecFile:
    """`spec.load`, and everything the spec names must exist here and work. Raises SpecInvalid with all problems."""
    folder = path.absolute().parent

    def here(document: Document) -> Iterator[Problem]:
        yield from code_problems(document, folder)
        yield from place_problems(document, folder)

    def store(document: Document) -> Iterator[Problem]:
        return store_problems(document, folder, clock)

    # The store comes last: it may be slow, and an impatient Ctrl-C must not lose the rest.
    return spec.load(path, overrides, checks=(here, store))


def load_deployed(path: Path, overrides: Sequence[str], _clock: Clock | None = None) -> SpecFile:
    """`spec.load` of a run that is planned: its code must be here; what its clouds must have, the plan tells."""
    folder = path.absolute().parent
    return spec.load(path, overrides, checks=(lambda document: code_problems(document, folder),))


def code_problems(document: Document, folder: Path) -> Iterator[Problem]:
    """Code that is not there, cannot be packed, or lacks what its command runs."""
    written = document.value(_PATH)
    if not isinstance(written, str) or not written:
        return
    path = folder / written
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "no such folder"
        yield document.problem(_PATH, f"{what}: {path}; write the folder that holds the training code")
        return
    try:
        files = bundle.files_of(path)
    except (Invalid, OSError) as error:
        yield document.problem(_PATH, str(error))
        return
    # What an image holds is not known here; what its script is called is.
    here = document.value(_KIND) in {"local", None}
    command = [word for word in document.entries(_COMMAND) if isinstance(word, str)]
    wrong = _command_problem(command, path, files, here=here)
    if wrong is not None:
        yield document.problem(_COMMAND, wrong)


def place_problems(document: Document, folder: Path) -> Iterator[Problem]:
    """A work folder that cannot be written, and a store folder that lies in it or among the code."""
    run = document.value(_RUN)
    run = run if isinstance(run, str) and spec.is_name(run) else _NAMELESS
    work = folder / spec.WORK_FOLDER / run
    if (wrong := _unwritable(work)) is not None:
        yield document.problem(_RUN, f"needs the work folder {work}, but {wrong}")
    store = _store_folder(document, folder)
    if store is None:
        return
    try:
        lies, works = (store / run).resolve(), work.resolve()
        code = folder / str(document.value(_PATH))
        packed = code.is_dir() and bundle.takes(code.resolve(), lies)
    except (Invalid, OSError, RuntimeError):  # told as a problem of the code, or of the store
        return
    if lies.is_relative_to(works) or works.is_relative_to(lies):
        text = f"lies in {spec.WORK_FOLDER}/{run}, the work folder of the run itself"
        yield document.problem(_STORE, f"{text}; write e.g. store: file://{spec.WORK_FOLDER}/store")
    elif packed:
        text = f"lies in the code folder {code}, and each `up` would pack it with the code"
        yield document.problem(
            _STORE, f"{text}; write e.g. store: file://{spec.WORK_FOLDER}/store, or list it in {bundle.IGNORE_FILE}"
        )


def store_problems(document: Document, folder: Path, clock: Clock) -> Iterator[Problem]:
    """A store that cannot be written or does not keep its promises."""
    written, run = document.value(_STORE), document.value(_RUN)
    if not isinstance(written, str):
        return
    run = run if isinstance(run, str) and spec.is_name(run) else _NAMELESS
    example = "write a place you may write to, e.g. store: file://.skerry/store"
    try:
        uri = coherence.run_uri(folder, coherence.as_store(written), run)
        with _unmade(uri):
            probe(open_store(uri, clock=clock, deadline_s=_STORE_DEADLINE_S), clock)
    except Retryable as error:
        yield document.problem(_STORE, f"cannot reach {written} ({in_short(error)}); {example}")
    except Exception as error:  # noqa: BLE001  an engine's own error for a wrong configuration is the user's to read
        yield document.problem(_STORE, f"cannot be used: {in_short(error)}; {example}")


def _command_problem(command: Sequence[str], code: Path, files: Sequence[str], *, here: bool) -> str | None:
    if not command:
        return None
    program = Path(command[0])
    if program.is_absolute() or "/" not in command[0]:
        # `python` is the interpreter that runs us, wherever it is.
        if here and command[0] not in ("python", "python3") and shutil.which(command[0]) is None:
            return f"no such program on this machine: {command[0]}; write e.g. [python, train.py]"
        script = _script(command)
        return None if script is None else _script_problem(script, code, files)
    wrong = _script_problem(command[0], code, files)
    if wrong is None and not os.access(code / program, os.X_OK):
        return f"{command[0]} is not executable; write [python, {program.name}], or `chmod +x` it"
    return wrong


def _script_problem(script: str, code: Path, files: Sequence[str]) -> str | None:
    path = Path(script)
    if path.is_absolute():
        return None if path.exists() else f"no such file on this machine: {script}"
    if {path.as_posix(), (path / "__main__.py").as_posix()} & set(files):
        return None
    return f"{script} is not among the {len(files)} files of {code}; write the name of a script in that folder"


def _script(command: Sequence[str]) -> str | None:
    """The file that an interpreter is to run, if `command` is one's and names a file."""
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
    """Why `folder` could not be made and written, if it could not."""
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        return f"{there} is not a folder; move it away"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written; copy the spec to a folder of yours"
    return None


def _store_folder(document: Document, folder: Path) -> Path | None:
    written = document.value(_STORE)
    try:
        uri = coherence.store_uri(folder, coherence.as_store(written)) if isinstance(written, str) else ""
    except ValueError:
        return None
    return Path(unquote(uri.removeprefix(coherence.FILE))) if uri.startswith(coherence.FILE) else None


@contextlib.contextmanager
def _unmade(uri: str) -> Generator[None]:
    """Make the folder of a file:// store, and afterwards remove every folder that was not there before.

    Making it here also tells at once what the store would retry: a parent that cannot hold it.
    """
    if not uri.startswith(coherence.FILE):
        yield
        return
    run = Path(unquote(uri.removeprefix(coherence.FILE)))
    made = {path for leaf in (run / keys.PROBE, run / TEMPORARY) for path in (leaf, *leaf.parents)}
    missing = [path for path in made if not path.exists()]
    try:
        run.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in sorted(missing, key=lambda path: -len(path.parts)):
            # One that is not empty is somebody else's by now.
            with contextlib.suppress(OSError):
                path.rmdir()
