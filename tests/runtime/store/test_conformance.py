"""Every store passes the conformance suite, buckets against servers of several authors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import boto3
import obstore
import pytest
from obstore.store import AzureStore
from tests.runtime.store import azurite
from tests.runtime.store.conformance import Peek, StoreConformance, StoreConformanceOfOneWriter
from tests.runtime.store.conftest import KEYS
from tests.support.gcsserver import GcsServer
from tests.testing.google.kit import make_bucket

from skerry.runtime.errors import Invalid
from skerry.runtime.store import FolderStore
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.obstore_clients import open_cloud_store
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.s3server import S3Server

    from skerry.runtime.store import Store
    from skerry.runtime.store.fsspec_store import FsspecStore


class Subject(NamedTuple):
    """A store under test, and a way to read its objects without it."""

    store: Store
    peek: Peek


@pytest.fixture
def memory() -> Subject:
    store = MemoryStore()
    return Subject(store, store.read)


@pytest.fixture
def directory(tmp_path: Path) -> Subject:
    def look(key: str) -> bytes | None:
        path = tmp_path / "run" / key
        return path.read_bytes() if path.exists() else None

    return Subject(DirectoryStore(tmp_path / "run"), look)


@pytest.fixture
def s3(server: S3Server, prefix: str) -> Subject:
    store = open_cloud_store("s3", "bucket", prefix, environment=KEYS | {"AWS_ENDPOINT_URL": server.endpoint})
    return Subject(store, lambda key: server.peek("bucket", prefix + key))


@pytest.fixture
def s3fs(server: S3Server, session: FsspecStore, prefix: str) -> Subject:
    store = session.below("fsspec+s3://bucket", f"bucket/{prefix}")
    return Subject(store, lambda key: server.peek("bucket", prefix + key))


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[GcsServer]:
    with GcsServer(page_keys=3) as running:
        yield running


@pytest.fixture
def gcs(gcs_server: GcsServer, prefix: str) -> Subject:
    store = open_cloud_store("gs", "bucket", prefix, environment={"STORAGE_EMULATOR_HOST": gcs_server.endpoint})
    return Subject(store, lambda key: gcs_server.peek("bucket", prefix + key))


@pytest.fixture(scope="module")
def google_sandbox() -> Iterator[GoogleSandbox]:
    with GoogleSandbox() as running:
        make_bucket(running)
        yield running
        assert running.violations == []


@pytest.fixture
def google(google_sandbox: GoogleSandbox, prefix: str) -> Subject:
    def look(key: str) -> bytes | None:
        stored = google_sandbox.objects.buckets["bucket"].objects.get(prefix + key)
        return None if stored is None else stored.data

    return Subject(open_cloud_store("gs", "bucket", prefix, environment=google_sandbox.environment), look)


@pytest.fixture(scope="module")
def moto_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  importing moto takes seconds

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto(moto_endpoint: str, prefix: str) -> Iterator[Subject]:
    """Another author's S3, which checks signatures and checksums."""
    client = boto3.client("s3", endpoint_url=moto_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="bucket")

    def look(key: str) -> bytes | None:
        try:
            return client.get_object(Bucket="bucket", Key=prefix + key)["Body"].read()
        except client.exceptions.NoSuchKey:
            return None

    environment = KEYS | {"AWS_ENDPOINT_URL": moto_endpoint}
    yield Subject(open_cloud_store("s3", "bucket", prefix, environment=environment), look)
    client.close()


@pytest.fixture(scope="module")
def azurite_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with azurite.run_azurite(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


@pytest.fixture
def azure(azurite_endpoint: str, prefix: str) -> Subject:
    client = AzureStore(
        config={
            "container_name": azurite.CONTAINER,
            "account_name": azurite.ACCOUNT,
            "account_key": azurite.KEY,
            "endpoint": azurite_endpoint,
        },
        client_options={"allow_http": True},
    )

    def look(key: str) -> bytes | None:
        try:
            return bytes(obstore.get(client, prefix + key).bytes())
        except FileNotFoundError:
            return None

    environment = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string(azurite_endpoint)}
    return Subject(open_cloud_store("az", azurite.CONTAINER, prefix, environment=environment), look)


STORES = [
    *("memory", "directory", "s3", "s3fs", "gcs", "google"),
    pytest.param("azure", marks=[pytest.mark.slow, azurite.needs_azurite]),
]


class _OfSubject:
    """The store and the way to look into it are those of the fixture `subject`."""

    @pytest.fixture
    def store(self, subject: Subject) -> Store:
        return subject.store

    @pytest.fixture
    def peek(self, subject: Subject) -> Peek:
        return subject.peek


@pytest.mark.usefixtures("aws_keys")
@pytest.mark.parametrize("name", STORES)
class TestEveryStore(_OfSubject, StoreConformance):
    @pytest.fixture
    def subject(self, name: str, request: pytest.FixtureRequest) -> Subject:
        return request.getfixturevalue(name)


@pytest.mark.slow
@pytest.mark.usefixtures("aws_keys")
class TestMoto(_OfSubject, StoreConformanceOfOneWriter):
    """moto checks and writes without a lock, so two racing creates can both succeed."""

    @pytest.fixture
    def subject(self, moto: Subject) -> Subject:
        return moto


@pytest.mark.usefixtures("aws_keys")
@pytest.mark.parametrize("name", ["directory", "google", pytest.param("moto", marks=pytest.mark.slow)])
def test_folders_are_the_first_names_of_longer_keys(name: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(name).store
    assert isinstance(store, FolderStore)
    assert store.folders() == []
    for key in ("b/run.json", "a/commits/00000000.json", "a/commits/00000001.json", "file"):
        assert store.create(key, b"x")
    assert store.folders() == ["a", "b"]


@pytest.mark.slow
@azurite.needs_azurite
def test_missing_container_is_named(azurite_endpoint: str) -> None:
    environment = {"AZURE_STORAGE_CONNECTION_STRING": azurite.connection_string(azurite_endpoint)}
    store = open_cloud_store("az", "no-such-container", "", environment=environment)
    for call in (lambda: store.create("a", b""), lambda: store.read("a"), lambda: store.list("")):
        with pytest.raises(Invalid, match="no such bucket: az://no-such-container"):
            call()
