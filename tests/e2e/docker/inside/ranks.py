"""Checks several ranks of one replica in the image: torchrun, gloo, DDP. Run in a container by test_container.py."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Exit with 1 and a traceback if the ranks do not connect or their parameters differ."""
    distributed.init_process_group("gloo")
    torch.manual_seed(int(os.environ["RANK"]))
    model = DistributedDataParallel(nn.Linear(4, 4))
    model(torch.randn(2, 4)).sum().backward()
    for parameter in model.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, parameter.detach())
        assert all(torch.equal(tensor, gathered[0]) for tensor in gathered), "ranks hold different parameters"
    print(f"RANK {distributed.get_rank()} of {distributed.get_world_size()}", flush=True)
    # Both ranks are done before either takes the group down.
    distributed.barrier()
    distributed.destroy_process_group()
    # torch 2.13 keeps the threads of gloo after DDP, also without model and group. One that still releases a tensor
    # while Python ends aborts the process, which is not what this script checks.
    os._exit(0)


if __name__ == "__main__":
    main()
