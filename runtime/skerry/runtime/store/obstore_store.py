"""A store in a bucket (s3, gs, az) over obstore's own API, not its fsspec interface, which overwrites on create.

One request per verb and page. obstore's retries are off, because a hidden retry can meet its own success; only
`retrying` repeats. Bodies are sent from the caller's buffers without joining them, and received piece by piece into the
caller's buffer. Every error of obstore is translated here. Source of the translation: arrow-rs object_store 0.12, in
which a 409 and a 412 are both AlreadyExistsError, and a lost reply is a GenericError.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Final, TypeAlias

import obstore
from obstore import exceptions

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.credentials.aws_container import FETCH_FAILED
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of
from skerry.runtime.store.validation import check_key, check_prefix, check_span, is_key, reserve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore import GetOptions, ObjectMeta, PutMode
    from obstore.store import AzureStore, ClientConfig, GCSStore, S3Store

    Client: TypeAlias = S3Store | GCSStore | AzureStore

# Bodies up to this size are sent by the client that aborts a stalled connection early.
SMALL_BYTES: Final = 1 << 20
# Size of the pieces that obstore returns while it receives the rest: the fastest of 256 KiB, 1, 8 and 64 MiB.
CHUNK_BYTES: Final = 256 << 10
# obstore fetches pages until it has this many keys; fewer than a page, so that no page is fetched without need.
CHUNK_KEYS: Final = 100

# A credential provider failed: obstore keeps the name and the text of its error.
_PROVIDER_ERROR: Final = re.compile(r"^[^\n]*External \w+ credential provider: (\w+): ")
_PROVIDER_ERRORS: Final = {kind.__name__: kind for kind in (Invalid, Retryable, Unauthorized)}
# The right that Cloud Storage requires for overwriting an object.
_OVERWRITE_RIGHT: Final = "storage.objects.delete"
_STATUS: Final = re.compile(r"status code: (\d{3})")
# Some servers answer a range past the end with 416, others with an empty range, which obstore rejects in these words.
_PAST_END: Final = "Wanted range starting at"
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# Texts of errors that come from a source of credentials, not from the store: a container's, a web identity's, and the
# metadata servers of EC2, Google and Azure, the last resort of each client.
_CREDENTIAL_SOURCES: Final = (
    FETCH_FAILED,
    "WebIdentity",
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
)
# Responses that guarantee that nothing was written; after any other failure the write may have happened.
_NOT_DONE: Final = {408, 409, 425, 429, 503}
# Keys that have expired: S3 answers 400, other stores 403, all of them with one of these codes.
_EXPIRED: Final = ("ExpiredToken", "TokenRefreshRequired")
# S3 answers 403 to a request that was signed more than 15 minutes before or after its own time.
_SKEWED: Final = "RequestTimeTooSkewed"
# S3 answers 400 to a body that arrived too slowly, and closes the connection.
_TOO_SLOW: Final = "RequestTimeout"
# S3 answers 400 to keys that never existed.
_UNKNOWN_KEYS: Final = "InvalidToken"


class Clients:
    """Two clients of one bucket, because obstore's time-outs belong to a client and one value cannot fit both uses.

    quick: reads, listings, deletes and small writes; a stalled connection ends the request.
    bulk: large writes; only the total time is limited, because no byte comes back while a body is sent. Created at the
    first one: a client costs 6 ms, and a command line never writes much.
    """

    def __init__(self, create: Callable[[ClientConfig], Client], stall_s: float, bulk_s: float) -> None:
        """create: a client with these time-outs; all clients share its credentials. Both limits are in seconds."""
        self._create = create
        self._total: ClientConfig = {"timeout": timedelta(seconds=bulk_s)}
        self.quick = create({"read_timeout": timedelta(seconds=stall_s), **self._total})

    @functools.cached_property
    def bulk(self) -> Client:
        """See the class."""
        return self._create(self._total)


class ObjectStore:
    """Objects of one bucket below `prefix` (empty, or ending in "/"). Thread-safe.

    When the store reports expired credentials, new clients replace the old ones, which would cache the credentials
    until the end that they were given.
    """

    def __init__(
        self, uri: str, connect: Callable[[], Clients], prefix: str, profile: Profile, *, renews: bool
    ) -> None:
        """connect: creates clients without cached credentials. renews: they may then get other credentials."""
        self._uri = uri
        self._connect = connect
        self._renews = renews
        self._renewal_lock = threading.Lock()
        self._clients = connect()
        self._prefix = prefix
        self._profile = profile
        # The last clients with credentials that the store accepted. Before the first success, an unreachable metadata
        # server means that this machine has no role; afterwards, that the server is temporarily unavailable.
        self._accepted: Clients | None = None

    @property
    def uri(self) -> str:
        """Scheme, bucket and prefix."""
        return self._uri

    @property
    def profile(self) -> Profile:
        """The profile derived from the endpoint."""
        return self._profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. Without `into` the result is obstore's own memory, read-only."""
        check_key(key)
        check_span(span)
        is_empty = span is not None and span.start == span.stop
        clients = self._clients
        options: GetOptions = {}
        if span is not None:
            # Servers have no ranges of zero bytes; reading the first byte shows if the object exists.
            options["range"] = (0, 1) if is_empty else (span.start, span.stop)
        try:
            response = obstore.get(clients.quick, self._prefix + key, options=options)
            self._accepted = clients
            if is_empty:
                return reserve(into, 0)
            if into is None:
                return memoryview(response.bytes())
            start, stop = response.range
            view = reserve(into, stop - start)
            filled = 0
            for chunk in response.stream(CHUNK_BYTES):
                view[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
            return None
        except exceptions.BaseError as error:
            if _status(error) == 416 or _PAST_END in str(error):
                return reserve(into, 0)
            raise self._translate(error, "read", key, clients) from error
        if filled < view.nbytes:
            facts = f"read key={key} store={self._uri} bytes={filled} announced={view.nbytes}"
            raise Retryable(f"incomplete body: {facts}")
        return view

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. False is only the store's answer: a 409 may mean that nothing was written."""
        try:
            self._put("create", key, data, "create")
        except _Exists:
            return False
        except Unauthorized as error:
            # Cloud Storage may check the right to overwrite before the condition: then the object existed.
            if _OVERWRITE_RIGHT in str(error.__cause__):
                with contextlib.suppress(SkerryError):
                    if self.read(key, Span(0, 0)) is not None:
                        return False
            raise
        return True

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        try:
            self._put("replace", key, data, "overwrite")
        except _Exists as error:  # 409: two writers of one key collided, and nothing was written
            raise Retryable(f"write conflict: replace key={key} store={self._uri}") from error

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list. Starts at the prefix and stops behind it, so older neighbours cost nothing."""
        check_prefix(prefix)
        path_prefix = self._prefix + prefix
        # obstore matches whole folders only; names inside the folder are matched below.
        folder = path_prefix[: path_prefix.rfind("/") + 1]
        offset = self._prefix + after if after and after > prefix else _just_below(path_prefix)
        entries: list[Entry] = []
        clients = self._clients
        try:
            # The overload for Arrow needs types that are not installed.
            pages = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                clients.quick, folder or None, offset=offset, chunk_size=CHUNK_KEYS
            )
            for page in pages:
                entries.extend(_entries(page, path_prefix, len(self._prefix)))
                if page and page[-1]["path"] > path_prefix and not page[-1]["path"].startswith(path_prefix):
                    break
            self._accepted = clients
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
        except exceptions.BaseError as error:
            raise self._translate(error, "list", prefix, clients) from error
        return sorted(entry for entry in entries if after is None or entry.key > after)

    def folders(self) -> Sequence[str]:
        """See FolderStore.folders."""
        clients = self._clients
        try:
            # As for `list`: the overload for Arrow needs types that are not installed.
            listed = obstore.list_with_delimiter(clients.quick, self._prefix or None)  # pyright: ignore[reportUnknownMemberType]
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
            return []
        except exceptions.BaseError as error:
            raise self._translate(error, "list", "", clients) from error
        names = (path.removeprefix(self._prefix).strip("/") for path in listed["common_prefixes"])
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        """See Store.delete."""
        check_key(key)
        clients = self._clients
        try:
            obstore.delete(clients.quick, self._prefix + key)
            self._accepted = clients
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
        except exceptions.BaseError as error:
            raise self._translate(error, "delete", key, clients) from error

    def _put(self, verb: str, key: str, data: Data, mode: PutMode) -> None:
        """One PUT of all buffers. Raises _Exists if the store reports that the key exists."""
        check_key(key)
        buffers = [buffer for buffer in buffers_of(data) if buffer.nbytes]
        is_small = sum(buffer.nbytes for buffer in buffers) <= SMALL_BYTES
        clients = self._clients
        client = clients.quick if is_small else clients.bulk
        # One buffer and several are both sent without a copy; a list of one would miss obstore's fast path for one.
        body = buffers[0] if len(buffers) == 1 else buffers or b""
        try:
            obstore.put(client, self._prefix + key, body, mode=mode, use_multipart=False)
            self._accepted = clients
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError) as error:
            # NotModified: MinIO before 2024 answered 304 to a create that lost.
            raise _Exists from error
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
            raise Invalid(f"the store answers 404 to a write: {verb} key={key} store={self._uri}") from error
        except exceptions.BaseError as error:
            raise self._translate(error, verb, key, clients) from error

    def _check_bucket(self, error: FileNotFoundError, clients: Clients) -> None:
        """Raises Invalid if a 404 means that the bucket, not the object, is absent."""
        if any(text in str(error) for text in _NO_BUCKET):
            raise Invalid(f"no such bucket: {self._uri}; create it, or correct the URI and the endpoint") from error
        self._accepted = clients

    def _translate(self, error: exceptions.BaseError, verb: str, key: str, clients: Clients) -> SkerryError:
        """The error to raise for an error of obstore. clients: the clients that raised it."""
        text, status = str(error), _status(error)
        facts = f"{verb} key={key} store={self._uri}: {_summary(text)}"
        if status == 403 and _SKEWED in text:
            return Retryable(f"this machine's clock differs too much from the store's, correct it: {facts}")
        if (refusal := self._credential_error(text, status, facts, clients)) is not None:
            return refusal
        if status in _NOT_DONE or (status == 400 and _TOO_SLOW in text):
            return Retryable(f"the store is busy: {facts}")
        if any(sign in text for sign in _NO_BUCKET):
            return Invalid(f"no such bucket: {self._uri}; create it, or correct the URI and the endpoint")
        # Without a status the connection failed; 3xx is another region, 4xx and 501 are a request it cannot serve.
        if not isinstance(error, exceptions.GenericError) or status == 501 or (status or 500) < 500:
            return Invalid(f"the store cannot do this: {facts}")
        return (Ambiguous if verb == "create" else Retryable)(f"no clear answer from the store: {facts}")

    def _credential_error(self, text: str, status: int | None, facts: str, clients: Clients) -> SkerryError | None:
        """The error to raise if the cause is the credentials; None for any other cause."""
        provider = _PROVIDER_ERROR.match(text)
        if provider is not None and (kind := _PROVIDER_ERRORS.get(provider[1])) is not None:
            return kind(f"no credentials for this store: {facts}")
        if any(source in text for source in _CREDENTIAL_SOURCES):
            is_busy = status is not None and (status in _NOT_DONE or status >= 500)
            kind = Retryable if is_busy or self._accepted is not None else Unauthorized
            return kind(f"no credentials in the environment, and none from this machine's role: {facts}")
        if status in {400, 401, 403} and any(code in text for code in _EXPIRED):
            return self._renew(clients, facts)
        # Google's 401 is the same for an expired and an unknown token; an accepted one must have expired.
        if status == 401 and (self._accepted is clients or self._clients is not clients):
            return self._renew(clients, facts)
        # By status and not by class: a listing's errors are all GenericError.
        if status in {401, 403} or (status == 400 and _UNKNOWN_KEYS in text):
            # Other credentials may be accepted again, unless a `create` just lost to an object that exists.
            if self._accepted is clients and self._renews and _OVERWRITE_RIGHT not in text:
                self._replace(clients)
            return Unauthorized(f"the store refuses these credentials: {facts}")
        return None

    def _renew(self, clients: Clients, facts: str) -> SkerryError:
        """Replaces clients with expired credentials, unless another thread already has. The request did nothing."""
        if not self._renews:
            return Unauthorized(
                f"expired credentials in the environment, which cannot be renewed: {facts}; give the job a role, or "
                "log in on this machine"
            )
        self._replace(clients)
        return Retryable(f"expired credentials, fetching new ones: {facts}")

    def _replace(self, clients: Clients) -> None:
        with self._renewal_lock:
            if self._clients is clients:
                self._clients = self._connect()


class _Exists(Exception):  # noqa: N818  an answer, not an error
    """The store reports that the key exists."""


def _entries(page: Sequence[ObjectMeta], path_prefix: str, root: int) -> Iterator[Entry]:
    """The entries of a page with a path that starts with `path_prefix`, without the first `root` characters.

    Skips names that are no keys: other tools wrote them, and no verb could name them.
    """
    for meta in page:
        if meta["path"].startswith(path_prefix) and is_key(meta["path"][root:]):
            yield Entry(meta["path"][root:], meta["size"], meta["last_modified"].timestamp())


def _just_below(prefix: str) -> str | None:
    """A name that sorts below every key starting with `prefix`, and above most others; None for a folder."""
    if not prefix or prefix.endswith("/"):
        return None
    return (prefix[:-1] + chr(ord(prefix[-1]) - 1)).rstrip("/") or None


def _status(error: Exception) -> int | None:
    """The HTTP status, which obstore states only in its text."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _summary(text: str) -> str:
    """The sentence before obstore's debug dump, without a URL's query, which contains Azure's signature."""
    return re.sub(r"(://[^\s?]*\?)\S+", r"\1...", text.split("\n\nDebug source", 1)[0])
