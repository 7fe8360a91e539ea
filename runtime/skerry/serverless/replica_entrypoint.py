"""Trains one replica with torchft's DiLoCo, over the ranks that meet at a rendezvous; any executor can start it.

    python -m skerry.serverless.replica_entrypoint --rendezvous URI [--task MODULE:FUNCTION] [--rounds N] ...

The function of `--task` is called with the rank and the world size. It returns the model, and a function that computes
the loss of an inner step from its number. All replicas begin with the weights of rank 0; the random states of torch
differ. Rank 0 saves the model after the last round: `skerry artifacts URI` fetches it. Ends by the exit codes of
`runtime/README.md`. A replica that is started again repeats its steps, and reads the averages that are known.
"""

# pyright: reportUnknownMemberType=false
from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, TypeAlias

import torch
from safetensors.torch import save as to_safetensors
from torch.distributed.distributed_c10d import ReduceOp
from torchft.local_sgd import DiLoCo

from skerry.runtime import contract
from skerry.runtime.allreduce import ObjectStoreAllReduce
from skerry.runtime.errors import Invalid, SkerryError
from skerry.runtime.log import files_saved_by_script
from skerry.runtime.replica import exit_code_of
from skerry.runtime.store import open_store
from skerry.serverless.fixed_ranks_manager import MockManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Task: TypeAlias = "tuple[torch.nn.Module, Callable[[int], torch.Tensor]]"
MODEL = "model.safetensors"
_FIRST_TRY = "skerry.serverless.replica_entrypoint:linear_regression"


def linear_regression(rank: int, world_size: int) -> Task:
    """The task if none is named, for a first try: a linear function of 16 numbers, from every rank's own samples."""
    del world_size
    model = torch.nn.Linear(16, 1)
    weights = torch.linspace(-1.0, 1.0, 16)

    def loss(step: int) -> torch.Tensor:
        samples = torch.randn(64, 16, generator=torch.Generator().manual_seed(step * 1000 + rank))
        return torch.nn.functional.mse_loss(model(samples).squeeze(1), samples @ weights)

    return model, loss


def train(rendezvous: ObjectStoreAllReduce, task: Callable[[int, int], Task], options: argparse.Namespace) -> None:
    """Train for the rounds of the options, with the others."""
    rank = rendezvous.rank
    torch.manual_seed(rank)
    model, loss_of = task(rank, rendezvous.world_size)
    manager = MockManager(rendezvous)
    share_weights(manager, model)
    inner = torch.optim.AdamW(model.parameters(), lr=options.lr)
    outer = torch.optim.SGD(model.parameters(), lr=options.outer_lr, momentum=options.outer_momentum, nesterov=True)
    every: int = options.sync_every
    with DiLoCo(manager, [model], inner, outer, every, should_quantize=options.should_quantize):  # pyright: ignore[reportArgumentType]  torchft calls no other method of its Manager
        for step in range(options.rounds * every):
            loss = loss_of(step)
            inner.zero_grad()
            loss.backward()
            inner.step()
            if (step + 1) % every == 0:
                print(f"round {(step + 1) // every} of {options.rounds}: loss {loss.item():.6f}", flush=True)  # noqa: T201  the log of a job
    if manager.is_leader():
        data = to_safetensors({name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()})
        files_saved_by_script.save(open_store(rendezvous.uri), rendezvous.slot, options.rounds, MODEL, data)


def share_weights(manager: MockManager, model: torch.nn.Module) -> None:
    """Give all ranks the state of rank 0's model, in one exchange."""
    # A tied weight has several names. The exchange works in place: of two views of it, the second would read a result.
    tensors = {(tensor.data_ptr(), tensor.nbytes): tensor for tensor in model.state_dict().values()}
    for tensor in tensors.values():
        if not manager.is_leader():
            tensor.zero_()
        manager.allreduce(tensor, reduce_op=ReduceOp.SUM)
    manager.should_commit()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says; ends the process by the contract's exit code."""
    options = _parser().parse_args(arguments)
    # The others wait for a replica that was stopped: it may come back.
    signal.signal(signal.SIGTERM, _stop)
    try:
        with _rendezvous(options) as rendezvous:
            train(rendezvous, _task(options.task), options)
    except (SkerryError, TimeoutError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(int(exit_code_of(error))) from error


def _stop(*_: object) -> None:
    raise SystemExit(int(contract.ExitCode.RETRY))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rendezvous", required=True, metavar="URI")
    parser.add_argument("--rank_env", default=contract.INDEX, metavar="NAME", help="the variable that holds the rank")
    parser.add_argument("--world_size", type=int, help="the number of replicas, if no executor tells it")
    parser.add_argument("--task", default=_FIRST_TRY, metavar="MODULE:FUNCTION")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sync_every", type=int, default=20, help="inner steps in a round")
    parser.add_argument("--lr", type=float, default=0.01, help="of AdamW, the inner optimizer")
    parser.add_argument("--outer_lr", type=float, default=0.7, help="of the outer SGD with Nesterov momentum")
    parser.add_argument("--outer_momentum", type=float, default=0.5)
    parser.add_argument("--should_quantize", action="store_true", help="exchange int8")
    parser.add_argument("--timeout_s", type=float, default=1800.0, help="how long to wait for the others")
    return parser


def _rendezvous(options: argparse.Namespace) -> ObjectStoreAllReduce:
    rank = os.environ.get(options.rank_env, "")
    if not rank.isdecimal():
        raise Invalid(f"no rank: {options.rank_env}={rank!r}; name the variable that holds it with --rank_env")
    return ObjectStoreAllReduce(options.rendezvous, int(rank), options.world_size, timeout_s=options.timeout_s)


def _task(name: str) -> Callable[[int, int], Task]:
    module, _, function = name.partition(":")
    try:
        task: Callable[[int, int], Task] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise Invalid(f"no task {name!r}: {error}; write --task MODULE:FUNCTION") from error
    return task


if __name__ == "__main__":
    main()
