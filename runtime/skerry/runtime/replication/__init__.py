"""Keeps copies of a replica's state at its ranks and on its machines, and gets them back.

    local_and_peer_checkpoints    saves of a rank on its machine, with copies at peers; in the format of a checkpoint
      copy_strategies             which ranks hold copies of which: cliques, built eagerly or at the first call
        exchange_between_ranks    a process group: states in, sealed copies out; a plan is executed here
          transport               bytes between ranks until a deadline; errors that all ranks of the job raise
          flat_buffers            tensors as a few flat buffers, and their seal
        tensors_of_state_dict     a state that can be taken apart into tensors and the rest
        copy_placement            cliques, plans and NoReplicasAvailableError: pure, without torch

    a save       pack (flat_buffers) -> headers to all -> buffers to all at once (transport) -> verify -> agree
    a restart    ids that each rank holds -> plan with alternates (copy_placement) -> verify, send, verify -> agree

The public names are those of NVIDIA's resiliency extension (nvidia-resiliency-ext), whose managers can use these
classes by a changed import. The design is GEMINI's (SOSP 2023). Importing this package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from skerry.runtime.replication.copy_placement import (
        ExchangePlan,
        ExchangePlanEntry,
        NoReplicasAvailableError,
        parse_group_sequence,
    )
    from skerry.runtime.replication.copy_strategies import (
        CliqueReplicationStrategy,
        LazyCliqueReplicationStrategy,
        LazyReplicationStrategyBuilder,
        ReplicationStrategy,
    )
    from skerry.runtime.replication.exchange_between_ranks import GroupWrapper
    from skerry.runtime.replication.tensors_of_state_dict import BasicTensorAwareStateDict, TensorAwareStateDict

__all__ = [
    "BasicTensorAwareStateDict",
    "CliqueReplicationStrategy",
    "ExchangePlan",
    "ExchangePlanEntry",
    "GroupWrapper",
    "LazyCliqueReplicationStrategy",
    "LazyReplicationStrategyBuilder",
    "NoReplicasAvailableError",
    "ReplicationStrategy",
    "TensorAwareStateDict",
    "parse_group_sequence",
]

_MODULES: Final = {
    "ExchangePlan": "copy_placement",
    "ExchangePlanEntry": "copy_placement",
    "GroupWrapper": "exchange_between_ranks",
    "NoReplicasAvailableError": "copy_placement",
    "parse_group_sequence": "copy_placement",
    "BasicTensorAwareStateDict": "tensors_of_state_dict",
    "TensorAwareStateDict": "tensors_of_state_dict",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'copy_strategies')}"), name)
