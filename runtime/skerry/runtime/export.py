"""The trained model of a run, from its bucket alone: `load` returns it, `write` makes a file of it. Never writes there.

Every byte is verified against the checkpoint's digests, the checkpoint against the log and the receipts of its round.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.exported_model import model_tensors, registered_state
from skerry.runtime.checkpointing.receipt_comparison import evidence_of, is_outvoted, receipts_of, refused
from skerry.runtime.checkpointing.shared_state import FRAGMENT, is_state, part_at
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.ranks.interface import combine_digests
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from skerry.runtime.checkpointing.shared_state import State
    from skerry.runtime.log.records import CheckpointManifest, Run
    from skerry.runtime.store import Store

SUFFIXES: Final = (".safetensors", ".pt")
_LISTED: Final = 8


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A written file. round: closed rounds that the model was trained for. tensors: how many it has."""

    path: str
    run: str
    round: int
    tensors: int
    size_bytes: int


def load(uri: str, round: int | None = None) -> dict[str, torch.Tensor]:  # noqa: A002  the word that users know
    """The trained model of the run at `uri`: its tensors in CPU memory, by their names in the model.

    round: closed rounds, one of those with a checkpoint; None takes the newest.
    Raises Invalid if there is no such run or checkpoint, Corrupt if the checkpoint is damaged, Retryable without an
    answer of the store.
    """
    return model_tensors(_read(open_store(uri), round)[2])


def write(store: Store, path: Path, round_number: int | None = None, *, force: bool = False) -> ModelFile:
    """Writes the trained model to `path`, whole or not at all.

    path: ends with .safetensors (the model's tensors) or .pt (the whole registered state, for `torch.load`).
    force: replace an existing file. Raises the errors of `load`, and Invalid for the path.
    """
    check_path(path, force=force)
    run, manifest, ranks = _read(store, round_number)
    about = {"format": "pt", "run": run.name, "round": str(manifest.round), "commit": manifest.commit}
    with _replacing(path) as temporary:
        count = (
            _write_tensors(temporary, ranks, about) if path.suffix == ".safetensors" else _write_state(temporary, ranks)
        )
        size = temporary.stat().st_size
    return ModelFile(path=str(path), run=run.name, round=manifest.round, tensors=count, size_bytes=size)


def check_path(path: Path, *, force: bool) -> None:
    """Raises Invalid unless a model can be written to `path`."""
    if path.suffix not in SUFFIXES:
        raise Invalid(f"{path}: name a file that ends with {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise Invalid(f"no such folder: {path.parent}")
    if path.is_dir() or (path.exists() and not force):
        raise Invalid(f"{path} exists and was not changed; name another file, or replace it with --force")


def _read(store: Store, round_number: int | None) -> tuple[Run, CheckpointManifest, Sequence[State]]:
    run = read_run(store)
    if run is None:
        raise Invalid(f"no run at {store.uri}; name the URI of a run's own prefix")
    while True:
        rounds = checkpoint.complete(store)
        chosen = _choose(store, rounds, round_number)
        manifest = checkpoint.manifest(store, chosen)
        if manifest is None:  # deleted meanwhile, because newer ones exist
            continue
        try:
            return run, manifest, _read_checkpoint(store, run, manifest)
        except Corrupt:
            if checkpoint.manifest(store, chosen) is not None:
                raise


def _choose(store: Store, rounds: Sequence[int], round_number: int | None) -> int:
    if not rounds:
        raise Invalid(f"no checkpoint at {store.uri} yet: a replica writes the first after a round")
    if round_number is not None and round_number not in rounds:
        raise Invalid(f"no checkpoint of {round_number} rounds; there are: {', '.join(map(str, rounds[:_LISTED]))}")
    return rounds[0] if round_number is None else round_number


def _read_checkpoint(store: Store, run: Run, manifest: CheckpointManifest) -> list[State]:
    where = f"checkpoint of {manifest.round} rounds"
    if manifest.run != run.nonce or manifest.commit != RunLog(store, run).read_previous_digest(manifest.round):
        raise Corrupt(f"the {where} belongs to another log: run={manifest.run} commit={manifest.commit[:12]}")
    ranks: list[State] = []
    for rank in range(len(manifest.shards) or 1):
        state = checkpoint.load(store, manifest, rank=rank)
        if not is_state(state):
            raise Corrupt(f"the {where} does not hold the state of a replica: {type(state).__name__}")
        ranks.append(state)
    _check_receipts(store, run, manifest, ranks)
    return ranks


def _check_receipts(store: Store, run: Run, manifest: CheckpointManifest, ranks: Sequence[State]) -> None:
    """Raises Corrupt if the receipts of its round contradict a checkpoint.

    Those of DDP and LocalSGD cover parameters that only the script knows: there they only show if a majority contradicts the writer.
    """
    if manifest.round == 0:
        return
    receipts = receipts_of(store, run.nonce, manifest.round - 1)
    considered = [receipt for receipt in receipts if receipt.slot in {*manifest.members, manifest.writer}]
    if is_outvoted(manifest.writer, considered):
        raise refused(manifest.round, f"a majority contradicts its writer {manifest.writer}")
    evidence = evidence_of(considered, manifest.members, manifest.commit)
    if evidence.scope == "fragments":
        paths = frozenset((key,) for key in ranks[0] if key.startswith(FRAGMENT))
        evidence.check(
            manifest.round, combine_digests([checkpoint.state_digest(part_at(state, paths)) for state in ranks])
        )


def _write_tensors(path: Path, ranks: Sequence[State], about: dict[str, str]) -> int:
    from safetensors.torch import save_file  # noqa: PLC0415  only needed here

    tensors = model_tensors(ranks)
    save_file(tensors, path, metadata=about)
    return len(tensors)


def _write_state(path: Path, ranks: Sequence[State]) -> int:
    import torch  # noqa: PLC0415

    torch.save(registered_state(ranks), path)
    return len(model_tensors(ranks))


@contextlib.contextmanager
def _replacing(path: Path) -> Generator[Path]:
    """A temporary file beside `path` that becomes `path` at the end, durably, or is removed after an error."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
