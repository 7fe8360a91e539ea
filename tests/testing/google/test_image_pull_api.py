"""Image manifests are read by the registry protocol, from the sandbox's registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.support.clocks import FakeClock
from tests.testing.registry import registry

from skerry.infra.clouds.google.artifact_registry import image_in_registry, read_manifest
from skerry.infra.clouds.google.session import Google
from skerry.infra.clouds.handler_helpers import Absent
from skerry.runtime.errors import Unauthorized
from skerry.testing.google import GoogleSandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.clouds.google.artifact_registry import Image

DIGEST: Final = f"sha256:{'ab' * 32}"
WITHIN: Final = "/v2/skerry-sandbox/skerry/replica"
EXISTING: Final = {
    f"{WITHIN}/manifests/{DIGEST}": b'{"config": {"digest": "sha256:cd"}}',
    f"{WITHIN}/blobs/sha256:cd": b'{"architecture": "amd64"}',
}


@pytest.fixture
def stocked() -> Iterator[GoogleSandbox]:
    with registry(EXISTING) as server, GoogleSandbox(registry=server.host) as running:
        running.enable("artifactregistry.googleapis.com")
        yield running
        assert running.violations == []


def named(digest: str, project: str = "skerry-sandbox") -> Image:
    image = image_in_registry(f"us-central1-docker.pkg.dev/{project}/skerry/replica@{digest}")
    assert image is not None
    return image


def test_image_manifest_and_config_are_readable(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    assert read_manifest(google, named(DIGEST)).architectures == {"amd64"}
    assert [call.name for call in stocked.calls] == ["artifactregistry.docker.get"] * 2
    assert stocked.calls.writes == []


def test_missing_image_is_absent(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    with pytest.raises(Absent):
        read_manifest(google, named(f"sha256:{'cd' * 32}"))


def test_sandbox_without_a_registry_has_no_images() -> None:
    with GoogleSandbox() as google:
        google.enable("artifactregistry.googleapis.com")
        with pytest.raises(Absent):
            read_manifest(Google(FakeClock(), google.environment), named(DIGEST))
        assert google.violations == []


def test_pull_without_download_permission_is_refused(stocked: GoogleSandbox) -> None:
    google = Google(FakeClock(), stocked.environment)
    with pytest.raises(Unauthorized):
        read_manifest(google, named(DIGEST, "other-project"))
    stocked.restrict({"storage.buckets.get"})
    with pytest.raises(Unauthorized):
        read_manifest(google, named(DIGEST))
