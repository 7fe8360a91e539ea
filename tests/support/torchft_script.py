"""A script in torchft's style: `Manager` as torchft's constructor takes it, its own loop, no `connect()`.

Arguments: ROUNDS of its loop, and "catch_up" or "no_catch_up". The contract is in its environment.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.manager import ObjectStoreManager as Manager


def main() -> None:
    rounds, mode = int(sys.argv[1]), sys.argv[2]
    model = nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    manager = Manager(
        pg=None,
        min_replica_size=1,
        state_dict=model.state_dict,
        load_state_dict=model.load_state_dict,
        replica_id="train_diloco_0",
        use_async_quorum=False,
    )
    with DiLoCo(manager, [model], inner, outer, sync_every=2):
        while manager.current_step() < rounds:
            if mode == "catch_up":
                manager.catch_up(inner)
            inner.zero_grad()
            model(torch.ones(1, 4)).square().sum().backward()
            inner.step()
    print(f"end of the script at round {manager.current_step()}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
