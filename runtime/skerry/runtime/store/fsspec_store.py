"""A store over fsspec, for protocols with a tested exclusive create; the others are refused with a reason.

fsspec does not guarantee an exclusive create ("trial basis", fsspec#1762), so each implementation is tested on its own.
Today only s3fs is: it sends `If-None-Match: *` and passes the conformance suite. It needs five times the CPU of
`obstore_store`; use it for credentials that only botocore finds. Its own retries are off, because a retry that meets
its own success reports that the object belongs to another writer.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import TYPE_CHECKING, Final, Protocol, TypedDict, cast

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.validation import check_key, check_prefix, check_span, is_key, reserve, write_into

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Mapping, Sequence

# As for a bucket; one stream, because more would compete for fsspec's only event loop.
PROFILE: Final = Profile(piece_bytes=8 << 20, streams=1, poll_first=0.2, poll_cap=2.0)
REFUSED: Final[Mapping[str, str]] = {
    "file": "its create checks and then writes, so two writers can win; write file:///folder",
    "local": "its create checks and then writes, so two writers can win; write file:///folder",
    "memory": "its create checks and then writes; write memory://name",
    "gs": "its create is not tested with any server; write gs://bucket/prefix",
    "gcs": "its create is not tested with any server; write gs://bucket/prefix",
    "az": "its create is not tested; write az://container/prefix",
    "abfs": "its create is not tested; write az://container/prefix",
}
# No byte for this long means a dead connection, as in `obstore_clients`.
_STALL_S: Final = 15
# Responses that guarantee that nothing was written, as in `obstore_store`.
_NOT_DONE: Final = frozenset({408, 409, 425, 429, 503})
# Keys that have expired, as in `obstore_store`.
_EXPIRED: Final = frozenset({"ExpiredToken", "TokenRefreshRequired"})
# As in `obstore_store`.
_SKEWED: Final = "RequestTimeTooSkewed"
# botocore's errors for a role that gives no keys, or none at present.
_NO_KEYS: Final = frozenset(
    {"NoCredentialsError", "CredentialRetrievalError", "MetadataRetrievalError", "TokenRetrievalError"}
)


class FileStatus(TypedDict):
    """The fields of fsspec's file information that are used."""

    size: int
    LastModified: dt.datetime


class FileSystem(Protocol):
    """The methods of an fsspec implementation that are used."""

    def cat_file(self, path: str, *, start: int, end: int | None) -> bytes:
        """The bytes of a range."""
        ...

    def pipe_file(self, path: str, value: bytes, mode: str) -> object:
        """Writes a file; mode "create" must be exclusive."""
        ...

    def find(self, path: str, *, detail: bool, prefix: str) -> Mapping[str, FileStatus]:
        """Every file below a folder."""
        ...

    def rm_file(self, path: str) -> object:
        """Deletes a file."""
        ...


def open_fsspec_store(protocol: str, bucket: str, prefix: str) -> FsspecStore:
    """The store at `fsspec+protocol://bucket/prefix`; prefix is empty or ends in `/`.

    Raises Invalid, with the reason, for every protocol except s3, and if s3fs is not installed.
    """
    if protocol != "s3":
        reason = REFUSED.get(protocol, "its exclusive create is not tested; test it with the conformance suite first")
        raise Invalid(f"cannot use fsspec+{protocol}:// for a run: {reason}")
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
            # Listings must not be cached, and one run's settings must not be used for another.
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        filesystem.retries = 1
        return cast("FileSystem", filesystem)

    connection_errors = cast("tuple[type[Exception], ...]", (*core.S3_RETRYABLE_ERRORS, botocore.BotoCoreError))
    uri = f"fsspec+s3://{bucket}/{prefix}".rstrip("/")
    # botocore renews a role's keys before they expire; only a new session reads all sources again.
    reconnect = None if os.environ.get("AWS_ACCESS_KEY_ID") else connect
    return FsspecStore(uri, connect(), f"{bucket}/{prefix}", connection_errors, reconnect)


class FsspecStore:
    """Objects below `root` (ending in "/") of an fsspec file system. Thread-safe if that is.

    connection_errors: the implementation's own errors, in addition to OSError, for a missing answer. reconnect: creates
    the same file system with new credentials; None if they cannot change. Buffers are joined, because fsspec accepts
    only bytes.
    """

    def __init__(
        self,
        uri: str,
        filesystem: FileSystem,
        root: str,
        connection_errors: tuple[type[Exception], ...],
        reconnect: Callable[[], FileSystem] | None = None,
    ) -> None:
        self._uri = uri
        self._filesystem = filesystem
        self._root = root
        self._errors = (OSError, *connection_errors)
        self._reconnect = reconnect
        self._renewal_lock = threading.Lock()
        # Before the first success, missing keys mean that this machine has no role; afterwards, a temporary failure.
        self._accepted = False

    @property
    def uri(self) -> str:
        """The URI as opened."""
        return self._uri

    @property
    def profile(self) -> Profile:
        """Large pieces, one stream."""
        return PROFILE

    def below(self, uri: str, root: str) -> FsspecStore:
        """A store of another root over the same session."""
        return FsspecStore(uri, self._filesystem, root, self._errors[1:], self._reconnect)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read."""
        check_key(key)
        check_span(span)
        start, end = span or (0, None)
        is_empty = start == end
        filesystem = self._filesystem
        try:
            # Servers have no ranges of zero bytes; reading one byte shows if the object exists.
            body = filesystem.cat_file(self._root + key, start=start, end=start + 1 if is_empty else end)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return None
        except self._errors as error:
            if _response_of(error)[0] == 416:  # the span begins at or past the end
                return reserve(into, 0)
            raise self._translate(error, "read", key, filesystem) from error
        self._accepted = True
        return reserve(into, 0) if is_empty else write_into(into, memoryview(body))

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. False is only the store's answer."""
        filesystem = self._filesystem
        try:
            self._pipe(filesystem, "create", key, data)
        except FileExistsError:
            return False
        except self._errors as error:
            if _response_of(error)[0] == 412:
                return False
            raise self._translate(error, "create", key, filesystem) from error
        return True

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        filesystem = self._filesystem
        try:
            self._pipe(filesystem, "overwrite", key, data)
        except self._errors as error:
            raise self._translate(error, "replace", key, filesystem) from error

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list. Lists everything below the prefix, because fsspec has no "after"."""
        check_prefix(prefix)
        folder, _, name = (self._root + prefix).rpartition("/")
        root_length = len(self._root)
        filesystem = self._filesystem
        try:
            files = filesystem.find(folder, detail=True, prefix=name)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return []
        except self._errors as error:
            raise self._translate(error, "list", prefix, filesystem) from error
        entries = (
            Entry(path[root_length:], status["size"], status["LastModified"].timestamp())
            for path, status in files.items()
            # As in `obstore_store`, names that are no keys are skipped.
            if path.startswith(self._root + prefix) and is_key(path[root_length:])
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
            raise self._translate(error, "delete", key, filesystem) from error

    def _pipe(self, filesystem: FileSystem, mode: str, key: str, data: Data) -> None:
        check_key(key)
        filesystem.pipe_file(self._root + key, b"".join(buffers_of(data)), mode=mode)
        self._accepted = True

    def _check_bucket(self, error: FileNotFoundError) -> None:
        if _response_of(error)[1] == "NoSuchBucket":
            raise Invalid(f"no such bucket: {self._uri}; create it, or correct the URI and the endpoint") from error

    def _translate(self, error: Exception, verb: str, key: str, filesystem: FileSystem) -> SkerryError:
        """The error to raise for an error of the implementation. filesystem: the instance that raised it."""
        facts = f"{verb} key={key} store={self._uri}: {type(error).__name__}: {error}"
        status, code = _response_of(error)
        if (refusal := self._credential_error(error, code, facts, filesystem)) is not None:
            return refusal
        if code == "NoSuchBucket":
            return Invalid(f"no such bucket: {facts}; create it, or correct the URI and the endpoint")
        if status in _NOT_DONE:
            return Retryable(f"the store is busy: {facts}")
        if status is not None and (status < 500 or status == 501):
            return Invalid(f"the store cannot do this: {facts}")
        return (Ambiguous if verb == "create" else Retryable)(f"no clear answer from the store: {facts}")

    def _credential_error(self, error: Exception, code: str, facts: str, filesystem: FileSystem) -> SkerryError | None:
        """The error to raise if the cause is the credentials; None for any other cause."""
        if code in _EXPIRED:
            return self._renew(filesystem, facts)
        if code == _SKEWED:
            return Retryable(f"this machine's clock differs too much from the store's, correct it: {facts}")
        if type(error).__name__ in _NO_KEYS and self._accepted:
            self._renew(filesystem, facts)
            return Retryable(f"this machine's role gives no credentials: {facts}")
        if type(error).__name__ in _NO_KEYS:
            return Unauthorized(f"no credentials in the environment, and none from this machine's role: {facts}")
        if isinstance(error, PermissionError):
            return Unauthorized(f"the store refuses these credentials: {facts}")
        return None

    def _renew(self, filesystem: FileSystem, facts: str) -> SkerryError:
        """Replaces a session with expired credentials, unless another thread already has. The request did nothing."""
        if self._reconnect is None:
            return Unauthorized(
                f"expired credentials in the environment, which cannot be renewed: {facts}; give the job a role"
            )
        with self._renewal_lock:
            if self._filesystem is filesystem:
                self._filesystem = self._reconnect()
        return Retryable(f"expired credentials, fetching new ones: {facts}")


def _response_of(error: Exception) -> tuple[int | None, str]:
    """HTTP status and code of the botocore error that s3fs keeps as the cause; (None, "") without a response."""
    response: object = getattr(error.__cause__, "response", None)
    if not isinstance(response, dict):
        return None, ""
    fields = cast("dict[str, dict[str, object]]", response)
    status = fields.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status if isinstance(status, int) else None, str(fields.get("Error", {}).get("Code", ""))
