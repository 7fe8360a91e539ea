"""A region, an account and a cloud are lost: a run goes on from its mirror in another one, by `skerry restore`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

import pytest
from tests.kit.managers import train_saved_run
from tests.support.clocks import FakeClock
from tests.support.command_line import invoke

from skerry.infra.cli import replicate_restore_commands
from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.session import Google
from skerry.runtime.clock import SystemClock
from skerry.runtime.mirrors.mirror import Mirror, MirrorOptions
from skerry.runtime.mirrors.restorable import find_cut
from skerry.runtime.store import open_store
from skerry.runtime.store.memory import MemoryStore
from skerry.testing.plugin import skerry_clouds, skerry_google, skerry_sandbox

if TYPE_CHECKING:
    from skerry.testing.both_clouds import Clouds

__all__ = ["skerry_clouds", "skerry_google", "skerry_sandbox"]

ROUNDS: Final = 2
HOME: Final = "s3://acme-skerry/runs/tiny"
WEST: Final = "s3://acme-west/runs/tiny"
ABROAD: Final = "gs://acme-dr/runs/tiny"


@pytest.fixture
def clouds(skerry_clouds: Clouds) -> Clouds:
    """A run in us-east-1, with whole mirrors in us-west-2 and at Google."""
    aws, google = Aws(FakeClock(), os.environ), Google(FakeClock(), os.environ)
    aws.call("s3", "us-east-1", "create_bucket", Bucket="acme-skerry")
    west = {"CreateBucketConfiguration": {"LocationConstraint": "us-west-2"}}
    aws.call("s3", "us-west-2", "create_bucket", Bucket="acme-west", **west)
    body = {"name": "acme-dr", "location": "EUROPE-WEST4"}
    google.call("storage", "POST", "storage/v1/b", body=body, query={"project": google.project})
    memory, home = MemoryStore(), open_store(HOME)
    train_saved_run(memory, ROUNDS)
    for entry in memory.list(""):
        assert home.create(entry.key, bytes(memory.read(entry.key) or b""))
    for uri in (WEST, ABROAD):
        Mirror(home, open_store(uri), SystemClock(), MirrorOptions(payloads=True)).catch_up()
    return skerry_clouds


def lose(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cloud in memory has no outage of a region or an account: what was there is deleted, or does not answer."""
    aws = Aws(FakeClock(), os.environ)
    buckets = {"region": ["acme-skerry"], "account": ["acme-skerry", "acme-west"], "cloud": []}[what]
    for bucket in buckets:
        listed = aws.call("s3", "us-east-1", "list_objects_v2", Bucket=bucket)
        for entry in listed["Contents"]:
            aws.call("s3", "us-east-1", "delete_object", Bucket=bucket, Key=entry["Key"])
        aws.call("s3", "us-east-1", "delete_bucket", Bucket=bucket)
    if what == "cloud":  # no process listens there
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setattr(replicate_restore_commands, "_DEADLINE_S", 0.1)


@pytest.mark.usefixtures("clouds")
@pytest.mark.parametrize(
    ("what", "mirror"), [("region", WEST), ("region", ABROAD), ("account", ABROAD), ("cloud", ABROAD)]
)
def test_run_goes_on_from_a_mirror_beyond_what_is_lost(what: str, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(what, monkeypatch)
    target = f"{mirror}-2"
    done = invoke("restore", mirror, "--to", target, "--auto-approve", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["uri"] == target
    assert find_cut(open_store(target)).round == ROUNDS
    checked = invoke("doctor", "--deep", target)
    assert checked.exit_code == 0, checked.output
