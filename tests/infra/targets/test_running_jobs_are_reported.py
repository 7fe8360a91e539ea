"""Commands report every running job, whatever is lost or cannot be asked, and start nothing twice.

A run with one RUNNING job in each cloud. After each command every job is named in the output, or the command fails and
names the place that it could not ask.
"""

from __future__ import annotations

import contextlib
import json
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.infra.deploy.account import Operator, skerry
from tests.infra.targets.runs import BatchRun, VertexRun
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra.cli import show_resources_commands, up_status_destroy_in_clouds
from skerry.infra.cli.interrupts import stopping_watch
from skerry.testing.both_clouds import Clouds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from typer.testing import Result

    from skerry.infra.deploy.restart_lost import StopRequest
    from skerry.testing.google.sandbox import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]
BUCKET: Final = "acme-skerry"
JOBS: Final = {"b-0": "aws_batch_job.b-0", "v-0": "vertex_job.v-0"}
# The words of which an error has one, if it says that a job's cloud could not be asked.
PLACES: Final = {"b-0": ("batch",), "v-0": ("vertex", "google")}
STORE: Final = (f"bucket {BUCKET}", "aws_bucket.store")
COMPLAINTS: Final = ("could not ask", "cannot", "no answer", "lack the permission", "is busy", "is not tagged")
OPTIONS: Final = {
    "status": (),
    "cancel": ("--auto-approve",),
    "up": ("--auto-approve", "--json"),
    "plan": ("--json",),
    "destroy": ("--yes", "--data"),
}
# Where a cloud could not be asked, `up` changes nothing either.
REFUSED: Final = ("no rights", "throttled", "unreachable")


class Running:
    """A run with a running job in each cloud, and what goes wrong with it."""

    def __init__(self, clouds: Clouds, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clouds = clouds
        self.monkeypatch = monkeypatch
        vertex, batch = VertexRun(folder, clouds.google), BatchRun(folder, clouds.aws)
        groups = batch.group(1, "role: replica").replace("name: a", "name: b")
        text = vertex.group(1, "role: replica").replace("name: a", "name: v")
        vertex.group = lambda _count, _options: text  # type: ignore[method-assign]
        self.spec = str(vertex.write_spec(store=f"s3://{BUCKET}/runs", others=groups))
        for name, value in clouds.environment.items():
            monkeypatch.setenv(name, value)
        skerry("apply", self.spec, "--auto-approve")
        self.jobs = vertex.jobs(Operator(Path(self.spec), clouds.environment))
        clouds.aws.batch.start(self.jobs["b-0"])
        clouds.google.jobs.start(self.jobs["v-0"])
        assert set(self.live()) == set(JOBS)

    def live(self) -> list[str]:
        """The slot of each job that runs or waits."""
        in_aws, in_google = (sandbox.inventory().get("job", ()) for sandbox in (self.clouds.aws, self.clouds.google))
        return ["b-0" for _ in in_aws] + ["v-0" for _ in in_google]

    def lose_state(self) -> None:
        self._delete("runs/tiny/state/")

    def lose_bucket(self) -> None:
        self._delete("")
        self.clouds.aws.client("s3").delete_bucket(Bucket=BUCKET)

    def lose_tags(self) -> None:
        tags = {"TagSet": [{"Key": "cost-center", "Value": "42"}]}
        self.clouds.aws.client("s3").put_bucket_tagging(Bucket=BUCKET, Tagging=tags)

    def lose_state_and_tags(self) -> None:
        self.lose_state()
        self.lose_tags()

    def lose_state_and_tags_of_jobs(self) -> None:
        """A tagging tool replaced all tags of the jobs, so that only their names are left."""
        self.lose_state()
        client = self.clouds.aws.client("batch")
        (row,) = client.describe_jobs(jobs=[self.jobs["b-0"]])["jobs"]
        client.untag_resource(resourceArn=row["jobArn"], tagKeys=list(row["tags"]))
        self.clouds.google.custom_jobs.find(self.jobs["v-0"]).resource["labels"] = {"cost-center": "42"}

    def deny_batch(self) -> None:
        self.clouds.aws.fail(how="deny", on="batch:*", times=None)

    def deny_store(self) -> None:
        self.clouds.aws.fail(how="deny", on="s3:*", times=None)

    def deny_batch_without_state(self) -> None:
        self.lose_state()
        self.deny_batch()

    def throttle_batch(self) -> None:
        self.clouds.aws.fail(how="throttle", on="batch:*", times=None)

    def throttle_vertex_without_state(self) -> None:
        self.lose_state()
        self.clouds.google.fail(how="throttle", on="aiplatform.*", times=None)

    def cut_off_google(self) -> None:
        for name in self.clouds.google.environment:
            if name.startswith("CLOUDSDK_API_ENDPOINT_OVERRIDES_"):
                self.monkeypatch.setenv(name, "http://127.0.0.1:9/")

    def cut_off_google_without_state(self) -> None:
        self.lose_state()
        self.cut_off_google()

    def cut_off_google_without_bucket(self) -> None:
        self.lose_bucket()
        self.cut_off_google()

    def _delete(self, prefix: str) -> None:
        s3 = self.clouds.aws.client("s3")
        for entry in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
            s3.delete_object(Bucket=BUCKET, Key=entry["Key"])


LOSSES: Final[dict[str, Callable[[Running], None]]] = {
    "nothing lost": lambda _: None,
    "state lost": Running.lose_state,
    "bucket lost": Running.lose_bucket,
    "tags lost": Running.lose_tags,
    "state and tags lost": Running.lose_state_and_tags,
    "state and tags of jobs lost": Running.lose_state_and_tags_of_jobs,
    "no rights to Batch": Running.deny_batch,
    "no rights to Batch, state lost": Running.deny_batch_without_state,
    "no rights to the store": Running.deny_store,
    "Batch throttled": Running.throttle_batch,
    "Vertex throttled, state lost": Running.throttle_vertex_without_state,
    "Google unreachable": Running.cut_off_google,
    "Google unreachable, state lost": Running.cut_off_google_without_state,
    "Google unreachable, bucket lost": Running.cut_off_google_without_bucket,
}


@pytest.fixture
def running(
    aws_sandbox: Sandbox, google_sandbox: GoogleSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[Running]:
    for module in (show_resources_commands, up_status_destroy_in_clouds):
        monkeypatch.setattr(module, "SystemClock", FakeClock)
    monkeypatch.setattr(up_status_destroy_in_clouds, "stopping_watch", stopping_at_once)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    yield Running(Clouds(aws=aws_sandbox, google=google_sandbox), tmp_path, monkeypatch)
    google_sandbox.heal()


@contextlib.contextmanager
def stopping_at_once() -> Generator[StopRequest]:
    """Ctrl-C comes as soon as the watch of `up` begins."""
    with stopping_watch() as stop:
        stop()
        yield stop


def commands_after(loss: str) -> tuple[tuple[str, ...], ...]:
    """The commands after a loss; each tuple has an account of its own, and only the last of it changes anything."""
    if any(sign in loss for sign in REFUSED):
        return (("status", "plan", "up", "cancel"), ("destroy",))
    return (("status", "plan", "cancel"), ("up",), ("destroy",))


@pytest.mark.parametrize(
    ("loss", "commands"),
    [
        pytest.param(loss, commands, id=f"{loss}-{'-'.join(commands)}")
        for loss in LOSSES
        for commands in commands_after(loss)
    ],
)
def test_no_command_reports_less_than_what_runs(running: Running, loss: str, commands: tuple[str, ...]) -> None:
    LOSSES[loss](running)
    running.clouds.aws.calls.clear()
    running.clouds.google.calls.clear()
    for command in commands:
        result = invoke(command, running.spec, *OPTIONS[command])
        live = running.live()
        text = f"{command}: exit code {result.exit_code}: {result.output}{result.stderr}"
        assert len(live) == len(set(live)), text
        written = [*running.clouds.aws.calls.writes, *running.clouds.google.calls.writes]
        assert command == commands[-1] or (set(live), written) == (set(JOBS), []), text
        unreported = {slot for slot in JOBS if not is_reported(result, command, slot, lives=slot in live)}
        assert not unreported, text


def is_reported(result: Result, command: str, slot: str, *, lives: bool) -> bool:
    """True if a job is named with what happens to it, or the command failed and names what it could not ask."""
    words = (result.stdout + result.stderr).lower()
    own, every = complains(result, PLACES[slot]), complains(result, [*chain(*PLACES.values()), *STORE])
    match command:
        case "plan":
            return every or planned(result.stdout, JOBS[slot]) in ("keep", "adopt", "update", "replace")
        case "up":
            return every or slot in final_line(result.stdout)
        case "status":
            return own or slot in words
        case _:  # stopped and named, or it still runs and the command says why
            return (own if command == "cancel" else every) if lives else f"-{slot}" in words


def complains(result: Result, places: Iterable[str]) -> bool:
    """True if the command failed, and a line of its output says that one of these could not be asked."""
    lines = (result.stdout + result.stderr).lower().splitlines()
    complaints = [line for line in lines if any(sign in line for sign in COMPLAINTS)]
    return result.exit_code != 0 and any(place in line for line in complaints for place in places)


def final_line(output: str) -> str:
    return output.splitlines()[-1] if output else ""


def planned(output: str, address: str) -> str:
    document: dict[str, Any] = json.loads(final_line(output) or "{}")
    return next((change["action"] for change in document.get("changes", ()) if change["address"] == address), "none")
