"""Parses the store's URI of a spec and builds the URI of a run. Does no I/O."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final
from urllib.parse import unquote

FILE: Final = "file://"
CLOUDS: Final = {"s3": "aws", "gs": "google"}
"""The cloud of a bucket, by the scheme of its URI."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)")
_ROUND: Final = re.compile(r"(.+)@(\d{1,8})", re.ASCII)
_SCHEMES: Final = ("file", "s3", "gs", "az", "hf")


def as_store(text: str) -> str:
    """Return the store's URI as written. Raises ValueError with the text to write if no replica could open it."""
    match = _SCHEME.fullmatch(text)
    if match is None:
        folder = Path(text)
        raise ValueError(
            f"must be a URI; for a folder write {folder.as_uri() if folder.is_absolute() else FILE + text}"
        )
    scheme, rest = match.groups()
    if scheme != scheme.lower():
        raise ValueError(f"must begin in lower case; write {scheme.lower()}://{rest}")
    if scheme == "memory":
        raise ValueError("must be a store that other processes can open; memory:// is gone with the process")
    if scheme not in _SCHEMES and not scheme.startswith("fsspec+"):
        raise ValueError(f"must begin with s3://, gs://, az://, hf:// or file://; there is no store for {scheme}://")
    if scheme == "file":
        _check_folder(rest)
    elif not rest.strip("/"):
        raise ValueError(f"must name a bucket; write {scheme}://bucket/prefix")
    return text


def store_uri(folder: Path, text: str) -> str:
    """Return the store's URI without a trailing slash; a relative file:// path starts at `folder`."""
    if not text.startswith(FILE):
        return text.rstrip("/")
    # absolute, not resolve: the text is compared and printed, and a symbolic link in it is the user's choice.
    return (folder / unquote(text.removeprefix(FILE))).absolute().as_uri()


def run_uri(folder: Path, store: str, run: str) -> str:
    """Return the URI of a run in its store."""
    return f"{store_uri(folder, store)}/{run}"


def as_source(text: str) -> str:
    """Return the URI of a run, with its round if one is named. Raises ValueError with the text to write."""
    uri, _ = split_source(text)
    if "@" in uri.rpartition("/")[2]:
        raise ValueError(f"must end with the number of a round after @; write e.g. {uri.rpartition('@')[0]}@40")
    as_store(uri)
    scheme, _, rest = uri.partition("://")
    if scheme != "file" and not rest.strip("/").partition("/")[2]:
        raise ValueError(f"must name a run, not a bucket; write e.g. {scheme}://{rest.strip('/')}/runs/base")
    return text


def split_source(text: str) -> tuple[str, int | None]:
    """Return the URI of a run without a trailing slash, and the round behind @, if one is named."""
    match = _ROUND.fullmatch(text)
    uri, number = (text, None) if match is None else (match[1], int(match[2]))
    return (uri.rstrip("/") if uri != FILE else uri), number


def _check_folder(text: str) -> None:
    """Reject texts that look like one folder and would be read as another."""
    first, _, rest = text.partition("/")
    if not text.strip("/"):
        raise ValueError("must name a folder; write file:///folder, or file://folder beside the spec")
    if first.startswith("~"):
        raise ValueError(f"must not begin with ~, which is not expanded; write file:///home/you/{rest}")
    if first == "localhost":
        raise ValueError(f"must name no host; write file:///{rest}")
