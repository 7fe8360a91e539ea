"""From a URI to a store that is safe to believe. Imports an engine only when its scheme is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.errors import Invalid
from skerry.runtime.store.checks import is_key
from skerry.runtime.store.retrying import DEADLINE_S, Retrying

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.runtime.store.interface import Store

FORMS = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, file:///folder, memory://name or fsspec+s3://bucket/prefix"


def open_store(
    uri: str,
    *,
    clock: Clock | None = None,
    deadline_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> Retrying:
    """The store at `uri`, retried, resolved and counted. Does no request: rights are found out by the first verb.

    Endpoint, region and credentials come from the standard environment of each cloud (see
    `skerry.runtime.store.clients`). `memory://name` is the same store for every caller in this process.
    deadline_s: how long one call may be retried. environment: instead of the process's own. Raises Invalid for a URI
    that cannot be one.
    """
    clock = clock or SystemClock()
    return Retrying(_engine(uri, clock, environment), clock, deadline_s=deadline_s)


def _engine(uri: str, clock: Clock, environment: Mapping[str, str] | None) -> Store:
    parts = urlsplit(uri)
    if not parts.scheme:
        raise Invalid(
            f"not a store URI: {uri!r}; for a folder write {Path(uri).absolute().as_uri()}, otherwise {FORMS}"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise Invalid(
            f"a store URI has no '?', '#' or '@': {parts.scheme}://...; credentials belong in the environment"
        )
    match parts.scheme:
        case "file":
            return _directory(uri, parts)
        case "memory":
            from skerry.runtime.store.memory import memory_store  # noqa: PLC0415  lazily, like every engine

            return memory_store(parts.netloc + parts.path, clock)
        case "s3" | "gs" | "az":
            from skerry.runtime.store.clients import cloud_store  # noqa: PLC0415  loads obstore

            return cloud_store(parts.scheme, *_bucket(uri, parts), environment=environment)
        case scheme if scheme.startswith("fsspec+"):
            from skerry.runtime.store.filesystem import filesystem_store  # noqa: PLC0415  loads fsspec

            return filesystem_store(scheme.removeprefix("fsspec+"), *_bucket(uri, parts))
        case scheme:
            raise Invalid(f"no store for {scheme}://; write {FORMS}")


def _directory(uri: str, parts: SplitResult) -> Store:
    from skerry.runtime.store.directory import DirectoryStore  # noqa: PLC0415  lazily, like every engine

    folder = Path(unquote(parts.path))
    if parts.netloc not in {"", "localhost"}:
        raise Invalid(
            f"{uri} names a host, not a folder; an absolute folder has three slashes: file:///{parts.netloc}{folder}"
        )
    if not folder.is_absolute() or folder == Path("/"):
        raise Invalid(f"{uri} names no folder; write an absolute one: file:///folder")
    return DirectoryStore(folder)


def _bucket(uri: str, parts: SplitResult) -> tuple[str, str]:
    """Bucket and prefix, the prefix empty or ending in `/`."""
    prefix = parts.path.strip("/")
    if not parts.netloc or ":" in parts.netloc:
        raise Invalid(f"{uri} names no bucket; write {parts.scheme}://bucket/prefix")
    if prefix and not is_key(prefix):
        raise Invalid(
            f"cannot use the prefix {prefix!r}: names of letters, digits, '.', '_' and '-' separated by single '/'"
        )
    return parts.netloc, f"{prefix}/" if prefix else ""
