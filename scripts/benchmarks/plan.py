"""Measures planning and applying: seconds and API calls for groups of 10, 100 and 1,000 jobs of AWS Batch.

    scripts/bench plan [--replicas 10 100 1000] [--turns 3] [--json]

cold     `skerry plan` of an empty account
apply    all of it made: a queue, its machines, roles, and a job for each replica
warm     the plan afterwards, which has to look at each job
again    an apply of what is there: may not write anything
destroy  all of it taken away, the bucket too
start    `python -c 'import skerry.infra.cli.app'`, and a whole `skerry plan` of four replicas as a process of its own

The cloud is the sandbox of skerry.testing, in this process and without containers: no time is spent on a network or
a machine, and its own time is in every figure, so seconds say what skerry and moto take together, on this machine.
Calls are exact. Sizes take turns, medians are reported; progress goes to stderr. Ends with 1 if a second apply writes.
"""
# ruff: noqa: D102, D103  a benchmark explains itself above

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.infra import targets
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.run import check_machine_and_store
from skerry.runtime.clock import SystemClock
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.infra.provision.apply import Outcome

SPEC: Final = """
run: bench
store: s3://acme-skerry/runs
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{digest}
code: {{path: train, command: [python, train.py]}}
outer: {{rounds: 100}}
limits: {{max_hours: 24}}
replicas:
  - name: b
    count: {count}
    target: {{kind: aws_batch, region: us-east-1, instance_types: [c7i.large], vcpus: 2, memory: 1GiB, role: group}}
"""
PHASES: Final = ("cold", "apply", "warm", "again", "destroy")
STARTED: Final = 4
# What the state and the run's own store are read and written with; everything else asks or changes a service.
OF_THE_STORE: Final = frozenset(
    {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListObjectsV2", "s3:HeadObject"}
)
# What this has to keep to, in seconds, at the largest size.
PLAN_S: Final = 2.0
APPLY_S: Final = 60.0
START_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One phase of one turn. calls: to services. store_calls: to the bucket's objects. writes: of both, what writes."""

    seconds: float
    calls: int
    store_calls: int
    writes: int


class Ground:
    """The sandbox, and one spec in it. Every phase is a deployment of its own, as a process would have it."""

    def __init__(self, sandbox: Sandbox, folder: Path) -> None:
        self._sandbox = sandbox
        sandbox.any_image = True
        self._folder = folder
        (folder / "train").mkdir()
        (folder / "train" / "train.py").write_text("print('training')\n")

    def spec(self, replicas: int) -> Path:
        path = self._folder / f"{replicas}.yaml"
        path.write_text(SPEC.format(digest="0123456789abcdef" * 4, count=replicas))
        return path

    def turn(self, replicas: int) -> dict[str, Figures]:
        """Every phase once, in an account that was empty before."""
        path = self.spec(replicas)
        self._sandbox.reset()
        phases: dict[str, Callable[[Deployment], object]] = {
            "cold": make_plan,
            "apply": apply,
            "warm": make_plan,
            "again": apply,
            "destroy": destroy,
        }
        figures = {name: self._measured(path, phases[name]) for name in PHASES}
        if left := self._sandbox.inventory():
            raise SystemExit(f"destroy left {left}")
        return figures

    def environment(self) -> dict[str, str]:
        return {**os.environ, **self._sandbox.environment}

    def _measured(self, path: Path, phase: Callable[[Deployment], object]) -> Figures:
        self._sandbox.calls.clear()
        began = time.perf_counter()
        phase(
            prepare(
                check_machine_and_store.load_deployed(path, targets.kinds(), ()),
                SystemClock(),
                self._sandbox.environment,
            )
        )
        seconds = time.perf_counter() - began
        names = self._sandbox.calls.names
        of_the_store = sum(name in OF_THE_STORE for name in names)
        return Figures(
            seconds=seconds,
            calls=len(names) - of_the_store,
            store_calls=of_the_store,
            writes=len(self._sandbox.calls.writes),
        )


def apply(deployment: Deployment) -> Outcome:
    outcome = apply_plan(deployment, make_plan(deployment), lambda _: None, lambda _: None)
    if not outcome.ok:
        raise SystemExit(f"apply failed: {[str(error) for error in outcome.failed.values()]}")
    return outcome


def destroy(deployment: Deployment) -> None:
    removal = removing.plan_removal(deployment)
    removed = removing.destroy(deployment, removal, data=True, on_step=lambda _: None, on_begin=lambda _: None)
    if not removed.ok:
        raise SystemExit(f"destroy left {removed.left}")


def process_seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own commands
    return time.perf_counter() - began


def starts(ground: Ground) -> dict[str, float]:
    """Seconds of a bare interpreter, of one that imports the command line, and of a whole plan."""
    python, environment = sys.executable, ground.environment()
    whole = "from skerry.infra.cli.app import main; main()"
    return {
        "python": process_seconds([python, "-c", "pass"], environment),
        "import": process_seconds([python, "-c", "import skerry.infra.cli.app"], environment),
        "plan": process_seconds([python, "-c", whole, "plan", str(ground.spec(STARTED))], environment),
    }


def summary(turns: Sequence[dict[str, Figures]]) -> dict[str, dict[str, float]]:
    """Medians over turns, by phase."""
    response: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        seconds = statistics.median(turn[phase].seconds for turn in turns)
        calls = statistics.median(turn[phase].calls for turn in turns)
        response[phase] = {
            "seconds": round(seconds, 3),
            "calls": calls,
            "store_calls": statistics.median(turn[phase].store_calls for turn in turns),
            "writes": max(turn[phase].writes for turn in turns),
            "calls_per_s": round(calls / seconds, 1),
        }
    return response


def marks(largest: dict[str, dict[str, float]], start: dict[str, float]) -> dict[str, dict[str, object]]:
    """Return each mark with the limit, the figure and the comparison."""
    bounds: dict[str, tuple[float, float]] = {
        "plan_cold_s": (largest["cold"]["seconds"], PLAN_S),
        "plan_warm_s": (largest["warm"]["seconds"], PLAN_S),
        "apply_s": (largest["apply"]["seconds"], APPLY_S),
        "start_s": (start["import"], START_S),
    }
    response: dict[str, dict[str, object]] = {
        name: {"found": result, "below": bound, "met": result < bound} for name, (result, bound) in bounds.items()
    }
    writes = largest["again"]["writes"]
    return {**response, "second_apply_writes": {"found": writes, "below": 1, "met": writes == 0}}


def ratios(sizes: Sequence[int], response: dict[int, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the ratio of the largest to the smallest size, by phase."""
    first, last = response[sizes[0]], response[sizes[-1]]
    return {
        phase: {
            "seconds": round(last[phase]["seconds"] / first[phase]["seconds"], 2),
            "calls": round(last[phase]["calls"] / max(1.0, first[phase]["calls"]), 2),
        }
        for phase in PHASES
    }


def show(
    response: dict[int, dict[str, dict[str, float]]], start: dict[str, float], met: dict[str, dict[str, object]]
) -> None:
    for size, phases in response.items():
        for phase, result in phases.items():
            print(
                f"{size:5} {phase:8} {result['seconds']:7.2f} s  {result['calls']:6.0f} calls"
                f"  {result['store_calls']:6.0f} of the store  {result['calls_per_s']:6.0f} calls/s"
            )
    print(f"start: {', '.join(f'{what} {seconds:.2f} s' for what, seconds in start.items())}")
    for mark, outcome in met.items():
        print(f"{mark}: {outcome['result']} below {outcome['below']}: {'met' if outcome['met'] else 'NOT met'}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[10, 100, 1000], help="sizes of the group, up to 1024"
    )
    parser.add_argument("--turns", type=int, default=3, help="how often each size is measured")
    options = parser.parse_args()
    sizes = sorted(options.replicas)
    turns: dict[int, list[dict[str, Figures]]] = {size: [] for size in sizes}
    started: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as name, Sandbox() as sandbox:
        ground = Ground(sandbox, Path(name))
        ground.turn(1)  # moto loads what it needs when it is first asked
        for turn in range(options.turns):
            for size in sizes:
                turns[size].append(ground.turn(size))
                phases = ", ".join(f"{phase} {turns[size][-1][phase].seconds:.2f} s" for phase in PHASES)
                say(f"turn {turn + 1}, {size} replicas: {phases}")
            started.append(starts(ground))
            say(f"turn {turn + 1}, start: {', '.join(f'{what} {s:.2f} s' for what, s in started[-1].items())}")
    response = {size: summary(turns[size]) for size in sizes}
    start = {what: round(statistics.median(item[what] for item in started), 3) for what in started[0]}
    met = marks(response[sizes[-1]], start)
    # The seconds of any size count for that size alone; that nothing is written holds for all.
    writes = max(response[size]["again"]["writes"] for size in sizes)
    if options.json:
        sized = {str(size): response[size] for size in sizes}
        told_once = {"sizes": sized, "start": start, "ratios": ratios(sizes, response), "marks": met}
        print(json.dumps({"benchmark": "plan", "cores": os.cpu_count(), "turns": options.turns, **told_once}))
    else:
        show(response, start, met)
    raise SystemExit(1 if writes else 0)


if __name__ == "__main__":
    main()
