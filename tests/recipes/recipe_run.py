"""One recipe as a user runs it: `skerry init --from`, `skerry up` with two replicas, SIGKILL to one of them.

That one waits within a round until the signal is sent: a fast machine would finish the run before.
"""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any, Final

from tests.infra.runs import Skerry
from tests.kit.managers import contributions, wait_for
from tests.support.command_line import invoke

from skerry.infra.observe.digests_agree import digests_equal
from skerry.infra.observe.history import read_history
from skerry.runtime.log import keys
from skerry.runtime.log.records import Member
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from skerry.runtime.log.records import Contribution

ROUNDS: Final = 8
STEPS: Final = 20
KILLED: Final = "local-1"
# A round needs both replicas, so the run cannot end while the killed replica is away.
SETTINGS: Final = (
    f"--set=outer.rounds={ROUNDS}",
    "--set=faults.min_replicas=2",
    "--set=faults.checkpoint_every=2",  # so the state that a restarted replica finds is older than the run
    "--set=faults.restarts.max=1",
)
# What takes a recipe long to import.
IMPORTS: Final = {
    "hf": ("transformers.trainer", "accelerate"),
    "lightning": ("lightning",),
    "tensorboard": ("torch.utils.tensorboard",),
    "wandb": ("wandb",),
}
# Before the script: its replica {slot} waits in its first inner step after the round {commit}, until {released} exists.
HOLD: Final = """\
import os, pathlib, time, torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
def hold(optimizer, *_):
    if isinstance(optimizer, torch.optim.AdamW) and pathlib.Path({commit!r}).exists():
        pathlib.Path({held!r}).touch()
        while not pathlib.Path({released!r}).exists():
            time.sleep(0.01)
if os.environ["SKERRY_SLOT"] == {slot!r}:
    register_optimizer_step_pre_hook(hold)
"""


class RecipeRun:
    """The run of one recipe in an empty folder."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.spec = folder / "skerry.yaml"
        self.recipe = recipe
        self.log = folder / ".skerry/store/my-run"
        self.store = open_store(self.log.as_uri())
        self.script = folder / "train/train.py"
        self.held, self.released = folder / "held", folder / "released"
        result = invoke("init", self.spec, "--from", recipe)
        assert result.exit_code == 0, result.output

    def train(
        self, *, kill_after: int | None = None, by: signal.Signals = signal.SIGKILL, rounds: int = ROUNDS
    ) -> None:
        """Run it to its end; end a replica after so many rounds. All replicas end as done, with the same bits.

        Called again, it goes on with a run that was extended to so many rounds.
        """
        if kill_after is not None:
            paths = {"commit": self.log / keys.commit(kill_after), "held": self.held, "released": self.released}
            hold = HOLD.format(slot=KILLED, **{name: str(path) for name, path in paths.items()})
            self.script.write_text(hold + self.script.read_text())
        with Skerry("up", str(self.spec), "--json", *SETTINGS, imports=IMPORTS.get(self.recipe, ())) as up:
            if kill_after is not None:
                wait_for(lambda: self.held.exists() or up.process.poll() is not None)
                if self.held.exists():  # else it has ended by itself, as its output shows
                    wait_for(self._has_receipt)
                    os.kill(self._process(), by)
                self.released.touch()
            code = up.end()
        assert code == 0, up.output
        summary = json.loads(up.output.splitlines()[-1])
        restarts = {result["slot"]: (result["fate"], result["restarts"]) for result in summary["results"]}
        assert restarts == {"local-0": ("done", 0), KILLED: ("done", 0 if kill_after is None else 1)}, up.output
        assert digests_equal(read_history(self.store).rounds, rounds)

    def log_of(self, slot: str, start: int = 0) -> str:
        """Everything that one start of a replica has written."""
        return (self.spec.parent / f".skerry/my-run/logs/{slot}.{start}.log").read_text()

    @property
    def folder(self) -> Path:
        """The folder in which the replicas run: the unpacked code."""
        (folder,) = (self.spec.parent / ".skerry/my-run/code").iterdir()
        return folder

    def telemetry(self, name: str) -> dict[str, list[Any]]:
        """A field of the telemetry of each round, by slot."""
        by_slot: dict[str, list[Contribution]] = {"local-0": [], KILLED: []}
        for contribution in sorted(contributions(self.store), key=lambda each: each.round):
            by_slot[contribution.slot].append(contribution)
        return {slot: [getattr(each.telemetry, name) for each in of_slot] for slot, of_slot in by_slot.items()}

    def _has_receipt(self) -> bool:
        """True if the replica has a receipt for every round that it contributed to.

        Otherwise it may never write the last one: it may load the checkpoint of that round when it comes back.
        """
        contributed = max(each.round for each in contributions(self.store) if each.slot == KILLED)
        return self.store.read(keys.receipt(contributed, KILLED)) is not None

    def _process(self) -> int:
        key = keys.member(KILLED, 0)
        return Member.parse(self.store.read(key) or b"", key).process


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file, which has LevelDB's log format after a header of 7 bytes."""
    block, record, at = 32 << 10, b"", 7
    while at + 7 <= len(data):
        left = block - at % block
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:  # padding to the end of the block
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # whole, or its last part
            yield record
            record = b""
