"""Measures the cost of skerry for training on a device: the copy to the host, and the exposed part of an exchange.

    scripts/bench gpu [--model 124M] [--steps 50] [--rounds 4] [--device cuda] [--compile] [--json]

copy      pseudo-gradients of the model from the device to the host, in turns: through pinned memory behind the device's
          stream, as replicas do it, and by `tensor.cpu()`
training  seconds of a round of `steps` inner steps (a GPT in bf16 autocast), in this order:
          alone      the inner steps and nothing else
          one after  ObjectStoreManager and torchft's DiLoCo: the exchange begins after the last inner step
          behind     two fragments, each exchanged behind the next half of the inner steps (`fragment_sync_delay`)

The second replica is a process on the CPU that trains nothing and is always first. Therefore an exchange lasts as long
as this replica's own encoding, upload, download and average. The store is a folder in memory. `exposed`: time of a
round beyond the inner steps alone; `parts` are the parts of an exchange by this replica's receipts. Ratios to `alone`
are the result; seconds are of one machine.
"""
# ruff: noqa: D101, D102, D103  it explains itself above

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torchft.local_sgd import DiLoCo

from skerry.runtime.log import keys
from skerry.runtime.log.records import Receipt
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store import Store, open_store
from skerry.runtime.tensors.tensors_sent_together import TensorBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# layers, width, heads, vocabulary, context, batch
MODELS = {"tiny": (2, 64, 2, 256, 32, 2), "124M": (12, 768, 12, 50304, 1024, 8), "355M": (24, 1024, 16, 50304, 1024, 8)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    """halves: two fragments of about equal size."""

    def __init__(self, model: str) -> None:
        super().__init__()
        layers, width, heads, self.vocabulary, self.context, self.batch = MODELS[model]
        middle = layers // 2
        first = nn.ModuleList([nn.Embedding(self.vocabulary, width), *(Block(width, heads) for _ in range(middle))])
        second = nn.ModuleList([*(Block(width, heads) for _ in range(middle, layers)), nn.LayerNorm(width)])
        self.halves = nn.ModuleList([first, second])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedding = self.halves[0][0]  # type: ignore[index]  a ModuleList
        x = embedding(tokens[:, :-1])
        for layer in [*self.halves[0][1:], *self.halves[1]]:  # type: ignore[index,misc]  ModuleLists
            x = layer(x)
        return functional.cross_entropy(functional.linear(x, embedding.weight).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Way:
    """delay: inner steps that an exchange may take behind training; None: without skerry."""

    name: str
    delay: int | None


class Training:
    """The model with its inner optimizer on one device; the same for every way."""

    def __init__(self, model: str, device: str, *, compiled: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.gpt = Gpt(model).to(device)
        self.inner = torch.optim.AdamW(self.gpt.parameters(), lr=1e-4)
        self._loss: Callable[[torch.Tensor], torch.Tensor] = torch.compile(self.gpt) if compiled else self.gpt  # type: ignore[assignment]

    def step(self) -> None:
        tokens = torch.randint(self.gpt.vocabulary, (self.gpt.batch, self.gpt.context + 1), device=self.device)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self._loss(tokens)
        self.inner.zero_grad()
        loss.backward()
        self.inner.step()


def quiet() -> None:
    """Print no events: a handler of the caller's own keeps skerry from adding one."""
    logging.getLogger("skerry").addHandler(logging.NullHandler())


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


@contextlib.contextmanager
def replica(
    uri: str, slot: str, gpt: Gpt, inner: torch.optim.Optimizer, steps: int, delay: int
) -> Iterator[ObjectStoreManager]:
    """A replica of two under torchft's DiLoCo, which waits for the other in every round."""
    manager = ObjectStoreManager(
        open_store(uri),
        replica_id=slot,
        min_replica_size=2,
        timeout=timedelta(minutes=5),
        grace=Grace(floor_s=120.0, cap_s=120.0),
    )
    fragments: list[nn.Module] = list(gpt.halves) if delay else [gpt]
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    try:
        with DiLoCo(manager, fragments, inner, outer, sync_every=steps, fragment_sync_delay=delay):
            yield manager
    finally:
        manager.shutdown()


def partner(uri: str, model: str, steps: int, delay: int, closed: int) -> None:
    """The second replica: it trains nothing, and is first in every round."""
    quiet()
    torch.set_num_threads(4)
    training = Training(model, "cpu", compiled=False)
    with replica(uri, "partner", training.gpt, training.inner, steps, delay) as manager:
        while manager.current_step() < closed:
            training.inner.step()


def rounds_alone(training: Training, steps: int, rounds: int) -> list[float]:
    seconds = []
    for _ in range(rounds + 1):
        synchronize(training.device)
        begun = time.perf_counter()
        for _ in range(steps):
            training.step()
        synchronize(training.device)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def parts_of(store: Store, rounds: range) -> dict[str, float]:
    """Median seconds of each part of an exchange, by this replica's receipts."""
    receipts = [keys.receipt(number, "trainer") for number in rounds]
    seconds = [Receipt.parse(store.read(key) or b"", key).seconds for key in receipts]
    return {part: statistics.median(receipt[part] for receipt in seconds) for part in seconds[0]}


def rounds_with(arguments: argparse.Namespace, training: Training, delay: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of `steps` inner steps with all exchanges that begin or end in them, and the parts of one exchange."""
    steps = arguments.steps
    fragments = 2 if delay else 1
    closed = (arguments.rounds + 2) * fragments
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        uri = Path(folder).as_uri()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the partner's DiLoCo would otherwise take the device
        other = multiprocessing.get_context("spawn").Process(
            target=partner, args=(uri, arguments.model, steps, delay, closed), daemon=True
        )
        other.start()
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
        seconds = []
        with replica(uri, "trainer", training.gpt, training.inner, steps, delay) as manager:
            while manager.current_step() < closed:
                synchronize(training.device)
                begun = time.perf_counter()
                for _ in range(steps):
                    training.step()
                synchronize(training.device)
                seconds.append(time.perf_counter() - begun)
        other.join(60)
        if other.exitcode != 0:
            sys.exit(f"the second replica ended with exit code {other.exitcode}")
        # The first joins the run, the second warms the buffers. The last round has no receipt yet.
        return seconds[2:], parts_of(open_store(uri), range(2 * fragments, closed - 1))


def copies(training: Training, turns: int = 7) -> dict[str, float]:
    """GB/s of all parameters from the device to the host."""
    tensors = [parameter.detach() for parameter in training.gpt.parameters()]
    size = sum(tensor.nbytes for tensor in tensors)

    def pinned() -> None:
        batch = TensorBatch("none", 2)
        for tensor in tensors:
            batch.add(tensor, "avg")
        batch.hosts()

    def plain() -> None:
        for tensor in tensors:
            tensor.cpu()

    seconds: dict[str, list[float]] = {"pinned": [], "plain": []}
    for _ in range(turns):
        for name, way in (("pinned", pinned), ("plain", plain)):
            synchronize(training.device)
            begun = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - begun)
    return {name: size / statistics.median(values[1:]) / 1e9 for name, values in seconds.items()}


@dataclass(frozen=True, kw_only=True)
class Row:
    way: str
    seconds: float
    exposed_s: float
    ratio: float
    parts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="124M")
    parser.add_argument("--steps", type=int, default=50, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true", help="compile the model; needs a C compiler")
    parser.add_argument("--folder", default="/dev/shm", help="where the store lies")  # noqa: S108
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.device != "cpu" and not torch.accelerator.is_available():
        parser.error(f"--device {arguments.device}: no accelerator here; --device cpu shows that it runs")
    quiet()
    training = Training(arguments.model, arguments.device, compiled=arguments.compile)
    count = sum(parameter.numel() for parameter in training.gpt.parameters())
    speeds = copies(training)
    ways = [
        Way(name="alone", delay=None),
        Way(name="one after", delay=0),
        Way(name="behind", delay=arguments.steps // 2 - 1),
    ]
    rows: list[Row] = []
    for way in ways:
        parts: dict[str, float] = {}
        if way.delay is None:
            measured = rounds_alone(training, arguments.steps, arguments.rounds)
        else:
            measured, parts = rounds_with(arguments, training, way.delay)
        seconds = statistics.median(measured)
        alone = rows[0].seconds if rows else seconds
        rows.append(Row(way=way.name, seconds=seconds, exposed_s=seconds - alone, ratio=seconds / alone, parts=parts))
        print(
            f"{way.name:10} {seconds:8.3f} s  exposed {rows[-1].exposed_s:7.3f} s  ratio {rows[-1].ratio:.3f}",
            file=sys.stderr,
        )
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    print(f"{name}, {count / 1e6:.0f} M parameters; to the host, GB/s: {speeds}", file=sys.stderr)
    if arguments.json:
        figures = {"device": name, "torch": torch.__version__, "parameters": count, "compiled": arguments.compile}
        print(json.dumps(figures | {"copy_gb_s": speeds, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
