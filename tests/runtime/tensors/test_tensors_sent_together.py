"""TensorBatch: which tensors may travel together."""

from __future__ import annotations

import gc
import re
import tracemalloc

import numpy as np
import pytest
import torch

from skerry.runtime.errors import Invalid
from skerry.runtime.tensors.tensors_sent_together import TensorBatch

WHOLE = torch.zeros(6, 10)


@pytest.mark.parametrize(
    "other",
    [
        WHOLE,
        WHOLE[2:3],
        WHOLE.t()[4],
        WHOLE.view(-1)[59:],
        WHOLE.view(torch.int32)[:1],
        torch.as_strided(WHOLE, (3,), (10,), 5),
        torch.from_numpy(WHOLE.numpy()[3:]),
    ],
)
def test_tensors_that_share_memory_are_refused_at_the_call(other: torch.Tensor) -> None:
    batch = TensorBatch("none", 2)
    batch.add(torch.zeros(3), "sum")
    batch.add(WHOLE, "sum", name="whole")
    with pytest.raises(Invalid, match=re.escape("share memory: tensor='view' other='whole'")):
        batch.add(other, "sum", name="view")
    assert [spec.name for spec in batch.index().tensors] == ["00000", "whole"]


def test_views_in_a_row_are_not_compared_by_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, flat = TensorBatch("none", 2), torch.zeros(400)
    monkeypatch.setattr(np, "shares_memory", lambda *_, **__: pytest.fail("compared"))
    for view in reversed(flat.split(2)):
        batch.add(view, "avg")


def test_separate_views_of_one_storage_travel_together() -> None:
    fused, flat = torch.zeros(6, 10), torch.zeros(10)
    batch = TensorBatch("none", 2)
    for tensor in (fused[:, :4], fused[:, 4:], flat[::2], flat[1::2], fused[0, :0], torch.zeros(0)):
        batch.add(tensor, "avg")
    assert len(batch.index().tensors) == 6


def test_nothing_is_kept_of_a_batch() -> None:
    tensors = [torch.zeros(4) for _ in range(20)]

    def send() -> None:
        batch = TensorBatch("none", 2)
        for tensor in tensors:
            batch.add(tensor, "sum")

    send()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(100):
        send()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 100_000
