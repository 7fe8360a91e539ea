"""Quantized exchanges of real managers: torchft's own DiLoCo, the codecs of a run, and calls that do not ask for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import (
    assert_same_parameters,
    begin_run,
    contributions,
    islands_of,
    manager_of,
    train_all,
)

from skerry.runtime.errors import Diverged
from skerry.runtime.log import keys
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.payload_format import read_header

if TYPE_CHECKING:
    from skerry.runtime.log.records import Codec
    from skerry.runtime.store import Store
    from skerry.runtime.store.interface import Profile


def codecs(store: Store) -> set[str]:
    """The codecs of all payloads that are still stored."""
    seen: set[str] = set()
    for contribution in contributions(store):
        for part in contribution.parts:
            key = keys.payload(contribution.round, contribution.slot, part.digest)
            data = store.read(key)
            if data is not None:
                seen.add(read_header(data, part, key).codec)
    return seen


def trained(store: Store, **settings: object) -> None:
    """Two replicas train layers that are large enough to be quantized, to the same bits."""
    begin_run(store, ["a", "b"], minimum=2)
    islands = islands_of(store, ["a", "b"], fragments=2, features=80, lr=1e-3, **settings)
    train_all(islands, rounds=4)
    assert_same_parameters(islands)


def test_torchfts_should_quantize_sends_int8() -> None:
    store = MemoryStore()
    trained(store, wrapper={"should_quantize": True})
    assert codecs(store) == {"int8"}


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "sparse"])
def test_replicas_of_a_quantizing_run_have_the_same_bits(codec: Codec) -> None:
    store = MemoryStore()
    trained(store, codec=codec)
    assert codecs(store) == {codec}


class DistantStore(MemoryStore):
    """A memory store behind a link."""

    @property
    def profile(self) -> Profile:
        return replace(super().profile, is_local=False)


@pytest.mark.parametrize(("store", "codec"), [(MemoryStore(), "none"), (DistantStore(), "int8")])
def test_codec_auto_quantizes_only_what_goes_over_a_link(store: Store, codec: Codec) -> None:
    trained(store, codec="auto")
    assert codecs(store) == {codec}


def test_replica_with_another_codec_ends_naming_both() -> None:
    store = MemoryStore()
    first, second = (
        manager_of(store, slot, minimum=1, grace_s=0.1, codec=codec) for slot, codec in (("a", "none"), ("b", "int8"))
    )
    for manager in (first, second):
        manager.start_quorum()
    for manager in (first, second):
        manager.allreduce(torch.ones(5000)).wait()
    with pytest.raises(Diverged, match="codec none instead of this replica's int8"):
        second.should_commit()


def test_codec_of_the_run_stays_if_it_quantizes_itself() -> None:
    store = MemoryStore()
    trained(store, wrapper={"should_quantize": True}, codec="int4")
    assert codecs(store) == {"int4"}


def test_exchange_is_quantized_only_if_every_call_asks_for_it() -> None:
    store = MemoryStore()
    manager = manager_of(store, "a", minimum=1)
    for second in (True, False):
        manager.start_quorum()
        works = [manager.allreduce(torch.ones(5000), should_quantize=quantize) for quantize in (True, second)]
        assert all(work.wait() for work in works)
        assert codecs(store) == ({"int8"} if second else {"int8", "none"})
        assert manager.should_commit()
    manager.shutdown()
