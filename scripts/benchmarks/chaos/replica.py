"""One replica of the chaos benchmark: a process that trains, writes down what happened, and may be killed any time.

Both contestants run the same loop: unmodified torchft DiLoCo over the tiny GPT of runtime/examples, on text. An inner
step is paced: what its arithmetic, the inner optimizer's included, leaves of the step's fixed length is waited out, so
that replicas that share cores do not slow each other down. A diary line is one O_APPEND write: SIGKILL can lose none
but the one that is being written. Its times are CLOCK_MONOTONIC, which all processes of a machine share.
"""
# ruff: noqa: D102  the two contestants have the methods of Place, and Training the usual ones
# pyright: reportUnknownMemberType=false
# torch leaves types open.

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch
import torch._dynamo  # pyright: ignore[reportUnusedImport]  the first optimizer would import it, a second of every restart
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  as torch's manual has it
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from chaos.faults import Faulty
from skerry.runtime.clock import SystemClock
from skerry.runtime.log.log import open_run
from skerry.runtime.log.run_record import MirrorSettings, Run
from skerry.runtime.manager import ObjectStoreManager
from skerry.runtime.protocol.quorum import Grace
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.training.torchft_fragments import shared_parameters_of

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "runtime/examples/tiny_gpt"))
import train as tiny_gpt  # the example is a script, found by its folder

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from skerry.runtime.log.records import Codec, Reduction

Contestant: TypeAlias = Literal["ours", "torchft"]
State: TypeAlias = dict[str, dict[str, Any]]

MODEL = {"batch": 8, "context": 32, "width": 32, "layers": 2, "lr": 4e-3}
# Chosen on undisturbed runs. The usual momentum of 0.9 is for rounds of hundreds of steps: with 20 it overshoots, ends
# 9 % higher, and single runs that differ in any way part by 1 to 4 %, not by 0.3 %.
OUTER = {"lr": 0.7, "momentum": 0.3, "nesterov": True}
# The same for both contestants.
MIN_REPLICAS = 2
# Ours. A killed replica is not waited for beyond the grace window, whatever its last heartbeat says.
GRACE = Grace(floor_s=0.3, cap_s=3.0, share=0.1)
HEARTBEAT_S = 0.2
# The current round is saved after every inner step, so that the slot's next process continues it. A save is 1 MB.
KEEP_UNFINISHED_STEPS = 0.5
# torchft's, the best of the combinations that were tried (4 replicas, a mean life of 6 rounds of 2 s, started again
# after a quarter of a round). A dead replica is known after a second (default 5), and a quorum is looked for every
# 50 ms (default 100). The Lighthouse waits for late replicas longer than a round takes: less leaves them out for good,
# and 10 s, as in torchft's own DiLoCo example, are five rounds lost at every kill. Only the timeout ends a stuck
# allreduce; 10 s of it cost a quarter of the goodput.
LIGHTHOUSE = {"heartbeat_timeout_ms": 1000, "quorum_tick_ms": 50, "join_timeout_ms": 3000}
TIMEOUT = timedelta(seconds=3)
QUORUM_TIMEOUT = timedelta(seconds=30)
CONNECT_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of every replica of one run. fault_share: of store requests, ours only. has_mirror: ours keeps one."""

    contestant: Contestant
    replicas: int
    rounds: int
    sync_every: int
    step_s: float
    seed: int
    codec: Codec
    reduction: Literal["auto"] | Reduction
    fault_share: float
    folder: str
    lighthouse: str
    has_mirror: bool = False

    @property
    def mirror(self) -> Path:
        """The folder of the mirror of our log."""
        return Path(self.folder, "mirror")

    @property
    def store(self) -> Path:
        """The folder of our log."""
        return Path(self.folder, "store")

    @property
    def held_out(self) -> Path:
        """Text that no replica trains on."""
        return Path(self.folder, "held-out.bin")

    def slot(self, index: int) -> str:
        """The name of a replica."""
        return f"r-{index}"

    def shard(self, index: int) -> Path:
        """The text that a replica trains on."""
        return Path(self.folder, f"shard-{index}.bin")

    def diary(self, index: int) -> Path:
        """Return the diary of a replica; all its processes write to one file."""
        return Path(self.folder, f"diary-{index}.jsonl")


class Diary:
    """Lines of JSON: what happened, when, in which process of the slot."""

    def __init__(self, path: Path, process: int) -> None:
        self._process = process
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(self._file, b"\n")  # ends what the last process was killed in

    def write(self, event: str, **facts: object) -> None:
        """One line, now."""
        line = {"t": time.monotonic(), "event": event, "process": self._process, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Place(Protocol):
    """The operations in which the two contestants differ."""

    @property
    def manager(self) -> ObjectStoreManager | Manager: ...

    def catch_up(self, inner: torch.optim.Optimizer) -> None: ...

    @property
    def finished(self) -> bool:
        """All rounds of the run are closed."""
        ...

    @property
    def contributes(self) -> bool:
        """My own inner steps are in the last round's average."""
        ...

    @property
    def resumed(self) -> int:
        """Inner steps of the slot's last process that this one goes on with, before it takes its first own."""
        ...

    @property
    def facts(self) -> dict[str, object]: ...


class Ours:
    """ObjectStoreManager on a folder whose requests fail now and then."""

    def __init__(self, setting: Setting, index: int, process: int, training: Training) -> None:
        seed = f"{setting.seed} {index} {process}"
        self._store = Faulty(DirectoryStore(setting.store), setting.fault_share, seed)
        self.manager: ObjectStoreManager = ObjectStoreManager(
            self._store,
            replica_id=setting.slot(index),
            min_replica_size=MIN_REPLICAS,
            state_dict=training.state,
            load_state_dict=training.load,
            timeout=timedelta(minutes=2),
            grace=GRACE,
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            keep_unfinished=timedelta(seconds=KEEP_UNFINISHED_STEPS * setting.step_s),
            codec=setting.codec,
            reduction=setting.reduction,
        )
        self.manager.register_private_state("inner", training.inner.load_state_dict, training.inner.state_dict)

    def catch_up(self, inner: torch.optim.Optimizer) -> None:
        self.manager.catch_up(inner)

    @property
    def finished(self) -> bool:
        return self.manager.finished

    @property
    def contributes(self) -> bool:
        return self.manager.is_participating()

    @property
    def resumed(self) -> int:
        return self.manager.inner_steps

    @property
    def facts(self) -> dict[str, object]:
        return {"incarnation": self.manager.presence.incarnation, "faults": self._store.injected}


class Torchft:
    """torchft's Manager with its Lighthouse, Gloo, and its own way to heal: a checkpoint from a peer over HTTP."""

    def __init__(self, setting: Setting, index: int, training: Training) -> None:
        self._rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._training = training
        self._rounds = setting.rounds
        self._healed_at: int | None = None
        self.manager: Manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=training.state,
            min_replica_size=MIN_REPLICAS,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=QUORUM_TIMEOUT,
            connect_timeout=CONNECT_TIMEOUT,
            replica_id=f"replica_{index}",
            store_addr="127.0.0.1",
            store_port=self._rendezvous.port,
            rank=0,
            world_size=1,
            lighthouse_addr=setting.lighthouse,
            hostname="127.0.0.1",
            init_sync=False,  # equal seeds make equal weights; else all but one replica waste the first round
        )

    def _load(self, state: State) -> None:
        self._training.load(state)
        self._healed_at = self.manager.current_step()

    def catch_up(self, inner: torch.optim.Optimizer) -> None:
        """It heals at its next exchange."""

    @property
    def finished(self) -> bool:
        return self.manager.current_step() >= self._rounds

    @property
    def contributes(self) -> bool:
        # A replica that healed in this round's quorum has offered a copy of its source's pseudo-gradient.
        return self.manager.is_participating() and self._healed_at != self.manager.current_step() - 1

    @property
    def resumed(self) -> int:
        return 0

    @property
    def facts(self) -> dict[str, object]:
        return {"healed": self._healed_at == self.manager.current_step() - 1}


class Training:
    """The loop, and the lines that the figures are made of.

    seated: it has its place in the run. ready: the first inner step begins; resumed: how many of the last process's
    it goes on with. step: one is done, before the optimizer's step. closed: `round` rounds are closed here, with the
    digest of the shared state; steps: inner steps since the last exchange. failed: the exchange gave nothing, the steps
    are thrown away. finished: with the loss on held-out text.
    """

    def __init__(self, setting: Setting, index: int, process: int) -> None:
        self._setting, self._index = setting, index
        self._options = argparse.Namespace(seed=setting.seed, **MODEL)
        self._model = tiny_gpt.build(self._options)
        self.inner = torch.optim.AdamW(self._model.parameters(), lr=self._options.lr)
        self._outer = torch.optim.SGD(self._model.parameters(), **OUTER)  # pyright: ignore[reportArgumentType]
        self._text = _text(setting.shard(index))
        self._diary = Diary(setting.diary(index), process)
        self._diary.write("started")
        self._place: Place = (
            Ours(setting, index, process, self) if setting.contestant == "ours" else Torchft(setting, index, self)
        )
        self._manager = self._place.manager
        self._diary.write("seated", **self._place.facts)
        self._round = self._since = 0
        self._arrived = time.monotonic()
        self._step = -1
        # What the last step of the inner optimizer took, where no exchange was part of it.
        self._optimizer_s = 0.0

    def state(self) -> State:
        return {"model": self._model.state_dict(), "inner": self.inner.state_dict()}

    def load(self, state: State) -> None:
        self._model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])

    def run(self) -> None:
        """Until all rounds are closed."""
        setting, manager = self._setting, self._manager
        diloco = DiLoCo(manager, [self._model], self.inner, [self._outer], sync_every=setting.sync_every)  # pyright: ignore[reportArgumentType]
        with diloco:
            # What all replicas must hold alike.
            self._shared = shared_parameters_of(diloco)
            # Registered after DiLoCo's own hook, so it runs after it, in empty steps too.
            self.inner.register_step_post_hook(self._after_step)
            began = False
            while True:
                self._place.catch_up(self.inner)
                if manager.current_step() != self._round:  # a checkpoint was loaded, and there was nothing to follow
                    self._closed()
                if self._place.finished:
                    break
                if not began:
                    self._since = self._place.resumed
                    self._step = self._round * setting.sync_every + self._since - 1
                    self._diary.write("ready", round=self._round, resumed=self._since, **self._place.facts)
                    began = True
                self._inner_step()
        held_out = _text(setting.held_out)
        with torch.no_grad():
            batches = [tiny_gpt.batch(held_out, 0, step, self._options) for step in range(64)]
            losses = [tiny_gpt.loss_of(self._model, batch).item() for batch in batches]
        self._diary.write("finished", round=self._round, loss=sum(losses) / len(losses), **self._place.facts)
        manager.shutdown()

    def _inner_step(self) -> None:
        began = time.monotonic()
        self._step = max(self._step + 1, self._round * self._setting.sync_every)
        self.inner.zero_grad()
        batch = tiny_gpt.batch(self._text, self._index, self._step, self._options)
        tiny_gpt.loss_of(self._model, batch).backward()
        left_s = self._setting.step_s - self._optimizer_s
        time.sleep(max(0.0, began + left_s - time.monotonic()))
        self._since += 1
        self._arrived = time.monotonic()
        self._diary.write("step", round=self._round, since=self._since, took=self._arrived - began + self._optimizer_s)
        within = self._since < self._setting.sync_every
        self.inner.step()
        # A step that ends in an exchange takes as much of its own as any other.
        self._optimizer_s = time.monotonic() - self._arrived if within else self._optimizer_s

    def _after_step(self, *_: object) -> None:
        if self._manager.current_step() != self._round:
            self._closed()
        elif self._since >= self._setting.sync_every:
            self._diary.write("failed", round=self._round, steps=self._since, arrived=self._arrived)
            self._since = 0

    def _closed(self) -> None:
        self._round = self._manager.current_step()
        self._diary.write(
            "closed",
            round=self._round,
            steps=self._since,
            arrived=self._arrived,
            members=self._manager.num_participants(),
            own=self._place.contributes,
            digest=self._digest(),
            **self._place.facts,
        )
        self._since = 0

    def _digest(self) -> str:
        """Of the global parameters and the outer momentum."""
        sha = hashlib.sha256()
        momenta = [self._outer.state[p].get("momentum_buffer") for p in self._model.parameters()]
        for tensor in [*self._shared.values(), *(m for m in momenta if m is not None)]:
            sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()[:16]


def start(setting: Setting, index: int, process: int) -> None:
    """A replica's entry: in a process that was forked with torch imported, and that ends when the benchmark does."""
    _end_with_parent()
    log = os.open(Path(setting.folder, f"log-{index}.txt"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {process} %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(1)
    Training(setting, index, process).run()


def start_lighthouse(address: Connection) -> None:
    """The Lighthouse of torchft, in a process of its own."""
    _end_with_parent()
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=MIN_REPLICAS, **LIGHTHOUSE)
    address.send(server.address())
    threading.Event().wait()


def prepare(setting: Setting) -> None:
    """The text as files, and our run record."""
    training, held_out = tiny_gpt.sources()
    setting.held_out.write_bytes(tiny_gpt.text(held_out).numpy().tobytes())
    for index in range(setting.replicas):
        setting.shard(index).write_bytes(tiny_gpt.text(training[index :: setting.replicas]).numpy().tobytes())
    if setting.contestant == "ours":
        clock = SystemClock()
        run = Run(
            nonce=clock.nonce(),
            name="chaos",
            spec=None,
            slots=tuple(setting.slot(index) for index in range(setting.replicas)),
            rounds=setting.rounds,
            sync_every=setting.sync_every,
            fragments=1,
            outer_lr=OUTER["lr"],
            outer_momentum=OUTER["momentum"],
            min_replicas=MIN_REPLICAS,
            grace_s=GRACE.cap_s,
            start_window_s=20.0,
            checkpoint_every=1,
            codec=setting.codec,
            reduction=None if setting.reduction == "auto" else setting.reduction,
            weighting="uniform",
            work=float(setting.rounds * setting.replicas),
            links=True,
            mirrors=(MirrorSettings(uri=setting.mirror.as_uri(), each_round=True),) if setting.has_mirror else None,
            created=clock.utc_text(),
        )
        open_run(DirectoryStore(setting.store), run)


def _text(path: Path) -> torch.Tensor:
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None  # noqa: S101

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
