"""`skerry-replica check`: what it finds, whom it finds, and that it never tells a secret."""

from __future__ import annotations

import datetime as dt
import http.server
import json
import os
import pwd
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Final

import pytest
from tests.support.entry import surroundings

from skerry.runtime.clock import SystemClock
from skerry.runtime.entry.identity import Identity, identity, signed_headers
from skerry.runtime.entry.machine import Gpu, Machine, Torch, cores
from skerry.runtime.entry.preflight import Link, warnings_of
from skerry.runtime.entry.privileges import user_of
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET: Final = "wJalrXUtnFEMI-secret"  # noqa: S105  nobody's
ARN: Final = "arn:aws:sts::123456789012:assumed-role/replica/i-1"


class Answers(http.server.BaseHTTPRequestHandler):
    """STS, a container's credentials and Google's metadata in one: each knows its own path."""

    asked: list[tuple[str, dict[str, str]]]

    def _answer(self) -> None:
        type(self).asked.append((self.path, {name.lower(): text for name, text in self.headers.items()}))
        body = {
            "/creds": json.dumps({"AccessKeyId": "AKIA", "SecretAccessKey": SECRET, "Token": "token-secret"}),
            "/": f"<R><Arn>{ARN}</Arn></R>",
            "/computeMetadata/v1/instance/service-accounts/default/email": "replica@acme.iam.gserviceaccount.com\n",
        }.get(self.path, "")
        self.send_response(200 if body else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_GET = do_POST = _answer  # noqa: N815  the names that the base class looks for

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answers() -> Iterator[str]:
    Answers.asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_keys_in_the_environment_are_asked_whose_they_are(answers: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": f"http://{answers}"}
    found = identity("s3://bucket/run", keys, SystemClock())
    assert found == Identity(source="environment (AWS_ACCESS_KEY_ID)", who=ARN)
    ((_, headers),) = Answers.asked
    assert headers["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIA/")
    assert SECRET not in json.dumps(headers)


def test_a_containers_role_is_asked_for_where_the_platform_says(answers: str) -> None:
    told = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"http://{answers}/creds",
        "AWS_ENDPOINT_URL_STS": f"http://{answers}",
    }
    found = identity("s3://bucket/run", told, SystemClock())
    assert found == Identity(source="the container's role", who=ARN)
    assert Answers.asked[1][1]["x-amz-security-token"] == "token-secret"


def test_googles_machine_says_its_service_account(answers: str) -> None:
    found = identity("gs://bucket/run", {"GCE_METADATA_HOST": answers}, SystemClock())
    assert found.who == "replica@acme.iam.gserviceaccount.com"
    assert Answers.asked[0][1]["metadata-flavor"] == "Google"


@pytest.mark.parametrize(
    ("uri", "environment", "expected"),
    [
        (
            "s3://b/r",
            {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": ARN},
            Identity(source="web identity (/t)", who=ARN),
        ),
        ("az://b/r", {"AZURE_STORAGE_ACCOUNT_NAME": "acme"}, Identity(source="environment", who="acme")),
        ("gs://b/r", {"STORAGE_EMULATOR_HOST": "x"}, Identity(source="an emulator, which asks nobody")),
        ("file:///r", {}, Identity(source="the file system")),
    ],
)
def test_others_are_known_without_asking(uri: str, environment: dict[str, str], expected: Identity) -> None:
    assert identity(uri, environment, SystemClock()) == expected


def test_nobody_who_answers_is_an_answer_too(answers: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": f"http://{answers}/no"}
    found = identity("s3://bucket/run", keys, SystemClock())
    assert (found.who, found.problem) == (None, f"{answers.partition(':')[0]} answers with status 403")


def test_signatures_are_as_botocore_makes_them() -> None:
    auth = pytest.importorskip("botocore.auth")
    requests = pytest.importorskip("botocore.awsrequest")
    credentials = pytest.importorskip("botocore.credentials").Credentials("AKIA", SECRET, "token")
    now = dt.datetime(2026, 11, 21, 12, 0, 0, tzinfo=dt.UTC)
    ours = signed_headers("AKIA", SECRET, "token", region="eu-west-1", host="sts.eu-west-1.amazonaws.com", now=now)
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


@pytest.mark.slow
def test_it_prints_text_and_ends_with_json_and_tells_no_secret(tmp_path: Path, answers: str) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIA", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL": f"http://{answers}"}
    words = [sys.executable, "-m", "skerry.runtime", "check", (tmp_path / "run").as_uri()]
    ended = subprocess.run(
        words, env={**surroundings(), **keys}, capture_output=True, text=True, check=False, timeout=60
    )
    *text, last = ended.stdout.splitlines()
    found = json.loads(last)
    assert (ended.returncode, found["ok"]) == (0, True), ended.stderr
    assert {line.split()[0] for line in text} >= {"store", "who", "gpus", "torch", "shm", "disk", "bandwidth", "clock"}
    assert found["torch"]["version"].startswith("2.")
    assert found["link"]["up_mb_s"] > 0
    assert abs(found["link"]["offset_s"]) < 5
    assert SECRET not in ended.stdout + ended.stderr
    assert not list((tmp_path / "run" / "probe").glob("*")), "what was measured with is gone"


@pytest.mark.slow
def test_a_store_that_cannot_hold_a_run_is_exit_code_20(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "skerry.runtime", "check", "--json", "http://x/y"]
    ended = subprocess.run(words, env=dict(surroundings()), capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 20
    assert json.loads(ended.stdout)["error"].startswith("Invalid: no store for http://")


def here(**changes: object) -> Machine:
    plenty = {
        "memory_bytes": 1 << 34,
        "shm_bytes": 1 << 33,
        "disk_free_bytes": 1 << 36,
        "n_gpus": 0,
        "gpus": (),
        "uid": 1,
    }
    return Machine(cores=4.0, **(plenty | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "torch", "link", "expected"),
    [
        (here(), Torch(version="2", cuda="13.0"), None, []),
        (here(), Torch(error="no module"), None, ["torch cannot be imported: no module"]),
        (
            here(n_gpus=1, gpus=(Gpu(name="L4", memory_mib=1, driver="550.1"),)),
            Torch(version="2", cuda="13.0"),
            None,
            ["1 GPUs, and torch cannot use them", "driver 550.1 is older than R580, which CUDA 13 wants"],
        ),
        (
            here(),
            Torch(version="2"),
            Link(up_mb_s=1, down_mb_s=1, offset_s=-700.0),
            ["this clock is -700 s off the store's: signatures will be refused; set it by NTP"],
        ),
    ],
)
def test_what_may_hurt_is_warned_of(machine: Machine, torch: Torch, link: Link | None, expected: list[str]) -> None:
    assert warnings_of(machine, torch, link) == expected


def test_cores_are_those_of_the_containers_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == len(os.sched_getaffinity(0))
    assert cores(tmp_path / "none") == len(os.sched_getaffinity(0))


def test_whom_to_become_is_a_name_or_numbers() -> None:
    me = pwd.getpwuid(0)
    assert (user_of("root").uid, user_of("0").home) == (0, me.pw_dir)
    stranger = user_of("4242:4243")
    assert (stranger.uid, stranger.gid, stranger.home) == (4242, 4243, "/tmp")  # noqa: S108
    with pytest.raises(Invalid, match="no such user in this image"):
        user_of("nobody-of-that-name")
