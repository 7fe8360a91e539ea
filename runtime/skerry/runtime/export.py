"""The trained model of a run, from its bucket alone: `load` returns it, `write` makes a file of it. Never writes there.

Every byte is verified against the checkpoint's digests, the checkpoint against the log and the receipts of its round.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  its path is a bare PathLike

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.model_from_checkpoint import TrainedModel, fragments_digest, trained_model
from skerry.runtime.checkpointing.receipt_comparison import read_evidence
from skerry.runtime.checkpointing.shared_state import is_state, tensors_in
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.output_file import check_output, replacing
from skerry.runtime.store import open_store
from skerry.runtime.structured_logging import emit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.checkpointing.shared_state import State
    from skerry.runtime.log.records import CheckpointManifest
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.store import Store

SUFFIXES: Final = (".safetensors", ".pt")
_LISTED: Final = 8


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A written file. round: closed rounds that the model was trained for. tensors: how many it has.

    by_fragment: the script did not register its model, so names are those in DiLoCo's fragments. disputed: the receipts
    of the round report different states, and no majority says which is right.
    """

    path: str
    run: str
    round: int
    tensors: int
    size_bytes: int
    by_fragment: bool
    disputed: bool


def load(uri: str, round: int | None = None) -> dict[str, torch.Tensor]:  # noqa: A002  the word that users know
    """Returns the trained model of the run at `uri`: its tensors in CPU memory, by their names in the model.

    round: closed rounds, one of those with a checkpoint; None takes the newest. Logs a warning if the receipts of the
    round report different states without a majority.
    Raises Invalid if there is no such run or checkpoint, Corrupt if the checkpoint is damaged, Retryable without an
    answer of the store.
    """
    _, manifest, model, disputed = _read(open_store(uri), round)
    if disputed:
        fields = {"round": manifest.round - 1, "what": "state of the exported model", "majority": False}
        emit("receipts_differ", fields, level=logging.WARNING)
    return model.tensors()


def write(store: Store, path: Path, round_number: int | None = None, *, force: bool = False) -> ModelFile:
    """Writes the trained model to `path`, whole or not at all.

    path: ends with .safetensors (the model's tensors) or .pt (the whole registered state, for torch).
    force: replace an existing file. Raises the errors of `load`, and Invalid for the path.
    """
    check_path(path, force=force)
    run, manifest, model, disputed = _read(store, round_number)
    if path.suffix == ".pt" and model.state is None:
        raise Invalid(
            "the script did not register its whole model, so there is no state to write; name a .safetensors file for "
            "the trained parameters"
        )
    about = {"format": "pt", "run": run.name, "round": str(manifest.round), "commit": manifest.commit}
    with replacing(path) as temporary:
        if path.suffix == ".pt" and model.state is not None:
            # A script with one part of state gave it no name, and expects what its `state_dict` has returned.
            torch.save(model.state["default"] if list(model.state) == ["default"] else model.state, temporary)
            count = len(list(tensors_in(model.state)))
        else:
            tensors = model.tensors()
            save_file(tensors, temporary, metadata=about)
            count = len(tensors)
        size = temporary.stat().st_size
    return ModelFile(
        path=str(path),
        run=run.name,
        round=manifest.round,
        tensors=count,
        size_bytes=size,
        by_fragment=model.state is None,
        disputed=disputed,
    )


def check_path(path: Path, *, force: bool) -> None:
    """Raises Invalid unless a model can be written to `path`."""
    if path.suffix not in SUFFIXES:
        raise Invalid(f"{path}: name a file that ends with {' or '.join(SUFFIXES)}")
    check_output(path, force=force)


def _read(store: Store, round_number: int | None) -> tuple[Run, CheckpointManifest, TrainedModel, bool]:
    """The model with its run and checkpoint, and if it is disputed."""
    run = read_run(store)
    if run is None:
        raise Invalid(f"no run at {store.uri}; name the URI of a run's own prefix")
    deleted: set[int] = set()  # meanwhile, by the run, because newer ones exist
    while True:
        rounds = [number for number in checkpoint.complete(store) if number not in deleted]
        chosen = _choose(store, rounds, round_number)
        try:
            manifest = checkpoint.manifest(store, chosen)
            if manifest is not None:
                if round_number is None:  # a round that is named needs no proof
                    RunLog(store, run).check_backed(chosen)
                ranks, disputed = _read_checkpoint(store, run, manifest)
                return run, manifest, trained_model(ranks), disputed
        except Corrupt as error:
            if store.read(keys.checkpoint_manifest(chosen)) is not None:
                others = _listed([number for number in rounds if number != chosen])
                raise Corrupt(f"{error}; other checkpoints: {others}") from error
        deleted.add(chosen)


def _choose(store: Store, rounds: Sequence[int], round_number: int | None) -> int:
    if not rounds:
        raise Invalid(f"no checkpoint at {store.uri} yet: a replica writes the first when it starts")
    if round_number is not None and round_number not in rounds:
        raise Invalid(f"no checkpoint of {round_number} rounds; there are: {_listed(rounds)}")
    return rounds[0] if round_number is None else round_number


def _listed(rounds: Sequence[int]) -> str:
    more = ", ..." if len(rounds) > _LISTED else ""
    return ", ".join(map(str, rounds[:_LISTED])) + more or "none"


def _read_checkpoint(store: Store, run: Run, manifest: CheckpointManifest) -> tuple[list[State], bool]:
    where = f"checkpoint of {manifest.round} rounds"
    if manifest.run != run.nonce or manifest.commit != RunLog(store, run).read_previous_digest(manifest.round):
        raise Corrupt(f"the {where} belongs to another log: run={manifest.run} commit={manifest.commit[:12]}")
    ranks: list[State] = []
    for rank in range(len(manifest.shards) or 1):
        state = checkpoint.load(store, manifest, rank=rank)
        if not is_state(state):
            raise Corrupt(f"the {where} does not hold the state of a replica: {type(state).__name__}")
        ranks.append(state)
    return ranks, _check_receipts(store, run, manifest, ranks)


def _check_receipts(store: Store, run: Run, manifest: CheckpointManifest, ranks: Sequence[State]) -> bool:
    """Raises Corrupt if the receipts of its round contradict a checkpoint. True if they differ without a majority.

    Receipts of DDP cover a part of the state that only the script knows, those of LocalSGD no state: there they show
    only that a majority contradicts the writer.
    """
    evidence = read_evidence(store, run.nonce, manifest)
    if evidence.scope == "fragments":
        evidence.check(manifest.round, fragments_digest(ranks))
    return len(evidence.states) > 1
