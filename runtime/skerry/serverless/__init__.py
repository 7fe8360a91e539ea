"""Serverless training: an executor starts replicas, which meet in a bucket and train with torchft's DiLoCo.

    executors               all that `skerry.infra.executors` exports, with ReplicaHandle and ServerlessExecutor
    ObjectStoreAllReduce    the place where the replicas meet: averages over a fixed set of ranks
    MockManager             drives torchft's DiLoCo by it
    replica_entrypoint      a program that trains with both (`python -m skerry.serverless.replica_entrypoint`)

Every name is imported when it is first used: a launcher needs no torch, and a replica needs nothing of `skerry.infra`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from skerry.infra.executors import *  # noqa: F403  a new executor needs a line there only
    from skerry.runtime.allreduce import ObjectStoreAllReduce as ObjectStoreAllReduce
    from skerry.serverless.fixed_ranks_manager import MockManager as MockManager

_IN_REPLICAS: Final = {
    "ObjectStoreAllReduce": "skerry.runtime.allreduce",
    "MockManager": "skerry.serverless.fixed_ranks_manager",
}
_EXECUTORS: Final = "skerry.infra.executors"


def __getattr__(name: str) -> object:
    if name in _IN_REPLICAS:
        return getattr(importlib.import_module(_IN_REPLICAS[name]), name)
    if not name.startswith("_") and name in __dir__():
        return getattr(importlib.import_module(_EXECUTORS), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    exported: list[str] = importlib.import_module(_EXECUTORS).__all__
    return sorted((*_IN_REPLICAS, *exported))
