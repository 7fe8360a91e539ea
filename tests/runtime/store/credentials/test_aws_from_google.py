"""A job on Google Cloud with its store in S3: the role accepts its identity token, and only with the right claims."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.credentials.issuer import AWS_AUDIENCE, ROLE, CredentialIssuer, sts_error
from tests.support.batchplace import allow
from tests.support.clocks import FakeClock, WallClock
from tests.testing.google.kit import good, make_account

from skerry.runtime import contract
from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.credentials.aws_from_google import AwsFromGoogle, aws_from_google

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

HOUR = 3600.0


class GoogleJob:
    """A job with a service account in Google's sandbox, and a role in AWS that trusts some claims of its token."""

    def __init__(self, google: GoogleSandbox, aws: Sandbox, name: str = "replica-0") -> None:
        self.google, self.aws = google, aws
        self.email = make_account(google, name)
        account = google.accounts.of_machine(self.email)
        assert account is not None
        self.number = account.number
        self.claims: dict[str, object] = {"sub": self.number, "oaud": AWS_AUDIENCE, "aud": [self.number, self.email]}

    def make_role(self, trusted: Mapping[str, object], issuer: str = "accounts.google.com") -> str:
        """A role that may use one run's prefix, and trusts tokens with all of these claims."""
        statement = {
            "Effect": "Allow",
            "Principal": {"Federated": issuer},
            "Action": "sts:AssumeRoleWithWebIdentity",
            "Condition": {"StringEquals": {f"accounts.google.com:{name}": value for name, value in trusted.items()}},
        }
        iam = self.aws.client("iam")
        trust = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        arn = iam.create_role(RoleName="visitor", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
        objects = {"Action": ["s3:GetObject", "s3:PutObject"], "Resource": "arn:aws:s3:::run/tiny/*"}
        iam.put_role_policy(RoleName="visitor", PolicyName="own", PolicyDocument=allow(objects))
        self.aws.client("s3").create_bucket(Bucket="run")
        return str(arn)

    def environment(self, role: str | None = None) -> dict[str, str]:
        """The variables of the job; the default role trusts all claims of its token."""
        return {
            **self.google.acting_as(self.email),
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            "AWS_REGION": self.aws.region,
            contract.AWS_ROLE: role or self.make_role(self.claims),
            contract.AWS_AUDIENCE: AWS_AUDIENCE,
            contract.SLOT: "replica-0",
        }


@pytest.fixture
def job(google: GoogleSandbox, aws: Sandbox) -> GoogleJob:
    return GoogleJob(google, aws)


def test_job_uses_the_store_as_its_role(job: GoogleJob, aws: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"AWS_ACCESS_KEY_ID": "another account's", "AWS_SECRET_ACCESS_KEY": "x"}
    for name, value in other.items():  # obstore would find these
        monkeypatch.setenv(name, value)
    environment = job.environment() | other
    store = open_store("s3://run/tiny", environment=environment, clock=FakeClock())
    assert store.create("a", b"body")
    assert not store.create("a", b"else")
    assert store.read("a") == b"body"
    with pytest.raises(Unauthorized, match="AccessDenied"):
        open_store("s3://run/other", environment=environment, clock=FakeClock()).create("a", b"body")
    calls = list(aws.calls)
    assert {call.caller for call in calls if call.name == "s3:PutObject"} == {"role/visitor"}
    assumed = next(call for call in calls if call.operation == "AssumeRoleWithWebIdentity")
    assert (assumed.params["RoleSessionName"], assumed.params["DurationSeconds"]) == ("replica-0", 3600)


@pytest.mark.parametrize("wrong", ["sub", "oaud", "aud", "audience as aud", "another issuer", "no such role"])
def test_untrusted_claim_is_unauthorized_and_the_claims_are_listed(job: GoogleJob, aws: Sandbox, wrong: str) -> None:
    """AWS compares `aud` with azp, the account; a policy with the audience there, as for other issuers, refuses."""
    stranger = GoogleJob(job.google, aws, "replica-1")
    trusted = {
        "sub": job.claims | {"sub": stranger.number},
        "oaud": job.claims | {"oaud": "skerry/123456789012/another-run"},
        "aud": job.claims | {"aud": [stranger.number, stranger.email]},
        "audience as aud": {"sub": job.number, "aud": AWS_AUDIENCE},
    }.get(wrong, job.claims)
    issuer = "cognito-identity.amazonaws.com" if wrong == "another issuer" else "accounts.google.com"
    role = job.make_role(trusted, issuer)
    role = role.replace("visitor", "absent") if wrong == "no such role" else role
    with pytest.raises(Unauthorized, match="does not let this job assume its role") as raised:
        open_store("s3://run/tiny", environment=job.environment(role)).create("a", b"body")
    claims = f"accounts.google.com:sub={job.number}, :oaud={AWS_AUDIENCE}, :aud={job.number}"
    assert all(part in str(raised.value) for part in (f"role={role}", f"audience={AWS_AUDIENCE}", claims))
    assert "eyJ" not in str(raised.value), "the first characters of every token"


def test_machine_without_a_service_account_is_unauthorized(job: GoogleJob) -> None:
    environment = job.environment()
    good(job.google, "DELETE", f"/v1/projects/skerry-sandbox/serviceAccounts/{job.email}")
    with pytest.raises(Unauthorized, match=r"no identity token from .*; give the job a service account"):
        open_store("s3://run/tiny", environment=environment).create("a", b"body")


# Against an issuer that accepts everyone.


def provider_of(environment: Mapping[str, str], clock: WallClock | None = None) -> AwsFromGoogle:
    provider = aws_from_google(environment, clock or WallClock())
    assert provider is not None
    return provider


def test_request_that_aws_rejects_is_invalid(issuer: CredentialIssuer) -> None:
    issuer.failures["/"] = 400, sts_error("ValidationError", "DurationSeconds exceeds the MaxSessionDuration")
    with pytest.raises(Invalid, match="MaxSessionDuration"):
        open_store("s3://bucket/run", environment=issuer.aws, clock=FakeClock()).create("a", b"body")


@pytest.mark.parametrize("skew_s", [-5 * HOUR, 5 * HOUR])
def test_lifetime_is_measured_by_the_clock_of_aws(issuer: CredentialIssuer, skew_s: float) -> None:
    issuer.skew_s = skew_s
    clock = WallClock()
    provider = provider_of(issuer.aws, clock)
    for issued in (1, 1, 1, 1, 2):
        provider()
        assert len(issuer.issued) == issued
        clock.advance(HOUR / 8)


@pytest.mark.parametrize(("slot", "session"), [("a", "replica-a"), ("batch-12", "batch-12")])
def test_session_is_named_after_the_slot(issuer: CredentialIssuer, slot: str, session: str) -> None:
    """AWS accepts no name of one character."""
    provider_of(issuer.aws | {contract.SLOT: slot})()
    assert issuer.forms[-1]["RoleSessionName"] == session


@pytest.mark.parametrize(("region", "domain"), [("eu-west-1", "amazonaws.com"), ("cn-north-1", "amazonaws.com.cn")])
def test_sts_of_the_buckets_region_is_used(region: str, domain: str) -> None:
    environment = {contract.AWS_ROLE: ROLE, contract.AWS_AUDIENCE: AWS_AUDIENCE, "AWS_REGION": region}
    assert provider_of(environment).sts_url == f"https://sts.{region}.{domain}/"
    assert aws_from_google({}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({contract.AWS_AUDIENCE: ""}, "SKERRY_AWS_AUDIENCE is not"),
        ({"AWS_REGION": ""}, "AWS_REGION is not"),
        ({contract.AWS_ROLE: "visitor"}, "not the ARN of a role: .*; write arn:aws:iam::"),
    ],
)
def test_incomplete_environment_is_invalid(issuer: CredentialIssuer, change: dict[str, str], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        open_store("s3://bucket/run", environment=issuer.aws | change)
