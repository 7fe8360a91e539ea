"""Averages: the same bits on every replica, and invalid contributions refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.tensors.payloads import FLOATS, INTEGERS, BusyStore, filled, flipping, index_for, publish

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.store.directory import DirectoryStore
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, CODECS, Index, TensorSpec
from skerry.runtime.tensors.codecs import BLOCK_FORMATS
from skerry.runtime.tensors.payload_encoder import byte_view, encode
from skerry.runtime.tensors.reduce import average
from skerry.runtime.tensors.sum_by_pieces import FEW_TENSORS, Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.byte_layout import Codec, Op
    from skerry.runtime.tensors.reduce import AverageResult, Source

Rows: TypeAlias = "Sequence[Sequence[torch.Tensor]]"
SLOTS = ("a", "b", "c", "d", "e")


def contributions(index: Index, replicas: int) -> list[list[torch.Tensor]]:
    return [[filled(spec, 1000 * r + t) for t, spec in enumerate(index.tensors)] for r in range(replicas)]


def published(store: Store, rows: Rows, index: Index, weights: Sequence[float] | None = None) -> list[Source]:
    """A contribution of each row, of a weight of 1 unless given; for a replica that only follows."""
    given = weights or [1.0] * len(rows)
    sources = [publish(store, SLOTS[r], row, index, weight=given[r]) for r, row in enumerate(rows)]
    return [replace(source, local=None) for source in sources]


def reduced(
    store: Store, sources: Sequence[Source], index: Index, rows: Rows, local: int | None
) -> tuple[list[torch.Tensor], AverageResult]:
    """Average as replica `local` does (None: as a replica that only follows). Returns the outputs and the result."""
    workspace = Workspace()
    own = [tensor.clone() for tensor in rows[local or 0]]
    encoded = encode(own, index) if local is not None else None
    mine = [replace(source, local=encoded if r == local else None) for r, source in enumerate(sources)]
    cost = average(store, mine, index, own, workspace=workspace)
    workspace.close()
    return own, cost


def averaged(
    rows: Rows, index: Index, *, weights: Sequence[float] | None = None, local: int | None = None
) -> list[torch.Tensor]:
    """The average of rows, published in a new store."""
    store = MemoryStore()
    return reduced(store, published(store, rows, index, weights), index, rows, local)[0]


def reference(rows: Rows, weights: Sequence[float], index: Index) -> list[torch.Tensor]:
    """The same reduction in float64, by torch."""
    results = []
    for t, spec in enumerate(index.tensors):
        sent = spec.dtype if index.wire[t] in BLOCK_FORMATS else index.wire[t]
        stack = torch.stack([row[t].to(getattr(torch, sent)).double() for row in rows])
        weight = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * (stack.dim() - 1))
        match spec.op:
            case "avg":
                results.append((stack * weight).sum(0) / weight.sum())
            case "sum":
                results.append(stack.sum(0))
            case "max":
                results.append(stack.amax(0))
            case _:
                results.append(stack.amin(0))
    return results


def same_bits(tensors: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(
        bytes(byte_view(x.reshape(-1))) == bytes(byte_view(y.reshape(-1))) for x, y in zip(tensors, other, strict=True)
    )


def digest_of(tensors: Sequence[torch.Tensor]) -> str:
    return xxhash.xxh3_128_hexdigest(b"".join(bytes(byte_view(tensor.reshape(-1))) for tensor in tensors))


TOLERANCE = {"float64": 1e-14, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
# Of the largest element: half a step of the linear codecs; what is cut off a normal distribution by the two levels.
BLOCK_TOLERANCE = {"int8x254": 0.005, "int4x252": 0.08, "int2x248": 0.8}
MIXED = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(FLOATS), st.sampled_from(["avg", "sum", "max", "min"])),
        st.tuples(st.sampled_from([*INTEGERS, "bool"]), st.sampled_from(["sum", "max", "min"])),
    ).flatmap(lambda kind: st.tuples(st.just(kind), st.sampled_from([(), (0,), (3, 5), (64,), (1000,), (300, 1001)]))),
    min_size=1,
    max_size=2 * FEW_TENSORS,
)


@pytest.mark.slow
@given(MIXED, st.integers(1, 4), st.sampled_from(CODECS), st.sampled_from([0.0, 0.6]), st.sampled_from([1, 3]))
@settings(max_examples=100)
def test_average_has_the_same_bits_on_every_replica(
    mixed: list[tuple[tuple[str, Op], tuple[int, ...]]], replicas: int, codec: Codec, extra: float, streams: int
) -> None:
    specs = [TensorSpec(f"t{i}", dtype, shape, op) for i, ((dtype, op), shape) in enumerate(mixed)]
    index = Index(tuple(specs), codec)
    rows = contributions(index, replicas)
    weights = [1.0 + extra * r for r in range(replicas)]
    store = BusyStore(streams=streams, piece_bytes=streams * BLOCK_BYTES)
    sources = published(store, rows, index, weights)
    first, cost = reduced(store, sources, index, rows, None)
    assert cost.digest == digest_of(first)
    for local in range(replicas):
        other, other_cost = reduced(store, sources, index, rows, local)
        assert same_bits(first, other)
        assert other_cost.digest == cost.digest
    for spec, wire, got, expected in zip(specs, index.wire, first, reference(rows, weights, index), strict=True):
        if spec.dtype in TOLERANCE:
            limit = (TOLERANCE[spec.dtype] + BLOCK_TOLERANCE.get(wire, 0.0)) * max(
                1.0, expected.abs().max().item() if expected.numel() else 0.0
            )
            assert (got.double() - expected).abs().max().item() <= limit if got.numel() else True
        elif spec.dtype == "bool":
            assert torch.equal(got, expected.bool())
        else:
            assert torch.equal(got, expected.to(torch.int64).to(got.dtype))


def test_float32_is_summed_in_slot_order() -> None:
    index = index_for([torch.zeros(300_000)])
    rows = contributions(index, 4)
    a, b, c, d = (row[0] for row in rows)
    assert same_bits(averaged(rows, index, local=2), [(((a + b) + c) + d) / 4])


def test_weighted_products_are_rounded_before_the_sum() -> None:
    index = index_for([torch.zeros(300_000)])
    rows, weights = contributions(index, 3), [3.0, 1.0, 0.1]
    a, b, c = (row[0].numpy() for row in rows)
    expected = ((a * np.float32(3.0) + b) + c * np.float32(0.1)) / np.float32(math.fsum(weights))
    assert same_bits(averaged(rows, index, weights=weights, local=1), [torch.from_numpy(expected)])


def test_weights_of_1_give_the_unweighted_bits() -> None:
    index = index_for([torch.zeros(70_000)], "bf16")
    rows = contributions(index, 3)
    a, b, c = (row[0].bfloat16().float() for row in rows)
    assert same_bits(averaged(rows, index), [((a + b) + c) / 3])


@pytest.mark.parametrize("zeros", [(0.0, -0.0, 0.0), (-0.0, 0.0, -0.0), (-0.0, -0.0, -0.0)])
@pytest.mark.parametrize("op", ["max", "min"])
def test_sign_of_zero_does_not_depend_on_the_local_source(op: Op, zeros: tuple[float, ...]) -> None:
    index = index_for([torch.zeros(1000)], op=op)
    rows = [[torch.full((1000,), zero)] for zero in zeros]
    results = [averaged(rows, index, local=local) for local in (None, 0, 1, 2)]
    assert all(same_bits(result, [torch.zeros(1000)]) for result in results)


@pytest.mark.parametrize(("codec", "fraction"), [("int8", 3.96), ("int4", 7.8), ("int2", 15.3)])
def test_blocks_are_a_fraction_of_the_bytes(codec: Codec, fraction: float) -> None:
    tensors = [torch.randn(500_000), torch.randn(700, 800)]
    index, store = index_for(tensors, codec), MemoryStore()
    _, cost = reduced(store, published(store, [tensors, tensors], index), index, [tensors], 0)
    assert 4 * 1_060_000 / cost.downloaded_bytes > fraction


def test_bf16_halves_the_bytes_and_averages_rounded_values() -> None:
    tensors = [torch.randn(500_000)]
    store, costs = MemoryStore(), {}
    for index in (index_for(tensors), index_for(tensors, "bf16")):
        rows = [tensors, tensors]
        got, costs[index.codec] = reduced(store, published(store, rows, index), index, rows, 0)
        assert torch.equal(got[0], tensors[0].to(getattr(torch, index.wire[0])).float())
    assert costs["bf16"].downloaded_bytes < 0.51 * costs["none"].downloaded_bytes


def test_average_is_written_to_the_encoded_tensors() -> None:
    own = [torch.randn(300_000)]
    pointer = own[0].data_ptr()
    index = index_for(own)
    store = MemoryStore()
    other = publish(store, "b", [torch.ones(300_000)], index)
    expected = (own[0] + 1) / 2
    encoded = encode(own, index)
    mine = replace(other, slot="a", parts=encoded.parts, local=encoded)
    average(store, [mine, other], index, own, workspace=Workspace())
    assert own[0].data_ptr() == pointer
    assert torch.equal(own[0], expected)


def test_average_is_written_to_non_contiguous_outputs() -> None:
    base = torch.zeros(5, 7)
    index = index_for([base.t()])
    rows, store = contributions(index, 2), MemoryStore()
    cost = average(store, published(store, rows, index), index, [base.t()], workspace=Workspace())
    expected = (rows[0][0] + rows[1][0]) / 2
    assert torch.equal(base.t(), expected)
    assert cost.digest == digest_of([expected])


def test_only_remote_contributions_are_downloaded(tmp_path: Path) -> None:
    tensors = [torch.randn(250_000) for _ in range(10)]
    index, store, rows = index_for(tensors), DirectoryStore(tmp_path), [tensors] * 3
    sources = published(store, rows, index)
    _, cost = reduced(store, sources, index, rows, 1)
    blocks = index.parts[0].blocks
    assert (cost.downloaded_bytes, cost.requests) == (2 * sources[0].parts[0].total_bytes, 2 * blocks)


def test_workspace_does_not_grow() -> None:
    tensors = [torch.randn(700_000)]
    index, store, workspace = index_for(tensors), MemoryStore(), Workspace()
    sources, allocated = published(store, [tensors] * 5, index), set[int]()
    for _ in range(4):
        average(store, sources, index, tensors, workspace=workspace)
        allocated.add(workspace.allocated_bytes)
    assert len(allocated) == 1
    assert workspace.allocated_bytes - workspace.reader.allocated_bytes <= 7 * BLOCK_BYTES


def test_64_replicas_need_two_buffers_more_than_streams() -> None:
    tensors, streams = [torch.randn(700_000)], 4
    index, store, workspace = index_for(tensors), BusyStore(streams=streams), Workspace()
    source = publish(store, "a", tensors, index)
    sources = [replace(source, slot=f"r-{number}", local=None) for number in range(64)]
    for number in range(64):
        key = keys.payload(0, f"r-{number}", source.parts[0].digest)
        store.create(key, source.local.data(0))
    average(store, sources, index, tensors, workspace=workspace)
    piece = BLOCK_BYTES + source.parts[0].header_bytes
    assert workspace.reader.allocated_bytes == (streams + 2) * piece
    workspace.close()


def test_contribution_of_several_parts_is_averaged() -> None:
    tensors = [torch.full((1000,), 2.0), torch.zeros(17 << 20)]
    index = index_for(tensors)
    assert len(index.parts) == 2
    tensors[1][-1] = 5.0
    store, rows = BusyStore(streams=3, piece_bytes=8 << 20), [tensors, tensors]
    got, _ = reduced(store, published(store, rows, index), index, rows, 0)
    assert all(map(torch.equal, got, tensors))


@pytest.mark.parametrize(("codec", "elements"), [("none", 1_000_000), ("int8", 3_000_000)])
@pytest.mark.parametrize("streams", [1, 3])
def test_damaged_block_reaches_no_output(streams: int, codec: Codec, elements: int) -> None:
    key = "payloads/00000000/b/"
    tensors = [torch.ones(elements)]
    index, store = index_for(tensors, codec), BusyStore(streams=streams)
    sources = published(store, [tensors] * 3, index)
    store.spoil = flipping(sources[1].parts[0].header_bytes + BLOCK_BYTES + 7, key)
    outputs = [torch.full((elements,), 9.0)]
    with pytest.raises(Corrupt, match=rf"key={key}\w+ slot=b block=1"):
        average(store, sources, index, outputs, workspace=Workspace())
    assert set(outputs[0].round().unique().tolist()) == {1.0, 9.0}, "only what is before the damaged block is written"


def assert_refused(sources: Sequence[Source], store: Store, index: Index, message: str) -> None:
    outputs = [filled(spec, 0) for spec in index.tensors]
    with pytest.raises(Invalid, match=message):
        average(store, sources, index, outputs, workspace=Workspace())


def test_contribution_of_another_model_is_refused_by_slot() -> None:
    index, store = Index((TensorSpec("x", "float32", (10,)),)), MemoryStore()
    good = publish(store, "a", [torch.zeros(10)], index)

    def other(name: str, elements: int) -> Source:
        other_index = Index((TensorSpec(name, "float32", (elements,)),))
        return publish(store, "b", [torch.zeros(elements)], other_index)

    longer, renamed = other("x", 12), replace(other("y", 10), local=None)
    assert_refused([good, replace(longer, local=None)], store, index, "slot=b")
    assert_refused([good, replace(longer, parts=good.parts)], store, index, "slot=b")
    key = keys.payload(0, "b", renamed.parts[0].digest)
    assert_refused([good, renamed], store, index, rf"key={key}.*tensor='y'.*expected='x'")


@pytest.mark.parametrize(("dtype", "op"), [(torch.int64, "avg"), (torch.bool, "avg"), (torch.float32, "keep")])
def test_integer_average_and_reduction_of_state_are_refused(dtype: torch.dtype, op: Op) -> None:
    tensors = [torch.zeros(3, dtype=dtype)]
    index, store = index_for(tensors, op=op), MemoryStore()
    assert_refused(published(store, [tensors], index), store, index, f"tensor='t0'.*op={op}")


def test_invalid_sources_are_refused() -> None:
    tensors = [torch.zeros(3)]
    index, store = index_for(tensors), MemoryStore()
    (source,) = published(store, [tensors], index)
    assert_refused([], store, index, "no contributions")
    assert_refused([source, source], store, index, "listed twice")
    for weight in (0.0, math.nan):
        assert_refused([replace(source, weight=weight)], store, index, "weight")


def test_average_without_tensors_is_empty() -> None:
    index, store = Index(()), MemoryStore()
    cost = average(store, published(store, [[]], index), index, [], workspace=Workspace())
    assert (cost.requests, cost.digest) == (0, digest_of([]))
