"""Keys of a role that trusts the tokens in a file, such as those of a pod."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.credentials.find_aws_keys import keys_of_job
from skerry.testing.token_issuer import TokenIssuer

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.sandbox import Sandbox

ACCOUNT: Final = "system:serviceaccount:train:skerry-a-0"
AUDIENCE: Final = "sts.amazonaws.com"
ISSUER: Final = TokenIssuer("https://oidc.example.com/id/0123")


class Pod:
    """A pod whose role may use the bucket `run`. write: gives it a token."""

    def __init__(self, aws: Sandbox, folder: Path) -> None:
        self.file = folder / "token"
        iam, host = aws.client("iam"), ISSUER.url.removeprefix("https://")
        provider = iam.create_open_id_connect_provider(
            Url=ISSUER.url, ClientIDList=[AUDIENCE], ThumbprintList=["0" * 40]
        )
        aws.issuers[ISSUER.url] = ISSUER.keys
        statement = {
            "Effect": "Allow",
            "Principal": {"Federated": provider["OpenIDConnectProviderArn"]},
            "Action": "sts:AssumeRoleWithWebIdentity",
            "Condition": {"StringEquals": {f"{host}:sub": ACCOUNT}},
        }
        trust = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        role = iam.create_role(RoleName="pod", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
        rights = {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject"], "Resource": "arn:aws:s3:::run/*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [rights]})
        iam.put_role_policy(RoleName="pod", PolicyName="own", PolicyDocument=policy)
        aws.client("s3").create_bucket(Bucket="run")
        self.environment = {
            "AWS_ENDPOINT_URL": aws.endpoint,
            "AWS_REGION": aws.region,
            "AWS_ROLE_ARN": str(role),
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(self.file),
        }

    def write(self, subject: str = ACCOUNT, expires: int = 4_000_000_000) -> None:
        self.file.write_text(ISSUER.token({"sub": subject, "aud": [AUDIENCE], "exp": expires}))


@pytest.fixture
def pod(aws: Sandbox, tmp_path: Path) -> Pod:
    return Pod(aws, tmp_path)


def test_pod_uses_the_store_as_its_role(pod: Pod, aws: Sandbox) -> None:
    pod.write()
    store = open_store("s3://run/tiny", environment=pod.environment, clock=FakeClock())
    assert store.create("a", b"body")
    assert store.read("a") == b"body"
    assert {call.caller for call in aws.calls if call.name in {"s3:GetObject", "s3:PutObject"}} == {"role/pod"}
    keys = keys_of_job(pod.environment)
    assert keys is not None
    assert keys.session is not None


def test_refused_pod_is_unauthorized_and_names_its_claims(pod: Pod) -> None:
    clock = FakeClock()
    pod.write(subject="system:serviceaccount:train:skerry-b-0")
    store = open_store("s3://run/tiny", environment=pod.environment, clock=clock)
    with pytest.raises(Unauthorized, match=r"the OIDC provider of https://oidc\.example\.com/id/0123 with .*-b-0 aud"):
        store.create("a", b"body")
    pod.write(expires=1_700_000_000)
    with pytest.raises(Unauthorized, match="identity token has expired"):
        keys_of_job(pod.environment)
    assert clock.pauses == []


def test_token_is_read_again_once_the_kubelet_has_written_it(pod: Pod) -> None:
    store = open_store("s3://run/tiny", environment=pod.environment, clock=FakeClock())
    with pytest.raises(Unauthorized, match=r"no identity token in .*FileNotFoundError"):
        store.create("a", b"body")
    pod.write()
    assert store.create("a", b"body")
