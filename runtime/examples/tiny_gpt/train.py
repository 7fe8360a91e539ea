"""A byte-level GPT trained with DiLoCo on the Python standard library's own sources: the script to copy.

`train_replica` is a replica's training, started by `skerry up`. Three modes need no run:
    train.py --lone              a single replica: plain AdamW, as many tokens as a replica of a run sees
    train.py --synchronous 4     data parallel: every step averages the gradients of 4 replicas' batches
    train.py --evaluate FILE     the loss of an exported model, with plain torch
Deterministic from --seed. The last line on stdout is JSON with the loss on files that no replica trains on.
"""
# pyright: reportUnknownMemberType=false, reportArgumentType=false
# Some of torch's types are unknown, and DiLoCo's signature requires torchft's own Manager class.

from __future__ import annotations

import argparse
import json
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

# Tensor names end in their shape: B batch, T time (context), D width, N bytes of text.
HEADS = 4


class Embedding(nn.Module):
    """Bytes and their positions as vectors."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        return self.byte(bytes_BT) + self.position.weight[: bytes_BT.shape[1]]


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.query_key_value(self.attention_norm(x_BTD)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.project(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.narrow(nn.functional.gelu(self.widen(self.forward_norm(x_BTD))))


def build(options: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(options.seed)
    blocks = [Block(options.width) for _ in range(options.layers)]
    last = [nn.LayerNorm(options.width), nn.Linear(options.width, 256)]
    return nn.Sequential(Embedding(options.context, options.width), *blocks, *last)


def sources() -> tuple[list[Path], list[Path]]:
    """The standard library's files to train on, and about every tenth, chosen by its name, to hold out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = [file for file in files if zlib.crc32(file.name.encode()) % 10 == 0]
    return [file for file in files if file not in held_out], held_out


def text(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch(text_N: Tensor, index: int, step: int, options: argparse.Namespace) -> Tensor:
    """The batch of replica `index` at `step`; depends only on these numbers, so a restart continues the same data."""
    generator = torch.Generator().manual_seed((options.seed * 4096 + index) * 1_000_000 + step)
    starts_B = torch.randint(len(text_N) - options.context, (options.batch,), generator=generator)
    return text_N[starts_B[:, None] + torch.arange(options.context + 1)].long()


def loss_of(model: nn.Module, bytes_BT: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(bytes_BT[:, :-1]).flatten(0, 1), bytes_BT[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: nn.Module, options: argparse.Namespace, batches: int = 32) -> dict[str, float]:
    """The loss on the first batches of the held-out files, always the same; and the checksum of these files."""
    text_N = text(sources()[1])
    losses = [loss_of(model, batch(text_N, 0, step, options)).item() for step in range(batches)]
    return {"text": zlib.crc32(text_N.numpy()), "held_out": round(sum(losses) / batches, 4)}


def train_replica(options: argparse.Namespace) -> None:
    with connect() as replica:
        run, model, text_N = replica.run, build(options), text(replica.shard(sources()[0]))
        inner = torch.optim.AdamW(model.parameters(), lr=options.lr)
        length, parts = len(model), run.fragments
        fragments = [model[length * part // parts : length * (part + 1) // parts] for part in range(parts)]
        nesterov = {"lr": run.outer_lr, "momentum": run.outer_momentum, "nesterov": True}
        outer = [torch.optim.SGD(part.parameters(), **nesterov) for part in fragments]
        manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        replica.keep(inner=inner)  # retained over a restart, with the step number that selects batches
        if replica.index == 0:  # one is enough: right after a round the model is that of all replicas
            replica.evaluate(lambda: {"val_loss": evaluate(model, options, 2)["held_out"]}, every=5)
        with DiLoCo(manager, fragments, inner, outer, sync_every=run.sync_every):
            for step in replica.steps(inner):
                loss = loss_of(model, batch(text_N, replica.index, step, options))
                inner.zero_grad()
                loss.backward()
                replica.log(loss=loss.item(), tokens=options.batch * options.context)
                inner.step()
        with manager.shared_parameters():  # the model that all replicas have, and that `skerry export` writes
            print(json.dumps({"slot": replica.slot, "rounds": manager.current_step(), **evaluate(model, options)}))


def train_synchronous(options: argparse.Namespace) -> None:
    model, replicas = build(options), options.synchronous
    texts = [text(sources()[0][index::replicas]) for index in range(replicas)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for step in range(options.steps):
        losses = [loss_of(model, batch(text_N, index, step, options)) for index, text_N in enumerate(texts)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    print(json.dumps({"replicas": replicas, "steps": options.steps, **evaluate(model, options)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--lone", action="store_const", const=1, dest="synchronous", help="same as --synchronous 1")
    alone.add_argument("--synchronous", type=int, metavar="N", help="one process, the batches of N replicas")
    alone.add_argument("--evaluate", metavar="FILE", help="a model.pt of `skerry export`")
    parser.add_argument("--steps", type=int, default=400, help="for --lone and --synchronous; a spec has its own")
    for name, default in {"seed": 0, "batch": 16, "context": 128, "width": 96, "layers": 3, "lr": 2e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default: {default}")
    options = parser.parse_args()
    if options.evaluate:
        model = build(options)
        model.load_state_dict(torch.load(options.evaluate))
        print(json.dumps({"file": options.evaluate, **evaluate(model, options)}))
    else:
        train_replica(options) if options.synchronous is None else train_synchronous(options)


if __name__ == "__main__":
    main()
