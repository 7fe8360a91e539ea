"""Saves the results of a ladder after each rung, and writes the page in Markdown that is made of them.

The saved file has ids and stays on this machine; the page has none.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tests.cloud import settings as names
from tests.cloud.remove_ids import Id, ids_of_environment, remove_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tests.cloud.settings import Settings

ROOT: Final = Path(__file__).parents[2]
Result = Literal["passed", "not configured", "stopped", "interrupted"]
_LIBRARIES: Final = (
    "boto3",
    "botocore",
    "google-auth",
    "google-cloud-aiplatform",
    "huggingface_hub",
    "kubernetes",
    "modal",
    "obstore",
    "sagemaker-core",
)
_IMAGES: Final = (names.AWS_IMAGE, names.GOOGLE_IMAGE, names.IMAGE)
_REGIONS: Final = {"AWS": names.AWS_REGION, "Google Cloud": names.GOOGLE_REGION}
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
# Of one test's output, the most that a page has: its beginning and its end.
_LINES: Final = 80
_RULE: Final = "|---" * 6 + "|"


@dataclass(kw_only=True)
class CaseResult:
    """One test. text: its error, or why it was skipped. usd_per_hour: of its machines; None if unknown or none."""

    name: str
    outcome: Literal["passed", "failed", "skipped"] = "passed"
    seconds: float = 0.0
    text: str = ""
    output: str = ""
    usd_per_hour: float | None = None


@dataclass(kw_only=True)
class RungResult:
    """One rung. usd: counted for it. deselected: tests that a rehearsal left out."""

    name: str
    does: str
    result: Result
    commit: str
    command: str = ""
    cap_usd: float = 0.0
    why_cap: str = ""
    usd: float = 0.0
    lacks: str = ""
    deselected: int = 0
    cases: list[CaseResult] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)


@dataclass(kw_only=True)
class Journal:
    """All of a ladder. day: on which it began. spent_usd: of all attempts. ids: that may not be published."""

    path: Path
    day: str
    rehearsal: bool
    budget_usd: float
    spent_usd: float = 0.0
    rungs: list[RungResult] = field(default_factory=list)
    ids: list[Id] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Journal:
        values = json.loads(path.read_text())
        rungs = [
            RungResult(**{**rung, "cases": [CaseResult(**case) for case in rung["cases"]]}) for rung in values["rungs"]
        ]
        return cls(**{**values, "path": path, "rungs": rungs, "ids": [Id(*item) for item in values["ids"]]})

    def save(self) -> None:
        values = {name: value for name, value in asdict(self).items() if name != "path"}
        written = self.path.with_suffix(".new")
        written.touch(mode=0o600)
        written.write_text(json.dumps(values, indent=1))
        written.replace(self.path)  # a journal that was cut short would forget what was spent

    def add(self, result: RungResult) -> None:
        """Save a rung's result in place of an earlier one of it."""
        self.rungs = [rung for rung in self.rungs if rung.name != result.name]
        self.rungs.append(result)
        self.spent_usd += result.usd
        self.save()

    def page(self, settings: Settings, order: Sequence[str], environment: Mapping[str, str]) -> str:
        """The page in Markdown. order: the names of all rungs. Raises Invalid if it would have an id."""
        known = [*self.ids, *ids_of_environment(environment), Id("path", str(ROOT)), Id("path", str(self.path.parent))]
        return remove_ids("\n".join(_lines(self, settings, order)) + "\n", known)


def commit() -> str:
    """The commit of this checkout, and whether it has changes that are in no commit."""

    def git(*words: str) -> str:
        ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return ended.stdout.strip()

    changed = " with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{git('rev-parse', '--short=12', 'HEAD') or 'unknown'}{changed}"


def _lines(journal: Journal, settings: Settings, order: Sequence[str]) -> Iterator[str]:
    if journal.rehearsal:
        yield f"# Rehearsal against sandboxes, {journal.day}"
        yield "**No account was used: this page proves nothing about a cloud, and is not to be published.**"
    else:
        yield f"# Services on real accounts, {journal.day}"
    yield ""
    yield "Written by `scripts/test --cloud --ladder`. Ids of accounts, projects, buckets, runs, machines"
    yield "and people are replaced by placeholders."
    yield from _table(_facts(journal, settings, order))
    yield from ["", "## Rungs", "| rung | result | tests | time | cost | at most |", _RULE]
    results = {rung.name: rung for rung in journal.rungs}
    for name in order:
        rung = results.get(name)
        if rung is None:
            yield f"| {name} | not started | | | | |"
        elif rung.result == "not configured":
            yield f"| {name} | not configured: {_cell(rung.lacks)} | | | | |"
        else:
            counts = ", ".join(f"{count} {word}" for word, count in _counts(rung).items() if count)
            money = f"${rung.usd:.2f} | ${rung.cap_usd:.2f}"
            yield f"| {name} | {rung.result} | {counts} | {_time(rung.seconds)} | {money} |"
    for name in order:
        if name in results and results[name].result != "not configured":
            yield from _section(results[name])


def _facts(journal: Journal, settings: Settings, order: Sequence[str]) -> Iterator[tuple[str, str]]:
    commits = list(dict.fromkeys(rung.commit for rung in journal.rungs))
    yield "skerry", f"{importlib.metadata.version('skerry')}, commit {', then '.join(commits) or commit()}"
    places = [f"{cloud} {settings.given[name]}" for cloud, name in _REGIONS.items() if name in settings.given]
    yield "regions", ", ".join(places) or "none"
    digests = {settings.given[name].partition("@")[2] or "no digest" for name in _IMAGES if name in settings.given}
    yield "images", ", ".join(f"`{digest}`" for digest in sorted(digests)) or "none"
    yield "Python", platform.python_version()
    yield "libraries", ", ".join(_versions())
    results = {rung.name: rung.result for rung in journal.rungs}
    words = [f"{list(results.values()).count(word)} {word}" for word in ("passed", "stopped", "interrupted")]
    words += [f"{list(results.values()).count('not configured')} not configured"]
    words += [f"{sum(name not in results for name in order)} not started"]
    yield "rungs", ", ".join(word for word in words if not word.startswith("0 "))
    yield "cost", f"${journal.spent_usd:.2f} counted, of at most ${journal.budget_usd:.2f}"


def _versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue


def _section(rung: RungResult) -> Iterator[str]:
    yield from [
        "",
        f"### {rung.name}",
        f"{rung.does[:1].upper()}{rung.does[1:]}. At most ${rung.cap_usd:.2f}: {rung.why_cap}.",
    ]
    if rung.deselected:
        yield f"{rung.deselected} tests were left out."
    yield from _code([f"$ {rung.command}", *_outcomes(rung.cases)])
    for surprise in rung.surprises:
        yield from ["", "Stopped by:", *_code(surprise.splitlines())]
    for case in rung.cases:
        if case.output or case.outcome == "failed":
            yield from ["", f"`{_short(case.name)}`:", *_code(_shortened(f"{case.output}\n{case.text}".splitlines()))]


def _outcomes(cases: Iterable[CaseResult]) -> Iterator[str]:
    for case in cases:
        reason = f": {case.text}" if case.outcome == "skipped" else ""
        yield f"{case.outcome:7} {case.seconds:7.1f} s  {_short(case.name)}{reason}"


def _short(name: str) -> str:
    return name.removeprefix("tests/cloud/")


def _shortened(lines: Sequence[str]) -> list[str]:
    lines = [line.rstrip() for line in lines if line.strip()]
    if len(lines) <= _LINES:
        return lines
    half = _LINES // 2
    return [*lines[:half], f"... {len(lines) - _LINES} lines ...", *lines[-half:]]


def _counts(rung: RungResult) -> Mapping[str, int]:
    outcomes = [case.outcome for case in rung.cases]
    return {word: outcomes.count(word) for word in ("passed", "failed", "skipped")}


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _code(lines: Iterable[str]) -> list[str]:
    """Placeholders are in code only, because elsewhere Markdown takes them for tags."""
    text = _ESCAPES.sub("", "\n".join(lines)).replace("```", "'''")
    return ["```text", *text.splitlines(), "```"]


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from ["", "| | |", "|---|---|"]
    for name, value in rows:
        yield f"| {name} | {_cell(value)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def is_rehearsal(settings: Settings, environment: Mapping[str, str]) -> bool:
    """True if the clouds are sandboxes: waits are hurried, or an endpoint is on this machine."""
    endpoints = [text for name, text in environment.items() if "ENDPOINT" in name or name == "STORAGE_EMULATOR_HOST"]
    return names.HASTE in settings.given or any("127.0.0.1" in text or "localhost" in text for text in endpoints)
