"""torchft's own tests, unchanged, on our manager: each ends as `cases.txt` and `deviations.py` say, no other way."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest
from tests.compat.deviations import DEVIATIONS, NOT_RUN, RECOVERY, Deviation, Version, histories

if TYPE_CHECKING:
    from tests.compat.deviations import History

pytestmark = pytest.mark.slow

Fault: TypeAlias = Literal["report", "exchange"]

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
# Where a test makes real managers; the other modules only mock ours, to see that its methods are still torchft's.
REAL = {"local_sgd_integ_test.py", "diloco_regression_test.py", "manager_integ_test.py"}
RANKS = "manager_integ_test.py::ManagerIntegTest::test_ddp_recovery_multi_rank"
# One fragment and no delay, two fragments and a delay: torchft's further cases are about the merge alone.
STREAMING = "local_sgd_integ_test.py::LocalSGDIntegTest::test_streaming_diloco_commit_failure_"
PLAYED_AGAIN = (f"{STREAMING}00", f"{STREAMING}10", RECOVERY)
# Without a further test: ten times what all of them take on two quiet cores.
LIMIT_S = 120
LAST_WORDS = 4000
COUNTED = ("joined", "restarted", "announced", "struck", "refused", "abstained")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of one test of torchft.

    happened: the runtime's events and what the plugin counts, by name. participants: of each closed round, in order.
    """

    outcome: str
    message: str
    happened: Counter[str]
    participants: list[int]


def torchft() -> Path:
    """The package of the torchft that this environment has."""
    result = importlib.util.find_spec("torchft")
    assert result is not None
    assert result.origin is not None
    return Path(result.origin).parent


def version() -> Version:
    (wheel,) = torchft().parent.glob("torchft*.dist-info")
    return "nightly" if wheel.name.startswith("torchft_nightly-") else "release"


def cases() -> dict[str, set[str]]:
    """The tests that this version has, by module."""
    result: dict[str, set[str]] = {}
    for line in (HERE / "cases.txt").read_text().splitlines():
        test, _, only = line.partition(" ")
        if test != "#" and only in {"", version()}:
            result.setdefault(test.partition("::")[0], set()).add(test)
    return result


def deviations(module: str) -> dict[str, Deviation]:
    here = [result for result in DEVIATIONS if version() in result.versions]
    return {result.test: result for result in here if result.test.startswith(module)}


def play(folder: Path, modules: list[str], *options: str, **environment: str) -> dict[str, Ended]:
    """Run tests of torchft's in a process of their own, in `folder`: there it finds torchft and the fixtures."""
    (folder / "torchft").symlink_to(torchft())
    written = folder / "report.json"
    path = [str(folder), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    settings = {
        "COMPAT_REPORT": str(written),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    # Nothing captured: what a test that hangs has said is in the output then.
    plugins = ["-s", "-p", "tests.compat.plugin", "-p", "no:cacheprovider"]
    files = [f"torchft/{module}" for module in modules]
    command = [sys.executable, "-m", "pytest", *plugins, "-c", os.devnull, f"--rootdir={folder}", *options, *files]
    output = folder / "output.txt"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            command, cwd=folder, env=os.environ | settings | environment, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        wait_while_it_reports(process, written)
    report: dict[str, dict[str, Any]] = json.loads(written.read_text()) if written.exists() else {}
    assert report, output.read_text()
    if lost := [test for test, result in report.items() if result["outcome"] == "lost"]:
        # pytest shows it with whatever fails of this
        sys.stdout.write(f"{lost} hangs; last words:\n" + output.read_text(errors="replace")[-LAST_WORDS:])
    return {
        test: Ended(
            outcome=result["outcome"],
            message=result["message"],
            happened=Counter(result["happened"]),
            participants=result["participants"],
        )
        for test, result in report.items()
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """All modules, as they are."""
    folder = tmp_path_factory.mktemp("torchft")
    (folder / "test_fixtures").symlink_to(FIXTURES)
    return play(folder, sorted(cases()))


@pytest.fixture(scope="module")
def histories_of_recovery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("again") / "test_fixtures"


@pytest.fixture(scope="module")
def played_again(histories_of_recovery: Path) -> dict[str, Ended]:
    """Those that inject failures: the store raises them, and histories are written instead of compared."""
    histories_of_recovery.mkdir()
    failing = ["-k", " or ".join(test.rpartition("::")[2] for test in PLAYED_AGAIN)]
    modules = ["local_sgd_integ_test.py", "diloco_regression_test.py"]
    return play(histories_of_recovery.parent, modules, *failing, COMPAT_FAULT="exchange", WRITE_FIXTURE="true")


def wait_while_it_reports(process: subprocess.Popen[bytes], written: Path) -> None:
    """Wait for its end; kill it once the report shows that no test has begun for LIMIT_S: one hangs.

    That one is "lost" in the report, and those behind it are not in it.
    """
    before = b""
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        now = written.read_bytes() if written.exists() else b""
        if now == before:
            process.kill()
        before = now


def must_have_happened(test: str, fault: Fault) -> Counter[str]:
    """Return the events that a test of `REAL` needs; without them it would pass and prove nothing."""
    expected = Counter(joined=3 if "upscale" in test else 2)
    if "recovery" in test:
        expected += Counter(joined=1, restarted=1)
    if "commit_failure" in test:
        expected += Counter(announced=2, struck=2, refused=2, abstained=2 if fault == "report" else 0)
    return expected


def what_happened(ended: Ended) -> Counter[str]:
    return Counter({name: ended.happened[name] for name in COUNTED if ended.happened[name]})


def test_every_module_of_torchfts_tests_is_run_or_has_a_reason() -> None:
    existing = {path.relative_to(torchft()).as_posix() for path in torchft().rglob("*_test.py")}
    assert existing - NOT_RUN.keys() == cases().keys()


def test_every_deviation_is_one_of_a_case() -> None:
    listed = {test for tests in cases().values() for test in tests}
    assert {result.test for result in DEVIATIONS if version() in result.versions} <= listed


@pytest.mark.parametrize("module", sorted(cases()))
def test_each_case_ends_as_listed(module: str, played: dict[str, Ended]) -> None:
    ended = {test: result for test, result in played.items() if test.startswith(module)}
    deviating = deviations(module)
    expected = {test: deviating[test].outcome if test in deviating else "passed" for test in cases()[module]}
    wrong = [f"{test} {result}" for test, result in ended.items() if result.outcome != expected.get(test)]
    assert not wrong, "\n".join(wrong)
    assert ended.keys() == expected.keys()
    for test, deviation in deviating.items():
        assert re.search(deviation.message, ended[test].message), (test, ended[test].message)


@pytest.mark.parametrize("module", sorted(REAL))
def test_in_each_case_happens_what_it_is_about(module: str, played: dict[str, Ended]) -> None:
    passed = {test: result for test, result in played.items() if test.startswith(module) and result.outcome == "passed"}
    happened = {test: what_happened(result) for test, result in passed.items()}
    assert happened == {test: must_have_happened(test, "report") for test in passed}


def test_replica_that_comes_later_stays_in_every_round(played: dict[str, Ended]) -> None:
    """Two close two rounds of four; then the third comes. They do not wait for it while it is joining."""
    late = {test: result.participants for test, result in played.items() if "upscale" in test}
    assert len(late) == 12
    allowed = ([2, 2, 2, 2], [2, 2, 2, 3], [2, 2, 3, 3])
    assert all(participants in allowed for participants in late.values()), late


def test_each_rank_of_a_replica_commits_what_one_of_them_closes(played: dict[str, Ended]) -> None:
    happened = played[RANKS].happened
    assert happened["round_closed"] >= 8
    assert happened["committed"] == 2 * happened["round_closed"]


def test_a_failure_of_the_store_fails_a_round_like_one_that_is_reported(played_again: dict[str, Ended]) -> None:
    assert {test: result.outcome for test, result in played_again.items()} == dict.fromkeys(PLAYED_AGAIN, "passed")
    happened = {test: what_happened(result) for test, result in played_again.items()}
    assert happened == {test: must_have_happened(test, "exchange") for test in played_again}


def test_restarted_replica_ends_as_the_deviation_expects(
    played_again: dict[str, Ended], histories_of_recovery: Path
) -> None:
    """Written by torchft's own WRITE_FIXTURE; its test then sees only that both replicas agree in the end."""
    assert played_again[RECOVERY].outcome == "passed"
    (written,) = histories_of_recovery.iterdir()
    assert read_histories(written) == histories(read_histories(FIXTURES / written.name)[0])


def read_histories(fixture: Path) -> tuple[History, History]:
    zero, item = (
        [before for _, before in sorted(steps(replica).items())] for replica in json.loads(fixture.read_text())
    )
    return zero, item


def steps(replica: list[dict[str, dict[str, dict[str, list[list[float]]]]]]) -> dict[int, tuple[float, float]]:
    return {
        int(step): (layers["layers.0.weight"][0][0], layers["layers.1.weight"][0][0])
        for step, layers in replica[0]["history"].items()
    }
