"""Fixtures for credentials: an issuer that accepts everyone, and sandboxes of both clouds that check rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.runtime.store.credentials.issuer import GOOGLE_AUDIENCE, CredentialIssuer
from tests.runtime.store.credentials.key_server import KeyServer, RoleKeyServer
from tests.support.batchplace import make_role
from tests.support.clocks import FakeClock
from tests.testing.google.kit import POOLS, bind, good, make_bucket

from skerry.runtime import contract
from skerry.runtime.store import open_store
from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.runtime.store.retrying import Retrying


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
def issuer() -> Iterator[CredentialIssuer]:
    with CredentialIssuer() as running:
        yield running


class Pool:
    """A bucket in Google's sandbox and a pool that gives the AWS role `replica` one prefix of it."""

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
        self.name = f"iam.googleapis.com/projects/{google.number}/locations/global/workloadIdentityPools/skerry-run"
        within = "resource.name.startsWith('projects/_/buckets/bucket/objects/tiny/')"
        bind(google, "roles/storage.objectUser", self.principals("replica"), within)

    def principals(self, role: str) -> str:
        """All sessions of an AWS role, as a policy names them."""
        return f"principalSet://{self.name}/attribute.aws_role/{role}"

    def subject(self, role: str, session: str) -> str:
        """One session of an AWS role, as a policy names it."""
        return f"principal://{self.name}/subject/arn:aws:sts::{self.aws.account}:assumed-role/{role}/{session}"

    def environment(self, keys: KeyServer) -> dict[str, str]:
        """The variables of a job with these keys, which has no metadata server of Google."""
        return {
            **keys.environment,
            "AWS_ENDPOINT_URL": self.aws.endpoint,
            contract.GOOGLE_AUDIENCE: GOOGLE_AUDIENCE,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"{self.google.endpoint}/",
            "STORAGE_EMULATOR_HOST": self.google.endpoint,
            "GCE_METADATA_HOST": "127.0.0.1:1",
        }

    def open(self, keys: KeyServer, prefix: str = "tiny", clock: FakeClock | None = None) -> Retrying:
        return open_store(f"gs://bucket/{prefix}", environment=self.environment(keys), clock=clock or FakeClock())


@pytest.fixture
def pool(google: GoogleSandbox, aws: Sandbox) -> Pool:
    return Pool(google, aws)


@pytest.fixture
def keys(aws: Sandbox) -> Iterator[RoleKeyServer]:
    with RoleKeyServer(make_role(aws, "replica")) as running:
        yield running
