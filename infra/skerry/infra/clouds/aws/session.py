"""Calls to AWS: clients that are made once, and errors named for what the caller does next.

The only file that holds an SDK's untyped values and imports boto3, lazily: planning for another cloud needs none. What
can be tried again has been tried again by boto3 (its standard mode) before an error comes out of here. What a service
throttles was turned away unread; it is asked again for minutes: Batch takes 50 submissions a second from a whole
account, so that a large run's own calls, and others', keep each other waiting longer than boto3 is patient.
Source: Batch user guide, "AWS Batch service quotas".
"""

from __future__ import annotations

import itertools
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skerry.infra.clouds.aws.codes import THROTTLED, Kind, action_of, kind_of
from skerry.infra.clouds.handling import Absent
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from skerry.runtime.clock import Clock

T = TypeVar("T")

REGION_OF_GLOBAL: Final = "us-east-1"
"""Where IAM and STS are asked if the environment names no region: they are the same everywhere in a partition."""

# A hung connection must not hold an apply for boto3's minute; five attempts span some seconds of throttling.
_CONNECT_S: Final = 10
_READ_S: Final = 60
_ATTEMPTS: Final = "5"
_CONNECTIONS: Final = 32
_BETWEEN: Final = Backoff(first=0.5, cap=10.0)
# A thousand submissions at the account's 50 a second take 20 s, and others may have the most of these.
_PATIENCE_S: Final = 300.0

# What endpoint variables call a service, where it is not its name in upper case.
_IN_VARIABLES: Final = {"logs": "CLOUDWATCH_LOGS"}
# The shapes of errors that say "no credentials" or "these have ended", by class name: botocore is imported lazily.
_NO_CREDENTIALS: Final = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "SSOTokenLoadError",
        "UnauthorizedSSOTokenError",
        "NoAuthTokenError",
        "LoginTokenLoadError",
        "LoginRefreshTokenExpired",
    }
)
_NO_ANSWER: Final = frozenset(
    {
        "EndpointConnectionError",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ConnectionClosedError",
        "ConnectionError",
        "HTTPClientError",
        "ProxyConnectionError",
        "ResponseStreamingError",
        "IncompleteReadError",
        "ResponseParserError",
    }
)
# Of those, what ends before anything is sent.
_UNSENT: Final = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
_PERFORM: Final = re.compile(r"perform:? ([A-Za-z0-9-]+:[A-Za-z0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose credentials these are."""

    account: str
    partition: str
    arn: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """Whose resources these are."""

    number: str
    partition: str


class Aws:
    """An account, as these credentials reach it. Thread-safe; asks nothing before the first call.

    environment: where credentials, profile, region and endpoints are looked for; what it lacks boto3 looks for itself.
    client_made: told of every new client, so that a test can listen to its calls.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        *,
        client_made: Callable[[str, Any], None] = lambda _service, _client: None,
    ) -> None:
        self.clock = clock
        self._environment = dict(environment)
        self._client_made = client_made
        # boto3 sessions are not thread-safe, clients are.
        self._making = threading.RLock()
        self._session: Any = None
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._identity: Identity | None = None

    def identity(self) -> Identity:
        """Account and name behind the credentials; asked once. Raises Unauthorized if there are none."""
        with self._making:
            if self._identity is None:
                told = self.call("sts", "", "get_caller_identity")
                arn = str(told["Arn"])
                self._identity = Identity(account=str(told["Account"]), partition=arn.split(":")[1], arn=arn)
            return self._identity

    def partition(self, region: str) -> str:
        """Which of AWS's separate clouds a region is in, by the SDK's own data; asks nobody. Raises Invalid."""
        with self._making, _Translated("sts", "session"):
            return str(self._opened().get_partition_for_region(region))

    def call(self, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        """One request. operation: in boto3's spelling, create_bucket. region: "" for what has none.

        Raises Absent for what is not there, Conflict for what exists or is in use, Unauthorized, Retryable, or Invalid
        with the service's own words.
        """
        client = self._client(service, region)
        return self._asked(lambda: self._sent(client, service, operation, parameters), once=False)

    def call_once(self, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        """As `call`, for what a repeat would do a second time: only what was turned away unread is asked again.

        Retryable leaves open whether it was done.
        """
        client = self._client(service, region, once=True)
        return self._asked(lambda: self._sent(client, service, operation, parameters), once=True)

    def pages(
        self, service: str, region: str, operation: str, result_key: str, /, **parameters: object
    ) -> Iterator[dict[str, Any]]:
        """The items of every page of a listing, as they come. Raises as `call`."""
        paginator = self._client(service, region).get_paginator(operation)
        pages = iter(paginator.paginate(**parameters))
        count = 0

        def following() -> dict[str, Any] | None:
            nonlocal pages
            try:
                with _Translated(service, operation):
                    return next(pages, None)
            except Retryable:  # it is over, and its place is lost
                pages = itertools.islice(paginator.paginate(**parameters), count, None)
                raise

        while (page := self._asked(following, once=False)) is not None:
            count += 1
            yield from page.get(result_key, [])

    def _sent(self, client: Any, service: str, operation: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        with _Translated(service, operation):
            return getattr(client, operation)(**parameters)

    def _asked(self, ask: Callable[[], T], *, once: bool) -> T:
        """The answer of `ask`, which is repeated while what it asks for is turned away unread.

        once: `ask` makes a single attempt; otherwise boto3 repeats by itself what was not sent.
        """
        began = self.clock.now()
        for number in itertools.count():
            try:
                return ask()
            except Retryable as error:
                if not self._again(error, number + 1, self.clock.now() - began, once=once):
                    raise
            self.clock.pause(_BETWEEN.delay(number, self.clock))
        raise AssertionError("unreachable")

    def _again(self, error: Retryable, made: int, waited_s: float, *, once: bool) -> bool:
        """Whether to ask again after `made` attempts. A number of attempts that the user wrote holds for everything."""
        if code_of(error) in THROTTLED and not self._environment.get("AWS_MAX_ATTEMPTS"):
            return waited_s < _PATIENCE_S
        return once and made < self._attempts() and _unread(error)

    def _client(self, service: str, region: str, *, once: bool = False) -> Any:
        where = region or self.region() or REGION_OF_GLOBAL
        with self._making:
            if (service, where, once) not in self._clients:
                with _Translated(service, "client"):
                    client = self._new_client(service, where, 1 if once else self._attempts())
                self._client_made(service, client)
                self._clients[service, where, once] = client
            return self._clients[service, where, once]

    def _new_client(self, service: str, region: str, attempts: int) -> Any:
        session = self._opened()
        from botocore.config import Config  # noqa: PLC0415  only who deploys to AWS needs it

        config = Config(
            retries={
                "mode": "standard",
                "total_max_attempts": attempts,
            },
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            max_pool_connections=_CONNECTIONS,
            user_agent_extra="skerry",
        )
        return session.client(service, region_name=region, endpoint_url=self._endpoint(service), config=config)

    def _opened(self) -> Any:
        """The one session, made when it is first needed."""
        if self._session is None:
            self._session = self._new_session()
        return self._session

    def _new_session(self) -> Any:
        try:
            import boto3  # noqa: PLC0415  only who deploys to AWS needs it  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise Invalid("AWS needs boto3: pip install 'skerry[aws]'") from error
        key = self._environment.get("AWS_ACCESS_KEY_ID") or None
        return boto3.Session(
            aws_access_key_id=key,
            aws_secret_access_key=self._environment.get("AWS_SECRET_ACCESS_KEY") if key else None,
            aws_session_token=self._environment.get("AWS_SESSION_TOKEN") or None if key else None,
            profile_name=None if key else self._environment.get("AWS_PROFILE") or None,
        )

    def _attempts(self) -> int:
        written = self._environment.get("AWS_MAX_ATTEMPTS") or _ATTEMPTS
        if not written.isdecimal() or int(written) == 0:
            raise Invalid(f"AWS_MAX_ATTEMPTS is {written!r}; write a number, 1 or more, or leave it out")
        return int(written)

    def _endpoint(self, service: str) -> str | None:
        name = _IN_VARIABLES.get(service, service.upper())
        return self._environment.get(f"AWS_ENDPOINT_URL_{name}") or self._environment.get("AWS_ENDPOINT_URL") or None

    def region(self) -> str | None:
        """Of the environment, or of the profile: in another partition only that one knows these credentials."""
        named = self._environment.get("AWS_REGION") or self._environment.get("AWS_DEFAULT_REGION")
        if named:
            return named
        with self._making, _Translated("sts", "session"):
            return self._opened().region_name or None


def code_of(error: BaseException) -> str:
    """The service's own code of an error that `Aws` raised: EntityAlreadyExists; "" if it has none."""
    response: dict[str, Any] = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _unread(error: BaseException) -> bool:
    """Whether what was asked was surely not done: there was no connection, or it was turned away."""
    return code_of(error) in THROTTLED or type(error.__cause__).__name__ in _UNSENT


_MEANINGS: Final[Mapping[Kind, tuple[type[SkerryError], str]]] = {
    Kind.BUSY: (Retryable, "AWS is busy: {}"),
    Kind.EXPIRED: (Unauthorized, "these credentials are not valid, or not any more: {}; log in again"),
    Kind.ABSENT: (Absent, "not there: {}"),
    Kind.TAKEN: (Conflict, "it exists already, or is in use: {}"),
    Kind.REFUSED: (Invalid, "AWS refuses: {}"),
}


class _Translated:
    """Turns what boto3 raises in its body into one of our errors."""

    def __init__(self, service: str, operation: str) -> None:
        self._service = service
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # By module: naming botocore's classes would import it.
        modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
        if error is not None and modules & {"botocore", "boto3"}:
            raise _meaning(self._service, self._operation, error) from error


def _meaning(service: str, operation: str, error: BaseException) -> SkerryError:
    response: dict[str, Any] | None = getattr(error, "response", None)
    action = action_of(service, operation)
    if response is None:
        return _of_the_client(service, action, error)
    told: dict[str, Any] = response.get("Error", {})
    code, message = str(told.get("Code", "")), str(told.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    said = f"{action}: {code}: {message}".rstrip(": ")
    kind = kind_of(code, status, message)
    if kind is Kind.DENIED:
        named = _PERFORM.search(message)
        return Unauthorized(f"these credentials lack the right {named[1] if named else action}: {said}")
    meaning, words = _MEANINGS[kind]
    return meaning(words.format(said))


def _of_the_client(service: str, action: str, error: BaseException) -> SkerryError:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _NO_CREDENTIALS:
        return Unauthorized(
            f"no AWS credentials for {action}: {error}; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or run `aws sso login`"
        )
    if names & _NO_ANSWER:
        return Retryable(f"no answer from AWS's {service}: {action}: {error}")
    return Invalid(f"cannot ask AWS: {action}: {error}")
