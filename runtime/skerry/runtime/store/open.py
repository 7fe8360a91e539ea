"""Opens the store for a URI, wrapped in `Retrying`. Imports an implementation only when its scheme is used."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import SplitResult, unquote, urlsplit

from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store.filesystem_type import mount_of
from skerry.runtime.store.interface import FolderStore
from skerry.runtime.store.retrying import DEADLINE_S, Retrying
from skerry.runtime.store.validation import is_key
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from obstore.store import GCSCredentialProvider, S3CredentialProvider

    from skerry.runtime.store.interface import Store

CredentialProvider: TypeAlias = "S3CredentialProvider | GCSCredentialProvider"
"""obstore's own type: called when credentials are about to expire, from any thread."""

URI_FORMS = (
    "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, hf://namespace/bucket/prefix, file:///folder, "
    "memory://name or fsspec+s3://bucket/prefix"
)


def open_store(
    uri: str,
    *,
    clock: Clock | None = None,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
    credentials: CredentialProvider | None = None,
) -> Retrying:
    """The store at `uri`, with retries and usage counters. Sends no request: the first verb finds missing rights.

    Endpoint, region and credentials come from the standard environment of each cloud (see
    `skerry.runtime.store.obstore_clients`). `memory://name` is one store for all callers in this process.
    deadline_s: how long one call may be retried. environment: replaces the process's own. credentials: for s3:// and
    gs://, instead of those that the environment names. Raises Invalid for a malformed URI.
    """
    clock = clock or SystemClock()
    return Retrying(_open_plain(uri, clock, environment, credentials), clock, deadline_s=deadline_s)


def list_folders(
    uri: str,
    *,
    clock: Clock | None = None,
    environment: Mapping[str, str] | None = None,
    credentials: CredentialProvider | None = None,
) -> Sequence[str]:
    """The names of the folders directly below `uri`, sorted: for people, so nothing is retried.

    One listing of names; a store of another client lists all its objects. environment, credentials: as `open_store`.
    Raises what the store raises, and Invalid for a malformed URI.
    """
    store = _open_plain(uri, clock or SystemClock(), environment, credentials)
    if isinstance(store, FolderStore):
        return store.folders()
    return sorted({entry.key.partition("/")[0] for entry in store.list("") if "/" in entry.key})


def _open_plain(
    uri: str, clock: Clock, environment: Mapping[str, str] | None, credentials: CredentialProvider | None
) -> Store:
    parts = urlsplit(uri)
    if not parts.scheme:
        raise Invalid(
            f"not a store URI: {uri!r}; write {Path(uri).absolute().as_uri()} for a folder, otherwise {URI_FORMS}"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise Invalid(
            f"not a store URI: {parts.scheme}://... contains '?', '#' or '@'; put credentials into the environment"
        )
    match parts.scheme:
        case "file":
            return _open_directory(uri, parts)
        case "memory":
            from skerry.runtime.store.memory import open_memory_store  # noqa: PLC0415  only when it is used

            return open_memory_store(parts.netloc + parts.path, clock)
        case "s3" | "gs" | "az" | "hf":
            from skerry.runtime.store.obstore_clients import open_cloud_store  # noqa: PLC0415  loads obstore

            place = _bucket_and_prefix(uri, parts)
            return open_cloud_store(parts.scheme, *place, environment=environment, credentials=credentials)
        case scheme if scheme.startswith("fsspec+"):
            from skerry.runtime.store.fsspec_store import open_fsspec_store  # noqa: PLC0415  loads fsspec

            return open_fsspec_store(scheme.removeprefix("fsspec+"), *_bucket_and_prefix(uri, parts))
        case scheme:
            raise Invalid(f"unknown scheme {scheme}://; write {URI_FORMS}")


def _open_directory(uri: str, parts: SplitResult) -> Store:
    from skerry.runtime.store.directory import DirectoryStore  # noqa: PLC0415  only when it is used

    folder = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"}:
        raise Invalid(f"{uri} names a host, not a folder; write three slashes: file:///{parts.netloc}{folder}")
    if not folder.is_absolute() or folder == Path("/"):
        raise Invalid(f"{uri} names no folder; write an absolute one: file:///folder")
    mount = mount_of(folder)
    if mount is not None and mount.remembers_absence:
        remedy = "mount it with lookupcache=positive, or replicas see each other's files up to a minute late"
        emit("mount_remembers_absence", {"uri": uri, "mount": mount.point, "why": remedy}, level=logging.WARNING)
    return DirectoryStore(folder)


def _bucket_and_prefix(uri: str, parts: SplitResult) -> tuple[str, str]:
    """Bucket and prefix; the prefix is empty or ends in `/`."""
    prefix = parts.path.strip("/")
    if not parts.netloc or ":" in parts.netloc:
        raise Invalid(f"{uri} names no bucket; write {parts.scheme}://bucket/prefix")
    if prefix and not is_key(prefix):
        raise Invalid(
            f"cannot use the prefix {prefix!r}; use names of letters, digits, '.', '_' and '-' separated by single '/'"
        )
    return parts.netloc, f"{prefix}/" if prefix else ""
