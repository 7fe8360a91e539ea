"""The rules of a replica as the sandbox judges them: all calls of a replica are allowed, all others denied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.clouds.aws.test_rights import CREATED, DELETED, MINE, OTHERS, THERE
from tests.infra.clouds.google.kit import wanted
from tests.infra.clouds.google.test_gcs import ONE as BUCKET
from tests.infra.clouds.google.test_service_accounts import ACCOUNT
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.bucket_bindings import BucketBinding, BucketBindings
from skerry.infra.clouds.google.gcs import Buckets
from skerry.infra.clouds.google.replica_rules import replica_rules
from skerry.infra.clouds.google.service_accounts import ServiceAccounts
from skerry.runtime.errors import Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import Store, open_store
from skerry.runtime.store.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.clouds.google.session import Google
    from skerry.testing.google import GoogleSandbox

PREFIX: Final = "teams/tiny-gpt"
DIGEST: Final = "0" * 32


def opened(environment: Mapping[str, str], place: str = f"acme-runs/{PREFIX}") -> Store:
    return open_store(f"gs://{place}", clock=FakeClock(), deadline_s=20, environment=environment)


@pytest.fixture(params=["replica", "group"])
def replica(request: pytest.FixtureRequest, google: Google, sandbox: GoogleSandbox) -> dict[str, str]:
    """The run's bucket with something in it, and the environment of one replica's job."""
    Buckets(google).create(BUCKET)
    outputs = ServiceAccounts(google).create(wanted(ACCOUNT))
    group = MINE.rpartition("-")[0] if request.param == "group" else None
    binding = BucketBinding(
        key="batch",
        name="skerry-tiny-gpt-batch",
        region="",
        bucket="acme-runs",
        member=f"serviceAccount:{outputs['email']}",
        rules=replica_rules(prefix=PREFIX, slots=[MINE], group=group),
    )
    BucketBindings(google).create(wanted(binding))
    body = {"name": "another-bucket", "location": "EUROPE-WEST4"}
    google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
    operator = opened(sandbox.environment)
    for key in (*THERE, keys.payload(1, OTHERS, DIGEST), keys.contribution(0, 0, MINE)):
        assert operator.create(key, b"1")
    for place in ("acme-runs/teams/tiny-gpt-2", f"another-bucket/{PREFIX}"):
        assert opened(sandbox.environment, place).create(keys.RUN, b"1")
    return sandbox.acting_as(outputs["email"])


def test_replica_store_works_with_its_rules(replica: dict[str, str]) -> None:
    store = opened(replica)
    probe(store, FakeClock())
    for key in THERE:
        assert bytes(store.read(key) or b"") == b"1"
    for key in CREATED:
        # A replica asks before it writes: what is not there must be absent, and not forbidden.
        assert store.read(key) is None
        assert store.create(key, b"mine")
        assert not store.create(key, b"again")
        assert bytes(store.read(key) or b"") == b"mine"
    for _ in range(2):
        store.replace(keys.heartbeat(MINE), b"beat")
    assert [entry.key for entry in store.list(keys.COMMITS)] == [keys.commit(0), keys.commit(1)]
    for key in DELETED:
        store.delete(key)
        store.delete(key)


FORBIDDEN: Final[dict[str, Callable[[Mapping[str, str]], object]]] = {
    "overwrite run.json": lambda env: opened(env).replace(keys.RUN, b"x"),
    "create code": lambda env: opened(env).create(keys.code("1" * 64), b"x"),
    "overwrite a commit": lambda env: opened(env).replace(keys.commit(0), b"x"),
    "overwrite its own contribution": lambda env: opened(env).replace(keys.contribution(0, 0, MINE), b"x"),
    "delete a commit": lambda env: opened(env).delete(keys.commit(0)),
    "delete its own contribution": lambda env: opened(env).delete(keys.contribution(0, 0, MINE)),
    "delete run.json": lambda env: opened(env).delete(keys.RUN),
    "delete a pin": lambda env: opened(env).delete(keys.pin(1)),
    "pin a round": lambda env: opened(env).create(keys.pin(2), b"x"),
    "take the state": lambda env: opened(env).create("state/00000002.json", b"x"),
    "beat another's heart": lambda env: opened(env).replace(keys.heartbeat("local-1"), b"x"),
    "contribute for another": lambda env: opened(env).create(keys.contribution(1, 0, "local-1"), b"x"),
    "fence another": lambda env: opened(env).create(keys.member("local-1", 9), b"x"),
    "write another's private state": lambda env: opened(env).create(
        keys.checkpoint_manifest(1, keys.private_prefix("local-1")), b"x"
    ),
    "read another run": lambda env: opened(env, "acme-runs/teams/tiny-gpt-2").read(keys.RUN),
    "write to another run": lambda env: opened(env, "acme-runs/teams/tiny-gpt-2").create(keys.heartbeat(MINE), b"x"),
    "list another run": lambda env: list(opened(env, "acme-runs/teams/tiny-gpt-2").list("")),
    "list the whole bucket": lambda env: list(opened(env, "acme-runs/teams").list("")),
    "read another bucket": lambda env: opened(env, f"another-bucket/{PREFIX}").read(keys.RUN),
    "write to another bucket": lambda env: opened(env, f"another-bucket/{PREFIX}").create(keys.commit(1), b"x"),
}


def test_replica_rules_allow_no_other_call(replica: dict[str, str]) -> None:
    done: list[str] = []
    for what, attempt in FORBIDDEN.items():
        try:
            attempt(replica)
        except Unauthorized:
            continue
        done.append(what)
    assert done == []
