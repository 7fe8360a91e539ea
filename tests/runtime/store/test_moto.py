"""The bucket store against moto's server, another author's S3, which checks signatures and checksums."""

from __future__ import annotations

import contextlib
import urllib.request
from typing import TYPE_CHECKING

import boto3
import pytest
from tests.runtime.store.conformance import StoreConformance

from skerry.runtime.store.obstore_clients import open_cloud_store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.runtime.store.conformance import Peek

    from skerry.runtime.store.obstore_store import ObjectStore


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
@pytest.mark.usefixtures("aws_keys")
class TestMoto(StoreConformance):
    races_large = False

    @pytest.fixture
    def store(self, endpoint: str, prefix: str) -> ObjectStore:
        environment = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test-key"}
        return open_cloud_store("s3", "bucket", prefix, environment=environment)

    @pytest.fixture
    def peek(self, endpoint: str, prefix: str) -> Peek:
        def look(key: str) -> bytes | None:
            s3 = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
            with contextlib.closing(s3):
                try:
                    return s3.get_object(Bucket="bucket", Key=prefix + key)["Body"].read()
                except s3.exceptions.NoSuchKey:
                    return None

        return look
