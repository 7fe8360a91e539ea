"""Compares ways to scale and weigh a late delta in the average, by the resulting loss.

    scripts/bench staleness [--quick] [--only CASE...] [--seeds 3] [--first 0] [--rounds 60] [--plot FILE] [--json]

Three replicas train the example's GPT (smaller: --width, --layers, --context, --batch) with AdamW, each on its shard;
the outer optimizer is SGD with Nesterov momentum. Two are on time with H inner steps. The third offers a payload s * d
with weight w, where d is its delta after k inner steps. A round's average is sum(w s d) / sum(w), and s = w = 1 for the
two. All of it is one process: every way has the same first weights and batches, so ways are compared seed by seed. The
same options give the same bits; another selection of ways rounds differently, which moves a difference by about 0.001.

slow    three times slower. It follows as soon as the others have closed the round, its k = H/3 steps go to the next
        round (one round late), and it trains on from the new state
short   as slow, with k = H/3 as its own sync_every: the same steps, in time
whole   as slow, but it makes H steps before it offers anything, once in three rounds: "w=..." without following in
        between, so that their base is two rounds old; "carried" follows in every round and trains on from the new
        state less its delta so far
hiccup  as fast as the others, but in one round of eight it is at k = H/3 steps when they close, and follows. Then
        "dropped": those steps are lost; "next round": they are its offer for the next round, whose own steps are lost;
        "added": they are added to the next round's; "behind": nothing is lost, but it stays one round late with all H
        steps for good (here: in every round)

"tokens" is s = 1, w = k/H. "normalised" is s = H/k, w = k/H (FedNova, arXiv 2007.07481). "x 0.5" multiplies w.
"waiting" is the synchronous ideal, H steps of all three in each round; with a slow replica its rounds take three times
as long, so at equal time it is where "after a third" of the rounds shows it.

loss is held-out, in nats a byte: the mean over the last fifth of the rounds (every second one), then over seeds. The
difference is to the first way of the case, seed by seed, with its standard error; negative is better.
"""
# ruff: noqa: D102, D103, N803, N806  it explains itself above; tensor names end in their dims
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from common.options import picture
from torch import Tensor
from torch.func import functional_call, vmap  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "runtime/examples/tiny_gpt"))

import train

# S rows: one replica of one way each. V ways, N parameters, B batch, T time.
STEPS, PART, SLOWER, HICCUP = 24, 8, 3, 8
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's defaults for AdamW
SHARE = PART / STEPS
CASES = ["slow", "short", "whole", "hiccup"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to treat the third replica. habit: what it does; scale, weight: s and w. outer_lr: times --outer-lr."""

    case: str
    name: str
    habit: str
    scale: float = 1.0
    weight: float = 1.0
    outer_lr: float = 1.0
    quick: bool = False


def ways() -> list[Way]:
    """All of them; the first of a case is what the others of it are compared with."""
    slow = [
        Way(case="slow", name="without it", habit="none", quick=True),
        Way(case="slow", name="without it, outer lr x 6/7", habit="none", outer_lr=6 / 7),
        Way(case="slow", name="s=1 w=1", habit="late", quick=True),
        Way(case="slow", name="s=H/k w=1", habit="late", scale=1 / SHARE),
        Way(case="slow", name="tokens", habit="late", weight=SHARE, quick=True),
        *(Way(case="slow", name=f"tokens x {g}", habit="late", weight=SHARE * g) for g in (0.9, 0.7)),
        Way(case="slow", name="tokens x 0.5", habit="late", weight=SHARE * 0.5, quick=True),
        *(
            Way(case="slow", name=f"normalised, s <= {cap}", habit="late", scale=cap, weight=SHARE)
            for cap in (1.5, 2.0)
        ),
        Way(case="slow", name="normalised", habit="late", scale=1 / SHARE, weight=SHARE, quick=True),
        *(
            Way(case="slow", name=f"normalised x {g}", habit="late", scale=1 / SHARE, weight=SHARE * g)
            for g in (0.9, 0.7, 0.5)
        ),
        Way(case="slow", name="waiting", habit="full", quick=True),
    ]
    short = [
        Way(case="short", name="without it", habit="none", quick=True),
        Way(case="short", name="s=1 w=1", habit="short"),
        Way(case="short", name="tokens", habit="short", weight=SHARE, quick=True),
        *(
            Way(case="short", name=f"normalised, s <= {cap}", habit="short", scale=cap, weight=SHARE)
            for cap in (1.5, 2.0)
        ),
        Way(case="short", name="normalised", habit="short", scale=1 / SHARE, weight=SHARE),
    ]
    whole = [
        Way(case="whole", name="without it", habit="none"),
        *(Way(case="whole", name=f"w={g}", habit="whole", weight=g) for g in (1.0, 0.81, 0.49, 0.25)),
        *(Way(case="whole", name=f"carried, w={g}", habit="carried", weight=g) for g in (1.0, 0.49)),
    ]
    hiccup = [
        Way(case="hiccup", name="dropped", habit="dropped"),
        Way(case="hiccup", name="next round, s=1 w=k/H", habit="next", weight=SHARE),
        Way(case="hiccup", name="added", habit="added"),
        *(Way(case="hiccup", name=f"behind, w={g}", habit="behind", weight=g) for g in (1.0, 0.7, 0.5)),
        Way(case="hiccup", name="no hiccup", habit="full"),
    ]
    return [*slow, *short, *whole, *hiccup]


class Third:
    """The third replica of a way: how many inner steps it makes in a round, and what it offers at the end of it."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._kept: Tensor | None = None

    def steps(self, number: int) -> int:
        """Inner steps in round `number`; 0 if there is no third replica."""
        match self._way.habit:
            case "none":
                return 0
            case "late" | "short" | "whole" | "carried":
                return PART
            case "dropped" | "next" | "added":
                return PART if hiccups(number) else STEPS
            case _:
                return STEPS

    def continue_from(self, number: int, shared_N: Tensor, delta_N: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the weights after a round and the base of the next delta; None if it does not follow yet."""
        if self._way.habit not in {"whole", "carried"} or number % SLOWER == SLOWER - 1:
            return shared_N, shared_N
        return (shared_N - delta_N, shared_N) if self._way.habit == "carried" else None

    def offers(self, number: int, delta_N: Tensor) -> tuple[Tensor, float] | None:
        """Payload and weight for the round, once its own training since it last followed came to delta_N."""
        way, kept_N = self._way, self._kept
        late = None if kept_N is None else (kept_N * way.scale, way.weight)
        self._kept, offer = None, (delta_N, 1.0)
        match way.habit:
            case "late" | "behind":
                self._kept, offer = delta_N, late
            case "short":
                offer = delta_N * way.scale, way.weight
            case "whole" | "carried":
                offer = (delta_N, way.weight) if number % SLOWER == SLOWER - 1 else None
            case "next" | "added" if hiccups(number):
                self._kept, offer = delta_N, None
            case "next" if late is not None:
                offer = late
            case "added" if kept_N is not None:
                offer = delta_N + kept_N, 1.0
            case "dropped" if hiccups(number):
                offer = None
            case "none":
                offer = None
            case _:
                pass  # all its steps, in time
        return offer


def hiccups(number: int) -> bool:
    return number % HICCUP == HICCUP - 1


class Loss(torch.nn.Module):
    """The example's model and its loss as one module, to be called with the weights of any row."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return train.loss_of(self._model, bytes_BT)


class Rows:
    """All replicas of all ways in one stack, so that a step of all of them is one step of torch."""

    def __init__(self, model: torch.nn.Module, count: int, lr: float) -> None:
        self._loss, self._lr = Loss(model), lr
        self._shapes = {name: tensor.shape for name, tensor in self._loss.named_parameters()}
        first_N = torch.cat([tensor.detach().flatten() for tensor in model.parameters()])
        self.params_SN = first_N.repeat(count, 1)
        self._mean_SN, self._square_SN = torch.zeros_like(self.params_SN), torch.zeros_like(self.params_SN)
        self._count_S1 = torch.zeros(count, 1)

    def train(self, rows_S: Tensor, batches: list[Tensor]) -> None:
        """AdamW steps of these rows, one for each batch [S, B, T]; the moments of the others stay as they are."""
        params_SN, mean_SN, square_SN = self.params_SN[rows_S], self._mean_SN[rows_S], self._square_SN[rows_S]
        count_S1 = self._count_S1[rows_S]
        for bytes_SBT in batches:
            gradient_SN = self._gradient(params_SN, bytes_SBT)
            count_S1 += 1
            mean_SN.lerp_(gradient_SN, 1 - BETAS[0])
            square_SN.mul_(BETAS[1]).addcmul_(gradient_SN, gradient_SN, value=1 - BETAS[1])
            scale_SN = (square_SN / (1 - BETAS[1] ** count_S1)).sqrt_().add_(EPSILON)
            params_SN.mul_(1 - self._lr * DECAY).addcdiv_(
                mean_SN / (1 - BETAS[0] ** count_S1), scale_SN, value=-self._lr
            )
        self.params_SN[rows_S], self._mean_SN[rows_S], self._square_SN[rows_S] = params_SN, mean_SN, square_SN
        self._count_S1[rows_S] = count_S1

    def losses(self, params_SN: Tensor, bytes_SBT: Tensor) -> Tensor:
        with torch.no_grad():
            return self._losses(self._tensors(params_SN), bytes_SBT)

    def _gradient(self, params_SN: Tensor, bytes_SBT: Tensor) -> Tensor:
        tensors = {name: tensor.detach().requires_grad_() for name, tensor in self._tensors(params_SN).items()}
        total = self._losses(tensors, bytes_SBT).sum()
        return torch.cat([part.flatten(1) for part in torch.autograd.grad(total, list(tensors.values()))], dim=1)

    def _tensors(self, params_SN: Tensor) -> dict[str, Tensor]:
        parts = params_SN.split([shape.numel() for shape in self._shapes.values()], dim=1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def _losses(self, tensors: dict[str, Tensor], bytes_SBT: Tensor) -> Tensor:
        def loss(item: dict[str, Tensor], bytes_BT: Tensor) -> Tensor:
            return functional_call(self._loss, item, (bytes_BT,))

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel costs twice as much on pieces this small
            return vmap(loss)(tensors, bytes_SBT)


class Race:
    """All ways from the same weights, round by round."""

    def __init__(self, contestants: list[Way], options: argparse.Namespace) -> None:
        self._ways, self._options = contestants, options
        self._thirds = [Third(way) for way in contestants]
        self._index_S = torch.arange(3).repeat(len(contestants))
        self._rows = Rows(train.build(options), 3 * len(contestants), options.lr)
        self._theta_VN = self._rows.params_SN[::3].clone()
        self._base_SN = self._rows.params_SN.clone()
        self._momentum_VN = torch.zeros_like(self._theta_VN)
        files, held_out = train.sources()
        self._shards = [train.text(files[index::3]) for index in range(3)]
        wide = argparse.Namespace(seed=99, batch=64, context=options.context)
        held_out_N = train.text(held_out)
        self._held_out = [train.batch(held_out_N, 0, step, wide) for step in range(4)]

    def round(self, number: int) -> None:
        """Run the inner steps of every replica, then one outer step of each way."""
        steps_S = torch.tensor([count for third in self._thirds for count in (STEPS, STEPS, third.steps(number))])
        for begin, end in pairwise([0, *sorted({*steps_S.tolist()} - {0})]):
            rows_S = (steps_S >= end).nonzero().flatten()
            self._rows.train(
                rows_S, [self._batch(number * STEPS + step)[self._index_S[rows_S]] for step in range(begin, end)]
            )
        for number_V, (way, third) in enumerate(zip(self._ways, self._thirds, strict=True)):
            rows = slice(3 * number_V, 3 * number_V + 3)
            deltas = self._base_SN[rows] - self._rows.params_SN[rows]
            offers = [(deltas[0], 1.0), (deltas[1], 1.0), third.offers(number, deltas[2])]
            existing = [offer for offer in offers if offer is not None]
            gradient_N = torch.stack([w * d_N for d_N, w in existing]).sum(dim=0) / sum(w for _, w in existing)
            self._outer_step(number_V, way.outer_lr * self._options.outer_lr, gradient_N)
            shared_N = self._theta_VN[number_V]
            nexts = [(shared_N, shared_N)] * 2 + [third.continue_from(number, shared_N, deltas[2])]
            for row, following in enumerate(nexts, start=rows.start):
                if following is not None:
                    self._rows.params_SN[row], self._base_SN[row] = following

    def held_out(self) -> list[float]:
        """The loss of each way's shared parameters, in nats a byte."""
        each = [self._rows.losses(self._theta_VN, part.expand(len(self._ways), -1, -1)) for part in self._held_out]
        return torch.stack(each).mean(dim=0).tolist()

    def _batch(self, step: int) -> Tensor:
        return torch.stack([train.batch(shard, index, step, self._options) for index, shard in enumerate(self._shards)])

    def _outer_step(self, way: int, lr: float, gradient_N: Tensor) -> None:
        """torch.optim.SGD(lr, momentum, nesterov=True)."""
        momentum = self._options.outer_momentum
        self._momentum_VN[way].mul_(momentum).add_(gradient_N)
        self._theta_VN[way] -= lr * (gradient_N + momentum * self._momentum_VN[way])


def run(contestants: list[Way], seed: int, options: argparse.Namespace) -> dict[int, list[float]]:
    """The losses of all ways, by the number of closed rounds."""
    options.seed = seed
    race, rounds = Race(contestants, options), options.rounds
    shown = {*range(rounds, rounds - rounds // 5, -2), *range(rounds // 6, rounds, rounds // 6), rounds // SLOWER}
    losses: dict[int, list[float]] = {}
    for number in range(rounds):
        race.round(number)
        if number + 1 in shown:
            losses[number + 1] = [round(loss, 5) for loss in race.held_out()]
            print(f"\rseed {seed}, round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    return losses


def error(values: list[float]) -> float:
    """Standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """One way: its loss, and the difference to the first of its case. curve: the loss by number of closed rounds."""

    case: str
    way: str
    loss: float
    difference: float
    error: float
    each_seed: list[float]
    after_a_third: float
    curve: dict[int, float]


def summary(contestants: list[Way], result: list[dict[int, list[float]]], rounds: int) -> list[Result]:
    late = [number for number in result[0] if number > rounds - rounds // 5]
    ends = [[statistics.fmean(by_round[r][v] for r in late) for by_round in result] for v in range(len(contestants))]
    results: list[Result] = []
    for number, way in enumerate(contestants):
        first = next(v for v, other in enumerate(contestants) if other.case == way.case)
        differences = [mine - base for mine, base in zip(ends[number], ends[first], strict=True)]
        curve = {r: round(statistics.fmean(by_round[r][number] for by_round in result), 4) for r in result[0]}
        results.append(
            Result(
                case=way.case,
                way=way.name,
                loss=round(statistics.fmean(ends[number]), 4),
                difference=round(statistics.fmean(differences), 4),
                error=round(error(differences), 4),
                each_seed=[round(difference, 4) for difference in differences],
                after_a_third=curve[rounds // SLOWER],
                curve=curve,
            )
        )
    return results


def describe(results: list[Result]) -> str:
    lines = [f"{'case':7} {'way':27} {'loss':>7} {'difference':>20} {'after a third':>14}"]
    for r in results:
        difference = f"{r.difference:+.4f} +- {r.error:.4f}"
        lines.append(f"{r.case:7} {r.way:27} {r.loss:7.4f} {difference:>20} {r.after_a_third:14.4f}")
    return "\n".join(lines)


def draw(results: list[Result], path: Path) -> None:
    """One panel a case: each way's difference to the first, with its standard error."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  matplotlib is needed here only
    from matplotlib.figure import Figure  # noqa: PLC0415

    cases = list(dict.fromkeys(result.case for result in results))
    counts = [sum(result.case == case for result in results) for case in cases]
    figure = Figure(figsize=(8, 1.5 + 0.32 * len(results)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(cases), 1, squeeze=False, height_ratios=counts)
    for case, (panel,) in zip(cases, panels, strict=True):
        mine = [result for result in results if result.case == case]
        panel.errorbar([r.difference for r in mine], range(len(mine)), xerr=[r.error for r in mine], fmt="o", capsize=3)
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(mine)), [r.way for r in mine])
        panel.invert_yaxis()
        panel.set_title(f'{case}: held-out loss against "{mine[0].way}" (left is better)', fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")
    parser.add_argument("--quick", action="store_true", help="only the main ways of the slow replica")
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--plot", type=picture, metavar="FILE", help="a picture of the differences, .png or .svg")
    parser.add_argument("--seeds", type=int, default=3, help="how many; default: 3")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.9)
    for name, default in {"batch": 4, "context": 32, "width": 32, "layers": 1, "lr": 2e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contestants = [way for way in ways() if way.case in options.only and (way.quick or not options.quick)]
    began, cpu = time.perf_counter(), time.process_time()
    matches = [run(contestants, seed, options) for seed in range(options.first, options.first + options.seeds)]
    print(file=sys.stderr)
    results = summary(contestants, matches, options.rounds)
    if options.plot:
        draw(results, options.plot)
    if not options.json:
        print(describe(results))
        return
    document = {
        "benchmark": "staleness",
        "cores": os.cpu_count(),
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "options": {name: value for name, value in vars(options).items() if name not in {"plot", "seed"}},
        "steps": {"full": STEPS, "part": PART},
        "results": [asdict(result) for result in results],
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
