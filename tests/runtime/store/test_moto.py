"""The bucket engine against moto's server: another author's idea of S3, with signatures and checksums in the way."""

from __future__ import annotations

import contextlib
import itertools
import urllib.request
from typing import TYPE_CHECKING

import boto3
import pytest
from tests.runtime.store.conformance import StoreConformance

from skerry.runtime.store.clients import cloud_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.runtime.store.cloud import ObjectStore

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  importing moto takes seconds

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        address = f"http://{host}:{port}"
        request = urllib.request.Request(f"{address}/bucket", method="PUT")  # noqa: S310  loopback
        with urllib.request.urlopen(request):  # noqa: S310
            pass
        yield address
    finally:
        server.stop()


@pytest.mark.slow
class TestMoto(StoreConformance):
    races_large = False

    @pytest.fixture
    def prefix(self) -> str:
        return f"runs/{next(NUMBERS)}/"

    @pytest.fixture
    def store(self, endpoint: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        told = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "nobody"}
        return cloud_store("s3", "bucket", prefix, environment=told)

    @pytest.fixture
    def peek(self, endpoint: str, prefix: str) -> Callable[[str], bytes | None]:
        def look(key: str) -> bytes | None:
            s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
            with contextlib.closing(s3):
                try:
                    return s3.get_object(Bucket="bucket", Key=prefix + key)["Body"].read()
                except s3.exceptions.NoSuchKey:
                    return None

        return look
