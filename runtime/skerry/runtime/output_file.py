"""Writes a file of the user whole or not at all: to a temporary file beside it, which then takes its name."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def check_output(path: Path, *, force: bool) -> None:
    """Raises Invalid unless a file can be written to `path`. force: an existing one may be replaced."""
    if not path.parent.is_dir():
        raise Invalid(f"no such folder: {path.parent}")
    if path.is_dir():
        raise Invalid(f"{path} is a folder; name a file in it")
    if path.exists() and not force:
        raise Invalid(f"{path} exists and was not changed; name another file, or replace it with --force")


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yields a new, empty file beside `path`. At the end it becomes `path`, durably; after an error it is deleted."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # a library may have put a file of its own in the place
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
