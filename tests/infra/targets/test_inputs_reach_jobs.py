"""Variables, secrets and data of a spec reach the jobs of each target, which are real processes with the job's rights.

A value is found in the environment of the training command only: not in plans, state, logs, requests or the bucket.
Jobs outside of the clouds have the keys of a user of AWS with the rights of a replica; pods also have roles, for which
they exchange the tokens of their service accounts, and identities in a pool of Google.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import Operator, skerry
from tests.infra.targets.runs import (
    BatchRun,
    ClusterAndAccount,
    HfJobsRun,
    KubernetesRun,
    ModalRun,
    SageMakerRun,
    TargetRun,
    VertexRun,
)
from tests.support.slurmsite import SlurmSite, slurm_site, until

from skerry.infra.clouds.aws.policies import document, replica_policy, text_of
from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.spec.env_secrets_and_data import Inputs, Secret
from skerry.runtime.store import open_store
from skerry.testing.calls import Calls
from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.huggingface import HuggingFaceSandbox
from skerry.testing.kubernetes import KubernetesSandbox
from skerry.testing.modal_cloud import ModalSandbox
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


USER: Final = "guest"


class SlurmCalls:
    """A real Slurm cluster, as the sandboxes of other services are driven."""

    def __init__(self, site: SlurmSite) -> None:
        self.site = site
        self.environment = site.environment
        self.variables: dict[str, str] = {}
        self.calls = Calls()

    @property
    def jobs(self) -> SlurmCalls:
        return self

    def wait(self, job: str, within_s: float) -> None:
        del within_s
        until(lambda: job not in self.site.call("squeue", "--noheader", "--format=%i").split())

    def inventory(self) -> dict[str, tuple[str, ...]]:
        queue = tuple(self.site.call("squeue", "--noheader", "--format=%i").split())
        return {"job": queue} if queue else {}


class SlurmRun(HfJobsRun):
    KIND = "slurm_job"

    def group(self, count: int, options: str) -> str:
        del options
        target = f'kind: slurm, python: {sys.executable}, partition: main, time: 1h, setup: [". ~/store-keys"]'
        return f"  - {{name: a, count: {count}, target: {{{target}}}}}\n"


class PodRoleRun(KubernetesRun):
    """Pods without a Secret for the store, in an account that trusts the cluster."""

    def group(self, count: int, options: str) -> str:
        del options
        return super().group(count, "keyless")


class ClusterAndProject(ClusterAndAccount):
    """A cluster, and the project of Google with the store."""

    def __init__(self, cluster: KubernetesSandbox, project: GoogleSandbox) -> None:
        self.cluster, self.account = cluster, project
        region = {"CLOUDSDK_COMPUTE_REGION": "us-central1"}
        self.environment = {**project.environment, **cluster.environment, **region}


class PodPoolRun(PodRoleRun):
    """Pods outside of GKE with a store in Cloud Storage."""

    def write_spec(self, **values: Any) -> Path:
        return super().write_spec(**{"store": "gs://acme-skerry/runs", **values})


@pytest.fixture
def project_guest(google_project: GoogleSandbox) -> Iterator[ClusterAndProject]:
    with KubernetesSandbox() as cluster:
        cluster.job_runs.containers = Processes()
        google_project.exchange.issuers[cluster.tokens.url] = cluster.tokens.keys
        names = ("STORAGE", "SECRETMANAGER")
        endpoints = [f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}" for name in names]
        cluster.variables.update({name: google_project.environment[name] for name in endpoints})
        yield ClusterAndProject(cluster, google_project)
        assert cluster.violations == []
        assert google_project.violations == []


@pytest.fixture
def keys(aws_account: Sandbox) -> dict[str, str]:
    """The keys of a user without rights: `spec_of` gives it those of a replica."""
    iam = aws_account.client("iam")
    iam.create_user(UserName=USER)
    key = iam.create_access_key(UserName=USER)["AccessKey"]
    return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}


@pytest.fixture
def guest(request: pytest.FixtureRequest, aws_account: Sandbox, keys: dict[str, str]) -> Iterator[ClusterAndAccount]:
    """A service outside of the clouds, whose jobs are processes, and the account with the store."""
    kind: type[TargetRun] = request.node.callspec.params["run"]
    within = {
        "AWS_ENDPOINT_URL": aws_account.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_DEFAULT_REGION": aws_account.region,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    with service_of(kind, keys, within) as service:
        service.variables.update(within)
        if kind is PodRoleRun:
            trust_cluster(aws_account, service)
        place = ClusterAndAccount(service, aws_account)
        place.environment |= {"REPLICA_KEY_ID": keys["AWS_ACCESS_KEY_ID"]}
        place.environment |= {"REPLICA_SECRET_KEY": keys["AWS_SECRET_ACCESS_KEY"]}
        yield place


def trust_cluster(account: Sandbox, cluster: KubernetesSandbox) -> None:
    account.issuers[cluster.tokens.url] = cluster.tokens.keys
    account.client("iam").create_open_id_connect_provider(
        Url=cluster.tokens.url, ClientIDList=["sts.amazonaws.com"], ThumbprintList=["0" * 40]
    )


@contextmanager
def service_of(kind: type[TargetRun], keys: Mapping[str, str], within: Mapping[str, str]) -> Iterator[Any]:
    if issubclass(kind, KubernetesRun):
        with KubernetesSandbox(keys=keys) as cluster:
            cluster.job_runs.containers = Processes()
            cluster.add("secrets", {"metadata": {"name": "hf"}, "stringData": {"token": VALUE, "other": "another"}})
            yield cluster
            assert cluster.violations == []
    elif kind is HfJobsRun:
        with HuggingFaceSandbox(processes=True) as hub:
            yield hub
            assert hub.violations == []
    elif kind is ModalRun:
        with ModalSandbox(processes=True, keys=keys) as modal:
            yield modal
    else:
        with slurm_site() as site:
            file = site.folder / "home/store-keys"
            file.touch(0o600)
            file.write_text("".join(f"export {name}={value}\n" for name, value in {**within, **keys}.items()))
            yield SlurmCalls(site)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> TargetRun:
    kind: type[TargetRun] = request.param
    fixtures: dict[type[TargetRun], str] = {
        VertexRun: "google_project",
        BatchRun: "aws_account",
        SageMakerRun: "aws_account",
        PodPoolRun: "project_guest",
    }
    return kind(tmp_path, request.getfixturevalue(fixtures.get(kind, "guest")))


def aws_secrets(sandbox: Sandbox) -> dict[str, dict[str, str]]:
    manager = sandbox.client("secretsmanager")
    token = manager.create_secret(Name="team/token", SecretString=json.dumps({"hf": VALUE}))["ARN"]
    manager.create_secret(Name="team/other", SecretString="another")
    sandbox.client("ssm").put_parameter(Name="/inner", Value=PARAMETER, Type="SecureString")
    inner = f"arn:aws:ssm:us-east-1:{sandbox.account}:parameter/inner"
    return {"TOKEN": {"aws_secretsmanager": token, "key": "hf"}, "INNER": {"aws_ssm": inner}}


def guest_secrets(run: TargetRun) -> dict[str, dict[str, str]]:
    """Those of AWS, one of them in the cluster itself if it can be, with the rights of the user on them."""
    account: Sandbox = run.sandbox.account
    secrets = aws_secrets(account)
    if isinstance(run, KubernetesRun):
        secrets["TOKEN"] = {"kubernetes_secret": "hf", "key": "token"}
    if isinstance(run, PodRoleRun):
        return secrets
    given = {name: Secret(**reference) for name, reference in secrets.items()}
    rights = {
        "run": replica_policy(bucket_arn="arn:aws:s3:::acme-skerry", prefix="runs/tiny", slots=("a-0",), group=None),
        "inputs": input_policy(Inputs(secrets=given, data={"corpus": "s3://acme-data/corpus"}), "aws"),
    }
    for name, statements in rights.items():
        account.client("iam").put_user_policy(
            UserName=USER, PolicyName=name, PolicyDocument=text_of(document(statements))
        )
    return secrets


def make_google_secret(sandbox: GoogleSandbox, name: str, value: str) -> str:
    parent = f"/v1/projects/{sandbox.project}/secrets"
    assert sandbox.call("POST", f"{parent}?secretId={name}", {"replication": {"automatic": {}}})[0] == 200
    payload = {"payload": {"data": base64.b64encode(value.encode()).decode()}}
    assert sandbox.call("POST", f"{parent}/{name}:addVersion", payload)[0] == 200
    return f"projects/{sandbox.project}/secrets/{name}"


def google_secrets(sandbox: GoogleSandbox) -> dict[str, dict[str, str]]:
    token = make_google_secret(sandbox, "token", json.dumps({"hf": VALUE}))
    inner = make_google_secret(sandbox, "inner", PARAMETER)
    first = {"google_secret": f"{token}/versions/1", "key": "hf"}
    return {"TOKEN": first, "INNER": {"google_secret": f"{inner}/versions/latest"}}


ON_GOOGLE: Final = (VertexRun, PodPoolRun)


def spec_of(run: TargetRun) -> Path:
    is_google = isinstance(run, ON_GOOGLE)
    if isinstance(run.sandbox, ClusterAndProject):
        secrets = google_secrets(run.sandbox.account)
    elif isinstance(run.sandbox, ClusterAndAccount):
        secrets = guest_secrets(run)
    else:
        secrets = google_secrets(run.sandbox) if is_google else aws_secrets(run.sandbox)
    data = f"data: {{corpus: {'gs' if is_google else 's3'}://acme-data/corpus}}\n"
    more = f"limits: {{max_hours: 24}}\nenv: {{COLOUR: green}}\nsecrets: {json.dumps(secrets)}\n{data}"
    path = run.write_spec(count=1, more=more)
    (run.folder / "train" / "train.py").write_text(SCRIPT)
    return path


def written(run: TargetRun, variables: Mapping[str, str]) -> bytes:
    """Everything in the run's bucket and on the operator's disk."""
    uri = "gs://acme-skerry" if isinstance(run, ON_GOOGLE) else "s3://acme-skerry"
    store = open_store(uri, environment=variables)
    objects = b"".join(store.read(entry.key) or b"" for entry in store.list(""))
    return objects + b"".join(file.read_bytes() for file in run.folder.rglob("*") if file.is_file())


IN_CLOUDS: Final = (BatchRun, SageMakerRun, VertexRun)
WITH_RIGHTS: Final = (*IN_CLOUDS, PodRoleRun, PodPoolRun)
GUESTS: Final = (KubernetesRun, PodRoleRun, PodPoolRun, HfJobsRun, ModalRun, SlurmRun)


@pytest.mark.parametrize("run", [*IN_CLOUDS, *GUESTS], indirect=True, ids=lambda kind: kind.__name__)
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
    if isinstance(run, WITH_RIGHTS):
        assert re.search(r"ssm:GetParameter|roles/secretmanager.secretAccessor", texts[0])
    assert "warning: data" not in texts[0]
    assert "cannot send a request" not in texts[0]
    requests = repr([(call.params, getattr(call, "body", None)) for call in run.sandbox.calls])
    if not isinstance(run, SlurmRun):
        assert "SKERRY_SECRET_INNER" in requests
    for value in (VALUE, PARAMETER):
        assert value not in "".join(texts)
        assert value not in requests
        assert value.encode() not in written(run, run.environment)
    skerry("destroy", str(path), "--yes", "--data")
    left = run.sandbox.inventory()
    assert left.keys() <= {"bucket", "identity provider", "secret", "user"}
    assert left["bucket"] == ("acme-data",)
