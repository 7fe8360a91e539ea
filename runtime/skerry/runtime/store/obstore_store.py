"""A store in a bucket, over obstore called directly (s3, gs, az). Never through obstore's fsspec face, whose
`mode="create"` overwrites.

One request per verb and page, and no repeat of obstore's own: its hidden retry can meet its own success, so repeats
belong to `retrying` alone. Bodies go out from the caller's buffers without being joined and come in piece by piece into
the caller's buffer. Every error of obstore ends here. Source of the answers: facts of arrow-rs object_store 0.12, where
a 409 and a 412 are both AlreadyExistsError, and a lost reply is a GenericError.
"""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import obstore
from obstore import exceptions

from skerry.runtime.errors import Ambiguous, Invalid, Retryable, SkerryError, Unauthorized
from skerry.runtime.store.checks import check_key, check_prefix, check_span, is_key, room
from skerry.runtime.store.container import NO_ANSWER
from skerry.runtime.store.interface import Data, Entry, Profile, Span, buffers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore import GetOptions, ObjectMeta, PutMode
    from obstore.store import AzureStore, GCSStore, S3Store

# Bodies up to this size go through the client that gives up on a stalled connection early.
SMALL_BYTES: Final = 1 << 20
# Pieces that obstore hands over while the rest is on its way: 256 KiB was the fastest of 256 KiB, 1, 8 and 64 MiB.
CHUNK_BYTES: Final = 256 << 10
# obstore fetches pages until it has this many keys; fewer than a page, so that nothing is fetched in vain.
CHUNK_KEYS: Final = 100

# A credential provider that failed: obstore keeps the name of its error's class, and its words.
_LENDER: Final = re.compile(r"^[^\n]*External \w+ credential provider: (\w+): ")
_LENDERS: Final = {kind.__name__: kind for kind in (Invalid, Retryable, Unauthorized)}
# The right that Cloud Storage wants of whoever writes over an object.
_OVERWRITES: Final = "storage.objects.delete"
_STATUS: Final = re.compile(r"status code: (\d{3})")
# Some servers answer a range past the end with 416, others with an empty range that obstore refuses in these words.
_PAST_END: Final = "Wanted range starting at"
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
# Where machines ask for their role's credentials: a container's, those of a web identity, and the metadata servers of
# EC2, Google and Azure, the last resort of each client. Their answers are not the store's.
_SOURCES: Final = (
    NO_ANSWER,
    "WebIdentity",
    "/latest/api/token",
    "/latest/meta-data/",
    "/computeMetadata/",
    "/metadata/identity/",
)
# Answers that promise that nothing was written; any other failure of a write may have happened.
_NOT_DONE: Final = {408, 409, 425, 429, 503}
# Keys that were good and have run out: S3 says 400, others 403 (and all of them with one of these codes).
_EXPIRED: Final = ("ExpiredToken", "TokenRefreshRequired")
# S3 says 400 to a body that came too slowly, and closes the connection.
_TOO_SLOW: Final = "RequestTimeout"
# S3 says 400 for keys that never were any.
_NO_KEYS: Final = "InvalidToken"


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Two clients of one bucket: obstore's time-outs belong to a client, and one number cannot serve both.

    quick: reads, listings, deletes and small writes; a pause of the connection ends the request.
    bulk: large writes; only their whole length is limited, since no byte comes back while a body goes out.
    """

    quick: S3Store | GCSStore | AzureStore
    bulk: S3Store | GCSStore | AzureStore


class ObjectStore:
    """Objects of one bucket below `prefix` (empty, or ending in "/"). Thread-safe.

    Credentials that the store says have run out are asked for anew: clients keep them until the time they were told,
    and may have been told wrong.
    """

    def __init__(
        self, uri: str, connect: Callable[[], Clients], prefix: str, profile: Profile, *, renews: bool
    ) -> None:
        """connect: makes clients that know no credentials yet. renews: they can get others than before."""
        self._uri = uri
        self._connect = connect
        self._renews = renews
        self._renewing = threading.Lock()
        self._clients = connect()
        self._prefix = prefix
        self._profile = profile
        # Before the first answer, an unreachable metadata server means that this machine has no role; later, a hiccup.
        self._let_in: Clients | None = None

    @property
    def uri(self) -> str:
        """Scheme, bucket and prefix."""
        return self._uri

    @property
    def profile(self) -> Profile:
        """As derived from the endpoint."""
        return self._profile

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        """See Store.read. Without `into` the result is obstore's own memory, read-only."""
        check_key(key)
        check_span(span)
        empty = span is not None and span.start == span.stop
        clients = self._clients
        options: GetOptions = {}
        if span is not None:
            # No server has a range of zero bytes; the first byte tells whether there is an object.
            options["range"] = (0, 1) if empty else (span.start, span.stop)
        try:
            found = obstore.get(clients.quick, self._prefix + key, options=options)
            self._let_in = clients
            if empty:
                return room(into, 0)
            if into is None:
                return memoryview(found.bytes())
            start, stop = found.range
            view = room(into, stop - start)
            filled = 0
            for chunk in found.stream(CHUNK_BYTES):
                view[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
            return None
        except exceptions.BaseError as error:
            if _status(error) == 416 or _PAST_END in str(error):
                return room(into, 0)
            raise self._meaning(error, "read", key, clients) from error
        if filled < view.nbytes:
            raise Retryable(f"the body ended early: read key={key} store={self._uri} got={filled} of={view.nbytes}")
        return view

    def create(self, key: str, data: Data) -> bool:
        """See Store.create. False is only what the store said: a 409 may mean that nobody has written yet."""
        try:
            self._put("create", key, data, "create")
        except _Exists:
            return False
        except Unauthorized as error:
            # Cloud Storage may ask for the right to overwrite before it looks at the condition: then it was there.
            if _OVERWRITES in str(error.__cause__):
                with contextlib.suppress(SkerryError):
                    if self.read(key, Span(0, 0)) is not None:
                        return False
            raise
        return True

    def replace(self, key: str, data: Data) -> None:
        """See Store.replace."""
        try:
            self._put("replace", key, data, "overwrite")
        except _Exists as error:  # 409: two writers of one key met; nothing was written
            raise Retryable(f"the store says conflict: replace key={key} store={self._uri}") from error

    def list(self, prefix: str, after: str | None = None) -> Sequence[Entry]:
        """See Store.list. Starts at the prefix and stops behind it, so old neighbours cost nothing."""
        check_prefix(prefix)
        wanted = self._prefix + prefix
        # obstore matches whole folders only; names inside the folder are matched here.
        folder = wanted[: wanted.rfind("/") + 1]
        offset = self._prefix + after if after and after > prefix else _just_below(wanted)
        entries: list[Entry] = []
        clients = self._clients
        try:
            # The overload for Arrow needs types that are not installed.
            pages = obstore.list(  # pyright: ignore[reportUnknownMemberType]
                clients.quick, folder or None, offset=offset, chunk_size=CHUNK_KEYS
            )
            for page in pages:
                entries.extend(_entries(page, wanted, len(self._prefix)))
                if page and page[-1]["path"] > wanted and not page[-1]["path"].startswith(wanted):
                    break
            self._let_in = clients
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
        except exceptions.BaseError as error:
            raise self._meaning(error, "list", prefix, clients) from error
        return sorted(entry for entry in entries if after is None or entry.key > after)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        check_key(key)
        clients = self._clients
        try:
            obstore.delete(clients.quick, self._prefix + key)
            self._let_in = clients
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
        except exceptions.BaseError as error:
            raise self._meaning(error, "delete", key, clients) from error

    def _put(self, verb: str, key: str, data: Data, mode: PutMode) -> None:
        """One PUT of all buffers. Raises _Exists where the store says that the key exists."""
        check_key(key)
        buffers = [buffer for buffer in buffers_of(data) if buffer.nbytes]
        small = sum(buffer.nbytes for buffer in buffers) <= SMALL_BYTES
        clients = self._clients
        client = clients.quick if small else clients.bulk
        # One buffer and many are both sent without a copy; a list of one would lose the fast path for one.
        body = buffers[0] if len(buffers) == 1 else buffers or b""
        try:
            obstore.put(client, self._prefix + key, body, mode=mode, use_multipart=False)
            self._let_in = clients
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError) as error:
            # NotModified: MinIO before 2024 answered 304 to a create that lost.
            raise _Exists from error
        except FileNotFoundError as error:
            self._check_bucket(error, clients)
            raise Invalid(f"the store found nowhere to write: {verb} key={key} store={self._uri}") from error
        except exceptions.BaseError as error:
            raise self._meaning(error, verb, key, clients) from error

    def _check_bucket(self, error: FileNotFoundError, clients: Clients) -> None:
        """A 404 says either that the object is absent or that the bucket is."""
        if any(sign in str(error) for sign in _NO_BUCKET):
            raise Invalid(f"no such bucket: {self._uri}; make it, or correct the URI and the endpoint") from error
        self._let_in = clients

    def _meaning(self, error: exceptions.BaseError, verb: str, key: str, clients: Clients) -> SkerryError:
        """What the caller does next about an error of obstore. clients: the ones that met it."""
        text, status = str(error), _status(error)
        facts = f"{verb} key={key} store={self._uri}: {_short(text)}"
        if (refusal := self._about_credentials(text, status, facts, clients)) is not None:
            return refusal
        if status in _NOT_DONE or (status == 400 and _TOO_SLOW in text):
            return Retryable(f"the store is busy: {facts}")
        if any(sign in text for sign in _NO_BUCKET):
            return Invalid(f"no such bucket: {self._uri}; make it, or correct the URI and the endpoint")
        # Without a status the connection failed; 3xx is another region, 4xx and 501 are a request it cannot serve.
        if not isinstance(error, exceptions.GenericError) or status == 501 or (status or 500) < 500:
            return Invalid(f"the store cannot do this: {facts}")
        return (Ambiguous if verb == "create" else Retryable)(f"the store gave no clear answer: {facts}")

    def _about_credentials(self, text: str, status: int | None, facts: str, clients: Clients) -> SkerryError | None:
        """What an error says about the credentials, if that is what it is about."""
        lender = _LENDER.match(text)
        if lender is not None and (kind := _LENDERS.get(lender[1])) is not None:
            return kind(f"no credentials for this store: {facts}")
        if any(sign in text for sign in _SOURCES):
            busy = status is not None and (status in _NOT_DONE or status >= 500)
            kind = Retryable if busy or self._let_in is not None else Unauthorized
            return kind(f"no credentials in the environment, and none from this machine's role: {facts}")
        if status in {400, 401, 403} and any(sign in text for sign in _EXPIRED):
            return self._run_out(clients, facts)
        # Google says no more of a token that has ended than of one that never was any; what let us in was one.
        if status == 401 and (self._let_in is clients or self._clients is not clients):
            return self._run_out(clients, facts)
        # By status and not by class: a listing's errors are all GenericError.
        if status in {401, 403} or (status == 400 and _NO_KEYS in text):
            return Unauthorized(f"the store refuses these credentials: {facts}")
        return None

    def _run_out(self, clients: Clients, facts: str) -> SkerryError:
        """Forget credentials that have run out, unless another thread already has. Nothing was done with them."""
        if not self._renews:
            return Unauthorized(
                f"these credentials have run out, and keys in the environment cannot be renewed; give the job a role, "
                f"or log in where you work yourself: {facts}"
            )
        with self._renewing:
            if self._clients is clients:
                self._clients = self._connect()
        return Retryable(f"these credentials have run out; others are asked for: {facts}")


class _Exists(Exception):  # noqa: N818  an answer, not an error
    """The store says that the key exists."""


def _entries(page: Sequence[ObjectMeta], wanted: str, root: int) -> Iterator[Entry]:
    """The entries of a page whose path starts with `wanted`, without the first `root` characters.

    What no key can name was put there by somebody else: no call of ours could take it.
    """
    for meta in page:
        if meta["path"].startswith(wanted) and is_key(meta["path"][root:]):
            yield Entry(meta["path"][root:], meta["size"], meta["last_modified"].timestamp())


def _just_below(prefix: str) -> str | None:
    """A name that sorts below every key starting with `prefix`, and above most of the others; None for a folder."""
    if not prefix or prefix.endswith("/"):
        return None
    return (prefix[:-1] + chr(ord(prefix[-1]) - 1)).rstrip("/") or None


def _status(error: Exception) -> int | None:
    """The HTTP status, which obstore tells only in words."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _short(text: str) -> str:
    """The sentence before obstore's debug dump, without a query (Azure signs in it)."""
    return re.sub(r"(://[^\s?]*\?)\S+", r"\1...", text.split("\n\nDebug source", 1)[0])
