"""Deviations from torchft's Manager in torchft's own tests, with reasons. Every entry is an expectation:

a test that stops to deviate, or deviates with other words, fails `test_torchft.py` until its entry is changed. What
is not listed passes. Tests of torchft that are not run at all are in `NOT_RUN`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Version: TypeAlias = Literal["release", "nightly"]


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """The expected end of one test. message: a pattern in its last output. versions: of torchft with this end."""

    test: str
    outcome: Literal["failed", "skipped"]
    message: str
    reason: str
    versions: tuple[Version, ...] = ("release", "nightly")


RECOVERY = "diloco_regression_test.py::DiLoCoMockedUpdateTest::test_diloco_mocked_failure_recovery_0"

_NO_DEVICE = "torchft skips it where two CUDA devices are missing; here they are hidden, for ours has no NCCL to test"
_NO_COMMS = "torchft skips it without torchcomms, a process group; ours has none"
_NO_RECONFIGURE = "torchft skips it where torch has no ProcessGroup.reconfigure (before 2.14); ours ignores its group"

DEVIATIONS = (
    Deviation(
        test=RECOVERY,
        outcome="failed",
        message=r"tensor\(\[\[-35\.\]\]\) is not the same as tensor\(\[\[-31\.\]\]\) for layers\.0\.weight at step 9$",
        reason=(
            "a restarted replica joins before its first inner step, where torchft's trains two steps on initial "
            "weights; and it offers what it has trained itself, where torchft's offers a copy of its source's "
            "pseudo-gradient. `histories` says what it comes to instead"
        ),
    ),
    Deviation(
        test="manager_integ_test.py::ManagerIntegTest::test_quorum_timeout",
        outcome="failed",
        message="replica_id is needed for several ranks, the same on all of them and after a restart",
        reason="it gives no replica_id; torchft makes one up, which would be another replica after a restart",
    ),
    Deviation(
        test="manager_integ_test.py::ManagerIntegTest::test_manager_allreduce_0",
        outcome="skipped",
        message="Not enough GPUs for CUDA test",
        reason=_NO_DEVICE,
    ),
    *(
        Deviation(
            test=f"manager_integ_test.py::ManagerIntegTest::{name}",
            outcome="skipped",
            message="torchcomms not installed",
            reason=_NO_COMMS,
        )
        for name in ("test_ddp_healthy_torchcomms", "test_ddp_recovery_torchcomms")
    ),
    *(
        Deviation(
            test=f"manager_integ_test.py::ManagerIntegTest::{name}",
            outcome="skipped",
            message="requires native process group reconfiguration",
            reason=_NO_RECONFIGURE,
            versions=("nightly",),
        )
        for name in ("test_ddp_recovery_2_native_async_quorum", "test_ddp_recovery_3_native_sync_quorum")
    ),
)

NOT_RUN = {
    "_test/managed_work_test.py": "torchft's own Work; ours is tests/runtime/training/test_allreduce_future.py",
    "checkpointing/http_transport_test.py": "checkpoints go through the store",
    "checkpointing/pg_transport_test.py": "checkpoints go through the store",
    "checkpointing/rwlock_test.py": "a lock of torchft's transport",
    "checkpointing/transport_test.py": "helpers without a test",
    "collectives_test.py": "GPU collectives of quantized tensors",
    "coordination_test.py": "the lighthouse and its clients; there are none",
    "data_test.py": "a sampler that knows no Manager",
    "fsdp_test.py": "needs GPUs, and ManagedProcessGroup, which ours refuses",
    "futures_test.py": "timers that know no Manager",
    "lighthouse_test.py": "the lighthouse; there is none",
    "manager_test.py": "mocks the client inside torchft's Manager; ours is tests/runtime/test_manager.py",
    "multiprocessing_test.py": "pipes of torchft's process groups",
    "parameter_server_test.py": "a process group of its own",
    "process_group_test.py": "process groups; ours has none",
    "quantization_test.py": "GPU kernels",
    "reconfigure_test.py": "process groups; ours has none",
    "torchcomms_test.py": "process groups; ours has none",
    "utils_test.py": "CUDA streams",
}
"""Modules of the wheels with nothing in them that ours could pass or fail."""

# One replica's weights [layer 0, layer 1] before each inner step.
History: TypeAlias = list[tuple[float, float]]


def histories(torchfts: History) -> tuple[History, History]:
    """Return the expected histories of the two replicas of `RECOVERY`, from that of torchft's healthy replica.

    Replica 1 dies with two rounds closed, before step 6 of 22: layer 0 was exchanged last at step 3, layer 1 at 6. It
    comes back with the initial weights, joins at the hook of its first step, and takes the shared weights, none of
    replica 0's steps since. For the exchange at step 9 it trains three steps of layer 0, replica 0 six. torchft counts
    replica 0's twice. Here half of the steps weigh half: steps of 2 average to (12 + 6 / 2) / 1.5, which is 2 short of
    12, and the outer rate is 2.
    """
    healthy = [(layer_0 + 4 * (step >= 9), layer_1) for step, (layer_0, layer_1) in enumerate(torchfts)]
    shared_0, shared_1 = healthy[3][0], healthy[6][1]
    own = [(shared_0 - 2 * steps, shared_1 - 2 * steps) for steps in (1, 2)]
    return healthy, [healthy[0], *own, *healthy[9:]]
