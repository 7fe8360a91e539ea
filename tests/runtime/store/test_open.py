from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from skerry.runtime.errors import Invalid
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

# Whatever speaks to a cloud; none of it may be loaded for a folder.
CLOUD = {"obstore", "fsspec", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "aiobotocore", "google", "azure", "torch"}
OPEN_A_FOLDER = """
import json, sys
# What this installation loads in every process is nobody's choice here: Google's packages share a name that way.
before = set(sys.modules)
import skerry.runtime.store
at_import = sorted(set(sys.modules) - before)
store = skerry.runtime.store.open_store(sys.argv[1])
store.create("a", b"1"), store.read("a"), store.list(""), store.delete("a")
skerry.runtime.store.open_store("memory://a")
print(json.dumps([at_import, sorted(set(sys.modules) - before)]))
"""


def test_neither_the_package_nor_a_folder_loads_anything_of_a_cloud(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", OPEN_A_FOLDER, (tmp_path / "run").as_uri()]
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    at_import, opened = (set(names) for names in json.loads(told))
    assert not {name.partition(".")[0] for name in at_import} & CLOUD
    assert not {name.partition(".")[0] for name in opened} & CLOUD
    # An engine is loaded when its scheme is asked for, not before.
    assert "skerry.runtime.store.directory" in opened - at_import


def test_a_folder_is_opened_by_its_uri_and_percent_signs_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    store = open_store(folder.as_uri())
    assert store.create("a/b", b"1")
    assert (folder / "a" / "b").read_bytes() == b"1"
    assert store.uri == folder.as_uri()


def test_a_memory_store_is_shared_by_name() -> None:
    open_store("memory://opening").create("a", b"1")
    assert open_store("memory://opening").read("a") == b"1"
    assert open_store("memory://opening-other").read("a") is None


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("/tmp/run", r"for a folder write file:///tmp/run"),  # noqa: S108  not opened
        ("run", r"not a store URI: 'run'"),
        ("", r"not a store URI"),
        ("ftp://host/run", r"no store for ftp://; write s3://bucket/prefix"),
        ("file://run", r"names a host, not a folder.*file:///run"),
        ("file:run", r"write an absolute one"),
        ("file://", r"write an absolute one"),
        ("file:///", r"write an absolute one"),
        ("s3:///run", r"names no bucket; write s3://bucket/prefix"),
        ("s3://bucket:80/run", r"names no bucket"),
        ("s3://bucket/a//b", r"cannot use the prefix"),
        ("gs://bucket/../b", r"cannot use the prefix"),
        ("az://bucket/a b", r"cannot use the prefix"),
        ("s3://key:secret@bucket/run", r"credentials belong in the environment"),
        ("s3://bucket/run?region=x", r"has no '\?'"),
        ("fsspec+file:///tmp/run", r"names no bucket|two writers won"),
        ("fsspec+gs://bucket/run", r"write gs://"),
        ("fsspec+sftp://host/run", r"not proved"),
    ],
)
def test_a_uri_that_cannot_be_one_is_refused_with_what_to_write(uri: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        open_store(uri)


def test_a_refusal_tells_no_secret() -> None:
    with pytest.raises(Invalid) as raised:
        open_store("s3://key:hunter2@bucket/run")
    assert "hunter2" not in str(raised.value)


def test_a_cloud_whose_environment_is_missing_is_invalid_not_an_engines_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(Invalid, match=r"cannot open az://container: .*Account"):
        open_store("az://container/runs")
