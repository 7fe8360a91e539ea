"""`scripts/quickstart`, small: what it promises happens, and when it does not, it says so."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest
from tests.infra.report.browser import Browser, require

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "quickstart.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    result = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert result is not None
    assert result.loader is not None
    module = importlib.util.module_from_spec(result)
    sys.modules["quickstart"] = module  # its dataclasses look themselves up there
    result.loader.exec_module(module)
    return module


class Quickstart(NamedTuple):
    """A quickstart that has ended: the folder of its checkout, its output, and the last line of it."""

    checkout: Path
    output: str
    verdict: dict[str, Any]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """`scripts/quickstart` in a fresh checkout, which has only the files that git knows, and our environment."""
    folder = tmp_path_factory.mktemp("quickstart")
    checkout, store = folder / "skerry", folder / "store"
    store.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    (checkout / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        (checkout / ".venv" / entry.name).symlink_to(entry)
    # Without this stamp it would make the environment anew, and fetch torch.
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes())
    (checkout / ".venv/skerry.sha256").unlink(missing_ok=True)
    (checkout / ".venv/skerry.sha256").write_text(f"{digest.hexdigest()}  -\n")
    command = ["scripts/quickstart", "--rounds", "6", "--replicas", "2", "--store", store.as_uri()]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'runtime'}:{checkout / 'infra'}"}
    result = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return Quickstart(checkout, result.stdout, json.loads(result.stdout.splitlines()[-1]))


def test_a_replica_is_killed_and_nothing_is_lost(ended: Quickstart) -> None:
    verdict = ended.verdict
    response = {
        name: verdict[name] for name in ("rounds", "replicas", "kills", "restarts", "lost_rounds", "digests_equal")
    }
    assert response == {"rounds": 6, "replicas": 2, "kills": 1, "restarts": 1, "lost_rounds": 0, "digests_equal": True}
    assert verdict["loss_last"] < verdict["loss_first"]
    assert "SIGKILL to local-1" in ended.output
    store = ended.checkout.with_name("store")
    assert verdict["store"].startswith(store.as_uri())
    assert not [path for path in store.rglob("*") if path.is_file()], "the run was to be destroyed"


def test_report_is_at_the_printed_path_and_opens_in_a_browser(ended: Quickstart) -> None:
    page = printed_path(ended, "the report, for a browser: ")
    assert page == ended.checkout / "build/quickstart/run.html"
    text = page.read_text()
    assert "finished: 6 rounds" in text
    assert re.search(r"Held-out val_loss: [\d.]+ in round 5, [\d.]+ in round 6, the lowest; logged in 2 rounds", text)
    require()
    with Browser() as browser:
        shown = browser.show(page, 1220)
        assert (shown.messages, shown.requests) == ([], [page.as_uri()])
        assert "finished: 6 rounds" in browser.evaluate("document.querySelector('h1').textContent")


# As on a machine with torch alone: what the script imports of skerry and torchft is needed by replicas only.
PLAIN: Final = """
import runpy, sys, types
for name in ("skerry", "skerry.runtime", "skerry.runtime.replica", "torchft", "torchft.local_sgd"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["skerry.runtime.replica"].connect = sys.modules["torchft.local_sgd"].DiLoCo = None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_exported_model_has_the_same_held_out_loss_in_plain_torch(ended: Quickstart) -> None:
    model = printed_path(ended, "the trained model: ")
    train = ended.checkout / "runtime/examples/tiny_gpt/train.py"
    script = PLAIN.replace("sys.argv[1]", repr(str(train)))
    command = [sys.executable, "-c", script, "--evaluate", str(model)]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    assert ended.verdict["same_text"]
    assert result["held_out"] == pytest.approx(ended.verdict["exported"], abs=1e-4)
    assert result["held_out"] == pytest.approx(ended.verdict["held_out"], abs=1e-3)
    line = f"its held-out loss in plain torch: {ended.verdict['exported']}, as in the replicas ("
    assert line in ended.output


def test_last_words_name_the_next_commands_and_their_page(ended: Quickstart) -> None:
    *_, words, last = ended.output.splitlines()
    assert json.loads(last) == ended.verdict
    match = re.fullmatch(r"next: `skerry init`, `skerry up` in a folder of your own; (\S+) shows it", words)
    assert match is not None, words
    assert "skerry init" in (ended.checkout / match[1]).read_text()


def test_page_shows_what_the_quickstart_prints_today(ended: Quickstart) -> None:
    """Except for numbers, strips of rounds and paths; and how many rounds a replica missed depends on the machine."""
    page = (ROOT / "docs/tutorial-language-model.md").read_text()
    (shown,) = re.findall(r"## What you see\n.*?```\n(.*?)```", page, re.DOTALL)
    printed = {shape(line) for line in ended.output.splitlines()}
    lines = [line for line in shown.splitlines() if line != "..."]
    assert len(lines) > 15
    assert not [line for line in lines if shape(line) not in printed]


def shape(line: str) -> str:
    """A line without what differs between two runs."""
    line = re.sub(r"^(?:warning:)? +?local-\d: .*(loss \S+ to )", r"\1", line)
    line = re.sub(r"^quickstart-\w+: .*; (?=receipts: )", "", line)
    line = re.sub(r"/\S+/build/", "build/", line)
    return " ".join(re.sub(r"[\d.,]+", "0", line).rstrip("█▄▒○░X ").split())


def printed_path(ended: Quickstart, label: str) -> Path:
    """The path that the output names after this label."""
    (path,) = [line.removeprefix(label) for line in ended.output.splitlines() if line.startswith(label)]
    return Path(path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--rounds", "2"), "--rounds: at least 4"),
        (("--replicas", "1"), "--replicas: at least 2"),
        (("--store", "no/uri"), "no/uri"),
        (("--fast",), "--fast"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_anything_starts(
    script: ModuleType,
    options: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["quickstart", *options])
    with pytest.raises(SystemExit) as ended:
        sys.exit(script.main())
    assert ended.value.code == 2
    output, errors = capsys.readouterr()
    assert expected in errors
    assert not output


@pytest.mark.parametrize("wrong", [{"kills": 0}, {"lost_rounds": 1}, {"digests_equal": False}, {"exported": 2.6}])
def test_a_promise_that_was_not_kept_is_a_failure(script: ModuleType, wrong: dict[str, object]) -> None:
    kept = {"kills": 1, "lost_rounds": 0, "digests_equal": True, "exported": 2.5, "same_text": True}
    rest = {"rounds": 4, "replicas": 2, "restarts": 1, "loss_first": 5.5, "loss_last": 2.5, "held_out": 2.5}
    rest |= {"model": "x", "report": "y", "seconds": 1.0, "store": "file:///x"}
    assert script.Verdict(**kept, **rest).ok
    assert not script.Verdict(**{**kept, **wrong}, **rest).ok
