"""Logins of registries, from servers that speak as the clouds' do, through the SDKs that ask them."""

from __future__ import annotations

import base64
import http.server
import importlib
import threading
from typing import TYPE_CHECKING, Final

import boto3
import pytest
from moto.server import ThreadedMotoServer

from skerry.infra.image.logins import registry_login
from skerry.runtime.errors import Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator

ECR: Final = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/skerry"
ARTIFACT_REGISTRY: Final = "europe-west4-docker.pkg.dev/acme/team/skerry"
TOKEN: Final = "ya29.of-no-account"  # noqa: S105  no real token


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    yield f"http://127.0.0.1:{port}"
    server.stop()


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as Google's metadata server does on a machine that has a service account."""

    paths: list[str]

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        type(self).paths.append(self.path)
        account = "/computeMetadata/v1/instance/service-accounts/default/"
        path = self.path.partition("?")[0]
        kind, body = {
            "/": ("text/plain", "ok"),
            "/computeMetadata/v1/project/project-id": ("text/plain", "acme"),
            "/computeMetadata/v1/universe/universe-domain": ("text/plain", "googleapis.com"),
            account: ("application/json", '{"email": "replica@acme.iam.gserviceaccount.com", "scopes": []}'),
            f"{account}token": ("application/json", f'{{"access_token": "{TOKEN}", "expires_in": 3599}}'),
        }.get(path, ("text/plain", ""))
        self.send_response(200 if body else 404)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    Metadata.paths = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, f"127.0.0.1:{server.server_port}")
    # Not the login of the user that runs the tests.
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path_factory.mktemp("gcloud")))
    # It reads those variables when it is imported, which another test may have done.
    metadata = importlib.import_module("google.auth.compute_engine._metadata")
    importlib.reload(metadata)
    yield
    monkeypatch.undo()
    importlib.reload(metadata)
    server.shutdown()
    thread.join()
    server.server_close()


def test_ecr_login_is_decoded_from_its_token(amazon: str) -> None:
    client = boto3.client("ecr", region_name="eu-west-1", endpoint_url=amazon)
    token = client.get_authorization_token(registryIds=["123456789012"])["authorizationData"][0]["authorizationToken"]
    login = registry_login(ECR)
    assert login is not None
    assert f"{login['username']}:{login['password']}" == base64.b64decode(token).decode()
    assert login["username"] == "AWS"


def test_missing_aws_credentials_are_unauthorized(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    with pytest.raises(Unauthorized, match=r"no ECR login: account=123456789012 region=eu-west-1: Unable to"):
        registry_login(ECR)


@pytest.mark.usefixtures("google")
def test_artifact_registry_login_is_the_service_accounts_token() -> None:
    assert registry_login(ARTIFACT_REGISTRY) == {"username": "oauth2accesstoken", "password": TOKEN}
    assert any("service-accounts/default/token" in path for path in Metadata.paths)


@pytest.mark.parametrize(
    "repository", ["127.0.0.1:5000/skerry", "docker.io/team/skerry", "ghcr.io/team/skerry", "dkr.ecr.evil.com/x"]
)
def test_other_registries_use_docker_login(repository: str) -> None:
    assert registry_login(repository) is None
