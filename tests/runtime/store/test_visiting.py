"""A replica in one cloud with its store in the other: let in by the trust it was given, and by no other; renewed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

import obstore
import pytest
from obstore.store import GCSStore, S3Store
from tests.infra.testing.google.ground import POOLS, bind, good, make_account, make_bucket
from tests.runtime.store.lender import AUDIENCE, HIDDEN, ROLE, Days, Lender, sts_answer, sts_error
from tests.support.batchplace import allow, make_role
from tests.support.clocks import FakeClock
from tests.support.gcsserver import GcsServer
from tests.support.keyserver import KeyServer
from tests.support.s3server import Request, Response, S3Server, refusal

from skerry.infra.testing.google import GoogleSandbox
from skerry.infra.testing.google.principals import Principal
from skerry.infra.testing.roles import keys_of
from skerry.infra.testing.sandbox import Sandbox
from skerry.runtime import contract
from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.entry.identity import identity
from skerry.runtime.errors import Invalid, Retryable, Unauthorized
from skerry.runtime.store import open_store, visiting
from skerry.runtime.store.lease import AGAIN_S
from skerry.runtime.store.visiting import AwsVisit, GoogleLogin, GoogleVisit, aws_visit, google_login, google_visit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import GCSCredential, S3Credential

    from skerry.runtime.store.retrying import Retrying

WANTED: Final = "skerry/123456789012/run"
IMPERSONATE: Final = "roles/iam.workloadIdentityUser"
HOUR: Final = 3600.0
DAY: Final = 24 * HOUR


@pytest.fixture(scope="module")
def aws_account() -> Iterator[Sandbox]:
    with Sandbox(enforce_iam=True) as running:
        yield running


@pytest.fixture
def aws(aws_account: Sandbox) -> Iterator[Sandbox]:
    yield aws_account
    aws_account.reset()


@pytest.fixture
def google(aws: Sandbox) -> Iterator[GoogleSandbox]:
    with GoogleSandbox(aws=aws.endpoint) as running:
        running.enable("iam.googleapis.com", "sts.googleapis.com")
        yield running
        assert running.violations == []


@pytest.fixture
def lender() -> Iterator[Lender]:
    with Lender() as running:
        yield running


def role_for(aws: Sandbox, conditions: dict[str, object], principal: str = "accounts.google.com") -> str:
    """A role that may use one run's prefix, and trusts tokens of which all this is true."""
    statement = {
        "Effect": "Allow",
        "Principal": {"Federated": principal},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {"StringEquals": {f"accounts.google.com:{name}": value for name, value in conditions.items()}},
    }
    iam = aws.client("iam")
    trust = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    arn = iam.create_role(RoleName="visitor", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    objects = {"Action": ["s3:GetObject", "s3:PutObject"], "Resource": "arn:aws:s3:::run/tiny/*"}
    iam.put_role_policy(RoleName="visitor", PolicyName="own", PolicyDocument=allow(objects))
    aws.client("s3").create_bucket(Bucket="run")
    return str(arn)


def on_google(google: GoogleSandbox, aws: Sandbox, email: str, role: str) -> dict[str, str]:
    """What a job on Google finds whose store lies in S3."""
    return {
        **google.acting_as(email),
        "AWS_ENDPOINT_URL": aws.endpoint,
        "AWS_REGION": aws.region,
        contract.AWS_ROLE: role,
        contract.AWS_AUDIENCE: WANTED,
        contract.SLOT: "replica-0",
    }


def number_of(google: GoogleSandbox, email: str) -> str:
    account = google.accounts.of_machine(email)
    assert account is not None
    return account.number


def full_trust(google: GoogleSandbox, email: str) -> dict[str, object]:
    number = number_of(google, email)
    return {"sub": number, "oaud": WANTED, "aud": [number, email]}


def test_a_job_on_google_writes_into_s3_as_its_role(
    google: GoogleSandbox, aws: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of somebody else, whom obstore would find")
    email = make_account(google)
    role = role_for(aws, full_trust(google, email))
    told = on_google(google, aws, email, role) | {"AWS_ACCESS_KEY_ID": "of somebody else", "AWS_SECRET_ACCESS_KEY": "x"}
    store = open_store("s3://run/tiny", environment=told, clock=FakeClock())
    assert store.create("a", b"body")
    assert not store.create("a", b"else")
    assert bytes(store.read("a") or b"") == b"body"
    with pytest.raises(Unauthorized, match="AccessDenied"):
        open_store("s3://run/other", environment=told, clock=FakeClock()).create("a", b"body")
    calls = list(aws.calls)
    assert {call.caller for call in calls if call.name == "s3:PutObject"} == {"role/visitor"}
    taken = next(call for call in calls if call.operation == "AssumeRoleWithWebIdentity")
    assert (taken.params["RoleSessionName"], taken.params["DurationSeconds"]) == ("replica-0", 3600)


@pytest.mark.parametrize("wrong", ["sub", "oaud", "aud", "audience as aud", "another issuer", "no such role"])
def test_a_claim_that_the_role_does_not_trust_is_refused_and_told(
    google: GoogleSandbox, aws: Sandbox, wrong: str
) -> None:
    """`aud` is compared with azp, the account; whoever writes the audience there, as for other issuers, is refused."""
    email, stranger = make_account(google), make_account(google, "replica-1")
    trusted = full_trust(google, email)
    trusted |= {
        "sub": {"sub": number_of(google, stranger)},
        "oaud": {"oaud": "skerry/123456789012/another-run"},
        "aud": {"aud": [number_of(google, stranger), stranger]},
        "audience as aud": {"aud": WANTED},
    }.get(wrong, {})
    if wrong == "audience as aud":
        del trusted["oaud"]
    role = role_for(
        aws, trusted, "cognito-identity.amazonaws.com" if wrong == "another issuer" else "accounts.google.com"
    )
    role = role.replace("visitor", "nobody") if wrong == "no such role" else role
    clock = FakeClock()
    with pytest.raises(Unauthorized, match="does not let this job take its role") as raised:
        open_store("s3://run/tiny", environment=on_google(google, aws, email, role), clock=clock).create("a", b"body")
    number = number_of(google, email)
    claims = f"accounts.google.com:sub={number}, :oaud={WANTED}, :aud={number}"
    assert all(part in str(raised.value) for part in (f"role={role}", f"audience={WANTED}", claims))
    assert "eyJ" not in str(raised.value), "how every token begins"
    assert clock.pauses == []


def test_another_audience_than_the_trusted_one_is_refused(google: GoogleSandbox, aws: Sandbox) -> None:
    email = make_account(google)
    told = on_google(google, aws, email, role_for(aws, full_trust(google, email)))
    with pytest.raises(Unauthorized, match=":oaud=skerry/another"):
        open_store("s3://run/tiny", environment=told | {contract.AWS_AUDIENCE: "skerry/another"}).create("a", b"body")


def test_a_token_that_has_ended_is_a_refusal_and_not_a_key_that_ran_out(aws: Sandbox) -> None:
    yesterday = Days()
    yesterday.jump(-DAY)
    with GoogleSandbox(clock=yesterday) as google:
        email = make_account(google)
        told = on_google(google, aws, email, role_for(aws, full_trust(google, email)))
        with pytest.raises(Unauthorized, match="identity token is not valid now"):
            open_store("s3://run/tiny", environment=told, clock=FakeClock()).read("a")


def test_a_machine_without_a_service_account_is_told_so(google: GoogleSandbox, aws: Sandbox) -> None:
    email = make_account(google)
    told = on_google(google, aws, email, role_for(aws, full_trust(google, email)))
    good(google, "DELETE", f"/v1/projects/skerry-sandbox/serviceAccounts/{email}")
    with pytest.raises(Unauthorized, match=r"no identity token from .* the job needs a service account"):
        open_store("s3://run/tiny", environment=told).create("a", b"body")


class Pool:
    """A bucket in Google, and a pool that lets the role `replica` of AWS in, and into one run's prefix."""

    def __init__(self, google: GoogleSandbox, aws: Sandbox) -> None:
        self.google, self.aws = google, aws
        make_bucket(google)
        good(google, "POST", f"{POOLS}?workloadIdentityPoolId=skerry-run", {})
        provider: dict[str, Any] = {
            "aws": {"accountId": aws.account},
            "attributeMapping": {
                "google.subject": "assertion.arn",
                "attribute.aws_role": "assertion.arn.extract('assumed-role/{role}/')",
            },
            "attributeCondition": "attribute.aws_role in ['replica']",
        }
        good(google, "POST", f"{POOLS}/skerry-run/providers?workloadIdentityPoolProviderId=batch", provider)
        pool = f"iam.googleapis.com/projects/{google.number}/locations/global/workloadIdentityPools/skerry-run"
        self.subjects = f"principal://{pool}/subject/"
        within = "resource.name.startsWith('projects/_/buckets/bucket/objects/tiny/')"
        bind(google, "roles/storage.objectUser", f"principalSet://{pool}/attribute.aws_role/replica", within)

    def told(self, keys: KeyServer) -> dict[str, str]:
        """What a job finds whose keys this gives; it may run beside a metadata server that is not its own."""
        return {
            **keys.environment,
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            contract.GOOGLE_AUDIENCE: AUDIENCE,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"{self.google.endpoint}/",
            "STORAGE_EMULATOR_HOST": self.google.endpoint,
            "GCE_METADATA_HOST": "127.0.0.1:1",
        }

    def open(self, keys: KeyServer, prefix: str = "tiny", clock: FakeClock | None = None) -> Retrying:
        return open_store(f"gs://bucket/{prefix}", environment=self.told(keys), clock=clock or FakeClock())


class RoleServer(KeyServer):
    """A container's keys that are good: those of a role of the sandbox's."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role = role

    def answer(self, token: str | None) -> bytes:
        if token != self.only_for or self.status != 200:
            return super().answer(token)
        told = keys_of(self.role, "task-1", "us-east-1")
        self.keys.append(told["AWS_ACCESS_KEY_ID"])
        names = {
            "AccessKeyId": "AWS_ACCESS_KEY_ID",
            "SecretAccessKey": "AWS_SECRET_ACCESS_KEY",
            "Token": "AWS_SESSION_TOKEN",
        }
        return json.dumps({name: told[variable] for name, variable in names.items()}).encode()


@pytest.fixture
def pool(google: GoogleSandbox, aws: Sandbox) -> Pool:
    return Pool(google, aws)


@pytest.fixture
def keys(aws: Sandbox) -> Iterator[RoleServer]:
    with RoleServer(make_role(aws, "replica")) as running:
        yield running


def test_a_job_on_aws_writes_into_cloud_storage_as_its_pool_knows_it(pool: Pool, keys: RoleServer) -> None:
    store = pool.open(keys)
    assert store.create("a", b"body")
    assert not store.create("a", b"else")
    assert bytes(store.read("a") or b"") == b"body"
    with pytest.raises(Unauthorized, match=r"storage\.objects\.create"):
        pool.open(keys, "other").create("a", b"body")


@pytest.mark.parametrize("where", ["the environment", "both"])
def test_keys_in_the_environment_come_before_a_container_s(
    pool: Pool, keys: RoleServer, aws: Sandbox, where: str
) -> None:
    told = pool.told(keys) | keys_of(keys.role, "task-2", "us-east-1")
    if where != "both":
        del told["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
    assert open_store("gs://bucket/tiny", environment=told).create("a", b"body")
    who = f"arn:aws:sts::{aws.account}:assumed-role/replica/task-2"
    assert identity("gs://bucket/tiny", told, SystemClock()).who == f"{pool.subjects}{who}"


def test_a_role_that_the_provider_does_not_name_is_refused_and_told(pool: Pool, keys: RoleServer, aws: Sandbox) -> None:
    keys.role = make_role(aws, "stranger")
    clock = FakeClock()
    with pytest.raises(Unauthorized, match="rejected by the attribute condition") as raised:
        pool.open(keys, clock=clock).create("a", b"body")
    arn = f"arn:aws:sts::{aws.account}:assumed-role/stranger/task-1"
    assert all(part in str(raised.value) for part in (f"audience={AUDIENCE}", f"job={arn}", "attribute.aws_role"))
    assert clock.pauses == []


@pytest.mark.parametrize("gone", ["skerry-run", "skerry-run/providers/batch"])
def test_a_pool_or_provider_that_was_deleted_lets_nobody_in(pool: Pool, keys: RoleServer, gone: str) -> None:
    good(pool.google, "DELETE", f"{POOLS}/{gone}")
    with pytest.raises(Unauthorized, match=r"invalid_target.* see that pool and provider exist"):
        pool.open(keys).create("a", b"body")


def test_a_token_that_google_ends_early_is_asked_for_anew(pool: Pool, keys: RoleServer) -> None:
    store = pool.open(keys)
    store.create("a", b"body")
    pool.google.principals.expire()
    assert bytes(store.read("a") or b"") == b"body"
    assert len(keys.keys) == 2
    assert store.usage.retries == 1


def test_a_container_whose_keys_do_not_come_is_an_outage(pool: Pool, keys: RoleServer) -> None:
    clock = FakeClock()
    store = pool.open(keys, clock=clock)
    keys.status = 500

    def comes_back() -> None:
        keys.status = 200 if len(clock.pauses) > 3 else 500

    clock.on_pause = comes_back
    assert store.create("a", b"body")
    assert len(clock.pauses) == 4


OUTAGES: Final = {
    "aws": {
        "metadata": (visiting._IDENTITY, (503, "")),
        "a server in trouble": ("/", (500, "oh")),
        "throttled": ("/", (400, sts_error("Throttling"))),
        "too many": ("/", (429, "")),
        "Google does not answer AWS": ("/", (400, sts_error("IDPCommunicationError"))),
        "a proxy's page": ("/", (200, "<html><br></html>")),
        "no answer of STS's": ("/", (200, "<R/>")),
        "a declaration": ("/", (200, f'<!DOCTYPE R [<!ENTITY a "b">]>{sts_answer("&a;", "2100-01-01T00:00:00Z")}')),
        "endless": ("/", (200, "<R>" + "x" * 70_000)),
    },
    "google": {
        "a server in trouble": ("/v1/token", (502, "oh")),
        "busy": ("/v1/token", (429, "{}")),
        "no token": ("/v1/token", (200, '{"access_token": "", "expires_in": 1}')),
        "no JSON": ("/v1/token", (200, "<html>")),
        "the container": ("/role", (500, "")),
    },
}


@pytest.mark.parametrize(("way", "what"), [(way, what) for way, whats in OUTAGES.items() for what in whats])
def test_a_service_that_is_away_is_waited_for(lender: Lender, way: str, what: str) -> None:
    """Also before it ever let this replica in: a wrong trust looks different."""
    path, answer = OUTAGES[way][what]
    lender.fails[path] = answer
    clock = FakeClock()

    def comes_back() -> None:
        if len(clock.pauses) > 2:
            lender.fails.clear()

    clock.on_pause = comes_back
    with S3Server() as s3, GcsServer() as gcs:
        told = lender.aws | {"AWS_ENDPOINT_URL": s3.endpoint}
        uri = "s3://bucket/run"
        if way == "google":
            told, uri = lender.google | {"STORAGE_EMULATOR_HOST": gcs.endpoint}, "gs://bucket/run"
        assert open_store(uri, environment=told, clock=clock).create("a", b"body")
    assert len(clock.pauses) == 3


REFUSALS: Final = {
    "aws": {
        "InvalidIdentityToken": (
            400,
            sts_error("InvalidIdentityToken", f"bad token {HIDDEN} AssumeRoleWithWebIdentity"),
        ),
        "ExpiredTokenException": (400, sts_error("ExpiredTokenException")),
        "IDPRejectedClaim": (403, sts_error("IDPRejectedClaim", HIDDEN)),
        "RegionDisabledException": (403, sts_error("RegionDisabledException", "STS is not activated in this region")),
    },
    "google": {
        "invalid_grant": (400, json.dumps({"error": "invalid_grant", "error_description": f"ExpiredToken {HIDDEN}"})),
        "API": (403, json.dumps({"error": {"code": 403, "message": "sts API has not been used"}})),
        "no JSON": (404, f"<html>{HIDDEN}"),
    },
}


def asked(way: str, lender: Lender, clock: FakeClock) -> AwsVisit | GoogleVisit:
    visit = aws_visit(lender.aws, clock) if way == "aws" else google_visit(lender.google, clock)
    assert visit is not None
    return visit


@pytest.mark.parametrize(("way", "what"), [(way, what) for way, whats in REFUSALS.items() for what in whats])
def test_a_refusal_is_told_at_once_without_a_secret(lender: Lender, way: str, what: str) -> None:
    """Whatever the servers quote, and whatever the store might take their words for."""
    lender.fails["/" if way == "aws" else "/v1/token"] = REFUSALS[way][what]
    clock = Days()
    with pytest.raises(Unauthorized, match=f"audience={AUDIENCE if way == 'google' else WANTED}") as raised:
        asked(way, lender, clock)()
    uri, told = ("s3://bucket/run", lender.aws) if way == "aws" else ("gs://bucket/run", lender.google)
    with pytest.raises(Unauthorized) as through:
        open_store(uri, environment=told, clock=clock).create("a", b"body")
    found = identity(uri, told, SystemClock())
    assert found.who is None
    for text in (str(raised.value), str(through.value), str(through.value.__cause__), str(found)):
        assert HIDDEN not in text
        assert "eyJ" not in text
        assert "in _ask" not in text, "lines of code, which hold words that the store looks for"
    assert clock.pauses == []


def test_what_aws_cannot_read_is_invalid(lender: Lender) -> None:
    lender.fails["/"] = 400, sts_error("ValidationError", "DurationSeconds exceeds the MaxSessionDuration")
    with pytest.raises(Invalid, match="MaxSessionDuration"):
        open_store("s3://bucket/run", environment=lender.aws, clock=FakeClock()).create("a", b"body")


@pytest.mark.parametrize("way", ["aws", "google"])
def test_nothing_that_is_held_shows_a_secret(lender: Lender, way: str) -> None:
    visit = asked(way, lender, Days())
    told: dict[str, Any] = dict(visit())
    assert told.get("secret_access_key", HIDDEN) == HIDDEN
    held = visit._lease._held
    assert held is not None
    for thing in (visit, visit._lease, held, held.credentials if way == "aws" else None, visit.__dict__.get("_caller")):
        assert HIDDEN not in repr(thing)
    assert "visitor/a" in visit.who()
    assert HIDDEN not in visit.who()


class Tokens(GcsServer):
    """Knows Google's tokens as its base knows AWS's keys."""

    def _not_let_in(self, request: Request) -> Response | None:
        token = request.headers["authorization"].removeprefix("Bearer ")
        self.used.setdefault(token)
        return refusal(self.expired[token], "Unauthorized") if token in self.expired else None


def stores(way: str) -> tuple[S3Server | GcsServer, Callable[[Any], S3Store | GCSStore]]:
    """A server, and how to make a client of it that knows no credentials yet."""
    options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    if way == "google":
        gcs = Tokens()
        return gcs, lambda visit: GCSStore(
            "bucket", config={"base_url": gcs.endpoint}, credential_provider=visit, **options
        )
    s3 = S3Server()
    config = {"endpoint": s3.endpoint, "region": "eu-west-1"}
    return s3, lambda visit: S3Store("bucket", config=config, credential_provider=visit, **options)


@pytest.mark.parametrize("way", ["aws", "google"])
def test_for_days_no_request_is_sent_with_what_has_ended(lender: Lender, way: str) -> None:
    """A client asks at any moment, here every seven minutes; now and then a new one writes, and the server looks."""
    clock = Days()
    visit = asked(way, lender, clock)
    server, client = stores(way)
    ends: dict[str, float] = {}
    with server:
        for step in range(int(3 * DAY / 420)):
            told = visit()
            key = told["token"] if way == "google" else told["access_key_id"]
            assert ends.setdefault(str(key), clock.now() + lender.life_s) > clock.now()
            if step % 60 == 0:
                server.expired.update({key: 401 for key, end in ends.items() if end <= clock.now()})
                obstore.put(client(visit), f"step-{step}", b"body")
            clock.advance(420.0)
    assert len(lender.lent) == 3 * 24 * 60 // 35 + 1, "at the first step after half an hour"
    assert set(server.used) < set(lender.lent)


@pytest.mark.parametrize("way", ["aws", "google"])
def test_a_client_in_use_asks_for_others_in_time(lender: Lender, way: str) -> None:
    """obstore would keep what it got until five minutes before its end, as it counts; here it asks all the time."""
    clock, real = Days(), SystemClock()
    server, client = stores(way)
    with server:
        store = client(asked(way, lender, clock))
        obstore.put(store, "a", b"body")
        clock.advance(HOUR / 2)

        def used_two() -> bool | None:
            obstore.put(store, "a", b"body")
            return True if len(server.used) == 2 else None

        # It asks at most ten times a second.
        assert wait_until(real, used_two, real.now() + 10.0, Backoff(first=0.02, cap=0.1))
        assert list(server.used) == lender.lent == ["key-1", "key-2"]


@pytest.mark.parametrize(
    ("seconds", "wall"),
    [(0.0, HOUR), (HOUR, -HOUR), (HOUR, -DAY)],
    ids=["the machine slept", "the clock stood still", "the clock was set back"],
)
@pytest.mark.parametrize("way", ["aws", "google"])
def test_a_clock_that_jumps_does_not_keep_what_has_ended(lender: Lender, way: str, seconds: float, wall: float) -> None:
    clock = Days()
    visit = asked(way, lender, clock)
    visit()
    clock.advance(seconds)
    clock.jump(wall)
    visit()
    assert lender.lent == ["key-1", "key-2"]
    visit()
    assert len(lender.lent) == 2


@pytest.mark.parametrize("how", ["away", "refused"])
@pytest.mark.parametrize("way", ["aws", "google"])
def test_a_renewal_that_fails_is_tried_again_for_as_long_as_the_old_ones_hold(
    lender: Lender, way: str, how: str
) -> None:
    clock = Days()
    visit = asked(way, lender, clock)
    first = visit()
    path = "/" if way == "aws" else "/v1/token"
    failing = sts_error("AccessDenied") if way == "aws" else '{"error": "unauthorized_client"}'
    tries = 0

    class Counting(dict[str, tuple[int, str]]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal tries
            tries += key == path
            return super().get(key, default)

    lender.fails = Counting({path: (503, "") if how == "away" else (403, failing)})
    clock.advance(HOUR / 2)
    for _ in range(int((HOUR / 2 - 20) / 5)):
        assert same(visit(), first)
        clock.advance(5.0)
    attempts = tries
    # A refused exchange with Google also asks AWS who this is.
    assert (HOUR / 2 - 20) / AGAIN_S - 1 <= attempts <= (HOUR / 2) / AGAIN_S + 1
    clock.advance(20.0)
    with pytest.raises(Retryable if how == "away" else Unauthorized):
        visit()
    assert tries == attempts + 1
    lender.fails.clear()
    assert not same(visit(), first)


def same(one: S3Credential | GCSCredential, other: S3Credential | GCSCredential) -> bool:
    """Whether these are the same credentials, however much longer they hold."""
    return {**one, "expires_at": None} == {**other, "expires_at": None}


def test_a_renewal_that_fails_once_is_made_up_for(lender: Lender) -> None:
    clock = Days()
    visit = asked("aws", lender, clock)
    visit()
    clock.advance(HOUR / 2)
    lender.fails["/"] = 500, ""
    visit()
    lender.fails.clear()
    clock.advance(AGAIN_S)
    assert visit()["access_key_id"] == "key-2"


@pytest.mark.parametrize("skew_s", [-5 * HOUR, 5 * HOUR])
def test_how_long_keys_hold_is_counted_by_who_gave_them(lender: Lender, skew_s: float) -> None:
    lender.skew_s = skew_s
    clock = Days()
    visit = asked("aws", lender, clock)
    for _ in range(4):
        visit()
        clock.advance(HOUR / 8)
    assert len(lender.lent) == 1
    visit()
    assert len(lender.lent) == 2


@pytest.mark.parametrize("way", ["aws", "google"])
def test_check_tells_who_the_visitor_is_and_nothing_else(lender: Lender, way: str) -> None:
    uri, told = ("s3://bucket/run", lender.aws) if way == "aws" else ("gs://bucket/run", lender.google)
    found = identity(uri, told, SystemClock())
    arn = "arn:aws:sts::123456789012:assumed-role/visitor/a"
    pool = AUDIENCE.partition("/providers/")[0]
    assert found.who == (arn if way == "aws" else f"principal:{pool}/subject/{arn}")
    assert found.problem is None
    assert HIDDEN not in str(found)
    lender.fails["/" if way == "aws" else "/v1/token"] = 500, ""
    assert "is in trouble" in str(identity(uri, told, SystemClock()).problem)


def test_a_visit_is_asked_for_by_its_own_cloud_s_store_only(lender: Lender) -> None:
    """A mixed run tells each job what it needs; what is told besides does no harm."""
    with S3Server() as server:
        told = lender.google | {"AWS_ENDPOINT_URL_S3": server.endpoint, "AWS_REGION": "eu-west-1"}
        assert open_store("s3://bucket/run", environment=told, clock=FakeClock()).create("a", b"body")
        assert list(server.used) == ["ASIA"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"SKERRY_AWS_AUDIENCE": ""}, "SKERRY_AWS_AUDIENCE is not"),
        ({"AWS_REGION": ""}, "AWS_REGION is not"),
        ({"SKERRY_AWS_ROLE": "visitor"}, "is no role; write arn:aws:iam::"),
    ],
)
def test_a_role_that_is_told_by_halves_is_refused_when_the_store_is_opened(
    lender: Lender, change: dict[str, str], named: str
) -> None:
    with pytest.raises(Invalid, match=named):
        open_store("s3://bucket/run", environment=lender.aws | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"SKERRY_GOOGLE_AUDIENCE": "batch"}, "is no provider; write //iam"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": ""}, "has no role there"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://keys.example.com/"}, "https or this machine's own"),
    ],
)
def test_a_provider_that_is_told_by_halves_is_refused_when_the_store_is_opened(
    lender: Lender, change: dict[str, str], named: str
) -> None:
    with pytest.raises(Invalid, match=named):
        open_store("gs://bucket/run", environment=lender.google | change)


@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        ("eu-west-1", "https://sts.eu-west-1.amazonaws.com/"),
        ("cn-north-1", "https://sts.cn-north-1.amazonaws.com.cn/"),
    ],
)
def test_aws_is_asked_in_the_bucket_s_region(region: str, endpoint: str) -> None:
    told = {contract.AWS_ROLE: ROLE, contract.AWS_AUDIENCE: WANTED, "AWS_REGION": region}
    visit = aws_visit(told)
    assert visit is not None
    assert visit._sts == endpoint
    assert (aws_visit({}), google_visit({})) == (None, None)


def test_the_session_bears_the_slot_s_name(lender: Lender) -> None:
    """AWS takes no name of one character."""
    for slot, name in {"a": "replica-a", "batch-12": "batch-12"}.items():
        visit = aws_visit(lender.aws | {contract.SLOT: slot}, Days())
        assert visit is not None
        visit()
        assert lender.forms[-1]["RoleSessionName"] == name


def test_the_names_are_those_of_the_contract() -> None:
    names = ("AWS_ROLE", "AWS_AUDIENCE", "GOOGLE_AUDIENCE", "SLOT")
    assert [getattr(visiting, name) for name in names] == [getattr(contract, name) for name in names]


def test_google_auth_is_loaded_by_the_exchange_and_not_before() -> None:
    """It takes a fifth of a second, and a replica in its own cloud needs none."""
    program = (
        "import sys; from skerry.runtime.store.clients import cloud_store; from skerry.runtime.store import visiting; "
        f"told = {{'AWS_ACCESS_KEY_ID': 'x', 'SKERRY_GOOGLE_AUDIENCE': {AUDIENCE!r}}}; "
        "visiting.google_visit(told); print('google.auth' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"


# Who works here: logins of persons and pipelines, as google-auth finds them.


class Login:
    """A federated login in a file, as a pipeline on AWS has one, and a store at a private endpoint of Google's."""

    def __init__(self, pool: Pool, file: Path, **more: str) -> None:
        self.endpoint = pool.google.endpoint
        check = "https://sts.{region}.amazonaws.com?Action=GetCallerIdentity&Version=2011-06-15"
        told = {
            "type": "external_account",
            "audience": AUDIENCE,
            "subject_token_type": "urn:ietf:params:aws:token-type:aws4_request",
            "token_url": f"{self.endpoint}/v1/token",
            "credential_source": {"environment_id": "aws1", "regional_cred_verification_url": check},
        }
        file.write_text(json.dumps({**told, **more}))
        self.file = file

    def enter(self, monkeypatch: pytest.MonkeyPatch, role: str) -> None:
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(self.file))
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "skerry-sandbox")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        for name, value in keys_of(role, "task-1", "us-east-1").items():
            monkeypatch.setenv(name, value)

    def open(self, clock: FakeClock | None = None) -> Retrying:
        # As gcloud is told of one: with the path of the other interface.
        told = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{self.endpoint}/storage/v1/"}
        return open_store("gs://bucket/tiny", environment=told, clock=clock or FakeClock())


def test_a_federated_login_opens_the_store_and_is_renewed(
    pool: Pool, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = Login(pool, tmp_path / "login.json")
    login.enter(monkeypatch, make_role(aws, "replica"))
    store = login.open()
    assert store.create("a", b"body")
    assert {call.caller for call in pool.google.calls if call.name == "storage.objects.insert"} == {
        f"{pool.subjects}arn:aws:sts::{aws.account}:assumed-role/replica/task-1"
    }
    pool.google.principals.expire()
    assert bytes(store.read("a") or b"") == b"body"
    assert store.usage.retries == 1


def test_a_login_that_acts_as_an_account_does_so_in_the_store(
    pool: Pool, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    email = make_account(pool.google)
    who = pool.subjects.removeprefix("principal://").removesuffix("subject/")
    policy = {"bindings": [{"role": IMPERSONATE, "members": [f"principalSet://{who}attribute.aws_role/replica"]}]}
    account = f"/v1/projects/skerry-sandbox/serviceAccounts/{email}"
    good(pool.google, "POST", f"{account}:setIamPolicy", {"policy": policy})
    bind(pool.google, "roles/storage.objectUser", f"serviceAccount:{email}")
    pool.google.enable("iamcredentials.googleapis.com")
    act = f"{pool.google.endpoint}/v1/projects/-/serviceAccounts/{email}:generateAccessToken"
    login = Login(pool, tmp_path / "login.json", service_account_impersonation_url=act)
    login.enter(monkeypatch, make_role(aws, "replica"))
    assert login.open().create("a", b"body")
    assert [call.caller for call in pool.google.calls if call.name == "storage.objects.insert"] == [
        f"serviceAccount:{email}"
    ]


def test_a_login_that_google_refuses_is_told_and_nobody_else_is_asked(
    pool: Pool, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login, clock = Login(pool, tmp_path / "login.json"), FakeClock()
    login.enter(monkeypatch, make_role(aws, "stranger"))
    with pytest.raises(Unauthorized, match=r"no login of Google's that works: .*rejected by the attribute") as raised:
        login.open(clock).create("a", b"body")
    assert not any(os.environ[name] in str(raised.value) for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"))
    assert clock.pauses == []
    login.file.write_text('{"type": "something else"}')
    with pytest.raises(Unauthorized, match="no login of Google's that works"):
        login.open(clock).read("a")


def test_an_answer_that_is_no_token_is_not_told(
    pool: Pool, lender: Lender, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """google-auth puts whole answers into its errors, and this one has a token, with an end that is no time."""
    act = "v1/projects/-/serviceAccounts/a@example.com:generateAccessToken"
    lender.fails[f"/{act}"] = 200, json.dumps({"accessToken": "ya29.hunter2", "expireTime": "soon"})
    url = lender.google["CLOUDSDK_API_ENDPOINT_OVERRIDES_STS"] + act
    login = Login(pool, tmp_path / "login.json", service_account_impersonation_url=url)
    login.enter(monkeypatch, make_role(aws, "replica"))
    with pytest.raises(Unauthorized, match="no login of Google's that works: an answer without an error") as raised:
        login.open().read("a")
    assert "hunter2" not in str(raised.value)


def test_a_login_s_server_that_is_away_is_an_outage(
    pool: Pool, aws: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = Login(pool, tmp_path / "login.json", token_url="http://127.0.0.1:1/v1/token")  # noqa: S106  an address
    login.enter(monkeypatch, make_role(aws, "replica"))
    with pytest.raises(Retryable, match=r"127\.0\.0\.1:1 does not answer"):
        open_store("gs://bucket/tiny", environment={}, deadline_s=1.0, clock=FakeClock()).read("a")


def test_a_token_in_the_environment_is_enough_and_is_never_told(google: GoogleSandbox) -> None:
    make_bucket(google)
    token = google.principals.token(Principal(name="user:somebody@example.com", grants=None))
    told = {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": google.environment["CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"],
        "CLOUDSDK_AUTH_ACCESS_TOKEN": token,
    }
    clock = FakeClock()
    store = open_store("gs://bucket/tiny", environment=told, clock=clock)
    assert store.create("a", b"body")
    google.principals.expire()
    with pytest.raises(Unauthorized, match="cannot be renewed") as raised:
        store.read("a")
    assert token not in str(raised.value) + repr(store) + repr(store.__dict__)
    with pytest.raises(Unauthorized, match="the store refuses these credentials"):
        open_store("gs://bucket/tiny", environment=told, clock=clock).read("a")
    assert clock.pauses == []


def test_who_is_logged_in_comes_from_where_google_s_own_clients_look(tmp_path: Path) -> None:
    (tmp_path / "application_default_credentials.json").write_text("{}")
    assert isinstance(google_login({"CLOUDSDK_CONFIG": str(tmp_path)}), GoogleLogin)
    assert isinstance(google_login({"GOOGLE_APPLICATION_CREDENTIALS": "login.json"}), GoogleLogin)
    # A machine's own account, or nobody.
    assert google_login({"CLOUDSDK_CONFIG": str(tmp_path / "absent")}) is None
