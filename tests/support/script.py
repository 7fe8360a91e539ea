"""A user's training script, small and fast. The first argument selects a failure."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time

import torch
from tests.support.clocks import FastClock
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.errors import Invalid
from skerry.runtime.replica import connect

# More than a pipe and its reader's buffer: a process that prints this much waits for its reader.
LONG_LINE = 1 << 17


class KilledOnceJoined(logging.Handler):
    """Kills this process when it has claimed the slot."""

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "event", "") == "joined":
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "train"
    torch.set_num_threads(1)
    if mode == "claim":
        logging.getLogger("skerry").addHandler(KilledOnceJoined())
        logging.getLogger("skerry").setLevel(logging.INFO)
    # A step that never ends uses up a limit of 23 s, here of 2.3 s.
    with connect(clock=FastClock(10) if mode == "stuck" else None) as replica:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        shard = replica.shard(range(1000))
        with DiLoCo(manager, [model], inner, [outer], sync_every=replica.run.sync_every):
            for step in replica.steps(inner):
                if mode == "crash":
                    raise OSError("disk full")
                if mode == "invalid":
                    raise Invalid("this will never work")
                generator = torch.Generator().manual_seed(shard[step % len(shard)])
                x = torch.randn(4, 8, generator=generator)
                loss = ((model(x) - x) ** 2).mean()
                inner.zero_grad()
                loss.backward()
                replica.log(loss=loss.item(), tokens=32)
                inner.step()
                # In mode slow, the script is at most a step ahead of the test that reads this.
                print(f"step {step}".ljust(LONG_LINE if mode == "slow" else 0), flush=True)  # noqa: T201
                if mode == "stop" and step == 1:
                    replica.request_stop("enough")
                if mode == "stuck" and step == 1:
                    time.sleep(3600)  # an inner step that never ends
        if mode == "vanish":
            os._exit(1)  # as if killed after the last step


if __name__ == "__main__":
    main()
