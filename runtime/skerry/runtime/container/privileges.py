"""Drops root: takes ownership of the folders that a platform created for root, then becomes an ordinary user for good.

The platform's folders are unknown when the image is built, so a container starts as root. If it may not change user (no
capability, another user in the job), it reports that and continues as the user it is.
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
"""The user that a container started as root becomes: a name or uid[:gid]. Empty or root stays root."""
# SageMaker creates these for root. Not recursive: a restored checkpoint may be large, and its files only need reading.
_FOLDERS: Final = ("", "output", "output/data", "model", "checkpoints")


@dataclass(frozen=True, kw_only=True)
class User:
    """A user to run as."""

    name: str
    uid: int
    gid: int
    home: str


def find_user(text: str) -> User:
    """The user named by `text`: a name, or uid[:gid], with or without a passwd entry. Raises Invalid if unknown."""
    uid, _, gid = text.partition(":")
    try:
        entry = pwd.getpwuid(int(uid)) if uid.isdecimal() else pwd.getpwnam(uid)
    except KeyError as error:
        if not uid.isdecimal():
            raise Invalid(f"{RUN_AS}={text}: no such user in this image; add it, or write uid:gid") from error
        # A user without an entry has no home: libraries that use one get a folder that can be written.
        return User(name=uid, uid=int(uid), gid=_group(gid, int(uid)), home="/tmp")  # noqa: S108
    return User(name=entry.pw_name, uid=entry.pw_uid, gid=_group(gid, entry.pw_gid), home=entry.pw_dir)


def drop_privileges(environment: dict[str, str], ml: Path) -> Sequence[str]:
    """Become the user of RUN_AS if this process is root. Returns messages: what was done, and what could not be done.

    environment: HOME, USER and LOGNAME are set in it. Raises Invalid for a user that does not exist.
    """
    text = environment.get(RUN_AS, "")
    if os.geteuid() != 0 or text in {"", "root", "0", "0:0"}:
        return list(_unwritable(ml))
    user = find_user(text)
    messages = list(_change_owner(ml, user))
    try:
        os.setgroups([])
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except PermissionError:
        return [*messages, f"stays root: this container may not become {user.name}; it was started without CAP_SETUID"]
    environment |= {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}
    return [*messages, f"runs as {user.name} ({user.uid}:{user.gid})", *_unwritable(ml)]


def _change_owner(ml: Path, user: User) -> Iterator[str]:
    for folder in (ml / name for name in _FOLDERS):
        if not folder.is_dir():
            continue
        try:
            os.chown(folder, user.uid, user.gid)
        except OSError as error:
            yield f"cannot change the owner of {folder}: {error.strerror}"
    # A container's output is a pipe or a file of the platform; a script may reopen it by name.
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
