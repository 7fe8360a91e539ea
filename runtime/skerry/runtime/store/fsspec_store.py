"""A store over fsspec, for the protocols whose exclusive create is proved, and a refusal in words for the others.

fsspec promises no exclusive create ("trial basis", fsspec#1762), so each implementation stands for itself. s3fs sends
`If-None-Match: *` and passes the suite. It is the slow way to S3 (five times the CPU of `cloud`), for credentials that
only botocore can find. Its own repeats are turned off: they turn our success into somebody else's.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Final, Protocol, TypedDict, cast

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.checks import check_key, check_prefix, check_span, is_key, land, room
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping, Sequence

# As for a bucket; one stream, because more would compete for fsspec's one event loop.
PROFILE: Final = Profile(piece_bytes=8 << 20, streams=1, poll_first=0.2, poll_cap=2.0)
REFUSED: Final[Mapping[str, str]] = {
    "file": "its create looks first and writes then, so two writers won; write file:///folder",
    "local": "its create looks first and writes then, so two writers won; write file:///folder",
    "memory": "its create looks first and writes then; write memory://name",
    "gs": "its create is proved against no server; write gs://bucket/prefix",
    "gcs": "its create is proved against no server; write gs://bucket/prefix",
    "az": "it is not proved here, and not needed; write az://container/prefix",
    "abfs": "it is not proved here, and not needed; write az://container/prefix",
}
# No byte for this long means a dead connection, as in `clients`.
_STALL_S: Final = 15
# Answers that promise that nothing was written, as in `cloud`.
_NOT_DONE: Final = frozenset({408, 409, 425, 429, 503})
# Keys that were good and have run out, as in `cloud`.
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired"})
# botocore's words for a role that gives no keys, or none now.
_NO_KEYS: Final = frozenset(
    {"NoCredentialsError", "CredentialRetrievalError", "MetadataRetrievalError", "TokenRetrievalError"}
)


class Found(TypedDict):
    """What fsspec tells about an object."""

    size: int
    LastModified: dt.datetime


class FileSystem(Protocol):
    """What is used of an fsspec implementation."""

    def cat_file(self, path: str, *, start: int, end: int | None) -> bytes:
        """The bytes of a range."""
        ...

    def pipe_file(self, path: str, value: bytes, mode: str) -> object:
        """Write a file; mode "create" must be exclusive."""
        ...

    def find(self, path: str, *, detail: bool, prefix: str) -> Mapping[str, Found]:
        """Every file below a folder."""
        ...

    def rm_file(self, path: str) -> object:
        """Delete a file."""
        ...


def filesystem_store(protocol: str, bucket: str, prefix: str) -> FsspecStore:
    """The store at `fsspec+protocol://bucket/prefix`; prefix is empty or ends in `/`.

    Raises Invalid, with the reason, for every protocol but s3, and where s3fs is not installed.
    """
    if protocol != "s3":
        reason = REFUSED.get(protocol, "its exclusive create is not proved; prove it with the conformance suite first")
        raise Invalid(f"fsspec+{protocol}:// cannot hold a run: {reason}")
    try:
        core = importlib.import_module("s3fs.core")
        botocore = importlib.import_module("botocore.exceptions")
    except ImportError as error:
        raise Invalid("fsspec+s3:// needs s3fs: pip install 'skerry[fsspec]', or write s3://") from error

    def connect() -> FileSystem:
        filesystem = core.S3FileSystem(
            config_kwargs={
                "connect_timeout": _STALL_S,
                "read_timeout": _STALL_S,
                "retries": {"total_max_attempts": 1, "mode": "standard"},
            },
            # Listings must not be cached, and one run's settings must not become another's.
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        filesystem.retries = 1
        return cast("FileSystem", filesystem)

    lost = cast("tuple[type[Exception], ...]", (*core.S3_RETRYABLE_ERRORS, botocore.BotoCoreError))
    uri = f"fsspec+s3://{bucket}/{prefix}".rstrip("/")
    # botocore renews a role's keys before they run out; only a new session looks at everything again.
    renew = None if os.environ.get("AWS_ACCESS_KEY_ID") else connect
    return FsspecStore(uri, connect(), f"{bucket}/{prefix}", lost, renew)


class FsspecStore:
    """Objects below `root` (ending in "/") of an fsspec file system. Thread-safe as far as that is.

    lost: the implementation's own errors, besides OSError, that mean that no answer came. renew: the same file system
    with credentials asked for anew; None where they cannot become others. Buffers are joined: fsspec takes bytes only.
    """

    def __init__(
        self,
        uri: str,
        filesystem: FileSystem,
        root: str,
        lost: tuple[type[Exception], ...],
        renew: Callable[[], FileSystem] | None = None,
    ) -> None:
        self._uri = uri
        self._filesystem = filesystem
        self._root = root
        self._errors = (OSError, *lost)
        self._renew = renew
        self._renewing = threading.Lock()
        # Before the first answer, no keys mean that this machine has no role; later, that its source is away.
        self._was_let_in = False

    @property
    def uri(self) -> str:
        """As opened."""
        return self._uri

    @property
    def profile(self) -> Profile:
        """Large pieces, one stream."""
        return PROFILE

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read."""
        check_key(key)
        check_span(span)
        start, end = span or (0, None)
        empty = start == end
        filesystem = self._filesystem
        try:
            # No server has a range of zero bytes; one byte tells whether there is an object.
            body = filesystem.cat_file(self._root + key, start=start, end=start + 1 if empty else end)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None
        except self._errors as error:
            if _answer(error)[0] == 416:  # the span begins at or past the end
                return room(into, 0)
            raise self._meaning(error, "read", key, filesystem) from error
        self._was_let_in = True
        return room(into, 0) if empty else land(memoryview(body), into)

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. False is only what the store said."""
        filesystem = self._filesystem
        try:
            self._pipe(filesystem, "create", key, data)
        except FileExistsError:
            return False
        except self._errors as error:
            if _answer(error)[0] == 412:
                return False
            raise self._meaning(error, "create", key, filesystem) from error
        return True

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        filesystem = self._filesystem
        try:
            self._pipe(filesystem, "overwrite", key, data)
        except self._errors as error:
            raise self._meaning(error, "replace", key, filesystem) from error

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list. Asks for everything below the prefix: fsspec has no "after"."""
        check_prefix(prefix)
        folder, _, name = (self._root + prefix).rpartition("/")
        bucket_and_prefix = len(self._root)
        filesystem = self._filesystem
        try:
            found = filesystem.find(folder, detail=True, prefix=name)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return []
        except self._errors as error:
            raise self._meaning(error, "list", prefix, filesystem) from error
        entries = (
            Entry(path[bucket_and_prefix:], status["size"], status["LastModified"].timestamp())
            for path, status in found.items()
            # As in `cloud`: what no key can name is not ours.
            if path.startswith(self._root + prefix) and is_key(path[bucket_and_prefix:])
        )
        return sorted(entry for entry in entries if after is None or entry.key > after)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        check_key(key)
        filesystem = self._filesystem
        try:
            filesystem.rm_file(self._root + key)
        except FileNotFoundError as error:
            self._check_bucket(error)
        except self._errors as error:
            raise self._meaning(error, "delete", key, filesystem) from error

    def _pipe(self, filesystem: FileSystem, mode: str, key: str, data: Data) -> None:
        check_key(key)
        filesystem.pipe_file(self._root + key, b"".join(buffers_of(data)), mode=mode)
        self._was_let_in = True

    def _check_bucket(self, error: FileNotFoundError) -> None:
        if _answer(error)[1] == "NoSuchBucket":
            raise Invalid(f"no such bucket: {self._uri}; make it, or correct the URI and the endpoint") from error

    def _meaning(self, error: Exception, verb: str, key: str, filesystem: FileSystem) -> SkerryError:
        """What the caller does next about an error of the implementation. filesystem: the one that met it."""
        facts = f"{verb} key={key} store={self._uri}: {type(error).__name__}: {error}"
        status, code = _answer(error)
        if (refusal := self._about_credentials(error, code, facts, filesystem)) is not None:
            return refusal
        if code == "NoSuchBucket":
            return Invalid(f"no such bucket: {facts}; make it, or correct the URI and the endpoint")
        if status in _NOT_DONE:
            return Retryable(f"the store is busy: {facts}")
        if status is not None and (status < 500 or status == 501):
            return Invalid(f"the store cannot do this: {facts}")
        return (Ambiguous if verb == "create" else Retryable)(f"the store gave no clear answer: {facts}")

    def _about_credentials(self, error: Exception, code: str, facts: str, filesystem: FileSystem) -> SkerryError | None:
        """What an error says about the credentials, if that is what it is about."""
        if code in _EXPIRED:
            return self._run_out(filesystem, facts)
        if type(error).__name__ in _NO_KEYS and self._was_let_in:
            self._run_out(filesystem, facts)
            return Retryable(f"this machine's role gives no credentials: {facts}")
        if type(error).__name__ in _NO_KEYS:
            return Unauthorized(f"no credentials in the environment, and none from this machine's role: {facts}")
        if isinstance(error, PermissionError):
            return Unauthorized(f"the store refuses these credentials: {facts}")
        return None

    def _run_out(self, filesystem: FileSystem, facts: str) -> SkerryError:
        """Forget credentials that have run out, unless another thread already has. Nothing was done with them."""
        if self._renew is None:
            return Unauthorized(
                f"these credentials have run out, and keys in the environment cannot be renewed; give the job a role: "
                f"{facts}"
            )
        with self._renewing:
            if self._filesystem is filesystem:
                self._filesystem = self._renew()
        return Retryable(f"these credentials have run out; others are asked for: {facts}")


def _answer(error: Exception) -> tuple[int | None, str]:
    """HTTP status and code of the botocore error that s3fs keeps as the cause; (None, "") if no answer came."""
    response: object = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None, ""
    told = cast("dict[str, dict[str, object]]", response)
    status = told.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None, str(told.get("Error", {}).get("Code", ""))
