"""Image manifests are read by the registry protocol, from the sandbox's registry."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.clocks import FakeClock

from skerry.infra.clouds.google.artifact_registry import architectures, image_in_registry
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.shared import Absent
from skerry.runtime.errors import Unauthorized
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from skerry.infra.clouds.google.artifact_registry import Image

KIND: Final = "application/vnd.docker.distribution.manifest.v2+json"
DIGEST: Final = f"sha256:{'ab' * 32}"
WITHIN: Final = "/v2/skerry-sandbox/skerry/replica"
THERE: Final = {
    f"{WITHIN}/manifests/{DIGEST}": b'{"config": {"digest": "sha256:cd"}}',
    f"{WITHIN}/blobs/sha256:cd": b'{"architecture": "amd64"}',
}


class Registry(BaseHTTPRequestHandler):
    """Stores one image; returns a manifest only to requests that accept it."""

    def do_GET(self) -> None:
        good = self.path in THERE and ("blobs" in self.path or KIND in self.headers["Accept"])
        self.send_response(200 if good else 404)
        self.send_header("Content-Type", KIND)
        self.end_headers()
        self.wfile.write(THERE[self.path] if good else b"{}")

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        pass


@contextmanager
def registry() -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def stocked() -> Iterator[GoogleSandbox]:
    with registry() as existing, GoogleSandbox(registry=existing) as running:
        running.enable("artifactregistry.googleapis.com")
        yield running
        assert running.violations == []


def named(digest: str, project: str = "skerry-sandbox") -> Image:
    image = image_in_registry(f"us-central1-docker.pkg.dev/{project}/skerry/replica@{digest}")
    assert image is not None
    return image


def test_image_manifest_and_config_are_readable(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    assert architectures(google, named(DIGEST)) == {"amd64"}
    assert [call.name for call in stocked.calls] == ["artifactregistry.docker.get"] * 2
    assert stocked.calls.writes == []


def test_one_that_is_not_there_is_absent(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    with pytest.raises(Absent):
        architectures(google, named(f"sha256:{'cd' * 32}"))


def test_without_a_registry_nothing_was_ever_pushed() -> None:
    with GoogleSandbox() as google:
        google.enable("artifactregistry.googleapis.com")
        with pytest.raises(Absent):
            architectures(Google(FakeClock(), google.environment), named(DIGEST))
        assert google.violations == []


def test_pull_without_download_permission_is_refused(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    with pytest.raises(Unauthorized):
        architectures(google, named(DIGEST, "somebody-else"))
    stocked.restrict({"storage.buckets.get"})
    with pytest.raises(Unauthorized):
        architectures(google, named(DIGEST))
