"""Counts the requests of a round by kind of object and verb, over all replicas, in the simulation of the shipped code.

    scripts/bench round-requests [--replicas 2 4 16] [--train 2] [--rounds 22] [--json]

Every round needs every replica (`min_replicas` is their number), as where no replica is lost. An inner step takes the
given seconds, +-15 %; a request takes 20 ms; heartbeats, polls and proposals are at the times of a cloud's store. The
first rounds and the last one are left out. A round has one exchange of one part, and one member writes a checkpoint.

exchange      contributions and payloads, written once and read by every other member: N x N of each
looking       what a replica asks to learn whether it must go on: the rest
round         seconds from commit to commit, of virtual time: fewer requests must not make it longer
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation is part of the tests

from tests.simulation.faults import Rates
from tests.simulation.run import Simulation
from tests.simulation.scenario import calm
from tests.simulation.search import quiet

from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.simulation.world import TraceLine

VERBS = ("read", "create", "replace", "list", "delete")
FIRST = 4
"""Rounds that are left out: they wait for replicas to start."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run of so many replicas. requests: of one round, all replicas together, by verb and kind of object."""

    replicas: int
    round_s: float
    total: float
    exchange: float
    looking: float
    requests: Mapping[str, float]


def measure(replicas: int, options: argparse.Namespace) -> Result:
    """Simulate a run and count. Raises RuntimeError if it breaks an invariant."""
    scenario = calm(
        replicas,
        rounds=options.rounds,
        min_replicas=replicas,
        train_s=options.train,
        jitter=0.15,
        heartbeat_s=5.0,
        deadline_s=600.0,
        retention=Retention(),
        compares=True,
        collects=True,
    )
    terms = replace(scenario.terms, propose_delay_s=None)
    settings = tuple(replace(each, terms=terms) for each in scenario.settings)
    scenario = replace(scenario, seed=options.seed, terms=terms, settings=settings, rates=Rates(latency_s=0.02))
    with quiet():
        result = Simulation(scenario).run()
    if result.violations:
        raise RuntimeError(result.report())
    closed = _closed(result.trace)
    rounds = options.rounds - FIRST - 1
    began, ended = closed[FIRST - 1], closed[options.rounds - 2]
    counts = Counter(
        f"{line.what} {line.key.partition('/')[0]}"
        for line in result.trace
        if line.what in VERBS and began < line.at <= ended
    )
    total, exchange = sum(counts.values()) / rounds, 2.0 * replicas * replicas
    return Result(
        replicas=replicas,
        round_s=round((ended - began) / rounds, 2),
        total=round(total, 1),
        exchange=exchange,
        looking=round(total - exchange, 1),
        requests={name: round(count / rounds, 1) for name, count in counts.most_common()},
    )


def _closed(trace: Sequence[TraceLine]) -> list[float]:
    """The time at which each round was closed."""
    closed: dict[str, float] = {}
    for line in trace:
        if line.what == "create" and line.key.startswith(keys.COMMITS):
            closed.setdefault(line.key, line.at)
    return [closed[key] for key in sorted(closed)]


def describe(results: Sequence[Result]) -> str:
    """The results as a table, with a column for each number of replicas."""
    names = list(dict.fromkeys(name for result in reversed(results) for name in result.requests))
    lines = [f"{'replicas':24}" + "".join(f"{result.replicas:>9}" for result in results)]
    sums = ("round_s", "total", "exchange", "looking")
    lines += [f"{name:24}" + "".join(f"{getattr(result, name):>9}" for result in results) for name in sums]
    lines += [f"  {name:22}" + "".join(f"{result.requests.get(name, 0.0):>9}" for result in results) for name in names]
    return "\n".join(lines)


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--train", type=float, default=2.0, metavar="S", help="seconds of a round's inner steps")
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    results = [measure(replicas, options) for replicas in options.replicas]
    if options.json:
        print(json.dumps({"benchmark": "round-requests", "results": [asdict(result) for result in results]}))
    else:
        print(describe(results))


if __name__ == "__main__":
    main()
