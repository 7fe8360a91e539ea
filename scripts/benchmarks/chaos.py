"""Measures how much training survives when replicas are killed repeatedly, for skerry and torchft 0.2.0 in one run.

    scripts/bench chaos [--quick] [--only ours|torchft] [--replicas 4 8] [--means 2 6] [--rounds 30] [--seeds 1]
                        [--codec NAME] [--reduction NAME] [--mirror] [--plot FILE] [--json]

Every replica is a real process that trains a small byte-level GPT with unmodified torchft DiLoCo: same model, text,
seeds and outer optimizer for both contestants. SIGKILL comes as a Poisson process of its own for each slot (--means:
the mean life in rounds); a new process follows at once, or after a pause (--down, in rounds), in which no steps are
possible: with a mean life of 2 rounds, a pause of a quarter leaves at most 89 %. The schedule is seeded, the same for
both, begins at the first commit and spares the last 3 of --rounds and the rounds added to them. Inner steps are paced
to a fixed length, so that replicas sharing few cores do not slow each other down and a second is the same work
everywhere. Processes are forked from one that has torch imported, for both alike: a start takes tens of milliseconds,
not the seconds of an import, which would hide everything else.

ours         ObjectStoreManager on a folder; 5 in 100 of all store requests fail (refused, broken off, or done with the
             reply lost). Grace 0.3 to 3 s, heartbeat 0.2 s, a checkpoint every round, two contributions are a quorum.
             The current round is saved after every inner step, and a restarted process continues it. The run makes
             up for lost work: it adds rounds until as much was trained as in an undisturbed one. --codec,
             --reduction: the model is so small that auto is always all_gather. --mirror: each of its cases once more
             with a mirror (log: every round) in another folder
torchft      Manager, Lighthouse and ProcessGroupGloo on loopback, healing over HTTP, two replicas are a quorum. Its
             settings, for fast recovery, are in chaos/replica.py. No faults are injected, because it has no store. It
             keeps nothing on disk: what all its live replicas forget is gone
undisturbed  the same without kills and faults, the measure for the loss

What the figures mean. An inner step is useful if its delta entered a committed average of the history that the run
ended with. For ours the log says so; for torchft the replicas that closed the round without having healed in it, plus
those killed before they could write that down. Time counts from the first inner step to the close of the last round.

goodput        useful inner steps / (replicas x seconds / length of a step): what was possible had nothing failed
goodput_ceiling
               the same if only the kills cost anything: without the time until a restart, and without the inner
               steps that died with their process since its last exchange and last save
goodput_while_alive, goodput_of_what_kills_left
               the useful ones against the seconds in which processes lived; and against the ceiling
where_steps_went
               the rest of what was possible: down (dead until restarted), joining (from the fork to the first inner
               step, with the exchange where the others waited for what was saved), killed (those inner steps), late (of
               a restarted replica, before its first contribution) and discarded (of all others) once 3 rounds have not
               used what was kept of them, in_lost_rounds,
               in_hand_at_the_end, overrun (inner steps that took longer than their length: the machine was busy),
               waiting (at exchanges, and whatever is left)
participation  members of a commit, by their own inner steps, among the replicas that live at that moment;
               _of_the_unharmed among those that lived through the whole round; _as_it_counts_itself by
               num_participants, where torchft counts the copies that healing replicas offer
committed_rounds_lost
               rounds that some replica closed and that are not, bit for bit, in the history that the run ended with
rounds_bit_identical
               rounds with one digest of global parameters and outer momentum over all that closed or followed them
kill_to_next_commit_s, of_it_waiting_s
               from a kill to the next close of a round; and how much of that the replicas waited after the last of
               them had arrived (the rest is their inner steps)
restart_to_first_contribution_s
               from the fork of a restarted process to the close of the first round that its inner steps are in
goodput_cost_of_mirror_percent, mirrored_rounds
               with --mirror: the share of the goodput of the same case without a mirror that is missing with it, one
               run against one run (--seeds shows how far these part by chance); and the rounds that are in the mirror
held_out_loss  of text that no replica trains on; loss_change_percent against the contestant's own undisturbed run of
               the same seed. The mark is for the mean over --seeds, which "losses" holds with its standard error: two
               runs that differ in any way part by some 0.3 %. Of torchft the first seed alone is run
"""
# ruff: noqa: S101, D103  a benchmark asserts, and explains itself above

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from chaos import figures, replica
from chaos.figures import Contribution
from chaos.replica import Contestant, Setting
from chaos.supervisor import GONE_S, START_S, Case, Supervisor
from common.options import picture

from skerry.runtime.log import keys, records
from skerry.runtime.log.read_rounds import find_closed
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import Codec, Reduction
from skerry.runtime.store.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from multiprocessing.context import ForkServerContext

FAULT_SHARE = 0.05
# The marks to reach.
GOODPUT_PERCENT, PARTICIPATION_PERCENT, LOSS_PERCENT, NEXT_COMMIT_S, MIRROR_PERCENT = 88.0, 90.0, 1.0, 5.0, 3.0


def run(context: ForkServerContext, case: Case) -> tuple[dict[str, object], Supervisor, list[Contribution]]:
    memory_disk = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108  a folder of its own in it
    folder = Path(tempfile.mkdtemp(prefix="skerry-chaos-", dir=memory_disk))
    try:
        with lighthouse(context, case.contestant) as address:
            setting = Setting(
                contestant=case.contestant,
                replicas=case.replicas,
                rounds=case.rounds,
                sync_every=case.sync_every,
                step_s=case.step_s,
                seed=case.seed,
                codec=case.codec,
                reduction=case.reduction,
                fault_share=0.0 if case.mean_rounds is None else FAULT_SHARE,
                folder=str(folder),
                lighthouse=address,
                has_mirror=case.has_mirror,
            )
            replica.prepare(setting)
            supervisor = Supervisor(context, case, setting)
            story = supervisor.run()
        diaries = supervisor.diaries
        if case.contestant == "ours":
            contributions, extra = contributions_of_log(setting, diaries), 0
        else:
            contributions = figures.contributions_of_diaries(diaries)
            extra = figures.unwritten(diaries, contributions, case.sync_every)
        if not contributions:
            last = "\n".join(Path(folder, "log-0.txt").read_text().splitlines()[-20:])
            sys.exit(f"{case.contestant} {case.name}: no round was closed; the last lines of replica 0:\n{last}")
        result: dict[str, object] = {**asdict(case), **figures.fold(setting, story, diaries, contributions, extra)}
        if case.has_mirror:
            result["mirrored_rounds"] = find_closed(DirectoryStore(setting.mirror), 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result, supervisor, contributions


@contextmanager
def lighthouse(context: ForkServerContext, contestant: Contestant) -> Generator[str]:
    """Address of a Lighthouse of this run's own; nothing for ours."""
    if contestant == "ours":
        yield ""
        return
    here, existing = context.Pipe(duplex=False)
    process = context.Process(target=replica.start_lighthouse, args=(existing,))
    process.start()
    try:
        assert here.poll(START_S), "no Lighthouse"
        yield here.recv()
    finally:
        process.kill()
        process.join(GONE_S)


def contributions_of_log(setting: Setting, diaries: figures.Diaries) -> list[Contribution]:
    """Return the contributions in our averages, from the decisions of closed rounds."""
    store = DirectoryStore(setting.store)
    process = {
        (setting.slot(index), line.incarnation): (index, line.process)
        for index, lines in diaries.items()
        for line in lines
        if line.incarnation is not None
    }
    result: list[Contribution] = []
    previous = records.GENESIS
    for entry in store.list(keys.COMMITS):
        commit = records.Commit.parse(store.read(entry.key) or b"", entry.key)
        assert commit.previous == previous, f"the chain is broken at {entry.key}"
        previous = digest_of(store.read(entry.key) or b"")
        key = keys.decision(commit.round, 0)
        for share in records.Decision.parse(store.read(key) or b"", key).members:
            key = keys.contribution(commit.round, 0, share.slot)
            offer = records.Contribution.parse(store.read(key) or b"", key)
            whose = process[share.slot, offer.incarnation]
            result.append(Contribution(commit.round + 1, *whose, offer.inner_steps, brought=offer.discount < 1.0))
    return result


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Of each number of replicas the undisturbed runs first; contestants take turns."""
    seeds = range(options.seed, options.seed + options.seeds)
    for seed, replicas in product(seeds, options.replicas):
        means: list[float | None] = [None, *options.means]
        first = seed == options.seed
        contestants: list[Contestant] = [item for item in options.only if first or item == "ours"]
        for mean, contestant, has_mirror in product(means, contestants, [False, True] if options.mirror else [False]):
            if has_mirror and contestant != "ours":
                continue
            yield Case(
                contestant=contestant,
                replicas=replicas,
                mean_rounds=mean,
                rounds=options.rounds,
                sync_every=options.sync_every,
                step_s=options.step,
                down_s=options.down * options.sync_every * options.step,
                seed=seed,
                codec=options.codec,
                reduction=options.reduction,
                has_mirror=has_mirror,
            )


def compare(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """Every disturbed run with its change of loss; ours also with the marks that it meets, and the cost of a mirror."""
    bare = {case_of(result): result for result in results if not result["has_mirror"]}
    calm = {(r["contestant"], r["replicas"], r["seed"]): r for r in bare.values() if r["mean_rounds"] is None}
    foreign = {(r["replicas"], r["mean_rounds"], r["seed"]): r for r in results if r["contestant"] == "torchft"}
    for result in results:
        if result["has_mirror"] and (other := bare.get(case_of(result))) is not None:
            result["goodput_cost_of_mirror_percent"] = goodput_cost(result["goodput"], other["goodput"])
        reference = calm.get((result["contestant"], result["replicas"], result["seed"]))
        if result["mean_rounds"] is None or reference is None:
            continue
        result["loss_change_percent"] = loss_change(result["held_out_loss"], reference["held_out_loss"])
        if result["contestant"] == "ours":
            result["marks"] = marks(result, foreign.get((result["replicas"], result["mean_rounds"], result["seed"])))
    return results


def case_of(result: dict[str, object]) -> tuple[object, ...]:
    """The case, with or without a mirror."""
    return tuple(result[name] for name in ("contestant", "replicas", "mean_rounds", "seed"))


def goodput_cost(goodput: object, reference: object) -> float | None:
    if not isinstance(goodput, int | float) or not isinstance(reference, int | float) or not reference:
        return None
    return round(100 * (reference - goodput) / reference, 2)


def losses(results: list[dict[str, object]]) -> list[dict[str, object]]:
    """The change of loss of each disturbed case over all seeds; ours also with its mark."""
    matches: dict[tuple[object, ...], list[float]] = {}
    for result in results:
        change = result.get("loss_change_percent")
        if isinstance(change, float) and not result["has_mirror"]:
            matches.setdefault((result["contestant"], result["replicas"], result["mean_rounds"]), []).append(change)
    response: list[dict[str, object]] = []
    for (contestant, replicas, mean_rounds), changes in matches.items():
        mean, several = statistics.fmean(changes), len(changes) > 1
        case: dict[str, object] = {
            "contestant": contestant,
            "replicas": replicas,
            "mean_rounds": mean_rounds,
            "loss_changes_percent": changes,
            "mean": round(mean, 2),
            "standard_error": round(statistics.stdev(changes) / len(changes) ** 0.5, 2) if several else None,
        }
        if contestant == "ours":
            case["marks"] = {f"loss within {LOSS_PERCENT:g} %": abs(mean) <= LOSS_PERCENT}
        response.append(case)
    return response


def loss_change(loss: object, reference: object) -> float | None:
    if not isinstance(loss, float) or not isinstance(reference, float):
        return None
    return round(100 * (loss - reference) / reference, 2)


def marks(ours: dict[str, object], torchft: dict[str, object] | None) -> dict[str, bool]:
    """Compare each figure with its mark, except the loss, which needs several runs."""

    def number(name: str, of: dict[str, object] = ours) -> float:
        value = of[name]
        return value if isinstance(value, int | float) else float("nan")

    met = {
        f"goodput at least {GOODPUT_PERCENT:g} %": number("goodput") >= GOODPUT_PERCENT,
        f"participation at least {PARTICIPATION_PERCENT:g} %": number("participation") >= PARTICIPATION_PERCENT,
        "no committed round lost": number("committed_rounds_lost") == 0,
        "no inner step of a survivor discarded": number("survivors_discarded_steps") == 0,
        "all rounds closed": number("replicas_finished") == number("replicas"),
        "bit-identical everywhere": ours["rounds_bit_identical"] == ours["rounds"],
    }
    if (spread := cast("dict[str, float] | None", ours["kill_to_next_commit_s"])) is not None:
        met[f"next commit within {NEXT_COMMIT_S:g} s of a kill, p50"] = spread["p50"] < NEXT_COMMIT_S
    if (cost := ours.get("goodput_cost_of_mirror_percent")) is not None:
        met[f"a mirror costs less than {MIRROR_PERCENT:g} % of goodput"] = cast("float", cost) < MIRROR_PERCENT
    if torchft is not None:
        met["goodput above torchft's"] = number("goodput") > number("goodput", torchft)
    return met


def describe(result: dict[str, object]) -> str:
    change = result.get("loss_change_percent")
    return (
        f"goodput {result['goodput']:5} %  participation {result['participation']} %"
        f"  rounds {result['rounds']} for {result['rounds_of']}, lost {result['committed_rounds_lost']}"
        f"  kills {result['kills']}  next commit {result['kill_to_next_commit_s']}"
        f"  back {result['restart_to_first_contribution_s']}"
        f"  loss {result['held_out_loss']}"
        + ("" if change is None else f" ({change:+} %)")
        + (f"  mirror costs {result.get('goodput_cost_of_mirror_percent')} %" if result["has_mirror"] else "")
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document; lines go to stderr")
    parser.add_argument(
        "--quick", action="store_true", help="4 replicas, a mean life of 6 rounds, 12 rounds: 4 minutes"
    )
    parser.add_argument("--only", choices=["ours", "torchft"], nargs=1, default=["ours", "torchft"])
    parser.add_argument("--replicas", type=int, nargs="+", help="default: 4 8")
    parser.add_argument("--means", type=float, nargs="+", help="mean life of a process in rounds; default: 2 6")
    parser.add_argument("--rounds", type=int, help="of each run; default: 30")
    parser.add_argument("--sync-every", type=int, default=20, help="inner steps of a round; default: 20")
    parser.add_argument("--step", type=float, default=0.2, help="seconds of an inner step")
    parser.add_argument("--down", type=float, default=0.0, help="rounds from a kill to the restart; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the batches and the kills")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case of ours, from --seed on; default: 1")
    parser.add_argument("--codec", choices=get_args(Codec), default="none", help="of ours; default: none")
    reductions = ["auto", *get_args(Reduction)]
    parser.add_argument("--reduction", choices=reductions, default="auto", help="of ours; default: auto")
    parser.add_argument("--mirror", action="store_true", help="each case of ours also with a mirror of its log")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture, .svg or .png")
    options = parser.parse_args()
    replicas, means, rounds = ([4], [6.0], 12) if options.quick else ([4, 8], [2.0, 6.0], 30)
    options.replicas, options.means = options.replicas or replicas, options.means or means
    options.rounds = options.rounds or rounds
    return options


def main() -> None:
    options = arguments()
    # Children find this folder's modules, use one core, and torchft writes a page of logs for every quorum.
    os.environ.update(PYTHONPATH=str(Path(__file__).parent), OMP_NUM_THREADS="1", RUST_LOG="error")
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))  # so that what was started ends, as on Ctrl-C
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos.replica"])
    results: list[dict[str, object]] = []
    runs: list[tuple[Case, Supervisor, list[Contribution]]] = []
    for case in cases(options):
        result, supervisor, contributions = run(context, case)
        results.append(result)
        runs.append((case, supervisor, contributions))
        compare(results)
        seed = f" seed {case.seed}" if options.seeds > 1 else ""
        out = sys.stderr if options.json else sys.stdout
        print(f"{case.name:18} {case.contestant:8}{seed} {describe(result)}", file=out, flush=True)
    if options.json:
        settings = {"grace": asdict(replica.GRACE), "heartbeat_s": replica.HEARTBEAT_S, "torchft": replica.LIGHTHOUSE}
        document = {"benchmark": "chaos", "cores": os.cpu_count(), "settings": settings}
        print(json.dumps({**document, "results": results, "losses": losses(results)}), flush=True)
    if options.plot is not None:
        draw_picture(options.plot, runs, results)
    if options.json:
        return
    for result in [*results, *losses(results)]:
        for mark, met in cast("dict[str, bool]", result.get("marks", {})).items():
            if not met:
                print(f"missed: N={result['replicas']} killed /{result['mean_rounds']:g}: {mark}")


def draw_picture(
    path: Path, runs: list[tuple[Case, Supervisor, list[Contribution]]], results: list[dict[str, object]]
) -> None:
    """Timelines of both contestants in the mildest disturbed case of the fewest replicas; bars of all cases."""
    from chaos.plot import Trace, draw  # noqa: PLC0415  matplotlib is needed here only

    chosen = min(
        ((case.replicas, -(case.mean_rounds or 0.0)) for case, _, _ in runs if case.mean_rounds), default=(0, 0.0)
    )
    traces = [
        Trace(
            title=f"{case.contestant}, {case.name} rounds",
            step_s=case.step_s,
            story=supervisor.story,
            diaries=supervisor.diaries,
            contributions=contributions,
        )
        for case, supervisor, contributions in runs
        if (case.replicas, -(case.mean_rounds or 0.0)) == chosen
    ]
    goodputs: dict[str, dict[str, float]] = {}
    for (case, _, _), result in zip(runs, results, strict=True):
        goodputs.setdefault(case.name, {})[case.contestant] = float(str(result["goodput"]))
    draw(path, traces, goodputs)


if __name__ == "__main__":
    main()
