"""Tensors as flat buffers: every dtype and stride, shared memory, few buffers; and the seals of their values."""

from __future__ import annotations

import pytest
import torch

from skerry.runtime.errors import Invalid
from skerry.runtime.replication import BasicTensorAwareStateDict
from skerry.runtime.replication.flat_buffers import SMALL, flatten, seal_of, unflatten

DTYPES = [
    *(
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
    ),
    *("float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
]


def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    table, buffers = flatten(tensors)
    assert table.sizes == tuple(sum(map(len, parts)) for parts in buffers)
    return unflatten(table, [torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8) for parts in buffers])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_copied(*tensors: torch.Tensor) -> None:
    for tensor, copy in zip(tensors, copied(list(tensors)), strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert raw(copy) == raw(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_copied_bit_by_bit(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    data = torch.randint(0, 2 if dtype == torch.bool else 256, (3 * dtype.itemsize,), dtype=torch.uint8)
    tensor = data.view(torch.bool if dtype == torch.bool else torch.uint8).view(dtype)
    assert_copied(torch.ones(1, dtype=torch.uint8), tensor)
    assert seal_of([tensor]) == seal_of(copied([tensor]))


def test_strided_tensors_are_copied_with_their_values() -> None:
    matrix = torch.arange(4096 * 300, dtype=torch.float32).view(4096, 300)
    assert_copied(matrix.t(), matrix[:, 3:5], matrix[::7], matrix[5].expand(4, 300), torch.tensor(2.5), matrix[:0])
    assert_copied(matrix[:, 3:5])
    assert_copied(torch.tensor(1.0).expand(1000))
    assert_copied(torch.view_as_complex(matrix[:, :2].contiguous()).conj(), torch.zeros(0, 5, dtype=torch.int16))


def test_column_of_a_matrix_does_not_take_the_matrix_along() -> None:
    table, _ = flatten([torch.zeros(4096, 1024)[:, 3]])
    assert sum(table.sizes) <= 4 * 4096 + 64


@pytest.mark.parametrize("elements", [16, SMALL])
def test_tied_tensors_travel_once_and_stay_tied(elements: int) -> None:
    weight = torch.nn.Parameter(torch.randn(2, elements))
    table, _ = flatten([weight, weight, weight.t(), weight[1]])
    assert sum(table.sizes) <= weight.nbytes + 64
    first, second, transposed, row = copied([weight, weight, weight.t(), weight[1]])
    first[1, 0] = 42.0
    assert (second[1, 0], transposed[0, 1], row[0]) == (42.0, 42.0, 42.0)


def test_number_of_buffers_does_not_grow_with_small_tensors() -> None:
    counts = [
        len(flatten([torch.zeros(n % 3 + 1, dtype=torch.float64) for n in range(count)])[1]) for count in (2, 5000)
    ]
    assert counts == [1, 1]
    assert len(flatten([torch.zeros(SMALL), torch.zeros(8), torch.zeros(9), torch.zeros(8, dtype=torch.int8)])[1]) == 3


def test_parts_of_one_large_tensor_are_copied_with_their_values() -> None:
    flat = torch.arange(3 * SMALL, dtype=torch.float32)
    table, buffers = flatten([flat[SMALL:], flat[5:SMALL]])
    assert len(buffers) == 2
    assert [tensor[0] for tensor in unflatten(table, [torch.cat(parts) for parts in buffers])] == [SMALL, 5]
    assert_copied(flat[SMALL:], flat[5:SMALL])


def test_tensors_are_sent_from_their_own_memory() -> None:
    tensors = [torch.zeros(SMALL), torch.zeros(64), torch.zeros(80)]
    parts = [part for buffer in flatten(tensors)[1] for part in buffer]
    assert {part.data_ptr() for part in parts} == {tensor.data_ptr() for tensor in tensors}


def test_tensors_that_cannot_be_copied_are_refused() -> None:
    class Scaled(torch.Tensor):
        pass

    for tensor in (torch.zeros(4, 4).to_sparse(), torch.zeros(4).as_subclass(Scaled)):
        with pytest.raises(Invalid, match="number=1"):
            flatten([torch.zeros(1), tensor])


def test_seal_depends_on_values_dtypes_and_shapes_not_on_memory() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    same = matrix.t().contiguous().t()
    assert seal_of([matrix]) == seal_of([same])
    others = [matrix + 1, matrix.view(4, 3), matrix.view(torch.int32), -matrix]
    assert len({seal_of([tensor]) for tensor in [matrix, *others]}) == 5


def test_state_is_taken_apart_and_put_together_without_changing_the_dict() -> None:
    given = {"a": torch.ones(2), "b": [3, (torch.zeros(1), {"c": torch.full((2, 2), 7)})]}
    state = BasicTensorAwareStateDict(given)
    tensors = state.pop_tensors()
    assert state.is_hollow
    with pytest.raises(Invalid, match="hollow"):
        state.pop_tensors()
    assert [tuple(tensor.shape) for tensor in tensors] == [(2,), (1,), (2, 2)]
    assert given["a"] is tensors[0]
    with pytest.raises(Invalid, match="cannot insert 2 tensors"):
        state.insert_tensors(tensors[:2])
    state.insert_tensors(tensors)
    assert state.state_dict == given
    state.pop_tensors()
    state.init_tensors()
    assert [tensor.dtype for tensor in state.tensors] == [tensor.dtype for tensor in tensors]
    state.copy_tensors_to_cpu()
    state.restore_tensor_device()
    assert not state.is_hollow
