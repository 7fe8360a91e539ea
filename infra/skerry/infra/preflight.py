"""What a spec needs from this machine and its store, checked before anything is started. Leaves nothing behind."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from skerry.infra import bundle, coherence, spec
from skerry.infra.workspace import remove_empty
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from skerry.infra.document import Document, Where
    from skerry.infra.errors import Problem
    from skerry.infra.spec import SpecFile
    from skerry.runtime.clock import Clock

_PATH: Where = ("code", "path")
_COMMAND: Where = ("code", "command")
_STORE: Where = ("store",)
_PYTHON = ("python", "python3")


def load(path: Path, overrides: Sequence[str], clock: Clock) -> SpecFile:
    """`spec.load`, and everything the spec names must exist here and work. Raises SpecInvalid with all problems."""
    folder = path.absolute().parent

    def code(document: Document) -> Iterator[Problem]:
        return code_problems(document, folder)

    def store(document: Document) -> Iterator[Problem]:
        return store_problems(document, folder, clock)

    return spec.load(path, overrides, checks=(code, store))


def code_problems(document: Document, folder: Path) -> Iterator[Problem]:
    """Code that is not there, is too large, or lacks what its command runs."""
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
    except Invalid as error:
        yield document.problem(_PATH, str(error))
        return
    command = [word for word in document.entries(_COMMAND) if isinstance(word, str)]
    script = _script(command)
    if script is not None and Path(script).as_posix() not in files:
        text = f"{script} is not among the {len(files)} files of {path}; write the name of a script in that folder"
        yield document.problem(_COMMAND, text)
    elif script is None and command and command[0] not in _PYTHON and shutil.which(command[0]) is None:
        yield document.problem(
            _COMMAND, f"no such program on this machine: {command[0]}; write e.g. [python, train.py]"
        )


def store_problems(document: Document, folder: Path, clock: Clock) -> Iterator[Problem]:
    """A store that cannot be written or does not keep its promises."""
    written, run = document.value(_STORE), document.value(("run",))
    if not isinstance(written, str) or not isinstance(run, str):
        return
    try:
        uri = coherence.store_uri(folder, coherence.as_store(written))
        with _unmade(uri):
            probe(open_store(f"{uri}/{run}", clock=clock), clock)
    except (SkerryError, OSError, ValueError) as error:
        text = f"cannot be used: {error}; write a place you may write to, e.g. store: file://.skerry/store"
        yield document.problem(_STORE, text)


@contextlib.contextmanager
def _unmade(uri: str) -> Generator[None]:
    """Make the folder of a file:// store, and afterwards remove every folder that was not there before.

    Making it here also tells at once what the store would retry for minutes: a parent that cannot hold it.
    """
    if not uri.startswith(coherence.FILE):
        yield
        return
    store = Path(unquote(uri.removeprefix(coherence.FILE)))
    missing = [path for path in (store, *store.parents) if not path.exists()]
    try:
        store.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for path in missing[-1:]:
            remove_empty(path)


def _script(command: Sequence[str]) -> str | None:
    """The file inside the code folder that `command` runs, if it names one."""
    if not command:
        return None
    if command[0] not in _PYTHON:
        return command[0] if command[0].startswith("./") else None
    for word in command[1:]:
        if word in ("-m", "-c", "-"):
            return None
        if not word.startswith("-"):
            return word
    return None
