"""Calls to AWS: one client per service and region, and boto3's errors translated into ours.

The only file that holds the SDK's untyped values. It imports boto3 lazily: planning for another cloud needs none. boto3
(standard mode) retries before an error leaves this module. Throttled requests were not executed and are repeated for
minutes: Batch accepts 50 submissions a second from a whole account, so the calls of a large run, and of other runs,
delay each other for longer than boto3 retries.
Source: Batch user guide, "AWS Batch service quotas".
"""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import re
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from skerry.infra.clouds.aws.errors import THROTTLED, Kind, action_of, kind_of
from skerry.infra.clouds.handler_helpers import NO_LIMIT, Absent
from skerry.infra.clouds.session_credentials_for_store_client import StoreCredentials
from skerry.runtime.clock import Backoff
from skerry.runtime.errors import Conflict, Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from skerry.runtime.clock import Clock

T = TypeVar("T")

REGION_OF_GLOBAL: Final = "us-east-1"
"""The region for IAM and STS without one in the environment: they are the same in all regions of a partition."""

# A hung connection must not hold an apply for boto3's minute; five attempts span some seconds of throttling.
_CONNECT_S: Final = 10
_READ_S: Final = 60
_ATTEMPTS: Final = "5"
_CONNECTIONS: Final = 32
_BETWEEN: Final = Backoff(first=0.5, cap=10.0)
# A thousand submissions at the account's 50 a second take 20 s, and other users may take most of the 50.
_PATIENCE_S: Final = 300.0

# Another tool may replace the keys in a file at any time; botocore would use the first ones for ever.
_IN_A_FILE: Final = frozenset({"shared-credentials-file", "config-file"})
_READ_AGAIN_S: Final = 60.0

# The characters that AWS refuses in the name of a session.
_NOT_IN_A_NAME: Final = re.compile(r"[^\w+=,.@-]+", re.ASCII)
_LONGEST_NAME: Final = 64
# The code of STS for a role that these credentials may not assume, also for one that does not exist.
_DENIED: Final = "AccessDenied"

# The services' names in endpoint variables, where they are not in upper case.
_IN_VARIABLES: Final = {"logs": "CLOUDWATCH_LOGS"}
# Errors for missing or expired credentials, by class name: botocore is imported lazily.
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
# The errors that occur before anything is sent.
_UNSENT: Final = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
_PERFORM: Final = re.compile(r"perform:? ([A-Za-z0-9-]+:[A-Za-z0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The account and name behind the credentials."""

    account: str
    partition: str
    arn: str


@dataclass(frozen=True, kw_only=True)
class Account:
    """An AWS account."""

    number: str
    partition: str


@dataclass(frozen=True, kw_only=True)
class Login:
    """The login that a spec names: a profile instead of the environment's credentials, then a role that they assume.

    role: its ARN. name: of the session, in AWS's own records. profile_place, role_place: in the spec, for errors.
    """

    profile: str | None = None
    role: str | None = None
    name: str = "skerry"
    profile_place: str = "aws.profile"
    role_place: str = "aws.assume_role"


class Aws:
    """Calls to one AWS account. Thread-safe; makes no calls before the first use.

    environment: has credentials, profile, region and endpoints; boto3 looks up the missing ones itself. login: has
    precedence over its credentials and its profile.
    calls: held during each call.
    client_made: called with every new client, so that a test can observe its calls.
    """

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        login: Login | None = None,
        *,
        calls: AbstractContextManager[object] = NO_LIMIT,
        client_made: Callable[[str, Any], None] = lambda _service, _client: None,
    ) -> None:
        self.clock = clock
        self._environment = dict(environment)
        self.login: Final = login
        self._calls = calls
        self._client_made = client_made
        # boto3 sessions are not thread-safe, clients are.
        self._making = threading.RLock()
        self._session: Any = None
        self._opened_s = 0.0
        self._clients: dict[tuple[str, str, bool], Any] = {}
        self._identity: Identity | None = None

    def identity(self) -> Identity:
        """Account and name behind the credentials; read once. Raises Unauthorized without credentials."""
        with self._making:
            if self._identity is None:
                response = self.call("sts", "", "get_caller_identity")
                arn = str(response["Arn"])
                self._identity = Identity(account=str(response["Account"]), partition=arn.split(":")[1], arn=arn)
            return self._identity

    def partition(self, region: str) -> str:
        """The AWS partition of a region, from the SDK's own data, without a call. Raises Invalid."""
        with self._making, self._translated("sts", "session"):
            return str(self._opened().get_partition_for_region(region))

    def call(self, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        """One request. operation: in boto3's spelling, create_bucket. region: "" for global services.

        Raises Absent if it does not exist, Conflict if it exists or is in use, Unauthorized, Retryable, or Invalid with
        the service's own message.
        """
        client = self._client(service, region)
        return self._repeated(lambda: self._sent(client, service, operation, parameters), once=False)

    def call_once(self, service: str, region: str, operation: str, /, **parameters: object) -> dict[str, Any]:
        """As `call`, for operations that are not idempotent: repeats only requests that were surely not executed.

        After Retryable, the operation may or may not have been executed.
        """
        client = self._client(service, region, once=True)
        return self._repeated(lambda: self._sent(client, service, operation, parameters), once=True)

    def pages(
        self, service: str, region: str, operation: str, result_key: str, /, **parameters: object
    ) -> Iterator[dict[str, Any]]:
        """The items of every page of a listing, page by page. Raises as `call`."""
        paginator = self._client(service, region).get_paginator(operation)
        pages = iter(paginator.paginate(**parameters))
        count = 0

        def following() -> dict[str, Any] | None:
            nonlocal pages
            try:
                with self._calls, self._translated(service, operation):
                    return next(pages, None)
            except Retryable:  # the iterator has ended and lost its position
                pages = itertools.islice(paginator.paginate(**parameters), count, None)
                raise

        while (page := self._repeated(following, once=False)) is not None:
            count += 1
            yield from page.get(result_key, [])

    def _sent(self, client: Any, service: str, operation: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        with self._calls, self._translated(service, operation):
            return getattr(client, operation)(**parameters)

    def _repeated(self, ask: Callable[[], T], *, once: bool) -> T:
        """The result of `ask`, repeated while its request is rejected without being executed.

        once: `ask` makes a single attempt; otherwise boto3 itself repeats requests that were not sent.
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

    def _again(self, error: Retryable, attempts: int, waited_s: float, *, once: bool) -> bool:
        """True if the call is to be repeated after so many attempts. A number set by the user limits all repeats."""
        if code_of(error) in THROTTLED and not self._environment.get("AWS_MAX_ATTEMPTS"):
            return waited_s < _PATIENCE_S
        return once and attempts < self._attempts() and _was_not_executed(error)

    def _client(self, service: str, region: str, *, once: bool = False) -> Any:
        where = region or self.region() or self._region_of_global()
        with self._making:
            with self._translated(service, "client"):
                self._opened()
                if (service, where, once) not in self._clients:
                    client = self._new_client(service, where, 1 if once else self._attempts())
                    self._client_made(service, client)
                    self._clients[service, where, once] = client
            return self._clients[service, where, once]

    def _new_client(self, service: str, region: str, attempts: int) -> Any:
        session = self._opened()
        from botocore.config import Config  # noqa: PLC0415  only deployments to AWS need it

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
        """The session, created on first use. Keys in a file are read again now and then."""
        if self._session is None:
            self._session, self._opened_s = self._new_session(), self.clock.now()
        elif self.clock.now() - self._opened_s >= _READ_AGAIN_S:
            self._opened_s = self.clock.now()
            self._read_again()
        return self._session

    def _read_again(self) -> None:
        """Replace the session if its keys were replaced. Raises Unauthorized if these are of another account."""
        before = self._session.get_credentials()
        if before is None or before.method not in _IN_A_FILE:
            return
        fresh = Aws(self.clock, self._environment, self.login, client_made=self._client_made)
        after = fresh._opened().get_credentials()
        if after is None or after.access_key == before.access_key:
            return
        began = self._identity
        if began is not None and (account := fresh.identity().account) != began.account:
            raise Unauthorized(f"the keys are of aws account {account} now, not of {began.account}; log in there again")
        self._session = fresh._opened()
        self._clients.clear()

    def store_credentials(self) -> StoreCredentials | None:
        """The credentials for a store's client; None without a login, because it finds the environment's own itself.

        They raise as `call`.
        """
        return None if self.login is None else StoreCredentials(self._keys, self.clock)

    def _keys(self) -> Mapping[str, str | None]:
        with self._translated("sts", "session"):
            with self._making:
                credentials = self._opened().get_credentials()
            if credentials is None:
                raise Unauthorized(f"no AWS credentials for the store{self._advice()}")
            keys = credentials.get_frozen_credentials()
        return {"access_key_id": keys.access_key, "secret_access_key": keys.secret_key, "token": keys.token}

    def _new_session(self) -> Any:
        try:
            import boto3  # noqa: PLC0415  only deployments to AWS need it  # pyright: ignore[reportMissingTypeStubs]
            import botocore.session  # noqa: PLC0415  same
        except ImportError as error:
            raise Invalid("AWS needs boto3: pip install 'skerry[aws]'") from error
        login = self.login or Login()
        key = None if login.profile else self._environment.get("AWS_ACCESS_KEY_ID") or None
        # A profile of its own has precedence over AWS_PROFILE, which may name one that is missing.
        base: Any = botocore.session.Session(profile=login.profile)
        if login.profile is not None and login.profile not in base.available_profiles:
            advice = f"write one that exists, or run `aws configure sso --profile {login.profile}`"
            raise Invalid(f"{login.profile_place}: no profile {login.profile} in ~/.aws/config; {advice}")
        base.register_component("data_loader", _loader(base.get_config_variable("data_path")))
        profile = login.profile or (None if key else self._environment.get("AWS_PROFILE") or None)
        if login.role is not None:
            base.register_component("credential_provider", self._assumed(login))
            key = None
        return boto3.Session(
            botocore_session=base,
            aws_access_key_id=key,
            aws_secret_access_key=self._environment.get("AWS_SECRET_ACCESS_KEY") if key else None,
            aws_session_token=self._environment.get("AWS_SESSION_TOKEN") or None if key else None,
            profile_name=profile,
        )

    def _assumed(self, login: Login) -> _CredentialSource:
        """The keys of the role, which botocore asks for anew before they expire."""
        from botocore.credentials import DeferredRefreshableCredentials  # noqa: PLC0415  as in `_new_session`

        source = Aws(self.clock, self._environment, replace(login, role=None), client_made=self._client_made)
        name = _NOT_IN_A_NAME.sub("-", login.name)[:_LONGEST_NAME]

        def fetch() -> dict[str, str]:
            try:
                region = source.region() or self._region_of_global()
                response = source.call("sts", region, "assume_role", RoleArn=login.role, RoleSessionName=name)
            except (Invalid, Unauthorized) as error:
                advice = "; allow them sts:AssumeRole on the role, and name them in its trust policy"
                text = f"{login.role_place}: {error}{advice if code_of(error).startswith(_DENIED) else ''}"
                raise type(error)(text) from error.__cause__
            keys = response["Credentials"]
            return {
                "access_key": keys["AccessKeyId"],
                "secret_key": keys["SecretAccessKey"],
                "token": keys["SessionToken"],
                "expiry_time": keys["Expiration"].isoformat(),
            }

        def now() -> dt.datetime:
            return dt.datetime.fromisoformat(self.clock.utc_text())

        return _CredentialSource(DeferredRefreshableCredentials(fetch, "assume-role", time_fetcher=now))

    def _translated(self, service: str, operation: str) -> _Translated:
        return _Translated(service, operation, self._advice())

    def _advice(self) -> str:
        """The end of an error for missing credentials."""
        login = self.login
        if login is None or login.profile is None:
            return "; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run `aws sso login`"
        return f"; {login.profile_place} has none: run `aws sso login --profile {login.profile}`, or add keys to it"

    def _attempts(self) -> int:
        attempts = self._environment.get("AWS_MAX_ATTEMPTS") or _ATTEMPTS
        if not attempts.isdecimal() or int(attempts) == 0:
            raise Invalid(f"AWS_MAX_ATTEMPTS is {attempts!r}; set a number of 1 or more, or unset it")
        return int(attempts)

    def _endpoint(self, service: str) -> str | None:
        name = _IN_VARIABLES.get(service, service.upper())
        return self._environment.get(f"AWS_ENDPOINT_URL_{name}") or self._environment.get("AWS_ENDPOINT_URL") or None

    def _region_of_global(self) -> str:
        """For IAM and STS if no region is set: one in the partition of the login's role, whose keys are valid there."""
        role = "" if self.login is None else self.login.role or ""
        if role.startswith("arn:aws:") or not role:
            return REGION_OF_GLOBAL
        with self._making, self._translated("sts", "session"):
            return next(iter(self._opened().get_available_regions("sts", role.split(":")[1])), REGION_OF_GLOBAL)

    def region(self) -> str | None:
        """The region of the environment or profile; credentials of another partition are valid only there."""
        region = self._environment.get("AWS_REGION") or self._environment.get("AWS_DEFAULT_REGION")
        if region:
            return region
        with self._making, self._translated("sts", "session"):
            return self._opened().region_name or None


@dataclass(frozen=True)
class _CredentialSource:
    """The part of botocore's CredentialResolver that a session uses."""

    credentials: Any

    def load_credentials(self) -> Any:
        """Called once by a session."""
        return self.credentials


@functools.cache
def _loader(data_path: str | None) -> Any:
    """The reader of the SDK's own data for all sessions. It keeps what it has read, such as 1 MB of endpoints."""
    import botocore.loaders  # noqa: PLC0415  only deployments to AWS need it

    return botocore.loaders.create_loader(data_path)  # pyright: ignore[reportUnknownMemberType]


def code_of(error: BaseException) -> str:
    """The service's own code of an error that `Aws` raised: EntityAlreadyExists; "" without one."""
    response: dict[str, Any] = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _was_not_executed(error: BaseException) -> bool:
    """True if the request was surely not executed: it was not sent, or it was throttled."""
    return code_of(error) in THROTTLED or type(error.__cause__).__name__ in _UNSENT


_ERRORS: Final[Mapping[Kind, tuple[type[SkerryError], str]]] = {
    Kind.BUSY: (Retryable, "AWS is busy: {}"),
    Kind.EXPIRED: (Unauthorized, "these credentials are not valid or have expired: {}; log in again"),
    Kind.ABSENT: (Absent, "does not exist: {}"),
    Kind.TAKEN: (Conflict, "exists already, or is in use: {}"),
    Kind.REFUSED: (Invalid, "AWS refuses: {}"),
}


class _Translated:
    """Translates boto3's errors into ours. advice: the end of one for missing credentials."""

    def __init__(self, service: str, operation: str, advice: str) -> None:
        self._service = service
        self._operation = operation
        self._advice = advice

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # Compared by module, because naming botocore's classes would import it.
        modules = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
        if error is not None and modules & {"botocore", "boto3"}:
            raise _error_of(self._service, self._operation, error, self._advice) from error


def _error_of(service: str, operation: str, error: BaseException, advice: str) -> SkerryError:
    response: dict[str, Any] | None = getattr(error, "response", None)
    action = action_of(service, operation)
    if response is None:
        return _client_error(service, action, error, advice)
    body: dict[str, Any] = response.get("Error", {})
    code, message = str(body.get("Code", "")), str(body.get("Message", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    description = f"{action}: {code}: {message}".rstrip(": ")
    kind = kind_of(code, status, message)
    if kind is Kind.DENIED:
        match = _PERFORM.search(message)
        permission = match[1] if match else action
        return Unauthorized(f"these credentials lack the permission {permission}: {description}")
    error_type, template = _ERRORS[kind]
    return error_type(template.format(description))


def _client_error(service: str, action: str, error: BaseException, advice: str) -> SkerryError:
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & _NO_CREDENTIALS:
        return Unauthorized(f"no AWS credentials for {action}: {error}{advice}")
    if names & _NO_ANSWER:
        return Retryable(f"no answer from AWS's {service}: {action}: {error}")
    return Invalid(f"cannot call AWS: {action}: {error}")
