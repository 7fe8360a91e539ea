"""The layout of tensors in parts: positions, limits, digests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.byte_layout import (
    ALIGNMENT,
    BLOCK_BYTES,
    CODECS,
    ITEM_BYTES,
    MAX_SLICES,
    OPS,
    PART_BYTES,
    Index,
    TensorSpec,
)

if TYPE_CHECKING:
    from skerry.runtime.tensors.byte_layout import Codec, Op

SPECS = st.lists(
    st.builds(
        lambda dtype, shape, op: (dtype, tuple(shape), op),
        st.sampled_from(sorted(ITEM_BYTES)),
        st.one_of(st.just([40_000_000]), st.lists(st.sampled_from([0, 1, 2, 3, 17, 1000, 5000]), max_size=2)),
        st.sampled_from(OPS),
    ),
    max_size=8,
)


def spec(name: str = "w", dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


@given(SPECS, st.sampled_from(CODECS))
@settings(max_examples=50)
def test_every_element_has_a_position_without_overlap(
    specs: list[tuple[str, tuple[int, ...], Op]], codec: Codec
) -> None:
    index = Index(tuple(TensorSpec(f"t{i}", *fields) for i, fields in enumerate(specs)), codec)
    placed = dict.fromkeys(range(len(specs)), 0)
    for number, part in enumerate(index.parts):
        assert part.number == number
        assert part.body_bytes <= PART_BYTES
        end = 0
        for piece in part.slices:
            step = max(ALIGNMENT, index.item_bytes[piece.tensor])
            assert piece.begin % step == 0
            assert end <= piece.begin < end + step
            assert piece.end - piece.begin == piece.count * index.item_bytes[piece.tensor]
            assert piece.first == placed[piece.tensor]
            placed[piece.tensor] += piece.count
            end = piece.end
        assert end == part.body_bytes
    assert placed == dict(enumerate(index.items))


@given(SPECS, st.sampled_from(CODECS))
@settings(max_examples=50)
def test_blocks_cover_all_items_of_their_part(specs: list[tuple[str, tuple[int, ...], Op]], codec: Codec) -> None:
    index = Index(tuple(TensorSpec(f"t{i}", *fields) for i, fields in enumerate(specs[:4])), codec)
    for part in index.parts[:2]:
        items = dict.fromkeys(range(len(specs)), 0)
        for start in range(0, part.body_bytes, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, part.body_bytes)
            for piece in part.between(start, stop, index.item_bytes):
                assert 0 <= piece.begin < piece.end <= stop - start
                items[piece.tensor] += piece.count
        assert items == {n: sum(piece.count for piece in part.slices if piece.tensor == n) for n in items}


def test_only_large_averaged_floats_are_quantized() -> None:
    kept = [("int32", 5000, "avg"), ("float64", 5000, "avg"), ("float32", 5000, "max"), ("float32", 4095, "avg")]
    blocks = [("float32", 4096, "avg"), ("bfloat16", 5000, "avg"), ("float16", 5000, "avg")]
    specs = [TensorSpec(f"t{i}", dtype, (n,), op) for i, (dtype, n, op) in enumerate([*kept, *blocks])]
    index = Index(tuple(specs), "int8")
    assert index.wire == (*(dtype for dtype, _, _ in kept), *["int8x254"] * 3)
    assert index.items[4:] == (17, 20, 20)


def test_100_mb_of_tensors_are_two_parts() -> None:
    index = Index(tuple(spec(f"t{i}", shape=(250_000,)) for i in range(100)))
    assert [part.body_bytes for part in index.parts] == [PART_BYTES, 100_000_000 - PART_BYTES]


def test_offsets_beyond_4_gib_are_exact() -> None:
    index = Index((spec("big", "float64", (3, 1 << 30)), spec("after", "uint8", (5,))))
    assert sum(part.body_bytes for part in index.parts) == 3 * 8 * (1 << 30) + 5
    assert index.parts[-2].slices[-1].first == 3 * (1 << 30) - PART_BYTES // 8
    assert (index.parts[-1].slices[0].tensor, index.parts[-1].slices[0].begin) == (1, 0)


def test_part_has_at_most_max_slices() -> None:
    index = Index(tuple(spec(f"t{i}", shape=()) for i in range(MAX_SLICES + 1)))
    assert [len(part.slices) for part in index.parts] == [MAX_SLICES, 1]


def test_index_without_tensors_has_no_parts() -> None:
    assert Index(()).parts == ()


def test_too_large_list_of_tensors_is_refused() -> None:
    with pytest.raises(Invalid, match="too large"):
        _ = Index((spec(shape=(1 << 50,)),)).parts


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (spec(dtype="complex64"), "dtype"),
        (spec(dtype="float8_e4m3fn"), "dtype"),
        (spec(name=""), "name"),
        (spec(name="a\nb"), "name"),
        (spec(name="\ud800"), "name"),
        (spec(name="x" * 257), "name"),
        (spec(shape=(-1,)), "shape"),
        (spec(shape=(1,) * 17), "shape"),
        (spec(shape=(1 << 40, 1 << 40)), "shape"),
        (spec(shape=(0, 1 << 61)), "shape"),
        (TensorSpec("w", "float32", (1,), "product"), "op"),  # type: ignore[arg-type]
    ],
)
def test_unsupported_tensor_is_refused_by_name_and_field(wrong: TensorSpec, message: str) -> None:
    with pytest.raises(Invalid, match=rf"^{message}.*tensor="):
        Index((wrong,))


def test_duplicate_names_and_unknown_codecs_are_refused() -> None:
    with pytest.raises(Invalid, match="tensor='w'"):
        Index((spec(), spec()))
    with pytest.raises(Invalid, match="codec='int3'"):
        Index((spec(),), "int3")  # type: ignore[arg-type]


def test_digest_differs_for_every_difference_only() -> None:
    base = Index((spec("a"), spec("b", shape=(2, 3))))
    same = Index((TensorSpec("a", "float32", (4,)), TensorSpec("b", "float32", (2, 3))))
    assert base.digest == same.digest
    assert hash(base) == hash(same)
    others = [
        Index(base.tensors, "bf16"),
        Index(base.tensors[::-1]),
        Index((base.tensors[0], spec("b", shape=(3, 2)))),
        Index((base.tensors[0], spec("b", "int32", (2, 3)))),
        Index((base.tensors[0], TensorSpec("b", "float32", (2, 3), "sum"))),
        Index((base.tensors[0], spec("c", shape=(2, 3)))),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == len(others) + 1


def test_parts_of_layout_2_are_units_of_up_to_eight_mebibytes() -> None:
    def sizes(elements: int, codec: Codec = "none") -> set[int]:
        index = Index((TensorSpec("t", "float32", (elements,)),), codec, 2)
        assert index.part_bytes == index.unit_bytes
        return {part.body_bytes for part in index.parts[:-1]}

    assert sizes(100) == set()
    assert sizes(BLOCK_BYTES // 4 - 100) == set(), "up to a block in one part"
    assert sizes(BLOCK_BYTES // 2) == {256 << 10}
    assert sizes(5 << 20) == {(20 << 20) // 32 + 4096}, "32 units of equal size, rounded up"
    assert sizes(10 << 20) == {2 * BLOCK_BYTES}
    assert sizes(1 << 30) == {8 * BLOCK_BYTES}
    assert sizes(1 << 30, "int8") == {4 * BLOCK_BYTES}, "its sums are four times as large"


def test_layouts_of_the_same_tensors_cannot_be_averaged() -> None:
    specs = (TensorSpec("t", "float32", (100,)),)
    assert Index(specs, "none", 2).digest != Index(specs, "none").digest
    assert Index(specs, "int8", 2).digest in Index(specs, "none", 2).codecs
