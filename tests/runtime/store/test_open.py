"""Opening a store: URIs, implementations loaded on demand, and the probe that refuses stores with broken guarantees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING

import pytest
from tests.kit.http_server import HttpReply, HttpServer
from tests.support.clocks import FakeClock
from tests.support.s3server import S3Server

from skerry.runtime.errors import Invalid, Unauthorized
from skerry.runtime.log import keys
from skerry.runtime.store import Data, list_folders, open_store
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.probe import ABANDONED_S, PREFIX, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Client libraries of clouds; none of them may be loaded for a folder.
CLOUD = {"obstore", "fsspec", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "aiobotocore", "google", "azure", "torch"}
OPEN_A_FOLDER = """
import json, sys
# Some installations load modules in every process: Google's packages share a namespace that way.
before = set(sys.modules)
import skerry.runtime.store
at_import = sorted(set(sys.modules) - before)
store = skerry.runtime.store.open_store(sys.argv[1])
store.create("a", b"1"), store.read("a"), store.list(""), store.delete("a")
skerry.runtime.store.open_store("memory://a")
print(json.dumps([at_import, sorted(set(sys.modules) - before)]))
"""


def test_folders_are_listed_of_any_store(tmp_path: Path) -> None:
    for uri in (tmp_path.as_uri(), "memory://folders"):
        store = open_store(uri)
        for key in ("b/run.json", "a/b/c", "file"):
            store.create(key, b"x")
        assert list_folders(uri) == ["a", "b"]
        assert list_folders(f"{uri}/none") == []


def test_folder_store_loads_no_client_library_of_a_cloud(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OPEN_A_FOLDER, (tmp_path / "run").as_uri()]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    at_import, after_opening = (set(names) for names in json.loads(output))
    assert not {name.partition(".")[0] for name in after_opening} & CLOUD
    assert "skerry.runtime.store.directory" in after_opening - at_import


def test_folder_uri_is_percent_decoded(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    store = open_store(folder.as_uri())
    assert store.create("a/b", b"1")
    assert (folder / "a" / "b").read_bytes() == b"1"
    assert store.uri == folder.as_uri()


def test_memory_stores_are_shared_by_name() -> None:
    open_store("memory://opening").create("a", b"1")
    assert open_store("memory://opening").read("a") == b"1"
    assert open_store("memory://opening-other").read("a") is None


def test_clock_of_a_memory_store_sets_the_modification_times() -> None:
    clock = FakeClock()
    store = open_store("memory://timed", clock=clock)
    store.replace("heart", b"1")
    clock.advance(5.0)
    store.replace("later", b"1")
    earlier, later = store.list("")
    assert later.modified - earlier.modified == 5.0


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("/tmp/run", r"write file:///tmp/run for a folder"),  # noqa: S108  not opened
        ("run", r"not a store URI: 'run'"),
        ("", r"not a store URI"),
        ("ftp://host/run", r"unknown scheme ftp://; write s3://bucket/prefix"),
        ("file://run", r"names a host, not a folder.*file:///run"),
        ("file:run", r"write an absolute one"),
        ("file://", r"write an absolute one"),
        ("file:///", r"write an absolute one"),
        ("s3:///run", r"names no bucket; write s3://bucket/prefix"),
        ("s3://bucket:80/run", r"names no bucket"),
        ("s3://bucket/a//b", r"cannot use the prefix"),
        ("gs://bucket/../b", r"cannot use the prefix"),
        ("az://bucket/a b", r"cannot use the prefix"),
        ("hf://acme", r"names no bucket; write hf://acme/bucket/prefix"),
        ("s3://key:hunter2@bucket/run", r"put credentials into the environment"),
        ("s3://bucket/run?region=x", r"contains '\?'"),
        ("fsspec+file:///tmp/run", r"names no bucket"),
        ("fsspec+gs://bucket/run", r"write gs://"),
        ("fsspec+sftp://host/run", r"not tested"),
    ],
)
def test_malformed_uri_is_invalid_with_the_form_to_write(uri: str, words: str) -> None:
    with pytest.raises(Invalid, match=words) as raised:
        open_store(uri)
    assert "hunter2" not in str(raised.value)


def test_missing_cloud_environment_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(Invalid, match=r"cannot open az://container: .*Account"):
        open_store("az://container/runs")


def test_key_that_cannot_be_read_is_in_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    key = json.dumps({"type": "service_account", "private_key": "-----BEGIN PRIVATE KEY-----\nhunter2\n"})
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))  # a text, where the document itself belongs
    with pytest.raises(Invalid, match=r"cannot open gs://bucket: .*service account") as raised:
        open_store("gs://bucket/runs")
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_bucket_of_hugging_face_needs_keys_of_its_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    with pytest.raises(Invalid, match="hf://acme/models needs keys of its S3 gateway"):
        open_store("hf://acme/models/runs")


# The probe.


@pytest.mark.usefixtures("aws_keys")
def test_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(honours_conditions=False) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        store = open_store("s3://bucket/run")
        with pytest.raises(Invalid, match=r"s3://bucket/run: .* ignores If-None-Match; use a store that honours"):
            probe(store, FakeClock())
        assert list(store.list("")) == []


def overwrite(store: MemoryStore, key: str, data: Data) -> bool:
    """A create that reports that the second one lost, but writes its bytes."""
    existed = store.read(key) is not None
    store.replace(key, data)
    return not existed


def refuse(*_: object) -> bool:
    raise Unauthorized("no right to write")


@pytest.mark.parametrize(
    ("verb", "broken", "kind", "words"),
    [
        ("create", overwrite, Invalid, "changed the object"),
        ("list", lambda *_: [], Invalid, "a listing after the write does not contain"),
        ("create", refuse, Unauthorized, "no right to write"),
    ],
)
def test_broken_guarantee_is_named(verb: str, broken: Callable[..., object], kind: type[Exception], words: str) -> None:
    store = type("BrokenStore", (MemoryStore,), {verb: broken})()
    with pytest.raises(kind, match=words):
        probe(store, FakeClock())


def test_probe_deletes_only_objects_of_probes_that_were_killed() -> None:
    clock = FakeClock()
    store = MemoryStore(clock=clock)
    store.create(f"{PREFIX}killed", b"first")
    clock.advance(ABANDONED_S - 60)
    store.create(f"{PREFIX}live", b"first")
    clock.advance(60)
    probe(store, clock)
    assert [entry.key for entry in store.list(PREFIX)] == [f"{PREFIX}live"]


def test_probe_that_loses_its_object_to_another_one_passes() -> None:
    """A file server's clock may jump, so that the object of a live probe looks old."""
    losses: list[str] = []

    class SweptStore(MemoryStore):
        def create(self, key: str, data: Data) -> bool:
            if self.read(key) is not None and not losses:
                losses.append(key)
                self.delete(key)
            return super().create(key, data)

    store = SweptStore()
    probe(store, FakeClock())
    assert losses
    assert list(store.list("")) == []


def test_probe_prefix_is_the_one_in_keys() -> None:
    assert PREFIX == keys.PROBE


def test_bucket_of_a_mirror_is_signed_for_in_its_own_region() -> None:
    environment = {
        "AWS_REGION": "us-east-1",
        "SKERRY_BUCKET_REGION_0": "acme-west=us-west-2",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    with HttpServer(lambda _: HttpReply(404)) as server:
        environment["AWS_ENDPOINT_URL"] = f"http://{server.host}"
        for bucket in ("acme", "acme-west"):
            assert open_store(f"s3://{bucket}/run", environment=environment).read("a") is None
    regions = [request.headers["authorization"].split("/")[2] for request in server.requests]
    assert regions == ["us-east-1", "us-west-2"]
