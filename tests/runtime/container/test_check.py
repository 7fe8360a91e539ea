"""`skerry-replica check`: the machine, the identity to the store, and no secret in its output."""

from __future__ import annotations

import datetime as dt
import json
import os
import pwd
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.http_server import HttpReply, HttpRequest, HttpServer
from tests.support.container import clean_environment
from tests.support.container import hardware as machine

from skerry.runtime.clock import SystemClock
from skerry.runtime.container.check import Link, warnings_of
from skerry.runtime.container.hardware import Gpu, Hardware, Torch, usable_cores
from skerry.runtime.container.identify_cloud_account import CloudIdentity, identify
from skerry.runtime.container.privileges import find_user
from skerry.runtime.errors import Invalid
from skerry.runtime.store.credentials.aws_signature import AwsKeys, signed_headers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET: Final = "wJalrXUtnFEMI-secret"  # noqa: S105  not a real one
ARN: Final = "arn:aws:sts::123456789012:assumed-role/replica/i-1"


IDENTITIES: Final = {
    "/creds": json.dumps({"AccessKeyId": "AKIA", "SecretAccessKey": SECRET, "Token": "token-secret"}),
    "/": f"<R><Arn>{ARN}</Arn></R>",
    "/computeMetadata/v1/instance/service-accounts/default/email": "replica@acme.iam.gserviceaccount.com\n",
}


@pytest.fixture
def services() -> Iterator[HttpServer]:
    """STS, a container's credential service and Google's metadata server in one."""

    def respond(request: HttpRequest) -> HttpReply:
        body = IDENTITIES.get(request.path)
        return HttpReply(403) if body is None else HttpReply(body=body)

    with HttpServer(respond) as server:
        yield server


@pytest.fixture
def keys(services: HttpServer) -> dict[str, str]:
    """The environment of a job with keys."""
    endpoint = f"http://{services.host}"
    return {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": endpoint}


def test_keys_in_the_environment_are_identified_by_sts(services: HttpServer, keys: dict[str, str]) -> None:
    result = identify("s3://bucket/run", keys, SystemClock())
    assert result == CloudIdentity(source="environment (AWS_ACCESS_KEY_ID)", principal=ARN)
    (request,) = services.requests
    assert request.headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIA/")
    assert SECRET not in str(request)


def test_container_role_is_read_from_the_platforms_endpoint(services: HttpServer) -> None:
    url = f"http://{services.host}"
    environment = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{url}/creds", "AWS_ENDPOINT_URL_STS": url}
    result = identify("s3://bucket/run", environment, SystemClock())
    assert result == CloudIdentity(source="the container's role", principal=ARN)
    assert services.requests[1].headers["x-amz-security-token"] == "token-secret"


def test_google_metadata_names_the_service_account(services: HttpServer) -> None:
    result = identify("gs://bucket/run", {"GCE_METADATA_HOST": services.host}, SystemClock())
    assert result.principal == "replica@acme.iam.gserviceaccount.com"
    assert services.requests[0].headers["metadata-flavor"] == "Google"


@pytest.mark.parametrize(
    ("uri", "environment", "expected"),
    [
        (
            "s3://b/r",
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": ARN},
            CloudIdentity(source="web identity (/t)", principal=ARN),
        ),
        ("az://b/r", {"AZURE_STORAGE_ACCOUNT_NAME": "acme"}, CloudIdentity(source="environment", principal="acme")),
        ("gs://b/r", {"STORAGE_EMULATOR_HOST": "x"}, CloudIdentity(source="an emulator without credentials")),
        ("file:///r", {}, CloudIdentity(source="the file system")),
    ],
)
def test_identity_without_a_service_needs_no_request(
    uri: str, environment: dict[str, str], expected: CloudIdentity
) -> None:
    assert identify(uri, environment, SystemClock()) == expected


def test_unknown_identity_is_reported_with_its_problem(keys: dict[str, str]) -> None:
    environment = keys | {"AWS_ENDPOINT_URL": f"{keys['AWS_ENDPOINT_URL']}/no"}
    result = identify("s3://bucket/run", environment, SystemClock())
    assert (result.principal, result.problem) == (None, "127.0.0.1 responds with status 403")


def test_signature_equals_botocores() -> None:
    auth = pytest.importorskip("botocore.auth")
    requests = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials").Credentials("AKIA", SECRET, "token")
    now = dt.datetime(2026, 11, 21, 12, 0, 0, tzinfo=dt.UTC)
    ours = signed_headers(
        AwsKeys(name="AKIA", secret=SECRET, session="token"),
        service="sts",
        region="eu-west-1",
        host="sts.eu-west-1.amazonaws.com",
        headers={"content-type": "application/x-www-form-urlencoded; charset=utf-8"},
        body=b"Action=GetCallerIdentity&Version=2011-06-15",
        now=now,
    )
    request = requests.AWSRequest(
        method="POST",
        url="https://sts.eu-west-1.amazonaws.com/",
        data="Action=GetCallerIdentity&Version=2011-06-15",
        headers={"content-type": ours["content-type"]},
    )
    signer = auth.SigV4Auth(credentials, "sts", "eu-west-1")
    request.context["timestamp"] = now.strftime("%Y%m%dT%H%M%SZ")
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    request.headers["X-Amz-Security-Token"] = "token"
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert ours["authorization"].endswith(f"Signature={signer.signature(text, request)}")


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "skerry.runtime", "check", *arguments]
    environment = {**clean_environment(), **environment}
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_check_prints_text_then_json_without_secrets(tmp_path: Path, keys: dict[str, str]) -> None:
    result = check((tmp_path / "run").as_uri(), **keys)
    *text, last = result.stdout.splitlines()
    report = json.loads(last)
    assert (result.returncode, report["ok"]) == (0, True), result.stderr
    subjects = "store identity gpus torch shm disk bandwidth clock"
    assert {line.split()[0] for line in text} >= set(subjects.split())
    assert report["torch"]["version"].startswith("2.")
    assert "who" in report["identity"], "the key that programs read since the first version"
    assert report["link"]["up_mb_s"] > 0
    assert abs(report["link"]["offset_s"]) < 5
    assert SECRET not in result.stdout + result.stderr
    assert not list((tmp_path / "run" / "probe").glob("*")), "the objects of the measurement are deleted"


@pytest.mark.slow
def test_check_of_an_unknown_store_ends_with_20() -> None:
    result = check("--json", "http://x/y")
    assert result.returncode == 20
    assert json.loads(result.stdout)["error"].startswith("Invalid: unknown scheme http://")


@pytest.mark.parametrize(
    ("detected", "torch", "link", "expected"),
    [
        (machine(), Torch(version="2", cuda="13.0"), None, []),
        (machine(), Torch(error="no module"), None, ["torch cannot be imported: no module"]),
        (
            machine(n_gpus=1, gpus=(Gpu(name="L4", memory_mib=1, driver="550.1"),)),
            Torch(version="2", cuda="13.0"),
            None,
            ["1 GPUs, and torch cannot use them", "driver 550.1 is older than R580, which CUDA 13 requires"],
        ),
        (
            machine(),
            Torch(version="2"),
            Link(up_mb_s=1, down_mb_s=1, offset_s=-700.0),
            ["this clock is -700 s off the store's: signatures will be refused; set it by NTP"],
        ),
    ],
)
def test_warnings_name_possible_problems(
    detected: Hardware, torch: Torch, link: Link | None, expected: list[str]
) -> None:
    assert warnings_of(detected, torch, link) == expected


def test_usable_cores_follow_the_cgroup_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_user_is_a_name_or_numbers() -> None:
    root = pwd.getpwuid(0)
    assert (find_user("root").uid, find_user("0").home) == (0, root.pw_dir)
    without_entry = find_user("4242:4243")
    assert (without_entry.uid, without_entry.gid, without_entry.home) == (4242, 4243, "/tmp")  # noqa: S108
    with pytest.raises(Invalid, match="no such user in this image"):
        find_user("nobody-of-that-name")
