"""From root to an ordinary user: takes over the folders that a platform made for root, then drops for good.

A container cannot know its platform's folders when it is built, so it starts as root. Where it may not (no capability,
another user in the job), it says so and goes on as what it is.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RUN_AS: Final = "SKERRY_RUN_AS"
"""Whom a container that starts as root becomes: a name or uid[:gid]. Empty or root stays root."""
# SageMaker makes these for root. Not recursive: a restored checkpoint may be large, and its files only need reading.
_FOLDERS: Final = ("", "output", "output/data", "model", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class User:
    """Whom to become."""

    name: str
    uid: int
    gid: int
    home: str


def user_of(text: str) -> User:
    """The user that `text` names: a name, or uid[:gid], with or without an entry. Raises Invalid if there is none."""
    uid, _, gid = text.partition(":")
    try:
        found = pwd.getpwuid(int(uid)) if uid.isdecimal() else pwd.getpwnam(uid)
    except KeyError as error:
        if not uid.isdecimal():
            raise Invalid(f"{RUN_AS}={text}: no such user in this image; add it, or write uid:gid") from error
        # Nobody's home: libraries that ask for one get a folder that can be written.
        return User(name=uid, uid=int(uid), gid=_group(gid, int(uid)), home="/tmp")  # noqa: S108
    return User(name=found.pw_name, uid=found.pw_uid, gid=_group(gid, found.pw_gid), home=found.pw_dir)


def drop(environment: dict[str, str], ml: Path) -> Sequence[str]:
    """Become the user that RUN_AS names, if this is root; what was done or could not be, in words.

    environment: HOME, USER and LOGNAME are set in it. Raises Invalid for a user that does not exist.
    """
    text = environment.get(RUN_AS, "")
    if os.geteuid() != 0 or text in {"", "root", "0", "0:0"}:
        return list(_unwritable(ml))
    user = user_of(text)
    said = list(_take_over(ml, user))
    try:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except PermissionError:
        return [*said, f"stays root: this container may not become {user.name}; it was started without CAP_SETUID"]
    environment |= {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    return [*said, f"runs as {user.name} ({user.uid}:{user.gid})", *_unwritable(ml)]


def _take_over(ml: Path, user: User) -> Iterator[str]:
    for folder in (ml / name for name in _FOLDERS):
        if not folder.is_dir():
            continue
        try:
            os.chown(folder, user.uid, user.gid)
        except OSError as error:
            yield f"cannot take over {folder}: {error.strerror}"
    # What a container writes to is a pipe or a file of the platform's; a script may reopen it by name.
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            os.fchown(stream, user.uid, user.gid)


def _unwritable(ml: Path) -> Iterator[str]:
    for name in ("output", "model", "checkpoints"):
        folder = ml / name
        if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
            yield f"cannot write {folder} as uid {os.geteuid()}; let the image start as root, or change its owner"


def _group(text: str, default: int) -> int:
    if not text:
        return default
    if text.isdecimal():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError as error:
        raise Invalid(f"{RUN_AS}: no such group in this image: {text}") from error
