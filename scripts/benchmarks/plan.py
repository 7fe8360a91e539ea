"""Measures planning and applying: seconds and API calls for groups of 10, 100 and 1,000 jobs of AWS Batch, and of as
many jobs of Kubernetes as the largest.

    scripts/bench plan [--replicas 10 100 1000] [--turns 3] [--json]

cold     `skerry plan` of an empty account
apply    all of it made: a queue, its machines, roles, and a job for each replica
warm     the plan afterwards, which has to look at each job
again    an apply of what is there: may not write anything
destroy  all of it taken away, the bucket too
start    `python -c 'import skerry.infra.cli.app'`, and a whole `skerry plan` of four replicas as a process of its own
six      the CPU, user and system, of a `skerry plan` of a replica each in six places as a process of its own

The API server of Kubernetes admits 50 calls a second during its apply, and answers 429 with Retry-After to the others.
Clouds are the sandboxes of skerry.testing, in this process and without containers: no time is spent on a network or
a machine. Their own time is in every figure but those of processes, so seconds say what skerry and they take together.
Calls are exact. Sizes take turns, medians are reported; progress goes to stderr. Ends with 1 if a second apply writes.
"""
# ruff: noqa: D102, D103  a benchmark explains itself above

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.infra import targets
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.run import check_machine_and_store
from skerry.runtime.clock import SystemClock
from skerry.testing.both_clouds import Clouds
from skerry.testing.google.sandbox import GoogleSandbox
from skerry.testing.huggingface import HuggingFaceSandbox
from skerry.testing.kubernetes import KubernetesSandbox
from skerry.testing.modal_cloud import ModalSandbox
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from skerry.infra.provision.apply import Outcome

SPEC: Final = """
run: bench
store: s3://acme-skerry/runs
image: {repository}@sha256:{digest}
code: {{path: train, command: [python, train.py]}}
outer: {{rounds: 100}}
limits: {{max_hours: 24}}
replicas:
"""
DIGEST: Final = "0123456789abcdef" * 4
ECR: Final = "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry"
GHCR: Final = "ghcr.io/acme/skerry"
BATCH: Final = "kind: aws_batch, region: us-east-1, instance_types: [c7i.large], vcpus: 2, memory: 1GiB, role: group"
KUBERNETES: Final = "kind: kubernetes, namespace: train, secret: store-keys"
KEYS: Final = "{AWS_ACCESS_KEY_ID: REPLICA_KEY_ID, AWS_SECRET_ACCESS_KEY: REPLICA_SECRET_KEY}"
PHASES: Final = ("cold", "apply", "warm", "again", "destroy")
STARTED: Final = 4
WHOLE: Final = "from skerry.infra.cli.app import main; main()"
# What the state and the run's own store are read and written with; everything else asks or changes a service.
OF_THE_STORE: Final = frozenset(
    {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListObjectsV2", "s3:HeadObject"}
)
# What this has to keep to, in seconds, at the largest size.
PLAN_S: Final = 2.0
APPLY_S: Final = 60.0
START_S: Final = 1.0
SIX_CPU_S: Final = 5.0
# Of the API server of Kubernetes, during an apply.
CALLS_PER_S: Final = 50.0


Phases = dict[str, dict[str, float]]
"""Figures by phase."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One phase of one turn. calls: to services. store_calls: to the bucket's objects. writes: of both, what writes."""

    seconds: float
    calls: int
    store_calls: int
    writes: int


def write_spec(path: Path, groups: str, repository: str = ECR) -> Path:
    (path.parent / "train").mkdir(exist_ok=True)
    (path.parent / "train" / "train.py").write_text("print('training')\n")
    path.write_text(SPEC.format(repository=repository, digest=DIGEST) + groups)
    return path


class Ground:
    """An account with the store, a cluster or none, and one spec in them.

    Every phase is a deployment of its own, as a process would have it.
    """

    def __init__(self, folder: Path, account: Sandbox, cluster: KubernetesSandbox | None = None) -> None:
        self._folder = folder
        self._cluster = cluster
        self._sandboxes: list[Sandbox | KubernetesSandbox] = [account] if cluster is None else [account, cluster]
        account.any_image = True

    def spec(self, replicas: int) -> Path:
        target, repository = (BATCH, ECR) if self._cluster is None else (KUBERNETES, GHCR)
        group = f"  - {{name: b, count: {replicas}, target: {{{target}}}}}\n"
        return write_spec(self._folder / f"{replicas}.yaml", group, repository)

    def turn(self, replicas: int) -> dict[str, Figures]:
        """Every phase once, in an account that was empty before."""
        path = self.spec(replicas)
        for sandbox in self._sandboxes:
            sandbox.reset()
        phases: dict[str, Callable[[Deployment], object]] = {
            "cold": make_plan,
            "apply": apply,
            "warm": make_plan,
            "again": apply,
            "destroy": destroy,
        }
        figures: dict[str, Figures] = {}
        for name in PHASES:
            if self._cluster is not None:
                self._cluster.limit(CALLS_PER_S if name == "apply" else None)
            figures[name] = self._measured(path, phases[name])
        if left := [left for sandbox in self._sandboxes if (left := sandbox.inventory())]:
            raise SystemExit(f"destroy left {left}")
        return figures

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for sandbox in self._sandboxes for name, value in sandbox.environment.items()}

    def _measured(self, path: Path, phase: Callable[[Deployment], object]) -> Figures:
        for sandbox in self._sandboxes:
            sandbox.calls.clear()
        # A process of its own has no sandbox, whose objects the collector would look through.
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        began = time.perf_counter()
        phase(
            prepare(
                check_machine_and_store.load_deployed(path, targets.kinds(), ()),
                SystemClock(),
                self.environment,
            )
        )
        seconds = time.perf_counter() - began
        names = [call.name for sandbox in self._sandboxes for call in sandbox.calls if call.status != 429]
        of_the_store = sum(name in OF_THE_STORE for name in names)
        return Figures(
            seconds=seconds,
            calls=len(names) - of_the_store,
            store_calls=of_the_store,
            writes=sum(len(sandbox.calls.writes) for sandbox in self._sandboxes),
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


def process_seconds(environment: Mapping[str, str], *command: str) -> tuple[float, float]:
    """Run a command of Python. Return its seconds, and those of its CPU, user and system."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-c", *command]
    subprocess.run(words, env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def starts(ground: Ground) -> dict[str, float]:
    """Seconds of a bare interpreter, of one that imports the command line, and of a whole plan."""
    commands = {"python": ["pass"], "import": ["import skerry.infra.cli.app"]}
    commands["plan"] = [WHOLE, "plan", str(ground.spec(STARTED))]
    return {what: process_seconds(ground.environment, *words)[0] for what, words in commands.items()}


class SixPlaces:
    """Sandboxes of six places, and a spec with a replica in each, with its store in the first."""

    def __init__(self, folder: Path, account: Sandbox, cluster: KubernetesSandbox, stack: ExitStack) -> None:
        google = stack.enter_context(GoogleSandbox())
        google.any_image = True
        clouds = Clouds(aws=account, google=google)
        hub, modal = stack.enter_context(HuggingFaceSandbox()), stack.enter_context(ModalSandbox())
        own = {"REPLICA_KEY_ID": "key", "REPLICA_SECRET_KEY": "secret"}
        self._environment = {**clouds.environment, **cluster.environment, **hub.environment, **modal.environment, **own}
        vertex = f"kind: vertex, project: {google.project}, region: us-central1, machine: n2-standard-4"
        targets = {
            "batch": (ECR, BATCH),
            "sagemaker": (ECR, "kind: sagemaker, region: us-east-1, instance: ml.g5.xlarge"),
            "vertex": (f"us-central1-docker.pkg.dev/{google.project}/skerry/replica", vertex),
            "cluster": (GHCR, KUBERNETES),
            "hub": (GHCR, f"kind: hf_jobs, namespace: acme, flavor: cpu-basic, secrets: {KEYS}"),
            "modal": (GHCR, "kind: modal, secrets: [store-keys]"),
        }
        entries = [
            f"  - {{name: {name}, count: 1, image: '{repository}@sha256:{DIGEST}', target: {{{target}}}}}\n"
            for name, (repository, target) in targets.items()
        ]
        self._spec = write_spec(folder / "six.yaml", "".join(entries))

    def plan(self) -> dict[str, float]:
        """The seconds of a plan, and those of its CPU."""
        seconds, cpu = process_seconds(self._environment, WHOLE, "plan", str(self._spec))
        return {"seconds": seconds, "cpu_s": cpu}


def summary(turns: Sequence[dict[str, Figures]]) -> Phases:
    """Medians over turns, by phase."""
    response: Phases = {}
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


def marks(
    largest: Phases, kubernetes: Phases, start: dict[str, float], six: dict[str, float]
) -> dict[str, dict[str, object]]:
    """Return each mark with the limit, the figure and the comparison."""
    bounds: dict[str, tuple[float, float]] = {
        f"{place}{phase}_s": (phases[name]["seconds"], bound)
        for place, phases in (("", largest), ("kubernetes_", kubernetes))
        for name, phase, bound in (
            ("cold", "plan_cold", PLAN_S),
            ("warm", "plan_warm", PLAN_S),
            ("apply", "apply", APPLY_S),
        )
    }
    bounds |= {"start_s": (start["import"], START_S), "six_places_plan_cpu_s": (six["cpu_s"], SIX_CPU_S)}
    bounds["second_apply_writes"] = (max(phases["again"]["writes"] for phases in (largest, kubernetes)), 1)
    return {name: {"found": result, "below": bound, "met": result < bound} for name, (result, bound) in bounds.items()}


def ratios(sizes: Sequence[int], response: dict[int, Phases]) -> dict[str, dict[str, float]]:
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
    response: dict[int, Phases],
    kubernetes: Phases,
    start: dict[str, float],
    six: dict[str, float],
    met: dict[str, dict[str, object]],
) -> None:
    named = {**{str(size): phases for size, phases in response.items()}, "kubernetes": kubernetes}
    for name, phases in named.items():
        for phase, result in phases.items():
            print(
                f"{name:>10} {phase:8} {result['seconds']:7.2f} s  {result['calls']:6.0f} calls"
                f"  {result['store_calls']:6.0f} of the store  {result['calls_per_s']:6.0f} calls/s"
            )
    print(f"start: {', '.join(f'{what} {seconds:.2f} s' for what, seconds in start.items())}")
    print(f"six places: plan {six['seconds']:.2f} s, {six['cpu_s']:.2f} s of CPU")
    for mark, outcome in met.items():
        print(f"{mark}: {outcome['found']} below {outcome['below']}: {'met' if outcome['met'] else 'NOT met'}")


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
    clustered: list[dict[str, Figures]] = []
    started: list[dict[str, float]] = []
    six: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(prefix="skerry-bench-") as name,
        Sandbox() as account,
        KubernetesSandbox() as cluster,
        ExitStack() as stack,
    ):
        ground, in_cluster = Ground(Path(name), account), Ground(Path(name), account, cluster)
        places = SixPlaces(Path(name), account, cluster, stack)
        ground.turn(1)  # moto loads what it needs when it is first asked
        in_cluster.turn(1)
        for turn in range(options.turns):
            for size in sizes:
                turns[size].append(measured(f"turn {turn + 1}, {size} replicas", ground, size))
            clustered.append(measured(f"turn {turn + 1}, {sizes[-1]} jobs of Kubernetes", in_cluster, sizes[-1]))
            account.reset()
            started.append(starts(ground))
            six.append(places.plan())
            now = {**started[-1], "six": six[-1]["cpu_s"]}
            say(f"turn {turn + 1}, start: {', '.join(f'{what} {seconds:.2f} s' for what, seconds in now.items())}")
    report(options, {size: summary(turns[size]) for size in sizes}, summary(clustered), medians(started), medians(six))


def measured(what: str, ground: Ground, replicas: int) -> dict[str, Figures]:
    """One turn, and a line about it."""
    figures = ground.turn(replicas)
    say(f"{what}: {', '.join(f'{phase} {figures[phase].seconds:.2f} s' for phase in PHASES)}")
    return figures


def medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {what: round(statistics.median(turn[what] for turn in turns), 3) for what in turns[0]}


def report(
    options: argparse.Namespace,
    response: dict[int, Phases],
    kubernetes: Phases,
    start: dict[str, float],
    six: dict[str, float],
) -> None:
    sizes = list(response)
    met = marks(response[sizes[-1]], kubernetes, start, six)
    # The seconds of any size count for that size alone; that nothing is written holds for all.
    writes = max(phases["again"]["writes"] for phases in (*response.values(), kubernetes))
    if options.json:
        document = {
            "benchmark": "plan",
            "cores": os.cpu_count(),
            "turns": options.turns,
            "sizes": {str(size): response[size] for size in sizes},
            "kubernetes": kubernetes,
            "start": start,
            "six_places": six,
            "ratios": ratios(sizes, response),
            "marks": met,
        }
        print(json.dumps(document))
    else:
        show(response, kubernetes, start, six, met)
    raise SystemExit(1 if writes else 0)


if __name__ == "__main__":
    main()
