"""none and bf16: elements of a dtype, cast one by one. Only in the calling thread."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from skerry.runtime.tensors.byte_layout import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""torch's dtype of each supported name."""
CALL_ELEMENTS: Final = 16_384
"""torch runs operations on fewer than 32,768 elements in the calling thread (at::internal::GRAIN_SIZE)."""


def cast(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy [N] to [N] of another dtype, rounding to nearest even, only in the calling thread.

    Several replicas may share a machine's cores; when torch splits each small operation over all cores, their threads
    wait for each other: measured 16 times slower with 4 processes on 2 cores.
    """
    for part, into in zip(torch.split(source, CALL_ELEMENTS), torch.split(target, CALL_ELEMENTS), strict=True):
        into.copy_(part)


def widen(data: memoryview, dtype: str, values: npt.NDArray[np.float32]) -> None:
    """Fill `values` from the sixteen-bit floats at the start of `data`. Exact: float32 can represent all of them."""
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32; as two integer passes this is twice as fast as small casts.
        bits = values.view(np.uint32)
        np.copyto(bits, np.frombuffer(data, dtype="<u2", count=values.size))
        np.left_shift(bits, 16, out=bits)
    else:
        cast(torch.frombuffer(data, dtype=TORCH_DTYPES[dtype], count=values.size), torch.from_numpy(values))
