"""Reads the model of another run with which this run starts: a copy of its checkpoint, below `initial/`.

run.json has the digest of the checkpoint's manifest, and the manifest names all its bytes, so every replica and every
restart reads the same model, whatever becomes of the other run. Never writes, and never asks the other run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.model_from_checkpoint import fragments_digest, trained_model
from skerry.runtime.checkpointing.shared_state import is_state
from skerry.runtime.errors import Corrupt
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import digest_of
from skerry.runtime.log.records import CheckpointManifest

if TYPE_CHECKING:
    import torch

    from skerry.runtime.checkpointing.shared_state import State
    from skerry.runtime.log.run_record import InitialModel
    from skerry.runtime.store import Store


def read_initial_model(store: Store, initial: InitialModel) -> dict[str, torch.Tensor]:
    """Returns the shared model of the other run: whole tensors in CPU memory, by their names in its model.

    Raises Corrupt if anything is missing, damaged or not what run.json and the receipts of the other run say.
    """
    key = keys.checkpoint_manifest(initial.round, keys.INITIAL)
    data = store.read(key)
    if data is None or digest_of(data) != initial.manifest:
        what = "is missing" if data is None else f"is damaged: digest={digest_of(data)} expected={initial.manifest}"
        raise Corrupt(f"the model to start from {what}: {store.uri}/{key}; destroy the run and start it again")
    manifest = CheckpointManifest.parse(data, key)
    ranks: list[State] = []
    for rank in range(len(manifest.shards) or 1):
        state = checkpoint.load(store, manifest, keys.INITIAL, rank)
        if not is_state(state):
            raise Corrupt(f"{key} does not hold the state of a replica: {type(state).__name__}")
        ranks.append(state)
    if initial.states and fragments_digest(ranks) not in initial.states:
        raise Corrupt(f"{store.uri}/{key} contradicts the receipts of {initial.uri}: it was replaced there")
    return trained_model(ranks).tensors()
