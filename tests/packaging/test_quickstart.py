"""`scripts/quickstart`, small: what it promises happens, and when it does not, it says so."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.report.browser import Browser, program
from tests.support.forked import ForkedProcess

from skerry.infra.observe.digests_agree import digests_equal
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS, Receipt
from skerry.runtime.store import Store, open_store

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


def receipt(store: Store, number: int, slot: str, state: str) -> None:
    text = Receipt(
        run="0" * 32,
        round=number,
        slot=slot,
        incarnation=0,
        commit=GENESIS,
        averages=("1" * 32,),
        state=state * 32,
        scope="fragments",
        contributed=True,
        uploaded_bytes=0,
        downloaded_bytes=0,
        requests=0,
        seconds={},
    )
    store.create(keys.receipt(number, slot), text.to_bytes())


def test_a_replica_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    options = ("--rounds", "6", "--replicas", "2", "--store", (tmp_path / "store").as_uri())
    words = ["-m", "tests.support.forked_skerry", "", str(SCRIPT), *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'infra'}"}
    with ForkedProcess(words, environment, tmp_path / "output", errors=tmp_path / "errors") as ended:
        code = ended.wait(240)
    output = ended.output.read_text()
    assert code == 0, output[-4000:] + ended.errors.read_text()[-4000:]
    verdict = json.loads(output.splitlines()[-1])
    response = {
        name: verdict[name] for name in ("rounds", "replicas", "kills", "restarts", "lost_rounds", "digests_equal")
    }
    assert response == {"rounds": 6, "replicas": 2, "kills": 1, "restarts": 1, "lost_rounds": 0, "digests_equal": True}
    assert verdict["loss_last"] < verdict["loss_first"]
    assert verdict["store"].startswith((tmp_path / "store").as_uri())
    assert verdict["exported"] == pytest.approx(verdict["held_out"], abs=1e-3)
    assert verdict["same_text"]
    assert Path(verdict["model"]).is_file()
    assert_shown(Path(verdict["report"]), "finished: 6 rounds")
    assert "SIGKILL to local-1" in output
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()], "the run was to be destroyed"


def assert_shown(page: Path, headline: str) -> None:
    """Assert that a browser shows the page without a message, if there is one here."""
    assert headline in page.read_text()
    if program() is not None:
        with Browser() as browser:
            assert browser.show(page, 1220).messages == []
            assert headline in browser.evaluate("document.querySelector('h1').textContent")


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


def test_digests_are_equal_if_receipts_agree_up_to_the_last_round(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    for number in range(2):
        for slot in ("r-0", "r-1"):
            receipt(store, number, slot, "a")
    assert digests_equal(store, 2)
    assert not digests_equal(store, 3), "the third round has no receipts"
    receipt(store, 2, "r-0", "a")
    assert not digests_equal(store, 3), "the third round has one receipt, which is compared with nothing"
    for slot in ("r-0", "r-1"):
        receipt(store, 3, slot, "a")
    assert digests_equal(store, 4), "r-1 was killed before its receipt of the third round, and was there at the end"


def test_one_replica_with_another_state_is_seen(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    for slot, state in [("r-0", "a"), ("r-1", "a"), ("r-2", "b")]:
        receipt(store, 0, slot, state)
    assert not digests_equal(store, 1)


@pytest.mark.parametrize("wrong", [{"kills": 0}, {"lost_rounds": 1}, {"digests_equal": False}, {"exported": 2.6}])
def test_a_promise_that_was_not_kept_is_a_failure(script: ModuleType, wrong: dict[str, object]) -> None:
    kept = {"kills": 1, "lost_rounds": 0, "digests_equal": True, "exported": 2.5, "same_text": True}
    rest = {"rounds": 4, "replicas": 2, "restarts": 1, "loss_first": 5.5, "loss_last": 2.5, "held_out": 2.5}
    rest |= {"model": "x", "report": "y", "seconds": 1.0, "store": "file:///x"}
    assert script.Verdict(**kept, **rest).ok
    assert not script.Verdict(**{**kept, **wrong}, **rest).ok
