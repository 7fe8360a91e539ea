"""The command `skerry sandbox`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import boto3
from tests.infra.deploy.account import DIGEST, write_run
from tests.infra.deploy.test_company_rules import VERTEX
from tests.support.command_line import invoke

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

COMMANDS = ("plan", "apply --auto-approve", "destroy --yes --data")
SKERRY = [sys.executable, "-c", "from skerry.infra.cli.app import main; main()"]


def test_printed_variables_lead_to_an_account_of_the_commands_lifetime() -> None:
    command = [*SKERRY, "sandbox", "--aws", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        variables = json.loads(process.stdout.readline())
        client = boto3.client(
            "s3",
            endpoint_url=variables["AWS_ENDPOINT_URL"],
            region_name=variables["AWS_REGION"],
            aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
        )
        client.create_bucket(Bucket="mine")
        assert [bucket["Name"] for bucket in client.list_buckets()["Buckets"]] == ["mine"]
        assert not any(name.startswith("CLOUDSDK") for name in variables)
        process.send_signal(signal.SIGTERM)
        messages = process.stderr.read()
        assert process.wait(300) == 0
    assert messages == (
        "the sandbox is ready; jobs wait, because --run-jobs is not set; end it with Ctrl-C\n"
        "the sandbox ends, and everything in it is gone\n"
    )


def test_google_alone_is_played_without_docker(tmp_path: Path) -> None:
    """Its export lines lead a shell there, in which a spec for Vertex AI is applied and removed."""
    group = VERTEX.format(project="skerry-sandbox", digest=DIGEST)
    write_run(tmp_path, group, store="gs://acme-skerry/runs")
    environment = {**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock", "AWS_PROFILE": "mine"}
    lines = tmp_path / "sandbox.env"
    with (
        lines.open("w") as output,
        subprocess.Popen(
            [*SKERRY, "sandbox", "--google"], stdout=output, stderr=subprocess.PIPE, text=True, env=environment
        ) as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline().startswith("the sandbox is ready; jobs wait")
        script = "\n".join(["set -e; . ./sandbox.env", *(f'"$@" {command}' for command in COMMANDS)])
        shell = ["sh", "-c", script, "sh", *SKERRY]
        ended = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "  + vertex_job.v-0 created" in ended.stdout
    unset, *exports = lines.read_text().splitlines()
    assert unset.startswith("unset AWS_PROFILE ")
    assert {line.split("=")[0] for line in exports} >= {"export GOOGLE_CLOUD_PROJECT"}
    assert not [line for line in exports if not line.startswith("export ") or line.startswith("export AWS_")]


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skerry.testing.sandbox", None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    result = invoke("sandbox")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert result.exit_code == 2
    assert "pip install 'skerry[testing]'" in result.output
