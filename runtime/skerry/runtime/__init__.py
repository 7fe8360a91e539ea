"""Runs inside a replica: averages pseudo-gradients through a bucket, and records every round in a log there.

Each line imports only from the lines below it:

    __main__        the commands `run` and `check` of a container
    container       starts the training command in a container and reports how it ended
    integrations    callbacks for training frameworks
    replica         sets up a run for a training script; replica_number_and_share: its part of the data; export: the
                    trained model of a run as a file; recompute_round_average: the average of a closed round, made again
    manager         torchft's Manager over the bucket; allreduce: averages over a fixed set of ranks
    training        one replica's rounds: join, contribute, follow, catch up
    replication     copies of a replica's state at its other ranks
    mirrors         copies of a run in other stores, and failover to one of them
    checkpointing   checkpoints, local state, receipts, divergence, garbage collection
    tensors         payload format, codecs, reduction; ranks: agreement between the ranks of one replica
    protocol        quorum, exchanges and membership, without torch
    log             object keys, records, and reading and writing them
    store           object stores behind five verbs, with credentials and retries
    contract        environment variables and exit codes between launchers and replicas
    clock           time and randomness; structured_logging: log events; daemon_executors: threads that do not keep
                    a process alive; output_file: a user's file, written whole or not at all; failure_text:
                    the words for a failure in a user's script
    errors          all errors, by what the caller does next

`load` is `export.load`. It needs torch, so it is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.runtime.export import load as load


def __getattr__(name: str) -> object:
    if name == "load":
        from skerry.runtime.export import load  # noqa: PLC0415  needs torch and safetensors

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
