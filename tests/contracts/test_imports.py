"""What importing costs and touches: asked of fresh interpreters, because this one has loaded everything already."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCH_FREE = (
    "alarm",
    "clock",
    "contract",
    "errors",
    "events",
    "exchange",
    "garbage",
    "journal",
    "keys",
    "membership",
    "pace",
    "records",
    "rounds",
    "store",
    "store.probe",
    "store.retrying",
)
HEAVY = {"torch", "torchft", "numpy"}
SDKS = {"boto3", "botocore", "google", "azure", "s3fs", "fsspec"}

# Prints what the imports loaded, and what they did that an import must not do.
PROBE = """
import json, logging, os, sys, threading
before = dict(os.environ), list(logging.getLogger().handlers)
opened = []
def hook(event, arguments):
    if event in ("socket.connect", "subprocess.Popen") or (event == "open" and set(str(arguments[1])) & set("wax+")):
        opened.append(f"{event} {arguments[0]}")
sys.dont_write_bytecode = True
sys.addaudithook(hook)
for name in sys.argv[1:]:
    __import__(name)
after = dict(os.environ), list(logging.getLogger().handlers)
json.dump({
    # An installed SDK may begin its namespace at every start of the interpreter, without a module of it.
    "loaded": sorted({name.split(".")[0] for name, module in sys.modules.items() if getattr(module, "__file__", None)}),
    "changed": before != after,
    "threads": threading.active_count(),
    "opened": opened,
}, sys.stdout)
"""


def after_importing(*modules: str) -> dict[str, object]:
    path = f"{ROOT / 'runtime'}:{ROOT / 'infra'}"
    ended = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        env={"PYTHONPATH": path, "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def loaded(found: dict[str, object]) -> set[str]:
    names = found["loaded"]
    assert isinstance(names, list)
    return set(names)


def test_the_protocol_is_imported_without_torch_or_an_sdk() -> None:
    found = after_importing(*(f"skerry.runtime.{name}" for name in TORCH_FREE))
    assert not loaded(found) & (HEAVY | SDKS)


def test_an_engine_is_imported_when_its_scheme_is_opened_and_not_before() -> None:
    assert "obstore" not in loaded(after_importing("skerry.runtime.store"))


def test_the_command_line_is_imported_without_torch_or_an_sdk() -> None:
    assert not loaded(after_importing("skerry.infra.cli")) & (HEAVY | SDKS)


@pytest.mark.parametrize("name", ["skerry.infra.cli", "skerry.runtime.exchange", "skerry.runtime.store.clients"])
def test_importing_has_no_effect(name: str) -> None:
    found = after_importing(name)
    assert (found["changed"], found["threads"], found["opened"]) == (False, 1, [])


def test_the_probe_notices_what_it_looks_for(tmp_path: Path) -> None:
    (tmp_path / "guilty.py").write_text(
        f"import os, fractions\nopen({str(tmp_path / 'x')!r}, 'w')\nos.environ['A'] = 'b'\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE, "guilty"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(ended.stdout)
    assert "fractions" in found["loaded"]
    assert found["changed"]
    assert found["opened"] == [f"open {tmp_path / 'x'}"]
