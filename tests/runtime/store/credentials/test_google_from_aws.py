"""A job on AWS with its store in Cloud Storage: Google's pool accepts its role, and no other."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.runtime.store.credentials.issuer import GOOGLE_AUDIENCE
from tests.support.batchplace import make_role
from tests.support.clocks import FakeClock
from tests.testing.google.kit import POOLS, good

from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.store import open_store
from skerry.runtime.store.credentials.google_from_aws import google_from_aws
from skerry.testing.aws.container_role_keys import role_keys

if TYPE_CHECKING:
    from tests.runtime.store.credentials.conftest import Pool, RoleKeyServer
    from tests.runtime.store.credentials.issuer import CredentialIssuer

    from skerry.testing.sandbox import Sandbox


def test_job_uses_the_store_as_its_pool_allows(pool: Pool, keys: RoleKeyServer) -> None:
    store = pool.open(keys)
    assert store.create("a", b"body")
    assert not store.create("a", b"else")
    assert bytes(store.read("a") or b"") == b"body"
    with pytest.raises(Unauthorized, match=r"storage\.objects\.create"):
        pool.open(keys, "other").create("a", b"body")


@pytest.mark.parametrize("has_container", [False, True])
def test_keys_in_the_environment_have_precedence_over_the_containers(
    pool: Pool,
    keys: RoleKeyServer,
    has_container: bool,  # noqa: FBT001
) -> None:
    environment = pool.environment(keys) | role_keys(keys.role, "task-2", "us-east-1")
    if not has_container:
        del environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"]
    assert open_store("gs://bucket/tiny", environment=environment).create("a", b"body")
    provider = google_from_aws(environment)
    assert provider is not None
    assert provider.principal() == pool.subject("replica", "task-2")


def test_role_that_the_condition_excludes_is_unauthorized(pool: Pool, keys: RoleKeyServer, aws: Sandbox) -> None:
    keys.role = make_role(aws, "stranger")
    clock = FakeClock()
    with pytest.raises(Unauthorized, match="rejected by the attribute condition") as raised:
        pool.open(keys, clock=clock).create("a", b"body")
    arn = f"arn:aws:sts::{aws.account}:assumed-role/stranger/task-1"
    facts = (f"audience={GOOGLE_AUDIENCE}", f"job={arn}", "attribute.aws_role")
    assert all(fact in str(raised.value) for fact in facts)
    assert clock.pauses == []


@pytest.mark.parametrize("deleted", ["skerry-run", "skerry-run/providers/batch"])
def test_deleted_pool_or_provider_is_unauthorized(pool: Pool, keys: RoleKeyServer, deleted: str) -> None:
    good(pool.google, "DELETE", f"{POOLS}/{deleted}")
    with pytest.raises(Unauthorized, match=r"invalid_target.* check that pool and provider exist"):
        pool.open(keys).create("a", b"body")


def test_revoked_token_is_replaced(pool: Pool, keys: RoleKeyServer) -> None:
    store = pool.open(keys)
    store.create("a", b"body")
    pool.google.principals.expire()
    assert bytes(store.read("a") or b"") == b"body"
    assert len(keys.keys) == 2
    assert store.usage.retries == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"SKERRY_GOOGLE_AUDIENCE": "batch"}, "not a workload identity provider: .*; write //iam"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": ""}, "has no AWS role"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://keys.example.com/"}, "https or an address of this machine"),
    ],
)
def test_incomplete_environment_is_invalid(issuer: CredentialIssuer, change: dict[str, str], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        open_store("gs://bucket/run", environment=issuer.google | change)


def test_google_auth_is_imported_by_the_exchange_only() -> None:
    """The import takes a fifth of a second, and a replica in its own cloud does not need it."""
    program = (
        "import sys; from skerry.runtime.store.obstore_clients import open_cloud_store; "
        "from skerry.runtime.store.credentials.google_from_aws import google_from_aws; "
        f"google_from_aws({{'AWS_ACCESS_KEY_ID': 'x', 'SKERRY_GOOGLE_AUDIENCE': {GOOGLE_AUDIENCE!r}}}); "
        "print('google.auth' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
    assert google_from_aws({}) is None
