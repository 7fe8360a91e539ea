from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.infra.targets.aws_batch.kit import LARGE, SMALL

from skerry.infra.targets.aws_batch.machine_sizing import Machine, attempt_s, own_hours, shape, usable_mib
from skerry.infra.targets.aws_batch.options import AwsBatchTarget
from skerry.runtime.errors import Invalid


def target(**options: object) -> AwsBatchTarget:
    fields = {"kind": "aws_batch", "region": "us-east-1", "instance_types": ("g6e.xlarge",), **options}
    return AwsBatchTarget.model_validate(fields)


def test_replica_gets_its_gpus_share_of_the_smallest_type() -> None:
    size = shape(target(gpus=1), 6, [SMALL, LARGE])
    assert (size.vcpus, size.memory_mib) == (4, 29440)
    # Six small machines have 24 vCPUs; two large machines, one of them half empty, have 96.
    assert size.max_vcpus == 96


def test_replica_without_gpus_gets_a_whole_machine() -> None:
    machine = Machine(type="c7i.2xlarge", vcpus=8, memory_mib=16384, gpus=0)
    size = shape(target(), 5, [machine])
    assert (size.vcpus, size.memory_mib, size.max_vcpus) == (8, 14592, 40)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"gpus": 2}, "a replica needs 2 GPUs, and g6e.xlarge has 1"),
        ({"vcpus": 8}, "a replica needs 8 vCPUs, and g6e.xlarge has 4"),
        ({"memory": "32GiB"}, "write memory: 30801MiB or less"),
        ({"memory": "4GiB", "shared_memory": "6GiB"}, "shared_memory is more than the 4096 MiB"),
    ],
)
def test_replica_that_does_not_fit_is_rejected(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(Invalid, match=complaint):
        shape(target(**options), 1, [SMALL])


@given(
    count=st.integers(1, 1024),
    gpus=st.integers(0, 4),
    vcpus=st.none() | st.integers(1, 48),
    memory=st.none() | st.integers(4, 100).map(lambda gib: f"{gib}GiB"),
)
def test_most_vcpus_hold_all_replicas(count: int, gpus: int, vcpus: int | None, memory: str | None) -> None:
    size = shape(target(gpus=gpus, vcpus=vcpus, memory=memory), count, [LARGE])
    machines = size.max_vcpus // LARGE.vcpus
    assert size.max_vcpus % LARGE.vcpus == 0
    share = math.ceil(count / machines)
    # The fullest machine has room for its share, and one machine less would be too few.
    assert share * size.vcpus <= LARGE.vcpus
    assert share * size.memory_mib <= usable_mib(LARGE)
    assert share * gpus <= LARGE.gpus
    most = min(LARGE.vcpus // size.vcpus, usable_mib(LARGE) // size.memory_mib, LARGE.gpus // gpus if gpus else 999)
    assert (machines - 1) * most < count


@pytest.mark.parametrize(
    ("hours", "runtime", "attempts", "seconds", "own"),
    [
        (None, None, 3, None, None),
        (24.0, None, 3, 86400, None),
        (24.0, "6h", 3, 21600, 18.0),
        (None, "6h", 2, 21600, 12.0),
        (0.1, None, 1, 360, None),
        (0.001, None, 1, 60, None),
    ],
)
def test_attempt_is_limited_by_the_run_and_its_own_time(
    hours: float | None, runtime: str | None, attempts: int, seconds: int | None, own: float | None
) -> None:
    options = target(attempts=attempts, max_runtime=runtime)
    assert attempt_s(hours, options) == seconds
    assert own_hours(options) == (None if own is None else pytest.approx(own))


@given(st.floats(0.02, 1e9), st.integers(1, 10), st.none() | st.integers(60, 10**6))
def test_attempt_limit_is_within_the_limits_of_batch(hours: float, attempts: int, runtime: int | None) -> None:
    options = target(attempts=attempts, max_runtime=None if runtime is None else f"{runtime}s")
    allowed = attempt_s(hours, options)
    assert allowed is not None
    assert 60 <= allowed <= min(hours * 3600, 2**31 - 1)
    assert options.max_runtime is None or options.max_runtime >= timedelta(seconds=allowed)


@pytest.mark.parametrize(
    ("options", "shared"), [({}, 2048), ({"memory": "1GiB"}, 512), ({"memory": "1GiB", "shared_memory": "1GiB"}, 1024)]
)
def test_default_shared_memory_is_at_most_half_of_the_memory(options: dict[str, object], shared: int) -> None:
    assert shape(target(**options), 1, [SMALL]).shared_memory_mib == shared
