"""Measures `skerry report`: seconds, memory and bytes for a run of 1,000 rounds and 16 replicas in a folder.

    scripts/bench report [--rounds 1000] [--replicas 16] [--turns 3] [--json]

whole    `skerry report --full` as a process: reads every record, examines the log, writes the page
page     `skerry report`, which reads roll-ups
csv      `skerry report --export csv`

The run is written by this benchmark: each replica is missing in one round of fifty, and has metrics. The store is a
folder, so the seconds are those of skerry and of this machine; a bucket adds the latency of its requests. Medians over
turns; CPU seconds beside them, because another process may take a part of the machine. Ends with 1 above a limit.
"""
# ruff: noqa: D103  a benchmark explains itself above

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.log import keys
from skerry.runtime.log.read_rounds import RoundListing
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import (
    GENESIS,
    Commit,
    Contribution,
    Decision,
    Member,
    Outcome,
    Receipt,
    Share,
    Telemetry,
)
from skerry.runtime.log.roll_up import ROUNDS, RollUp
from skerry.runtime.log.run_record import Run
from skerry.runtime.log.summarize_round import RecordedRound
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.record_parsing import Record

NONCE: Final = "a" * 32
FORMS: Final = {"whole": ["--full"], "page": [], "csv": ["--export", "csv"]}
# What the command has to keep to.
SECONDS: Final = 10.0
BYTES: Final = 2_000_000
MISSING: Final = 0.02


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One call. cpu_s: of the process. peak_mb: of its memory. size_bytes: of the file that it wrote."""

    seconds: float
    cpu_s: float
    peak_mb: float
    size_bytes: int


class WrittenRun:
    """The log of a run, written into a folder as its replicas would."""

    def __init__(self, folder: Path, rounds: int, replicas: int) -> None:
        self._folder = folder
        self._random = random.Random(0)  # noqa: S311  a seeded run
        self._slots = tuple(f"node-{number}" for number in range(replicas))
        self._put(keys.RUN, self._run(rounds))
        for slot in self._slots:
            self._put(keys.member(slot, 0), member(slot))
        previous = GENESIS
        for number in range(rounds):
            previous = self._round(number, previous)
        for slot in self._slots:
            self._put(keys.outcome(slot, 0), outcome(slot, rounds))
        self._roll_up(rounds)

    def _put(self, key: str, record: Record) -> str:
        """Write a record. Returns its digest."""
        path, data = self._folder / key, record.to_bytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return digest_of(data)

    def _roll_up(self, rounds: int) -> None:
        store = DirectoryStore(self._folder)
        for first in range(0, rounds - ROUNDS + 1, ROUNDS):
            singles = list(RoundListing(store, NONCE, range(first, first + ROUNDS)).read())
            recorded = [RecordedRound.of(single.number, single.closed_at, single.records) for single in singles]
            roll_up = RollUp.of(NONCE, self._slots[0], singles[-1].commit or "", recorded)
            store.create(keys.roll_up(roll_up.first, roll_up.last), roll_up.to_stored())

    def _run(self, rounds: int) -> Run:
        return Run(
            nonce=NONCE,
            name="bench",
            spec=None,
            slots=self._slots,
            rounds=rounds,
            sync_every=20,
            fragments=1,
            outer_lr=0.7,
            outer_momentum=0.9,
            min_replicas=1,
            grace_s=60.0,
            start_window_s=120.0,
            checkpoint_every=1,
            codec="none",
            weighting="uniform",
            created="2026-01-01T00:00:00+00:00",
        )

    def _round(self, number: int, previous: str) -> str:
        """One round. Returns the digest of its commit."""
        present = [slot for slot in self._slots if self._random.random() > MISSING] or [self._slots[0]]
        shares: list[Share] = []
        for slot in present:
            record = contribution(slot, number, previous, self._random.random())
            digest = self._put(keys.contribution(number, 0, slot), record)
            shares.append(Share(slot=slot, contribution=digest, weight=1.0))
        decision = Decision(
            run=NONCE,
            round=number,
            exchange=0,
            base=previous,
            index="1" * 32,
            reduction="all_gather",
            members=tuple(shares),
            proposer=present[0],
            nonce="e" * 32,
        )
        exchange = self._put(keys.decision(number, 0), decision)
        closed = Commit(run=NONCE, round=number, exchanges=(exchange,), participants=len(present), previous=previous)
        digest = self._put(keys.commit(number), closed)
        for slot in present:
            self._put(keys.receipt(number, slot), receipt(slot, number, digest))
        return digest


def member(slot: str) -> Member:
    created = "2026-01-01T00:00:00+00:00"
    return Member(run=NONCE, slot=slot, incarnation=0, nonce="b" * 32, host=f"host-{slot}", process=1, created=created)


def outcome(slot: str, rounds: int) -> Outcome:
    return Outcome(
        run=NONCE,
        slot=slot,
        incarnation=0,
        status="done",
        exit_code=0,
        reason="all rounds are closed",
        round=rounds,
        inner_step=20 * rounds,
        tokens=0,
        loss_first=11.0,
        loss_last=2.0,
        ended="2026-01-02T00:00:00+00:00",
    )


def contribution(slot: str, number: int, base: str, noise: float) -> Contribution:
    loss = 2 + 9 * math.exp(-number / 40) + 0.02 * noise
    metrics = {"val_loss": loss + 0.1, "accuracy": noise} if number % 10 == 0 else {}
    telemetry = Telemetry(
        loss=loss, steps=20, possible=20, tokens=20_000, train_s=17 + noise, learning_rate=1e-3, metrics=metrics
    )
    return Contribution(
        run=NONCE,
        round=number,
        exchange=0,
        slot=slot,
        incarnation=0,
        base=base,
        index="1" * 32,
        parts=(),
        tokens=20_000,
        inner_steps=20,
        telemetry=telemetry,
        nonce="d" * 32,
    )


def receipt(slot: str, number: int, commit: str) -> Receipt:
    return Receipt(
        run=NONCE,
        round=number,
        slot=slot,
        incarnation=0,
        commit=commit,
        averages=("a" * 32,),
        state="b" * 32,
        scope="fragments",
        contributed=True,
        uploaded_bytes=1_000_000,
        downloaded_bytes=15_000_000,
        requests=60,
        seconds={"encode": 0.05, "upload": 0.2, "wait": 0.4, "download": 0.3, "reduce": 0.05},
    )


def measure(uri: str, folder: Path, form: str) -> Figures:
    """One call of the command in a process of its own."""
    path = folder / ("run.csv" if form == "csv" else "run.html")
    program = [sys.executable, "-c", "from skerry.infra.cli.fast_help_entry_point import main; main()"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([*program, "report", uri, "-o", str(path), *FORMS[form]], check=True, stdout=subprocess.DEVNULL)  # noqa: S603  our own command
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Figures(seconds=seconds, cpu_s=cpu_s, peak_mb=after.ru_maxrss / 1024, size_bytes=path.stat().st_size)


def medians(turns: Sequence[Figures]) -> dict[str, float]:
    return {name: round(statistics.median(asdict(turn)[name] for turn in turns), 2) for name in asdict(turns[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--turns", type=int, default=3, help="how often each form is measured")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    turns: dict[str, list[Figures]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as name:
        folder = Path(name)
        began = time.perf_counter()
        WrittenRun(folder / "run", options.rounds, options.replicas)
        print(f"the run was written in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        for turn in range(options.turns):
            for form, results in turns.items():
                results.append(measure((folder / "run").as_uri(), folder, form))
                print(f"turn {turn + 1}, {form}: {results[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    forms = {form: medians(results) for form, results in turns.items()}
    marks = {
        "whole_s": {"result": forms["whole"]["seconds"], "below": SECONDS},
        "page_bytes": {"result": forms["whole"]["size_bytes"], "below": BYTES},
    }
    met = all(mark["result"] < mark["below"] for mark in marks.values())
    if options.json:
        size = {"rounds": options.rounds, "replicas": options.replicas, "turns": options.turns}
        print(json.dumps({"benchmark": "report", "cores": os.cpu_count(), **size, "forms": forms, "marks": marks}))
    else:
        for form, values in forms.items():
            print(
                f"{form:6} {values['seconds']:7.2f} s  {values['cpu_s']:7.2f} s of CPU  {values['peak_mb']:6.0f} MB"
                f"  {values['size_bytes']:9,.0f} bytes written"
            )
    raise SystemExit(0 if met else 1)


if __name__ == "__main__":
    main()
