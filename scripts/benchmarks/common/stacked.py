"""Trains many replicas of many runs as one stack of rows, so that a step of all of them is one step of torch.

Every run starts from the same weights and sees the same batches, seed by seed, so that runs can be compared in pairs.
The arithmetic is that of a round: AdamW inside, then the weighted mean of the pseudo-gradients and SGD with Nesterov
momentum. The model and the text are the example's: a GPT over bytes, Python's own standard library.
"""
# ruff: noqa: N803, N806  tensor names end in their dims
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call, vmap  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime/examples/tiny_gpt"))

import train

from skerry.infra.spec.model import Outer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from common.simulated_rounds import Round

# S rows: one replica of one run each. N parameters, B batch, T time.
# The outer step of a spec that names none.
OUTER = Outer(rounds=None)
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01  # torch's defaults for AdamW
MODEL = {"batch": 4, "context": 32, "width": 32, "layers": 1, "lr": 2e-3}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and of the inner optimizer."""
    for name, default in MODEL.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run to train. rounds: the steps and weights of all replicas. encoded: applied to each pseudo-gradient.

    published: applied to their average, as reduce-scatter does. feedback: of what `encoded` leaves out, so much is
    added to the replica's next one.
    synchronous: data parallel; every step averages the gradients of all replicas, and there is no outer step. shards:
    into how many the text is divided for its replicas: more than it has replicas if it sees a part of the text only.
    rotates: one replica that sees the batches of all shards in turn.
    """

    name: str
    seed: int
    rounds: Sequence[Round]
    shards: int
    lr: float
    outer_lr: float = OUTER.lr
    outer_momentum: float = OUTER.momentum
    encoded: Callable[[Tensor], Tensor] | None = None
    published: Callable[[Tensor], Tensor] | None = None
    feedback: float = 0.0
    synchronous: bool = False
    rotates: bool = False

    @property
    def replicas(self) -> int:
        """The number of replicas that train at the same time."""
        return len(self.rounds[0].steps)


@functools.cache
def _sources(shards: int) -> tuple[Tensor, ...]:
    files, _ = train.sources()
    return tuple(train.text(files[index::shards]) for index in range(shards))


def text_digest() -> str:
    """Identifies the text: another version of Python has another one."""
    digest = hashlib.sha256()
    for files in train.sources():
        digest.update(train.text(files).numpy().tobytes())
    return digest.hexdigest()


class _Loss(torch.nn.Module):
    """The example's model and its loss as one module, to be called with the weights of any row."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """The mean loss of a batch."""
        return train.loss_of(self._model, bytes_BT)


class _Rows:
    """Weights and AdamW moments of all replicas."""

    def __init__(self, first_SN: Tensor, model: torch.nn.Module, lr_S1: Tensor) -> None:
        self._loss = _Loss(model)
        self._shapes = {name: tensor.shape for name, tensor in self._loss.named_parameters()}
        self._lr_S1 = lr_S1
        self.params_SN = first_SN
        self._mean_SN, self._square_SN = torch.zeros_like(first_SN), torch.zeros_like(first_SN)
        self._count_S1 = torch.zeros(len(first_SN), 1)

    def step(self, rows_S: Tensor, bytes_SBT: Tensor, groups_S: Tensor) -> None:
        """An AdamW step of these rows; the moments of the others stay. groups_S: rows of a group share gradients."""
        # Views where all rows take the step: copies would be a fifth of its time.
        rows = slice(None) if len(rows_S) == len(self.params_SN) else rows_S
        params_SN, mean_SN, square_SN = self.params_SN[rows], self._mean_SN[rows], self._square_SN[rows]
        lr_S1, count_S1 = self._lr_S1[rows], self._count_S1[rows] + 1
        gradient_SN = self._gradient(params_SN, bytes_SBT)
        groups, number_S = groups_S[rows].unique(return_inverse=True)
        if len(groups) < len(rows_S):
            sums = torch.zeros(len(groups), gradient_SN.shape[1]).index_add_(0, number_S, gradient_SN)
            gradient_SN = (sums / torch.bincount(number_S)[:, None])[number_S]
        mean_SN.lerp_(gradient_SN, 1 - BETAS[0])
        square_SN.mul_(BETAS[1]).addcmul_(gradient_SN, gradient_SN, value=1 - BETAS[1])
        scale_SN = (square_SN / (1 - BETAS[1] ** count_S1)).sqrt_().add_(EPSILON)
        scale_SN.mul_((1 - BETAS[0] ** count_S1) / lr_S1)
        params_SN.mul_(1 - lr_S1 * DECAY).addcdiv_(mean_SN, scale_SN, value=-1.0)
        self._count_S1[rows] = count_S1
        if rows is rows_S:
            self.params_SN[rows], self._mean_SN[rows], self._square_SN[rows] = params_SN, mean_SN, square_SN

    def losses(self, params_SN: Tensor, bytes_BT: Tensor) -> Tensor:
        """The loss of each row on the same batch."""
        with torch.no_grad():
            return self._losses(self._tensors(params_SN), bytes_BT.expand(len(params_SN), -1, -1))

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


class Stack:
    """All runs, round by round. A run with fewer rounds than others ends before them."""

    def __init__(self, plans: Sequence[RunPlan], options: argparse.Namespace) -> None:
        """options: batch, context, width and layers of the model."""
        self._plans, self._options = plans, options
        first = {plan.seed: self._weights(plan.seed) for plan in plans}
        self._slices: list[slice] = []
        for plan in plans:
            begin = self._slices[-1].stop if self._slices else 0
            self._slices.append(slice(begin, begin + plan.replicas))
        owners = [plan for plan in plans for _ in range(plan.replicas)]
        lr_S1 = torch.tensor([[plan.lr] for plan in owners])
        self._rows = _Rows(torch.stack([first[plan.seed] for plan in owners]), train.build(self._of(0)), lr_S1)
        self._shared = [first[plan.seed].clone() for plan in plans]
        self._momentum = [torch.zeros_like(shared_N) for shared_N in self._shared]
        self._left = [torch.zeros_like(first[plan.seed]) for plan in owners]
        self._taken = [0] * len(owners)
        numbers = range(len(owners))
        self._groups_S = torch.tensor(
            [
                rows.start if plan.synchronous else number
                for plan, rows in zip(plans, self._slices, strict=True)
                for number in numbers[rows]
            ]
        )
        held_out_N = train.text(train.sources()[1])
        wide = argparse.Namespace(seed=99, batch=64, context=options.context)
        self._held_out = [train.batch(held_out_N, 0, step, wide) for step in range(4)]

    @property
    def rounds(self) -> int:
        """Of the longest run."""
        return max(len(plan.rounds) for plan in self._plans)

    def round(self, number: int) -> None:
        """Take the inner steps of a round in every run that has one, then its outer step."""
        active = [index for index, plan in enumerate(self._plans) if number < len(plan.rounds)]
        steps = [0] * len(self._taken)
        for index in active:
            steps[self._slices[index]] = self._plans[index].rounds[number].steps
        self._train(torch.tensor(steps))
        for index in active:
            self._outer_step(index, number)

    def held_out(self) -> list[float]:
        """The loss of each run's shared parameters on files that no replica trains on, in nats a byte."""
        params_SN = torch.stack(self._shared)
        each = [self._rows.losses(params_SN, part) for part in self._held_out]
        return torch.stack(each).mean(dim=0).tolist()

    def _train(self, steps_S: Tensor) -> None:
        for begin, end in pairwise([0, *sorted({*steps_S.tolist()} - {0})]):
            rows_S = (steps_S >= end).nonzero().flatten()
            for _ in range(begin, end):
                self._rows.step(rows_S, self._batches(rows_S), self._groups_S)

    def _batches(self, rows_S: Tensor) -> Tensor:
        """The next batch of each row. Rows of the same seed, shard and step have the same one."""
        known: dict[tuple[int, int, int, int], Tensor] = {}
        wanted = {*rows_S.tolist()}
        batches: list[Tensor] = []
        for plan, rows in zip(self._plans, self._slices, strict=True):
            for index, row in enumerate(range(rows.start, rows.stop)):
                if row not in wanted:
                    continue
                step, shard = divmod(self._taken[row], plan.shards) if plan.rotates else (self._taken[row], index)
                key = (plan.seed, plan.shards, shard, step)
                if key not in known:
                    known[key] = train.batch(_sources(plan.shards)[shard], shard, step, self._of(plan.seed))
                batches.append(known[key])
                self._taken[row] += 1
        return torch.stack(batches)

    def _outer_step(self, index: int, number: int) -> None:
        """torch.optim.SGD(lr, momentum, nesterov=True) on the weighted mean; then every replica has its result."""
        plan, rows, shared_N = self._plans[index], self._slices[index], self._shared[index]
        if plan.synchronous:
            self._shared[index] = self._rows.params_SN[rows.start].clone()
            return
        weights = plan.rounds[number].weights
        sum_N = torch.zeros_like(shared_N)
        for row, weight in enumerate(weights, rows.start):
            if weight:
                sum_N += weight * self._encoded(plan, row, shared_N - self._rows.params_SN[row])
        mean_N = sum_N / sum(weights)
        mean_N = mean_N if plan.published is None else plan.published(mean_N)
        self._momentum[index].mul_(plan.outer_momentum).add_(mean_N)
        shared_N -= plan.outer_lr * (mean_N + plan.outer_momentum * self._momentum[index])
        self._rows.params_SN[rows] = shared_N

    def _encoded(self, plan: RunPlan, row: int, delta_N: Tensor) -> Tensor:
        """A replica's pseudo-gradient as the others get it."""
        if plan.encoded is None:
            return delta_N
        if not plan.feedback:
            return plan.encoded(delta_N)
        whole_N = delta_N + self._left[row]
        sent_N = plan.encoded(whole_N)
        self._left[row] = plan.feedback * (whole_N - sent_N)
        return sent_N

    def _of(self, seed: int) -> argparse.Namespace:
        return argparse.Namespace(**{**vars(self._options), "seed": seed})

    def _weights(self, seed: int) -> Tensor:
        model = train.build(self._of(seed))
        return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])
