"""Kills real `skerry apply` and `skerry destroy` processes at random moments, and checks that the next one finishes.

    scripts/bench apply-chaos [--kills 100] [--seed 1] [--json]

Two runs take turns: `batch` (two replicas on AWS Batch) and `mixed` (two on Vertex AI, one on Batch, one bucket in S3).
Both clouds are the sandboxes of skerry.testing, which this process serves; every command is a process of its own.
A turn: an apply gets SIGKILL once the clouds have received a random number of its writing calls (of as many as an
undisturbed one makes) and after a further pause of up to 20 ms; the next apply must succeed and leave exactly what an
undisturbed one does; a plan then finds nothing to do. Then the same with destroy, which must leave nothing.

kills               processes that were killed; not those that ended before their moment
not_finished        commands after a kill that did not end with 0
doubled             kinds of which there was another number of resources than after an undisturbed apply
unsettled           plans after that apply that were not empty
left                kinds of which there was something after the destroy
killed_at           by run and command: after how many of the writing calls, as a share, in tenths
seconds_to_finish   of the commands after a kill: median and longest

Ends with 1 if any of the four is not 0.
"""
# ruff: noqa: D102, D103  a benchmark explains itself above

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the runs are those of the tests

from tests.infra.targets.runs import BatchRun, VertexRun

from skerry.testing.both_clouds import Clouds
from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.infra.deploy.account import Operator

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "apply": ("--auto-approve",),
    "destroy": ("--yes", "--data"),
}
PROGRAM: Final = (sys.executable, "-c", "from skerry.infra.cli.app import main; main()")
# Between two looks at the calls; a call takes some milliseconds.
LOOK_S: Final = 0.001
PAUSE_S: Final = 0.02


@dataclass(kw_only=True)
class Figures:
    """The results of the turns so far."""

    kills: Counter[str] = field(default_factory=Counter[str])
    killed_at: dict[str, Counter[int]] = field(default_factory=dict[str, Counter[int]])
    seconds: list[float] = field(default_factory=list[float])
    not_finished: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])
    unsettled: list[str] = field(default_factory=list[str])
    left: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        return not (self.not_finished or self.doubled or self.unsettled or self.left)

    def document(self, options: argparse.Namespace) -> dict[str, object]:
        return {
            "benchmark": "apply_chaos",
            "cores": os.cpu_count(),
            "seed": options.seed,
            "kills": self.kills.total(),
            "kills_of": dict(sorted(self.kills.items())),
            "not_finished": self.not_finished,
            "doubled": self.doubled,
            "unsettled": self.unsettled,
            "left": self.left,
            "killed_at": {what: dict(sorted(tenths.items())) for what, tenths in sorted(self.killed_at.items())},
            "seconds_to_finish": {
                "median": round(statistics.median(self.seconds), 2) if self.seconds else None,
                "longest": round(max(self.seconds), 2) if self.seconds else None,
            },
        }


class Run:
    """One run in the sandboxes, and what an undisturbed apply and destroy of it do."""

    def __init__(self, name: str, operator: Operator, clouds: Clouds) -> None:
        self.name = name
        self._operator = operator
        self._clouds = clouds
        self._environment = {**os.environ, **clouds.environment, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.writes: dict[str, int] = {}
        self._end("apply")
        self.whole = self.counts()
        self._end("destroy")
        if left := self.counts():
            raise SystemExit(f"{name}: an undisturbed destroy left {left}")

    def start(self, command: str) -> subprocess.Popen[str]:
        for sandbox in (self._clouds.aws, self._clouds.google):
            sandbox.calls.clear()
        words = [*PROGRAM, command, str(self._operator.path), *COMMANDS[command]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(words, env=self._environment, text=True, **pipes)  # noqa: S603  our own command

    def written(self) -> int:
        """Return the number of writing calls since the last start."""
        return len(self._clouds.aws.calls.writes) + len(self._clouds.google.calls.writes)

    def counts(self) -> dict[str, int]:
        """Return the number of resources of each kind, in both clouds."""
        counts: Counter[str] = Counter()
        for cloud, sandbox in (("aws", self._clouds.aws), ("google", self._clouds.google)):
            counts.update({f"{cloud} {kind}": len(names) for kind, names in sandbox.inventory().items()})
        return dict(sorted(counts.items()))

    def is_settled(self) -> bool:
        return self._operator.plan().plan.empty

    def kill(self, command: str, chance: random.Random, figures: Figures) -> None:
        """Start a command and kill it at a random moment, unless it ends before."""
        at, pause = chance.randint(1, self.writes[command]), chance.uniform(0, PAUSE_S)
        process = self.start(command)
        while process.poll() is None and self.written() < at:
            time.sleep(LOOK_S)
        time.sleep(pause)
        process.kill()
        process.communicate()
        if process.returncode < 0:
            what = f"{self.name} {command}"
            figures.kills[what] += 1
            figures.killed_at.setdefault(what, Counter())[min(9, 10 * at // self.writes[command])] += 1

    def finish(self, command: str, figures: Figures, turn: str) -> None:
        """Run a command to its end, which must be a success."""
        began = time.perf_counter()
        process = self.start(command)
        output = process.communicate()[0]
        figures.seconds.append(time.perf_counter() - began)
        if process.returncode:
            figures.not_finished.append(f"{turn} {command}: {process.returncode}: {output[-2000:]}")

    def _end(self, command: str) -> None:
        process = self.start(command)
        output = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{self.name}: an undisturbed {command} failed: {output[-4000:]}")
        self.writes[command] = self.written()


def turn(run: Run, number: int, chance: random.Random, figures: Figures) -> None:
    """Kill an apply and a destroy once each, and check what the next ones leave."""
    name = f"{run.name} {number}"
    run.kill("apply", chance, figures)
    run.finish("apply", figures, name)
    if (counts := run.counts()) != run.whole:
        figures.doubled.append(f"{name}: {counts} instead of {run.whole}")
    if not run.is_settled():
        figures.unsettled.append(name)
    run.kill("destroy", chance, figures)
    run.finish("destroy", figures, name)
    if left := run.counts():
        figures.left.append(f"{name}: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--kills", type=int, default=100, help="processes to kill, of both runs together")
    parser.add_argument("--seed", type=int, default=1, help="of the moments; the machine adds its own chance")
    options = parser.parse_args()
    chance, figures = random.Random(options.seed), Figures()  # noqa: S311  a schedule
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as name, Sandbox() as aws, GoogleSandbox() as google:
        aws.any_image = google.any_image = True
        clouds = Clouds(aws=aws, google=google)
        folders = [Path(name) / part for part in ("batch", "mixed")]
        for folder in folders:
            folder.mkdir()
        batch, vertex = BatchRun(folders[0], aws), VertexRun(folders[1], google)
        vertex.environment = dict(clouds.environment)
        others = batch.group(1, "role: replica").replace("name: a", "name: b")
        runs = [
            Run("batch", batch.operator(), clouds),
            Run("mixed", vertex.operator(store="s3://acme-skerry/runs", others=others), clouds),
        ]
        number = 0
        while figures.kills.total() < options.kills:
            turn(runs[number % 2], number, chance, figures)
            number += 1
            print(f"{number} turns, {figures.kills.total()} kills, ok: {figures.ok}", file=sys.stderr, flush=True)
    document = figures.document(options)
    print(json.dumps(document) if options.json else "\n".join(f"{what}: {value}" for what, value in document.items()))
    raise SystemExit(0 if figures.ok else 1)


if __name__ == "__main__":
    main()
