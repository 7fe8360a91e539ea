"""The payload format: headers, and the damaged or hostile headers that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.runtime.tensors.payloads import resealed

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log.records import Part
from skerry.runtime.tensors import payload_format
from skerry.runtime.tensors.byte_layout import (
    ALIGNMENT,
    BLOCK_BYTES,
    MAX_DIMS,
    MAX_NAME_BYTES,
    MAX_SLICES,
    Index,
    TensorSpec,
)
from skerry.runtime.tensors.payload_format import build_header, check_parts, index_from_headers, read_header

if TYPE_CHECKING:
    from skerry.runtime.tensors.payload_format import Header

INDEX = Index(
    (
        TensorSpec("weight", "float32", (700, 600)),
        TensorSpec("empty", "int64", (0, 3), "sum"),
        TensorSpec("bias", "bfloat16", ()),
        TensorSpec("mask", "bool", (65,), "max"),
    )
)
BLOCKS = [f"{i:032x}" for i in range(INDEX.parts[0].blocks)]
HEAD, PART = build_header(INDEX, INDEX.parts[0], BLOCKS)
BODY = INDEX.parts[0].body_bytes


def read(data: bytes, part: Part | None = None, *, index: Index | None = INDEX) -> Header:
    return read_header(memoryview(data), part or resealed(data, total_bytes=len(data) + BODY), "the/key", index=index)


def document() -> dict[str, object]:
    return json.loads(HEAD[24:].rstrip(b"\0"))


def head_of(changed: object) -> bytes:
    """A header like build_header's around any JSON."""
    text = json.dumps(changed, separators=(",", ":")).encode()
    data = HEAD[:16] + len(text).to_bytes(8, "little") + text
    return data + bytes(-len(data) % ALIGNMENT)


def test_header_is_read_as_it_was_built() -> None:
    header = read(HEAD, PART)
    assert list(header.blocks) == BLOCKS
    assert tuple(piece.spec for piece in header.slices) == INDEX.tensors
    assert tuple(piece.place for piece in header.slices) == INDEX.parts[0].slices
    assert len(HEAD) == PART.header_bytes
    assert PART.header_bytes % ALIGNMENT == 0
    assert index_from_headers([header], ["the/key"]) == INDEX
    assert head_of(document()) == HEAD, "the tests build headers as the module does"


def test_headers_of_layout_2_name_the_index_of_layout_2() -> None:
    index = replace(INDEX, layout=2)
    built = [build_header(index, part, ["0" * 32] * part.blocks) for part in index.parts]
    headers = [
        read_header(memoryview(data), part, "the/key", index=index, number=number)
        for number, (data, part) in enumerate(built)
    ]
    assert len(headers) > 1
    assert index_from_headers(headers, ["the/key"] * len(headers)) == index


def test_header_length_does_not_depend_on_the_digests() -> None:
    other, part = build_header(INDEX, INDEX.parts[0], ["f" * 32] * len(BLOCKS))
    assert (len(other), part.total_bytes) == (len(HEAD), PART.total_bytes)
    check_parts([part], INDEX, "slot=a")


def test_largest_possible_header_is_accepted() -> None:
    index = Index(
        tuple(
            TensorSpec(f"{i:04d}" + '"' * (MAX_NAME_BYTES - 4), "float32", (1,) * MAX_DIMS) for i in range(MAX_SLICES)
        )
    )
    head, part = build_header(index, index.parts[0], ["0" * 32] * index.parts[0].blocks)
    assert index_from_headers([read_header(memoryview(head), part, "k", index=index)], ["k"]) == index


@given(st.integers(0, len(HEAD) - 1), st.integers(1, 255))
@settings(max_examples=100)
def test_changed_byte_is_detected_by_the_digest(position: int, flip: int) -> None:
    data = bytearray(HEAD)
    data[position] ^= flip
    with pytest.raises(Corrupt, match="damaged: key=the/key"):
        read(bytes(data), PART)


@given(st.integers(0, len(HEAD) - 1), st.integers(1, 255))
@settings(max_examples=400)
def test_changed_byte_with_matching_digest_changes_only_block_digests(position: int, flip: int) -> None:
    data = bytearray(HEAD)
    data[position] ^= flip
    try:
        header = read(bytes(data))
    except (Corrupt, Invalid) as error:
        assert "key=the/key" in str(error)  # noqa: PT017  both outcomes are valid, depending on the byte
    else:
        # Only a digit of a block's digest may differ; the verification of the body detects that.
        assert list(header.blocks) != BLOCKS
        assert header.model_copy(update={"blocks": tuple(BLOCKS)}) == read(HEAD, PART)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.just([]),
    st.just({}),
    st.just("f" * 32),
)


def paths(node: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    below = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(inner for key, value in below for inner in paths(value, (*path, key)))]


FIELDS = [path for path in paths(document()) if path and path[0] != "blocks"] + [("blocks",)]


def document_with(path: tuple[object, ...], value: object) -> dict[str, object]:
    """The document with another value at this path. Rejects an equal one."""
    changed = document()
    node = changed
    for step in path[:-1]:
        node = node[step]
    assume((type(node[path[-1]]), node[path[-1]]) != (type(value), value))
    node[path[-1]] = value
    return changed


@given(st.sampled_from(FIELDS), SCALARS)
@settings(max_examples=400)
def test_changed_field_is_refused_naming_the_key(path: tuple[object, ...], value: object) -> None:
    with pytest.raises((Corrupt, Invalid), match="key=the/key"):
        read(head_of(document_with(path, value)))


PLACES = [path for path in FIELDS if path[-1] in {"first", "count", "begin", "end", "tensor", "body_bytes"}]
# The first slice of a part may be of any tensor.
PLACES = [path for path in PLACES if path[-1] != "tensor" or path[1] != 0]


@given(st.sampled_from(PLACES),
       st.one_of(st.integers(-2, 200), st.integers(0, 1 << 62), st.integers(BODY - 130, BODY + 130)))  # fmt: skip
@settings(max_examples=300)
def test_wrong_spans_are_refused_without_the_index(path: tuple[object, ...], value: int) -> None:
    with pytest.raises(Corrupt, match="key=the/key"):
        read(head_of(document_with(path, value)), index=None)


@pytest.mark.parametrize("fields", [{"extra": 1}, {"codec": "bf16"}, {"index": "0" * 32}, {"part": 1, "parts": 2}])
def test_header_with_other_facts_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises((Corrupt, Invalid), match="key=the/key"):
        read(head_of({**document(), **fields}))


def test_header_of_another_model_is_refused_naming_the_tensor() -> None:
    other = Index((TensorSpec("weight", "float32", (600, 700)), *INDEX.tensors[1:]))
    with pytest.raises(Invalid, match=r"key=the/key.*tensor='weight'.*shape=\(700, 600\).*shape=\(600, 700\)"):
        read(HEAD, PART, index=other)


def assert_refused_before_allocation(data: bytes, part: Part | None = None) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="key=the/key"):
            read(data, part)
        assert tracemalloc.get_traced_memory()[1] < len(data) + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "hostile",
    [
        Part(digest="0" * 32, header_bytes=1 << 60, total_bytes=1 << 61),
        Part(digest="0" * 32, header_bytes=0, total_bytes=10),
        Part(digest="0" * 32, header_bytes=100, total_bytes=200),
        PART.model_copy(update={"header_bytes": len(HEAD) + ALIGNMENT}),
        PART.model_copy(update={"header_bytes": len(HEAD) - ALIGNMENT}),
        PART.model_copy(update={"total_bytes": 1 << 60}),
        PART.model_copy(update={"total_bytes": 0}),
    ],
)
def test_wrong_sizes_are_refused_before_allocation(hostile: Part) -> None:
    assert_refused_before_allocation(HEAD, hostile)


@pytest.mark.parametrize(
    "changed",
    [
        {"slices": [{**document()["slices"][0], "shape": [1 << 30, 1 << 29], "count": 1 << 59}]},  # type: ignore[index]
        {"slices": [{**document()["slices"][0], "shape": [1 << 62] * 16}]},  # type: ignore[index]
        {"body_bytes": 1 << 62},
        {"parts": 1 << 62},
        {"slices": []},
        {"slices": [7] * 100_000},
        {"blocks": [7] * 100_000},
        {"blocks": ["0" * 32] * 10_000},
    ],
)
def test_wrong_numbers_are_refused_before_allocation(changed: dict[str, object]) -> None:
    assert_refused_before_allocation(head_of({**document(), **changed}))


def test_gap_between_tensors_is_refused() -> None:
    changed = document()
    changed["slices"][-1]["begin"] += ALIGNMENT
    changed["slices"][-1]["end"] += ALIGNMENT
    changed["body_bytes"] += ALIGNMENT
    data = head_of(changed)
    with pytest.raises(Corrupt, match="bad span: key=the/key"):
        read(data, resealed(data, total_bytes=len(data) + BODY + ALIGNMENT), index=None)


def test_tensors_with_other_numbers_are_refused() -> None:
    changed = document()
    for piece in changed["slices"]:
        piece["tensor"] += 1
    assert read(head_of(changed), index=None)
    with pytest.raises(Invalid, match="another position: key=the/key tensor='weight'"):
        read(head_of(changed))


def test_wrong_length_fields_are_refused() -> None:
    for length in (0, 1, len(HEAD), 1 << 63, (1 << 64) - 1):
        with pytest.raises(Corrupt, match="key=the/key"):
            read(HEAD[:16] + length.to_bytes(8, "little") + HEAD[24:])


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 100_000, b"\xff\xfe", b"", b"NaN"])
def test_hostile_json_is_corrupt(text: bytes) -> None:
    data = HEAD[:16] + len(text).to_bytes(8, "little") + text
    data += bytes(-len(data) % ALIGNMENT)
    with pytest.raises(Corrupt, match="key=the/key"):
        read(data)


def test_other_version_is_invalid_and_other_file_is_corrupt() -> None:
    with pytest.raises(Invalid, match="version=4 known=1, 2, 3"):
        read(HEAD[:8] + (4).to_bytes(8, "little") + HEAD[16:])
    with pytest.raises(Corrupt, match="bad version: key=the/key version=2 codec=none"):
        read(HEAD[:8] + (2).to_bytes(8, "little") + HEAD[16:])
    with pytest.raises(Corrupt, match="not a payload"):
        read(b"PK\x03\x04" + HEAD[4:])


def test_short_header_is_truncated() -> None:
    with pytest.raises(Corrupt, match="truncated: key=the/key"):
        read(HEAD[:-1], PART)


def test_wrong_parts_are_refused_by_owner_and_field() -> None:
    for wrong, message in (
        ([], "parts=0"),
        ([PART, PART], "parts=2"),
        ([PART.model_copy(update={"header_bytes": 64})], "header_bytes=64"),
        ([PART.model_copy(update={"total_bytes": 64})], "total_bytes=64"),
    ):
        with pytest.raises(Invalid, match=f"slot=a.*{message}"):
            check_parts(wrong, INDEX, "slot=a")


def test_headers_join_only_complete_and_in_order() -> None:
    index = Index((TensorSpec("a", "float32", (40_000_000,)), TensorSpec("b", "uint8", (3,))))
    built = [build_header(index, layout, ["0" * 32] * layout.blocks) for layout in index.parts]
    headers = [read_header(memoryview(head), part, f"k{i}") for i, (head, part) in enumerate(built)]
    assert index_from_headers(headers, ["k"] * len(headers)) == index
    assert index_from_headers([], []) == Index(())
    for wrong in (headers[::-1], headers[:-1], headers[1:], [*headers, headers[-1]], [headers[0]] * len(headers)):
        with pytest.raises(Corrupt, match="key=k"):
            index_from_headers(wrong, [f"k{i}" for i in range(len(wrong))])


def test_format_is_frozen() -> None:
    assert (payload_format.MAGIC, BLOCK_BYTES) == (b"skerry\r\n", 1 << 20)
    assert payload_format.VERSIONS == {"none": 1, "bf16": 1, "int8": 2, "int4": 2, "int2": 2, "sparse": 3}
    assert PART.digest == "67fcd6256f483570b63aba3e03a89953"


def test_format_is_read_without_torch() -> None:
    modules = "skerry.runtime.tensors.payload_format, skerry.runtime.tensors.payload_reader"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
