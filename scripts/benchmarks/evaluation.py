"""Measures how many of its tokens a replica loses if it alone evaluates in its training loop, as nanoGPT does.

    scripts/bench evaluation [--sync-every 25 100] [--rounds 9] [--round-s 12] [--every 100] [--iterations 10] [--json]

Real runs of `skerry up` with two replicas on this machine, three at once: the first replica evaluates not at all, in
the plain loop, and within `replica.evaluating()`. Every `--every` inner steps it takes the loss of `--iterations`
batches of each of two splits. Steps are padded to equal lengths, so that replicas are alike on a busy machine; a batch
of an evaluation takes a third of a step, as it has no backward pass. The defaults are a twentieth of nanoGPT's: it
evaluates for 200 iterations every 2,000 steps. So 25 steps of a round are the 500 of DiLoCo's paper.

evaluation    its time, as a share of the time of a round
counted       tokens of the first replica that are in averages
cost          the share of its tokens that it loses, against the run without evaluations
round         seconds, mean of all but the first
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

SPLITS = ("train", "val")
WAYS = ("none", "plain loop", "replica.evaluating()")
SPEC = """\
run: evaluation
store: file://store
code: {path: code, command: [python, train.py, --replica, '%(way)s']}
outer: {rounds: %(rounds)s, sync_every: %(sync_every)s}
env: {STEP_S: '%(step_s)s', EVERY: '%(every)s', ITERATIONS: '%(iterations)s'}
replicas: [{name: r, count: 2, target: {kind: local, threads: 1}}]
"""


def train(way: str) -> None:
    """One replica, started by `skerry up`."""
    import os  # noqa: PLC0415  what only a replica needs
    from contextlib import nullcontext  # noqa: PLC0415

    import torch  # noqa: PLC0415
    from torchft.local_sgd import DiLoCo  # noqa: PLC0415

    from skerry.runtime.replica import connect  # noqa: PLC0415

    step_s, every, iterations = (float(os.environ[name]) for name in ("STEP_S", "EVERY", "ITERATIONS"))

    def loss_of(least_s: float) -> torch.Tensor:
        ends = time.monotonic() + least_s
        loss = model(torch.randn(16, 8)).square().mean()
        time.sleep(max(0.0, ends - time.monotonic()))
        return loss

    @torch.no_grad()
    def estimate_loss() -> dict[str, float]:
        return {split: statistics.fmean(loss_of(step_s / 3).item() for _ in range(int(iterations))) for split in SPLITS}

    with connect() as replica:
        model = torch.nn.Linear(8, 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=replica.run.outer_lr)
        manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        with DiLoCo(manager, [model], inner, outer, sync_every=replica.run.sync_every):  # type: ignore[arg-type]
            for step in replica.steps(inner):
                if way != "none" and replica.index == 0 and step and step % every == 0:
                    with replica.evaluating() if way == "replica.evaluating()" else nullcontext():
                        replica.log(**estimate_loss())
                loss = loss_of(step_s)
                inner.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                replica.log(tokens=1)
                inner.step()


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way of a setting; see the module."""

    way: str
    sync_every: int
    evaluation: float
    counted: int
    cost: float
    round_s: float


def compare(sync_every: int, options: argparse.Namespace) -> list[Result]:
    """Run the three ways at once. Raises subprocess.CalledProcessError if a run fails."""
    step_s = options.round_s / sync_every
    texts = {name: getattr(options, name) for name in ("rounds", "every", "iterations")}
    with tempfile.TemporaryDirectory(prefix="skerry-evaluation-") as name, ThreadPoolExecutor(len(WAYS)) as pool:
        folders = [Path(name) / str(index) for index in range(len(WAYS))]
        for way, folder in zip(WAYS, folders, strict=True):
            (folder / "code").mkdir(parents=True)
            shutil.copy(__file__, folder / "code" / "train.py")
            (folder / "skerry.yaml").write_text(
                SPEC % {**texts, "way": way, "sync_every": sync_every, "step_s": step_s}
            )
        counted = list(pool.map(up, folders))
    whole = counted[0][0]
    share = len(SPLITS) * options.iterations / 3 / sync_every
    return [
        Result(
            way=way,
            sync_every=sync_every,
            evaluation=0.0 if way == "none" else round(share, 3),
            counted=tokens,
            cost=round(1 - tokens / whole, 4),
            round_s=round_s,
        )
        for way, (tokens, round_s) in zip(WAYS, counted, strict=True)
    ]


def up(folder: Path) -> tuple[int, float]:
    """Run it; the counted tokens of its first replica, and the seconds of a round."""
    from skerry.infra.observe.history import read_history  # noqa: PLC0415  a replica needs none of this
    from skerry.runtime.store import open_store  # noqa: PLC0415

    skerry = Path(sys.executable).with_name("skerry")
    # 3: finished, but one replica missed rounds, which is what is measured
    ended = subprocess.run([skerry, "up"], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if ended.returncode not in {0, 3}:
        raise subprocess.CalledProcessError(ended.returncode, "skerry up", ended.stdout, ended.stderr)
    rounds = read_history(open_store((folder / "store/evaluation").as_uri())).rounds
    parts = [part for each in rounds for part in each.replicas if part.slot == "r-0" and part.in_average]
    closed = [each.closed_at or 0.0 for each in rounds]
    lengths = [after - before for before, after in pairwise(closed)]
    return sum(part.telemetry.tokens for part in parts if part.telemetry), round(statistics.fmean(lengths), 2)


def describe(results: list[Result]) -> str:
    """The results as a table."""
    lines = [f"{'sync_every':>10}  {'evaluation':>10}  {'way':22} {'counted':>8} {'cost':>8} {'round':>8}"]
    for each in results:
        numbers = f"{each.counted:8,} {each.cost:8.1%} {each.round_s:6.2f} s"
        lines.append(f"{each.sync_every:10}  {each.evaluation:10.1%}  {each.way:22} {numbers}")
    return "\n".join(lines)


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--sync-every", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--round-s", type=float, default=12.0, help="seconds of a round's steps; default: 12")
    parser.add_argument("--every", type=int, default=100, help="inner steps between two evaluations; default: 100")
    parser.add_argument("--iterations", type=int, default=10, help="batches of each split; default: 10")
    parser.add_argument("--replica", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        train(options.replica)
        return
    results = [result for sync_every in options.sync_every for result in compare(sync_every, options)]
    if options.json:
        print(json.dumps({"benchmark": "evaluation", "results": [asdict(result) for result in results]}))
    else:
        print(describe(results))


if __name__ == "__main__":
    main()
