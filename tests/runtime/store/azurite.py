"""Starts Azurite, Microsoft's emulator of Azure Blob, if it is installed.

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
from contextlib import contextmanager
from email.utils import formatdate
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONTAINER = "container"
ACCOUNT = "devstoreaccount1"
# Azurite's published key, the same in every installation.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def _command() -> list[str]:
    script, program = os.environ.get("SKERRY_TEST_AZURITE"), shutil.which("azurite-blob")
    if script and shutil.which("node"):
        return ["node", script]
    return [program] if program else []


needs_azurite = pytest.mark.skipif(
    not _command(), reason="no Azurite: npm install azurite, then set SKERRY_TEST_AZURITE"
)


@contextmanager
def run_azurite(folder: Path) -> Iterator[str]:
    """The endpoint of the account, which has one container."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck", "--silent"]
    process = subprocess.Popen([*_command(), *options], cwd=folder, stdout=subprocess.DEVNULL)
    try:
        _await_port(port, process)
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        _make_container(endpoint)
        yield endpoint
    finally:
        process.kill()
        process.wait()


def connection_string(endpoint: str) -> str:
    return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
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
