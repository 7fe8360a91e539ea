"""The long search: seeded schedules of whole runs with faults, every invariant after every event. No network.

    scripts/bench simulate [--seeds 20000] [--first 0] [--jobs N] [--json]
    scripts/bench simulate --seed 231 [--lines 80]      replay one seed, twice, and show how it ended
    scripts/bench simulate --mirrors [--seeds 5000]     replicas keep a mirror: checked after each put, with kills there
    scripts/bench simulate --mutants [--limit 5000]     every deliberate bug, and after how many seeds it was caught
    scripts/bench simulate --deaths 1000                how much longer an exchange takes if an owner of units dies
    scripts/bench simulate --explore                    all interleavings of small runs, up to the bounds that are shown

A schedule is a run of 2 to 5 replicas over 2 to 6 rounds on a memory store with its own virtual time. Exit code 1 if an
invariant broke, or if a mutant was not caught; the report names the seed, which replays exactly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the simulation is part of the tests

from tests.simulation.explore import LISTED, Bounds, Explored, explore
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import run_seed
from tests.simulation.search import Caught, Tally, hunt, quiet, search
from tests.simulation.takeover import TakeoverCase, takeover_ratios

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCH = 100


def batches(first: int, count: int) -> Iterator[range]:
    """The seeds in pieces for the worker processes."""
    for start in range(first, first + count, BATCH):
        yield range(start, min(start + BATCH, first + count))


def long_search(options: argparse.Namespace) -> int:
    """Search all seeds on all cores."""
    total, began = Tally(), time.perf_counter()
    with ProcessPoolExecutor(options.jobs) as pool:
        for done in pool.map(partial(search, mirrored=options.mirrors), batches(options.first, options.seeds)):
            total.add(done)
            if not options.json:
                print(f"\r{total.schedules} schedules, {len(total.reports)} broken", end="", file=sys.stderr)
    seconds = time.perf_counter() - began
    result = {
        "benchmark": "simulate",
        "mirrors": options.mirrors,
        "first_seed": options.first,
        "schedules": total.schedules,
        "events": total.events,
        "virtual_hours": round(total.virtual_s / 3600, 1),
        "seconds": round(seconds, 1),
        "schedules_per_s": round(total.schedules / seconds, 1),
        "jobs": options.jobs,
        "violations": len(total.reports),
    }
    counts = {"faults": dict(total.faults.most_common()), "facts": dict(total.facts.most_common())}
    if options.json:
        print(json.dumps(result | counts | {"reports": total.reports}))
    else:
        print(file=sys.stderr)
        for name, value in result.items():
            print(f"{name:16} {value}")
        for name, kinds in counts.items():
            print(f"{name:16} {', '.join(f'{kind} {count}' for kind, count in kinds.items())}")
        for report in islice(total.reports, 3):
            print(f"\n{report}")
    return 1 if total.reports else 0


def replay(options: argparse.Namespace) -> int:
    """Simulate one seed twice, and show its end."""
    with quiet():
        result, again = (run_seed(options.seed, mirrored=options.mirrors) for _ in range(2))
    same = result.digest == again.digest
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "simulate",
                    "seed": options.seed,
                    "digest": result.digest,
                    "replays": same,
                    "violations": list(result.violations),
                }
            )
        )
    else:
        print(result.report(options.lines))
        print(f"trace {result.digest}, {'the same again' if same else f'ANOTHER THE SECOND TIME: {again.digest}'}")
    return 1 if result.violations or not same else 0


def _hunt(numbered: tuple[int, int]) -> tuple[int, Caught | None]:
    number, limit = numbered
    return number, hunt(MUTANTS[number], limit)


def mutation_proof(options: argparse.Namespace) -> int:
    """Look for every mutant."""
    with ProcessPoolExecutor(options.jobs) as pool:
        caught = dict(pool.map(_hunt, [(n, options.limit) for n in range(len(MUTANTS))]))
    rows = [
        {
            "mutant": mutant.name,
            "where": mutant.where,
            "caught": (result := caught[number]) is not None,
            "invariant": None if result is None else result.invariant,
            "seeds": options.limit if result is None else result.seeds,
        }
        for number, mutant in enumerate(MUTANTS)
    ]
    missed = sum(not row["caught"] for row in rows)
    if options.json:
        print(json.dumps({"benchmark": "simulate", "mutants": rows, "caught": len(rows) - missed, "missed": missed}))
    else:
        print("| where | bug | invariant that broke | seeds until then |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row['where']} | {row['mutant']} | {row['invariant'] or 'NOT CAUGHT'} | {row['seeds']} |")
    return 1 if missed else 0


def _explore(bounds: Bounds) -> tuple[Explored, float]:
    began = time.perf_counter()
    with quiet():
        return explore(bounds), time.perf_counter() - began


def exhaustive(options: argparse.Namespace) -> int:
    """Explore every listed bound."""
    rows: list[dict[str, object]] = []
    broken = 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for seen, seconds in pool.map(_explore, LISTED):
            broken += bool(seen.violations)
            row: dict[str, object] = {
                **asdict(seen),
                "seconds": round(seconds, 1),
                "violations": list(seen.violations[:1]),
            }
            rows.append(row)
            print(
                f"{seen.bounds}: {seen.schedules} schedules, {seen.states} states, {seen.steps} steps, "
                f"{'complete' if seen.complete else 'NOT COMPLETE'}, {seconds:.0f} s, "
                f"violations: {seen.violations[:1] or 'none'}",
                flush=True,
                file=sys.stderr if options.json else sys.stdout,
            )
    if options.json:
        print(json.dumps({"benchmark": "simulate", "explored": rows, "violations": broken}))
    return 1 if broken else 0


def deaths(options: argparse.Namespace) -> int:
    """Compare exchanges by reduce-scatter in which an owner dies with the same ones without, in so many runs."""
    rows: list[dict[str, float]] = []
    for members, unit_s in itertools.product((4, 8), (0.005, 0.05, 0.5)):
        ratios = takeover_ratios(TakeoverCase(members=members, units=32, unit_s=unit_s), options.deaths)
        p50, p99 = ratios[len(ratios) // 2], ratios[int(len(ratios) * 0.99)]
        rows.append({"members": members, "unit_s": unit_s, "p50": p50, "p99": p99, "most": ratios[-1]})
        if not options.json:
            print(f"{members} members, {unit_s:g} s a unit: p50 {p50:.2f}, p99 {p99:.2f}, most {ratios[-1]:.2f} times")
    if options.json:
        print(json.dumps({"benchmark": "simulate", "runs": options.deaths, "deaths": rows}))
    return int(any(row["p99"] > 2.0 for row in rows))


def main() -> int:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (2000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--seed", type=int, default=None, help="replay this one")
    parser.add_argument("--lines", type=int, default=60, help="of the trace that a replay shows (60)")
    parser.add_argument("--mirrors", action="store_true", help="the replicas keep a mirror; also with --seed")
    parser.add_argument("--mutants", action="store_true", help="prove that deliberate bugs are caught")
    parser.add_argument("--limit", type=int, default=5000, help="seeds after which a mutant counts as missed (5000)")
    parser.add_argument("--explore", action="store_true", help="all interleavings of small runs")
    parser.add_argument("--deaths", type=int, default=0, help="runs of exchanges in which an owner of units dies")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (all cores)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args()
    if options.seed is not None:
        return replay(options)
    if options.deaths:
        return deaths(options)
    if options.mutants:
        return mutation_proof(options)
    return exhaustive(options) if options.explore else long_search(options)


if __name__ == "__main__":
    sys.exit(main())
