"""These tests themselves, run against sandboxes as a user runs them against accounts: by variables, in a process.

Jobs are processes of this machine, each with the rights that its role has. Not tried here: what an account does that
no sandbox does, which is what the tests are for.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
from tests.cloud import ladder
from tests.cloud import settings as names
from tests.cloud.place import CLOUDS, Place
from tests.cloud.transcript import ROOT
from tests.e2e.conftest import until
from tests.support.command_line import invoke
from tests.support.forked import ForkedProcess
from tests.support.forked_replica import ForkedReplicas

from skerry.infra import targets
from skerry.infra.run import check_machine_and_store
from skerry.runtime.errors import Invalid
from skerry.testing.both_clouds import Clouds
from skerry.testing.google import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

pytestmark = pytest.mark.slow

DIGEST: Final = f"sha256:{'1' * 64}"
SERVICES: Final = ("aiplatform", "artifactregistry", "cloudresourcemanager", "iam", "iamcredentials", "logging", "sts")
# Tests of stores: those that use each fixture, and the races. The race on S3 is left out: moto has no lock, so both
# writers may get a success. Tests of handlers: those that need the most rights in each kind, and one that kills a
# process. Other tests run both suites whole against the sandboxes.
LADDER: Final = (
    "account or runs or create_of_an_existing or replace_overwrites or listed_as_soon or (TestGoogle and racing)"
    " or read_as_desired or (killed_create and LogGroups) or (list_owned and Buckets)"
)
# One test for each thing that a stage does, and not all that the suite asks: that is asked of the sandboxes elsewhere.
EXECUTORS: Final = "gets_the_contract or (TestBatch and (failed_start or killed_replica or cancel_ends))"


KINDS_OUTSIDE: Final = ("kubernetes", "slurm", "hf_jobs", "modal")
OTHERS: Final = {names.KUBERNETES_NAMESPACE, names.SLURM_PYTHON, names.HF_NAMESPACE, names.MODAL_ENVIRONMENT}
"""The first setting of each place outside both clouds."""


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(environment: Mapping[str, str], *words: str) -> Ended:
    imported = "ignore::pytest.PytestAssertRewriteWarning"  # this process has it from the one that it is forked from
    with started(
        ["-m", "pytest", "-p", "no:cacheprovider", "-W", imported, "-q", "-m", "cloud", *words], environment
    ) as (_, ended):
        return ended()


def climb(environment: Mapping[str, str], folder: Path, *words: str) -> Ended:
    with climbing(environment, folder, *words) as (_, ended):
        return ended()


def climbing(
    environment: Mapping[str, str], folder: Path, *words: str
) -> AbstractContextManager[tuple[ForkedProcess, Callable[[], Ended]]]:
    limited = {**environment, names.MAX_USD: "20"}
    return started(["-m", "tests.cloud.ladder", "--folder", str(folder), *words], limited)


@contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[ForkedProcess, Callable[[], Ended]]]:
    """A process with these variables alone, and what waits for its end."""
    home = {"PATH": os.environ["PATH"], "HOME": os.devnull}
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with ForkedProcess(command, {**home, **environment}, output, errors=errors) as process:
            yield process, lambda: Ended(process.wait(600), output.read_text(), errors.read_text())


def results(page: str) -> dict[str, str]:
    """The result of each rung, from the table of a page."""
    rows = re.findall(r"^\| ([\w-]+) \| (passed|stopped|interrupted|not \w+)\b", page, re.MULTILINE)
    return dict(rows)


def counts(response: Ended) -> dict[str, int]:
    """passed, failed, skipped, ... by the last line."""
    return {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", response.stdout.splitlines()[-1])}


@pytest.fixture
def clouds() -> Iterator[Clouds]:
    aws = Sandbox(enforce_iam=True, registry="127.0.0.1:1", network="host", stop_grace_s=1000)
    with aws, GoogleSandbox(registry="127.0.0.1:1", object_rate=True) as google:
        aws.client("ecr").create_repository(repositoryName="skerry")
        google.enable(*(f"{name}.googleapis.com" for name in SERVICES))
        place = f"/v1/projects/{google.project}/locations/us-central1/repositories"
        status, created = google.call("POST", f"{place}?repositoryId=skerry", {"format": "DOCKER"})
        assert status == 200, created
        google.repositories.push("us-central1", "skerry", "replica", DIGEST)
        aws.any_image = google.any_image = True
        for jobs in (aws.batch, aws.training, google.job_runs):
            jobs.containers = ForkedReplicas()
        both = Clouds(aws=aws, google=google)
        aws.calls.clear()
        before = both.aws.inventory(), both.google.inventory()
        yield both
        assert google.violations == []
        assert (both.aws.inventory(), both.google.inventory()) == before


@pytest.fixture
def account(clouds: Clouds) -> dict[str, str]:
    """The settings of a user."""
    return {
        **clouds.environment,
        names.AWS_REGION: "us-east-1",
        names.AWS_IMAGE: f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@{DIGEST}",
        names.SAGEMAKER_USD: "0.115",
        names.GOOGLE_PROJECT: clouds.google.project,
        names.GOOGLE_REGION: "us-central1",
        names.GOOGLE_IMAGE: f"us-central1-docker.pkg.dev/{clouds.google.project}/skerry/replica@{DIGEST}",
        names.MAX_USD: "100",
        names.HASTE: "20",
    }


def test_jobs_of_each_executor_pass_and_nothing_is_left(account: dict[str, str]) -> None:
    response = run(account, "tests/cloud/test_executors.py", "-k", EXECUTORS)
    assert response.returncode == 0, response.stdout[-8000:] + response.stderr[-2000:]
    assert "skipped" not in counts(response)


def test_whole_ladder_passes_and_its_page_has_no_id(account: dict[str, str], clouds: Clouds, tmp_path: Path) -> None:
    response = climb({**account, "PYTEST_ADDOPTS": f"-k '{LADDER}'"}, tmp_path)
    assert response.returncode == 0, response.stdout[-8000:] + response.stderr[-2000:]
    (path,) = tmp_path.glob("*-rehearsal.md")
    page = path.read_text()
    assert results(page) == {
        **dict.fromkeys(("account", "stores-aws", "stores-google", "handlers-aws", "handlers-google"), "passed"),
        **dict.fromkeys(KINDS_OUTSIDE, "not configured"),
        **dict.fromkeys((*CLOUDS, "mixed", "spot"), "passed"),
    }
    assert page in response.stdout
    for number, name in enumerate(KINDS_OUTSIDE, 6):
        assert f"rung {number} of 14, {name}: not configured: set SKERRY_CLOUD_" in response.stdout
    assert re.search(
        r"rung 10 of 14, aws_batch: one job in aws_batch\n  at most \$0\.20: 2 h of \$0\.10/h", response.stdout
    )
    assert "3 of 3 rounds; all 3 replicas in 3 of them" in page
    assert DIGEST in page
    private = {text for name, text in clouds.environment.items() if re.search("KEY|TOKEN|PROJECT", name)}
    for text in {"123456789012", clouds.google.project, str(ROOT), *private}:
        assert text not in page, text
    # As a word: a short name can be a part of a random one.
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", page)


def test_ladder_stops_at_a_surprise_and_goes_on_until_ctrl_c(
    account: dict[str, str], clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_aws = {name: text for name, text in account.items() if name not in {names.GOOGLE_PROJECT, names.AWS_IMAGE}}
    only_aws["PYTEST_ADDOPTS"] = "-k 'caller or replace_overwrites'"
    clouds.aws.fail(how="deny", on="s3:DeleteBucket", times=None)
    response = climb(only_aws, tmp_path)
    assert response.returncode == ladder.SURPRISE, response.stdout[-8000:]
    assert "stopped at rung stores-aws by a surprise:" in response.stdout
    assert "LEFT in the account" in response.stdout
    assert "s3:DeleteBucket" in response.stdout
    assert "rung 4 of 14" not in response.stdout
    assert "--ladder --from stores-aws" in response.stdout
    (page,) = tmp_path.glob("*-rehearsal.md")
    stopped = results(page.read_text())
    assert (stopped["account"], stopped["stores-aws"], stopped["stores-google"]) == ("passed", "stopped", "not started")
    clouds.aws.heal()
    for name, text in clouds.environment.items():
        monkeypatch.setenv(name, text)
    # By the command that was printed.
    ((command, folder),) = re.findall(r"take it away:  (skerry destroy .*) && rm -r (.*)", response.stdout)
    assert invoke(*shlex.split(command)[1:]).exit_code == 0
    shutil.rmtree(folder)
    clouds.aws.calls.clear()
    clouds.aws.fail(how="throttle", on="s3:CreateBucket", times=None)
    with climbing(only_aws, tmp_path, "--from", "stores-aws") as (process, ended):
        # In the middle of an apply, which catches the signal and ends well. It cannot end before.
        until(lambda: any(call.name == "s3:CreateBucket" for call in clouds.aws.calls))
        process.send_signal(signal.SIGINT)
        clouds.aws.heal()
        response = ended()
    assert response.returncode == ladder.INTERRUPTED, response.stdout[-8000:]
    assert "interrupted in rung stores-aws; nothing is left" in response.stdout
    assert results(page.read_text())["stores-aws"] == "interrupted"


def test_ctrl_c_during_the_cleaning_names_what_is_left(
    account: dict[str, str], clouds: Clouds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_aws = {name: text for name, text in account.items() if name not in {names.GOOGLE_PROJECT, names.AWS_IMAGE}}
    only_aws["PYTEST_ADDOPTS"] = "-k 'caller or replace_overwrites or (TestRoles and keeps_the_order)'"
    clouds.aws.fail(how="throttle", on="iam:DeleteRole", times=None)
    with climbing(only_aws, tmp_path) as (process, ended):
        until(lambda: any(call.name == "iam:DeleteRole" for call in clouds.aws.calls))
        process.send_signal(signal.SIGINT)
        response = ended()
    assert response.returncode == ladder.INTERRUPTED, response.stdout[-8000:]
    assert "interrupted in rung handlers-aws; something may still run" in response.stdout
    clouds.aws.heal()
    for name, text in clouds.environment.items():
        monkeypatch.setenv(name, text)
    for command in re.findall(r"take it away:  skerry (destroy .*) && rm -r", response.stdout):
        assert invoke(*shlex.split(command)).exit_code == 0


def test_a_bucket_of_the_users_own_is_empty_again(account: dict[str, str], clouds: Clouds) -> None:
    s3, name = clouds.aws.client("s3"), "theirs"
    s3.create_bucket(Bucket=name)
    body = {"name": name, "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}}}
    status, created = clouds.google.call("POST", f"/storage/v1/b?project={clouds.google.project}", body)
    assert status == 200, created
    own = {names.AWS_BUCKET: name, names.GOOGLE_BUCKET: name}
    response = run({**account, **own}, "tests/cloud/test_stores.py", "-k", "replace_overwrites")
    assert counts(response)["passed"] == 2, response.stdout[-4000:]
    assert any(call.service == "s3" and call.writes and name in str(call.params) for call in clouds.aws.calls)
    assert "Contents" not in s3.list_objects_v2(Bucket=name)
    assert not clouds.google.objects.buckets[name].objects
    s3.delete_bucket(Bucket=name)
    assert clouds.google.call("DELETE", f"/storage/v1/b/{name}")[0] == 204


@pytest.fixture
def ear() -> Iterator[socket.socket]:
    """A socket that listens and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0)
        yield listening


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ({}, {names.AWS_REGION, names.GOOGLE_PROJECT, *OTHERS}),
        (
            {names.GOOGLE_PROJECT: "acme", names.AWS_IMAGE: "x", names.GOOGLE_IMAGE: "x", names.MAX_USD: "1"},
            {names.AWS_REGION, names.GOOGLE_REGION, *OTHERS},
        ),
    ],
)
def test_credentials_that_are_there_are_no_leave_to_use_them(
    ear: socket.socket, given: dict[str, str], needed: set[str]
) -> None:
    existing = f"http://127.0.0.1:{ear.getsockname()[1]}"
    services = ("AIPLATFORM", "CLOUDRESOURCEMANAGER", "IAM", "SERVICEUSAGE", "STORAGE")
    ambient = {
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "something",
        "AWS_REGION": "us-east-1",
        "AWS_BUCKET": "theirs",
        "AWS_ENDPOINT_URL": existing,
        "CLOUDSDK_AUTH_ACCESS_TOKEN": "token",
        "GOOGLE_CLOUD_PROJECT": "theirs",
        "STORAGE_EMULATOR_HOST": existing,
        "GCE_METADATA_HOST": existing.removeprefix("http://"),
        **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": existing for name in services},
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), existing),
    }
    response = run({**ambient, **given}, "tests/cloud")
    assert response.returncode == 0, response.stdout[-4000:]
    assert counts(response).keys() == {"skipped", "deselected"}, response.stdout[-4000:]
    assert set(re.findall(r"set (SKERRY_CLOUD_\w+) to ", response.stdout)) == needed
    with pytest.raises(BlockingIOError):
        ear.accept()


def test_without_an_image_or_a_limit_no_job_is_started(ear: socket.socket) -> None:
    given = {names.AWS_REGION: "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ear.getsockname()[1]}"}
    for lacking in (names.AWS_IMAGE, names.MAX_USD):
        response = run(given, "tests/cloud/test_runs.py", "tests/cloud/test_executors.py", "-k", "batch")
        assert counts(response).keys() == {"skipped", "deselected"}, response.stdout[-4000:]
        assert set(re.findall(r"set (SKERRY_CLOUD_\w+) to ", response.stdout)) == {lacking}
        given[lacking] = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@{DIGEST}"
    with pytest.raises(BlockingIOError):
        ear.accept()


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS_OUTSIDE), ["aws_batch", *KINDS_OUTSIDE]])
def test_spec_of_a_run_outside_both_clouds_is_valid(kinds: list[str], tmp_path: Path) -> None:
    digest = f"ghcr.io/acme/skerry@{DIGEST}"
    given = dict.fromkeys(names.MEANINGS, "acme") | {name: digest for name in names.MEANINGS if "IMAGE" in name}
    given |= {names.AWS_BUCKET: "acme-runs", names.GOOGLE_PROJECT: "acme-diloco", names.SLURM_SETUP: ". ~/store-keys"}
    given |= {names.AWS_REGION: "us-east-1", names.GOOGLE_REGION: "us-central1", names.MAX_USD: "100"}
    given[names.FOLDER] = str(tmp_path)
    place = Place.spelled(names.Settings(given), "skerry-cloud-test-1", kinds, 2)
    spec = check_machine_and_store.load_deployed(place.spec, targets.kinds(), ()).spec
    assert [slot for group in spec.replicas for slot in (f"{group.name}-0", f"{group.name}-1")] == place.slots
    assert (spec.limits.max_cost_usd is None) == (kinds != ["hf_jobs"])
    shutil.rmtree(place.spec.parent)


def test_unknown_name_is_reported() -> None:
    with pytest.raises(Invalid, match=r"no such setting: SKERRY_CLOUD_REGION; there are SKERRY_CLOUD_AWS_REGION"):
        names.Settings.read({"SKERRY_CLOUD_REGION": "us-east-1"})


def test_insufficient_budget_fails_before_anything_is_created(account: dict[str, str], clouds: Clouds) -> None:
    response = run({**account, names.MAX_USD: "2"}, "tests/cloud/test_executors.py", "-k", "TestBatch")
    assert counts(response).keys() == {"skipped", "deselected"}, response.stdout[-4000:]
    assert re.search(r"SKERRY_CLOUD_MAX_USD is too little for 40 jobs at \$0\.\d+/h: set \d+", response.stdout)
    assert clouds.aws.calls.writes == []
