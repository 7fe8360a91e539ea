"""Variables, secrets and data of a spec reach the jobs of each target, which are real processes with the job's rights.

A value is found in the environment of the training command only: not in plans, state, logs, requests or the bucket.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Final

import pytest
from tests.infra.deploy.account import Operator, skerry
from tests.infra.targets.runs import BatchRun, SageMakerRun, TargetRun, VertexRun

from skerry.runtime.store import open_store
from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.processes import Processes
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.slow

VALUE: Final = "kaffee-und-kuchen-4711"
PARAMETER: Final = "tee-und-torte-0815"
SCRIPT: Final = """\
import hashlib, os
from skerry.runtime.errors import SkerryError
from skerry.runtime.store import open_store

def digest(name):
    return hashlib.sha256(os.environ[name].encode()).hexdigest()

print("RESULT", os.environ["COLOUR"], digest("TOKEN"), digest("INNER"))
corpus = open_store(os.environ["SKERRY_DATA_CORPUS"])
print("DATA", [entry.key for entry in corpus.list("")], bytes(corpus.read("a.txt")))
try:
    print("OTHER", open_store(os.environ["SKERRY_DATA_CORPUS"] + "-private").read("x.txt"))
except SkerryError as error:
    print("OTHER", type(error).__name__)
"""
OBJECTS: Final = {"corpus/a.txt": b"words", "corpus-private/x.txt": b"not yours"}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def aws_account() -> Iterator[Sandbox]:
    with Sandbox(enforce_iam=True, registry="127.0.0.1:1", network="host", stop_grace_s=1000) as sandbox:
        sandbox.any_image = True
        for jobs in (sandbox.batch, sandbox.training):
            jobs.containers = Processes()
        s3 = sandbox.client("s3")
        s3.create_bucket(Bucket="acme-data")
        for key, data in OBJECTS.items():
            s3.put_object(Bucket="acme-data", Key=key, Body=data)
        yield sandbox


@pytest.fixture
def google_project() -> Iterator[GoogleSandbox]:
    with GoogleSandbox(registry="127.0.0.1:1") as sandbox:
        sandbox.any_image = True
        sandbox.job_runs.containers = Processes()
        sandbox.enable("secretmanager.googleapis.com")
        body = {"name": "acme-data", "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
        assert sandbox.call("POST", f"/storage/v1/b?project={sandbox.project}", body)[0] == 200
        for key, data in OBJECTS.items():
            open_store("gs://acme-data", environment=sandbox.environment).create(key, data)
        yield sandbox


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> TargetRun:
    kind: type[TargetRun] = request.param
    return kind(tmp_path, request.getfixturevalue("google_project" if kind is VertexRun else "aws_account"))


def aws_secrets(sandbox: Sandbox) -> str:
    manager = sandbox.client("secretsmanager")
    token = manager.create_secret(Name="team/token", SecretString=json.dumps({"hf": VALUE}))["ARN"]
    manager.create_secret(Name="team/other", SecretString="another")
    sandbox.client("ssm").put_parameter(Name="/inner", Value=PARAMETER, Type="SecureString")
    inner = f"arn:aws:ssm:us-east-1:{sandbox.account}:parameter/inner"
    return f"secrets: {{TOKEN: {{aws_secretsmanager: '{token}', key: hf}}, INNER: {{aws_ssm: '{inner}'}}}}\n"


def make_google_secret(sandbox: GoogleSandbox, name: str, value: str) -> str:
    parent = f"/v1/projects/{sandbox.project}/secrets"
    assert sandbox.call("POST", f"{parent}?secretId={name}", {"replication": {"automatic": {}}})[0] == 200
    payload = {"payload": {"data": base64.b64encode(value.encode()).decode()}}
    assert sandbox.call("POST", f"{parent}/{name}:addVersion", payload)[0] == 200
    return f"projects/{sandbox.project}/secrets/{name}"


def google_secrets(sandbox: GoogleSandbox) -> str:
    token = make_google_secret(sandbox, "token", json.dumps({"hf": VALUE}))
    inner = make_google_secret(sandbox, "inner", PARAMETER)
    first, second = f"google_secret: {token}/versions/1, key: hf", f"google_secret: {inner}/versions/latest"
    return f"secrets: {{TOKEN: {{{first}}}, INNER: {{{second}}}}}\n"


def spec_of(run: TargetRun) -> Path:
    is_google = isinstance(run, VertexRun)
    secrets = google_secrets(run.sandbox) if is_google else aws_secrets(run.sandbox)
    data = f"data: {{corpus: {'gs' if is_google else 's3'}://acme-data/corpus}}\n"
    path = run.write_spec(count=1, more=f"limits: {{max_hours: 24}}\nenv: {{COLOUR: green}}\n{secrets}{data}")
    (run.folder / "train" / "train.py").write_text(SCRIPT)
    return path


def written(run: TargetRun, variables: Mapping[str, str]) -> bytes:
    """Everything in the run's bucket and on the operator's disk."""
    uri = "gs://acme-skerry" if isinstance(run, VertexRun) else "s3://acme-skerry"
    store = open_store(uri, environment=variables)
    objects = b"".join(store.read(entry.key) or b"" for entry in store.list(""))
    return objects + b"".join(file.read_bytes() for file in run.folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("run", [BatchRun, SageMakerRun, VertexRun], indirect=True, ids=lambda kind: kind.KIND)
def test_job_gets_inputs_and_no_value_is_stored(run: TargetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in run.environment.items():
        monkeypatch.setenv(name, text)
    path = spec_of(run)
    run.sandbox.calls.clear()
    texts = [skerry("plan", str(path), "-v").output]
    texts.append(skerry("apply", str(path), "--auto-approve").output)
    (job,) = run.jobs(Operator(path, run.environment)).values()
    run.driver.wait(job, within_s=120)
    lines = skerry("logs", str(path)).output
    texts += [lines, skerry("status", str(path)).output]
    assert f"RESULT green {sha256(VALUE)} {sha256(PARAMETER)}" in lines, lines
    assert "DATA ['a.txt'] b'words'" in lines
    assert "OTHER Unauthorized" in lines
    assert '\n  COLOUR="green"\n' in texts[0]
    assert "\n  TOKEN: the secret " in texts[0]
    assert "://acme-data/corpus\n" in texts[0]
    assert re.search(r"secretsmanager:GetSecretValue|roles/secretmanager.secretAccessor", texts[0])
    assert "warning: data" not in texts[0]
    requests = repr([(call.params, getattr(call, "body", None)) for call in run.sandbox.calls])
    assert "SKERRY_SECRET_TOKEN" in requests
    for value in (VALUE, PARAMETER):
        assert value not in "".join(texts)
        assert value not in requests
        assert value.encode() not in written(run, run.environment)
    skerry("destroy", str(path), "--yes", "--data")
    left = run.sandbox.inventory()
    assert left.keys() <= {"bucket", "secret"}
    assert left["bucket"] == ("acme-data",)
