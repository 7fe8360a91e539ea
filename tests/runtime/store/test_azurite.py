"""The bucket store against Azurite, Microsoft's emulator of Azure Blob, if it is installed.

npm install azurite; export SKERRY_TEST_AZURITE=$PWD/node_modules/azurite/dist/src/blob/main.js
"""

from __future__ import annotations

import base64
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from email.utils import formatdate
from typing import TYPE_CHECKING

import obstore
import pytest
from obstore.store import AzureStore
from tests.runtime.store.conformance import StoreConformance

from skerry.runtime.errors import Invalid
from skerry.runtime.store.obstore_clients import open_cloud_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime.store.conformance import Peek

    from skerry.runtime.store.obstore_store import ObjectStore

CONTAINER = "container"
ACCOUNT = "devstoreaccount1"
# Azurite's published key, the same in every installation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def _command() -> list[str] | None:
    script = os.environ.get("SKERRY_TEST_AZURITE")
    if script and shutil.which("node"):
        return ["node", script]
    program = shutil.which("azurite-blob")
    return [program] if program else None


COMMAND = _command()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMMAND is None, reason="no Azurite: npm install azurite, then set SKERRY_TEST_AZURITE"),
]


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The connection string of a running Azurite with one container."""
    assert COMMAND is not None
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    folder = tmp_path_factory.mktemp("azurite")
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    process = subprocess.Popen([*COMMAND, *options], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        _await_port(port, process)
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        _make_container(endpoint)
        yield f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"
    finally:
        process.kill()
        process.wait()


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        assert process.poll() is None, "Azurite ended"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "Azurite does not listen"
        else:
            return


def _make_container(endpoint: str) -> None:
    """One request with a Shared Key. Source: learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key"""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    canonical = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + canonical + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), "sha256")).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    address = f"{endpoint}/{CONTAINER}?restype=container"
    request = urllib.request.Request(address, headers=headers, method="PUT")  # noqa: S310  loopback
    with urllib.request.urlopen(request) as response:  # noqa: S310
        assert response.status == 201


class TestAzurite(StoreConformance):
    @pytest.fixture
    def store(self, connection: str, prefix: str) -> ObjectStore:
        return open_cloud_store("az", CONTAINER, prefix, environment={"AZURE_STORAGE_CONNECTION_STRING": connection})

    @pytest.fixture
    def peek(self, connection: str, prefix: str) -> Peek:
        endpoint = connection.partition("BlobEndpoint=")[2]
        client = AzureStore(
            config={"container_name": CONTAINER, "account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint},
            client_options={"allow_http": True},
        )

        def look(key: str) -> bytes | None:
            try:
                return bytes(obstore.get(client, prefix + key).bytes())
            except FileNotFoundError:
                return None

        return look


def test_missing_container_is_named(connection: str) -> None:
    store = open_cloud_store("az", "no-such-container", "", environment={"AZURE_STORAGE_CONNECTION_STRING": connection})
    for call in (lambda: store.create("a", b""), lambda: store.read("a"), lambda: store.list("")):
        with pytest.raises(Invalid, match="no such bucket: az://no-such-container"):
            call()
