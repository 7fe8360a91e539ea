"""Climbs from the cheapest proof on real accounts to the dearest, and stops at the first surprise.

    scripts/test --cloud --ladder [--from RUNG] [--folder FOLDER]

Every rung is tests of this folder, run by pytest in this process. Before it starts, the ladder says what it does and
what it can cost at most. It ends with a page of what was seen, without ids.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import os
import re
import shlex
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.cloud import settings as names
from tests.cloud.place import NAME
from tests.cloud.remove_ids import Id
from tests.cloud.rungs import LIMIT_USD, Rung, rungs
from tests.cloud.settings import Settings
from tests.cloud.transcript import ROOT, CaseResult, Journal, RungResult, commit, is_rehearsal

from skerry.infra.cost.prices import VARIABLE as PRICES
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

OK: Final = 0
SURPRISE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
_ADDOPTS: Final = "PYTEST_ADDOPTS"
_WARNING: Final = re.compile(r"^(?:skerry: )?warning: .*", re.MULTILINE)
# A run is expected to take half an hour; its cap is its price for two hours.
_EXPECTED: Final = 0.5
# The last lines of what a failed test saw, on the terminal; the page has more.
_SEEN: Final = 40


@dataclass(kw_only=True, eq=False)
class Recorder:
    """A plugin of pytest that keeps what happens in one rung. properties: that tests have recorded.

    heard: True once the process was interrupted, whatever has caught the signal.
    """

    cases: dict[str, CaseResult] = field(default_factory=dict)
    properties: list[tuple[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    deselected: int = 0
    interrupted: bool = False
    heard: Callable[[], bool] = lambda: False
    session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.heard() and self.session is not None:
            self.session.shouldstop = "interrupted"
        case = self.cases.setdefault(report.nodeid, CaseResult(name=report.nodeid))
        case.seconds += report.duration
        if report.failed:
            case.outcome = "failed"
            case.text += report.longreprtext
        elif report.skipped and case.outcome == "passed":
            case.outcome = "skipped"
            case.text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if report.when == "teardown":
            case.output = report.capstdout + report.capstderr
            self.properties += report.user_properties
            case.usd_per_hour = dict(report.user_properties).get("usd_per_hour")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problems.append(f"{report.nodeid}: {report.longreprtext}")

    def pytest_warning_recorded(self, warning_message: Any) -> None:
        self.problems.append(f"a warning of Python: {warning_message.message}")

    def pytest_deselected(self, items: Sequence[object]) -> None:
        self.deselected += len(items)

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def ids(self) -> Iterator[Id]:
        """The ids among the properties, and their parts: the user in an ARN, the domain of an address."""
        for name, value in self.properties:
            text = str(value)
            if name == "usd_per_hour" or " " in text:  # "your own login" is none
                continue
            yield Id(name, text)
            if name == "principal":
                yield from (Id(name, part) for part in re.split("[@/]", re.sub(r"^.*:[\w-]+/", "", text)))
            elif "@" in text:
                yield from (Id(name, part) for part in text.split("@"))


@contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Hears SIGINT and SIGTERM, also those that a command of skerry catches in this process."""
    reading, writing = os.pipe()
    numbers: set[int] = set()

    def heard() -> bool:
        with suppress(BlockingIOError):
            numbers.update(os.read(reading, 512))
        return bool(numbers & {signal.SIGINT, signal.SIGTERM})

    for end in (reading, writing):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield heard
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def run_tests(rung: Rung) -> Recorder:
    """Run the tests of a rung in this process."""
    # The modules that an earlier rung has imported are rewritten already.
    ignored = "ignore::pytest.PytestAssertRewriteWarning"
    words = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-W",
        ignored,
        "-m",
        "cloud",
        "--rootdir",
        str(ROOT),
        *rung.tests,
    ]
    with interrupts() as heard:
        recorder = Recorder(heard=heard)
        try:
            code = pytest.main(words, plugins=[recorder])
        except KeyboardInterrupt:  # a second one, while the first one is cleaned up after
            code = pytest.ExitCode.INTERRUPTED
        recorder.interrupted = recorder.interrupted or heard()
    if code not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}:
        recorder.problems.append(f"pytest ended with {code}: see its output above")
    return recorder


def surprises(rung: Rung, recorder: Recorder, cap_usd: float, usd: float, left: Sequence[Path]) -> list[str]:
    """All that was not expected of a rung. left: the specs of what is not gone."""
    result = list(recorder.problems)
    for case in recorder.cases.values():
        if case.outcome == "failed":
            seen = "\n".join(f"{case.output}\n{case.text}".strip().splitlines()[-_SEEN:])
            result.append(f"{case.name} failed:\n{seen}")
        elif case.outcome == "skipped":
            result.append(f"{case.name} was skipped: {case.text}")
        result += [f"{case.name} passed with a {match[0]}" for match in _WARNING.finditer(case.output)]
    if not any(case.outcome == "passed" for case in recorder.cases.values()):
        result.append("no test has passed")
    if rung.kinds and usd > cap_usd * _EXPECTED:
        expected = f"${cap_usd * _EXPECTED:.2f} was expected at most"
        result.append(f"its machines cost ${usd:.2f} in the time that it took, and {expected}")
    result += [f"left over: what {spec} describes" for spec in left]
    return result


def cost(rung: Rung, recorder: Recorder, cap_usd: float) -> float:
    """The dollars to count: machines for as long as the tests took; the cap if that is unknown, or all did not pass."""
    if not rung.kinds or any(case.outcome != "passed" for case in recorder.cases.values()) or recorder.interrupted:
        return cap_usd
    prices = [case.usd_per_hour for case in recorder.cases.values()]
    if not prices or None in prices:
        return cap_usd * _EXPECTED
    return sum((case.usd_per_hour or 0.0) * case.seconds / 3600 for case in recorder.cases.values())


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass(kw_only=True)
class Ladder:
    """One climb. folder: has the journal, the page, and the specs of what is not gone. say: prints a line."""

    settings: Settings
    rungs: Sequence[Rung]
    journal: Journal
    folder: Path
    say: Callable[[str], None] = say
    run: Callable[[Rung], Recorder] = run_tests

    def climb(self, start: str | None = None) -> int:
        """From the first rung, or from `start` after the account was checked again. Returns the exit code."""
        order = [rung.name for rung in self.rungs]
        first = 0 if start is None else order.index(start)
        for number, rung in enumerate(self.rungs, 1):
            if number - 1 < first and rung.name != order[0]:
                continue
            if rung.lacks is not None:
                self.say(f"rung {number} of {len(order)}, {rung.name}: not configured: {rung.lacks}")
                self._add(rung, "not configured", lacks=rung.lacks)
                continue
            cap_usd, why = rung.cap_usd(self.settings)
            self.say(f"rung {number} of {len(order)}, {rung.name}: {rung.does}")
            budget = self.journal.budget_usd
            left_usd = budget - self.journal.spent_usd
            self.say(f"  at most ${cap_usd:.2f}: {why}; ${left_usd:.2f} of ${budget:.2f} are left")
            if cap_usd > left_usd:
                self.say("stopped: what is left does not pay for it; a ladder from the start has a new budget")
                return SURPRISE
            code = self._climb_one(rung, cap_usd, why)
            if code != OK:
                return code
        passed = sum(rung.result == "passed" for rung in self.journal.rungs)
        self.say(
            f"{passed} rungs passed, {len(order) - passed} are not configured; ${self.journal.spent_usd:.2f} counted"
        )
        return OK

    def _climb_one(self, rung: Rung, cap_usd: float, why: str) -> int:
        # If this process is killed, the rung counts as if it had cost all.
        self._add(rung, "interrupted", cap_usd=cap_usd, why_cap=why, usd=cap_usd)
        recorder = self.run(rung)
        left = specs_left(self.folder)
        usd = cost(rung, recorder, cap_usd)
        self.journal.ids += [item for item in recorder.ids() if item not in self.journal.ids]
        more = {"cap_usd": cap_usd, "why_cap": why, "usd": usd, "deselected": recorder.deselected}
        more["cases"] = list(recorder.cases.values())
        self.journal.spent_usd -= cap_usd
        if recorder.interrupted:
            self._add(rung, "interrupted", **more)
            self.say(f"interrupted in rung {rung.name}; {'something may still run' if left else 'nothing is left'}")
            self._say_commands(left)
            self.say(f"to go on:  scripts/test --cloud --ladder --from {rung.name}")
            return INTERRUPTED
        seen = surprises(rung, recorder, cap_usd, usd, left)
        self._add(rung, "stopped" if seen else "passed", surprises=seen, **more)
        if not seen:
            return OK
        self.say(f"stopped at rung {rung.name} by a surprise:")
        for surprise in seen:
            self.say(surprise)
        self._say_commands(left)
        self.say(f"when it is mended:  scripts/test --cloud --ladder --from {rung.name}")
        return SURPRISE

    def _say_commands(self, left: Sequence[Path]) -> None:
        for line in commands(left):
            self.say(f"take it away:  {line}")

    def _add(self, rung: Rung, result: Any, **more: Any) -> None:
        command = shlex.join(["pytest", "-m", "cloud", *rung.tests])
        self.journal.add(
            RungResult(name=rung.name, does=rung.does, result=result, commit=commit(), command=command, **more)
        )


def specs_left(folder: Path) -> list[Path]:
    """The specs of what is not gone: a place deletes its own once nothing of it is left."""
    return sorted(folder.glob(f"{NAME}*/skerry.yaml"))


def commands(left: Sequence[Path]) -> list[str]:
    """The commands that take away what each spec describes."""
    destroy, delete = ["skerry", "destroy"], ["rm", "-r"]
    return [
        f"{shlex.join([*destroy, str(spec), '--yes', '--data'])} && {shlex.join([*delete, str(spec.parent)])}"
        for spec in left
    ]


def budget_usd(settings: Settings) -> float:
    """The budget of the ladder. Raises Invalid if it is no amount, or above the limit."""
    text = settings.given.get(names.MAX_USD, str(LIMIT_USD))
    try:
        usd = float(text)
    except ValueError:
        usd = math.nan
    if not 0 < usd <= LIMIT_USD:
        raise Invalid(f"{names.MAX_USD}={text}: a ladder may cost ${LIMIT_USD:.0f} at most; set an amount up to that")
    return usd


def prepare(environment: Mapping[str, str], folder: Path, start: str | None) -> Ladder:
    """Read what the ladder may use, and what was done before. Raises Invalid before anything is asked of a cloud."""
    settings = Settings.read({**environment, names.FOLDER: str(folder)})
    budget = budget_usd(settings)
    rehearsal = is_rehearsal(settings, environment)
    if _ADDOPTS in environment and not rehearsal:
        raise Invalid(f"{_ADDOPTS} is set, and may leave tests out; unset it")
    folder.mkdir(parents=True, exist_ok=True)
    if left := specs_left(folder):
        raise Invalid("\n".join(["an earlier ladder has left something, which may cost; first run", *commands(left)]))
    try:
        settings.write_prices(folder / "prices.json")
    except ValueError as error:
        raise Invalid(f"{names.SAGEMAKER_USD} is no price: {error}") from error
    os.environ.update({names.FOLDER: str(folder), PRICES: str(folder / "prices.json")})
    all_rungs = rungs(settings)
    if all(rung.lacks is not None for rung in all_rungs):
        raise Invalid(f"nothing is configured: {all_rungs[0].lacks}; see 'Against a real account' in infra/README.md")
    path = folder / "ladder.json"
    if start is None:
        day = dt.datetime.now(dt.UTC).date().isoformat()
        journal = Journal(path=path, day=day, rehearsal=rehearsal, budget_usd=budget)
    else:
        journal = continued(path, start, [rung.name for rung in all_rungs], rehearsal=rehearsal)
        journal.budget_usd = min(journal.budget_usd, budget)
    return Ladder(settings=settings, rungs=all_rungs, journal=journal, folder=folder)


def continued(path: Path, start: str, order: Sequence[str], *, rehearsal: bool) -> Journal:
    if start not in order:
        raise Invalid(f"no such rung: {start}; there are {', '.join(order)}")
    if not path.exists():
        raise Invalid(f"no ladder to go on with in {path.parent}; run it without --from")
    journal = Journal.load(path)
    if journal.rehearsal != rehearsal:
        raise Invalid(
            f"the ladder in {path.parent} was {'a' if journal.rehearsal else 'no'} rehearsal; name another --folder"
        )
    done = {rung.name for rung in journal.rungs if rung.result in {"passed", "not configured"}}
    if before := [name for name in order[: order.index(start)] if name not in done]:
        raise Invalid(f"{before[0]} comes before {start} and has not passed; use --from {before[0]}")
    journal.rungs = [rung for rung in journal.rungs if rung.name in order[: order.index(start)]]
    return journal


def main(words: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 after a surprise, 2 for wrong usage, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="scripts/test --cloud --ladder", description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="start", metavar="RUNG", help="go on there, after the first rung")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/ladder", help="of the journal and the page")
    arguments = parser.parse_args(words)

    folder: Path = arguments.folder.resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ladder = prepare(os.environ, folder, arguments.start)
        code = ladder.climb(arguments.start)
    except Invalid as error:
        say(str(error))
        return USAGE
    page = folder / f"{ladder.journal.day}-{'rehearsal' if ladder.journal.rehearsal else 'services'}.md"
    try:
        text = ladder.journal.page(ladder.settings, [rung.name for rung in ladder.rungs], os.environ)
    except Invalid as error:
        page.unlink(missing_ok=True)
        say(f"{page}: {error}")
        return SURPRISE
    page.write_text(text)
    say(f"\n{text}\n{page}")
    if not ladder.journal.rehearsal:
        say(f"read it, then publish it:  cp {shlex.quote(str(page))} docs/verified/")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
