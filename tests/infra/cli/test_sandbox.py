"""The command `skerry sandbox`: what it prints, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import boto3
from tests.support.command_line import invoke

if TYPE_CHECKING:
    import pytest

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
        assert process.wait(60) == 0
    assert messages == (
        "the sandbox is ready; jobs wait, because --run-jobs is not set; end it with Ctrl-C\n"
        "the sandbox ends, and everything in it is gone\n"
    )


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skerry.testing.sandbox", None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    result = invoke("sandbox")
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert result.exit_code == 2
    assert "pip install 'skerry[testing]'" in result.output
