"""The words that a person sees if a script, a machine or a second `up` does harm. Real processes and torch."""

from __future__ import annotations

import logging
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from tests.infra.runs import STANDIN, Skerry, write_spec
from tests.support.command_line import invoke

from skerry.infra.observe.doctor.findings import SLOW
from skerry.infra.observe.history import read_history
from skerry.runtime.store import open_store
from skerry.runtime.structured_logging import level_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CODE = Path(__file__).parents[1] / "misuse"
BEHAVIOURS = {"a-1": "raise", "a-2": "nan", "a-3": "kill", "a-4": "memory", "a-5": "evaluate"}
ROUNDS, SYNC_EVERY = 8, 50
MEMORY = "out of memory: use a smaller batch or model, or a machine with more memory"


class Ended(NamedTuple):
    """An `up` that ended: its spec, exit code and output."""

    spec: Path
    code: int
    output: str

    def lines(self, *parts: str) -> list[str]:
        """The lines with all of these parts."""
        return [line for line in self.output.splitlines() if all(part in line for part in parts)]


def line_of(text: str) -> int:
    """The number of the first line of the script with `text`."""
    return next(number for number, line in enumerate((CODE / "train.py").read_text().splitlines(), 1) if text in line)


def changes(**fields: object) -> Sequence[str]:
    return [f"--set={name.replace('__', '.')}={value}" for name, value in fields.items()]


def up_to_its_end(folder: Path, behaviours: Mapping[str, str]) -> Ended:
    """A run of a-0, which trains, and of the replicas with these behaviours."""
    words = [f"{slot}={behaviour}" for slot, behaviour in behaviours.items()]
    spec = write_spec(folder, *words, count=1 + len(behaviours), restarts=0, code=CODE)
    settings = changes(
        outer__rounds=ROUNDS, outer__sync_every=SYNC_EVERY, faults__grace="5s", faults__start_window="2m"
    )
    with Skerry("up", str(spec), *settings) as running:
        code = running.end()
    return Ended(spec, code, running.output)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return up_to_its_end(tmp_path_factory.mktemp("misuse"), BEHAVIOURS)


@pytest.mark.slow
def test_run_finishes_but_not_by_all_with_exit_code_3(ended: Ended) -> None:
    assert ended.code == 3, ended.output
    assert f"{ROUNDS} of {ROUNDS} rounds; all 6 replicas in 1 of them" in ended.output
    assert ended.lines("done in", "but not by all replicas (exit code 3)")
    assert ended.lines("  a-0: in all 8 rounds, loss ", " tokens, ")
    assert ended.lines("[a-0] a-0 is done")
    assert not ended.lines(" INFO ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "why"),
    [
        ("a-1", rf"ValueError: bad sample in shard 17 \(train.py:{line_of('raise ValueError')}, round 3\)"),
        ("a-2", r"NaN or infinity in the pseudo-gradient of parameter 'weight' .*\(rounds 1-7\)"),
        ("a-3", rf"killed \(signal SIGKILL\); if not by a person, then {MEMORY}; it had used \d+\.\d of \d+\.\d GB"),
        ("a-4", rf"RuntimeError: .* \(train.py:{line_of('torch.empty')}, round 3\); {MEMORY}"),
        ("a-5", rf"it came too late for rounds 2[-, \d]+; {re.escape(SLOW)}"),
    ],
)
def test_misuse_is_named_when_it_happens_at_the_end_and_by_doctor(ended: Ended, slot: str, why: str) -> None:
    live, *_ = ended.lines(f"skerry: warning: {slot} ")
    assert re.search(
        rf"{slot} is missing since round \d|{slot} missed round 2|{slot} failed and is not restarted", live
    ), live
    (summary,) = [line for line in ended.output.splitlines() if line.startswith(f"warning: {slot}: ")]
    assert re.search(rf"missing in \d of {ROUNDS} rounds \(.*\)[^:]*: {why}", summary), summary
    (finding,) = [line for line in invoke("doctor", ended.spec).output.splitlines() if f"replica={slot} " in line]
    assert finding.startswith("warning: missing-in-rounds"), finding
    assert re.search(why, finding), finding
    (shown,) = [line for line in invoke("status", ended.spec).output.splitlines() if f"warning: {slot}:" in line]
    assert re.search(why, shown), shown


@pytest.mark.slow
def test_rounds_of_evaluations_went_on_without_the_replica(ended: Ended) -> None:
    history = read_history(open_store((ended.spec.parent / "store/test-run").as_uri()))
    parts = {item.round: part for item in history.rounds for part in item.replicas if part.slot == "a-5"}
    evaluated = [number for number, part in parts.items() if part.telemetry and "val_loss" in part.telemetry.metrics]
    assert evaluated == [100 * number // SYNC_EVERY for number in (1, 2, 3)]
    assert {parts[number].part for number in evaluated} == {"late"}


@pytest.mark.slow
def test_first_round_that_ends_early_is_a_warning_with_a_remedy(tmp_path: Path) -> None:
    ended = up_to_its_end(tmp_path, {"a-1": "cut"})
    assert ended.code == 0, ended.output
    (line,) = ended.lines("[a-1]", "round_ended_early")
    assert re.search(
        r"WARNING round_ended_early round=3 slot=a-1 steps=20 share=0\.4 why=.*the others wait, and this replica has "
        r"40% of their inner steps, which it contributes; it has evaluated for \d+ s of this round: evaluate on less "
        r"data or in fewer rounds, or choose a larger sync_every",
        line,
    ), line
    assert not ended.lines("warning: a-1"), "one round is no pattern"


@contextmanager
def limited_memory(cgroups: Path) -> Iterator[Path]:
    """A group of processes that the kernel ends when they use more than 128 MiB, below the group of this process.

    Skips a test where there is no right to make one; fails it if SKERRY_TEST_CGROUPS is `required`.
    """
    groups = [line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for controller, path in groups:
        parent = cgroups / controller / path.lstrip("/")
        # In version 2 a group with processes has no limited groups below it: only beside it.
        parent = parent if controller else parent.parent
        group = parent / f"skerry-test-{os.getpid()}"
        if controller not in {"memory", ""} or not parent.is_dir():
            continue
        with suppress(OSError):
            group.mkdir()
            try:
                (group / ("memory.limit_in_bytes" if controller else "memory.max")).write_text(str(128 << 20))
                yield group
            finally:
                group.rmdir()
            return
    if os.environ.get("SKERRY_TEST_CGROUPS") == "required":
        pytest.fail("a right to limit the memory of processes is required, and there is none")
    pytest.skip("no right to limit the memory of processes; `scripts/test` as root has one where cgroups are writable")


@pytest.fixture
def limited() -> Iterator[Path]:
    with limited_memory(Path("/sys/fs/cgroup")) as group:
        yield group


@pytest.mark.parametrize(("variable", "outcome"), [("", pytest.skip.Exception), ("required", pytest.fail.Exception)])
def test_missing_right_to_limit_memory_is_a_failure_if_required(
    variable: str, outcome: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKERRY_TEST_CGROUPS", variable)
    with pytest.raises(outcome), limited_memory(tmp_path / "none"):
        pass


@pytest.mark.slow
def test_replica_that_the_kernel_ends_for_its_memory_is_named(tmp_path: Path, limited: Path) -> None:
    ended = up_to_its_end(tmp_path, {"a-1": f"limit:{limited}"})
    counts = next(path for name in ("memory.oom_control", "memory.events") if (path := limited / name).exists())
    assert "oom_kill 1\n" in counts.read_text(), "the kernel has ended it"
    assert ended.code == 3, ended.output
    guess = rf"killed \(signal SIGKILL\), probably {MEMORY}; it had used 0\.\d of 0\.1 GB"
    why = rf"missing in \d of {ROUNDS} rounds \(3-7\): {guess}"
    for lines in (ended.output, invoke("doctor", ended.spec).output, invoke("status", ended.spec).output):
        assert re.search(why, lines), lines


@pytest.mark.slow
def test_replica_with_another_shape_fails_and_asks_for_the_model(tmp_path: Path) -> None:
    ended = up_to_its_end(tmp_path, {"a-1": "shape"})
    assert ended.code == 3, ended.output
    # The first to write a checkpoint defines the shape.
    (summary,) = [line for line in ended.output.splitlines() if line.startswith("warning: a-")]
    assert re.search(
        r"missing in 8 of 8 rounds \(0-7\): Diverged: .* all replicas run the same model.* \(train.py:\d+, round 0\)",
        summary,
    ), summary


@pytest.mark.slow
def test_protocol_events_are_shown_by_logs_with_verbose(ended: Ended) -> None:
    uri = (ended.spec.parent / "store/test-run").as_uri()
    for run in (ended.spec, uri):
        lines = invoke("logs", run, "--replica", "a-0", "-v").output.splitlines()
        assert any(" INFO joined" in line for line in lines), lines
        # On a slow machine there are warnings, too, of a store that is late.
        shown = [line for line in lines if level_of(line.removeprefix("[a-0] ")) != logging.INFO]
        assert "[a-0] a-0 is done" in shown
        assert invoke("logs", run, "--replica", "a-0").output.splitlines() == shown


def two_folders(tmp_path: Path, *behaviour: str, code: Path = STANDIN) -> tuple[list[Path], list[str]]:
    """The same endless run in two folders, with one store."""
    specs: list[Path] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        specs.append(write_spec(tmp_path / name, *behaviour, count=1, restarts=0, code=code))
    endless = [*changes(outer__rounds=100_000, outer__sync_every=4), f"--set=store={(tmp_path / 'store').as_uri()}"]
    return specs, endless


LIVE = (
    r"run test-run is live, and not by this folder: a-0 on \S+ \(process \d+\) since \S+, in round \d+, "
    r"last heartbeat \d\.\d s ago. Take it over\? The replicas there will end\."
)


@pytest.mark.slow
def test_second_up_from_another_folder_is_refused(tmp_path: Path) -> None:
    specs, endless = two_folders(tmp_path, "a-0=wait")
    with Skerry("up", str(specs[0]), *endless, "-v") as first:
        first.until("] ready")
        with Skerry("up", str(specs[1]), *endless) as second:
            assert second.end() == 2
        assert re.search(rf"^{LIVE} There is no terminal to ask on: add --take-over$", second.output, re.MULTILINE)
        # A spec with other slots would remove the live ones from the run.
        with Skerry("up", str(specs[1]), *endless, "--set", "replicas[0].name=b") as other:
            assert other.end() == 2
        assert re.search(rf"^{LIVE} ", other.output, re.MULTILINE), other.output
        assert not (tmp_path / "two" / ".skerry" / "test-run" / "logs").exists()
        destroyed = invoke("destroy", f"{(tmp_path / 'store').as_uri()}/test-run", "--yes")
        assert (destroyed.exit_code, "are at work; stop them first" in destroyed.output) == (2, True), destroyed.output
        first.interrupt()
        first.until("] stopping cleanly")
        assert first.end() == 1
    # Nothing is live any more, so it is not asked about.
    with Skerry("up", str(specs[1]), *endless, "-v") as second:
        second.until("run test-run continues")
        second.until("] ready")
        second.interrupt()
        second.end()


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["n", "y"])
def test_second_up_asks_on_a_terminal(tmp_path: Path, answer: str) -> None:
    specs, endless = two_folders(tmp_path, "a-0=wait")
    with Skerry("up", str(specs[0]), *endless, "-v") as first:
        first.until("] ready")
        terminal, keyboard = os.openpty()
        with Skerry("up", str(specs[1]), *endless, "-v", terminal=Path(os.ttyname(keyboard))) as second:
            os.write(terminal, f"{answer}\n".encode())
            if answer == "n":
                assert second.end() == 2
                assert "nothing was changed" in second.output
                first.interrupt()
                first.until("] stopping cleanly")
                first.end()
            else:
                second.until("run test-run continues")
                second.until("] ready")
                assert first.end() == 1
                second.interrupt()
                second.end()
            assert re.search(rf"{LIVE} \[y/N\]", second.output)
        os.close(terminal)
        os.close(keyboard)


@pytest.mark.slow
def test_take_over_from_another_folder_ends_the_replicas_of_the_first(tmp_path: Path) -> None:
    specs, endless = two_folders(tmp_path, code=CODE)
    with Skerry("up", str(specs[0]), *endless, "-v") as first:
        first.until(" INFO round_closed")
        with Skerry("up", str(specs[1]), *endless, "-v", "--take-over") as second:
            second.until("run test-run continues")
            second.until(" INFO round_closed")
            assert first.end() == 1
            second.interrupt()
            assert second.end() == 1
    assert re.search(
        r"warning: a-0 failed and is not restarted: exit code 20: a restart cannot help: .*"
        r"the newer one is live; do not restart this one",
        first.output,
    ), first.output
