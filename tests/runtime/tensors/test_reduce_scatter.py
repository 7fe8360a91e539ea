"""Reduce-scatter: the bits of all-gather, whichever replica makes a unit, and whatever happens to the others."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.tensors.payloads import BusyStore, filled, index_for, publish
from tests.support.clocks import FakeClock

from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Retryable
from skerry.runtime.log import keys
from skerry.runtime.store.retrying import Retrying
from skerry.runtime.tensors import byte_layout as tensor_layout
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, CODECS, Index, TensorSpec
from skerry.runtime.tensors.find_wrong_reduced_units import is_confirmed, spot_check, wrong_units
from skerry.runtime.tensors.payload_encoder import encode
from skerry.runtime.tensors.reduce import average
from skerry.runtime.tensors.reduce_scatter import MAX_PATIENCE_S, Scatter, reduce_scatter
from skerry.runtime.tensors.reduced_unit import UnitName, seal, unseal
from skerry.runtime.tensors.sum_by_pieces import Workspace, plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.clock import Clock
    from skerry.runtime.log.records import Layout
    from skerry.runtime.tensors.byte_layout import Codec
    from skerry.runtime.tensors.find_wrong_reduced_units import WrongUnit
    from skerry.runtime.tensors.reduce import AverageResult

DECISION = "ab" * 32


class Fleet:
    """Members with random contributions in one store, and what their averages must be."""

    def __init__(self, index: Index, members: int, *, weights: Sequence[float] | None = None, streams: int = 1) -> None:
        self.index = index
        self.makers: list[str] = []
        self.store = BusyStore(streams=streams)
        self.slots = [f"r-{number}" for number in range(members)]
        self.rows = [
            [filled(spec, 1000 * row + number) for number, spec in enumerate(index.tensors)] for row in range(members)
        ]
        given = weights or [1.0] * members
        self.sources = [
            replace(publish(self.store, slot, row, index, weight=weight), local=None)
            for slot, row, weight in zip(self.slots, self.rows, given, strict=True)
        ]

    def scatter(self, mine: str | None, *, patient: bool = True, **elsewhere: object) -> Scatter:
        """elsewhere: `at_work` and `limit_s`, for a replica in another region than the makers."""
        return Scatter(
            round=0,
            exchange=0,
            decision=DECISION,
            rank=0,
            members=self.slots,
            makers=self.makers or self.slots,
            mine=mine,
            patient=patient,
            **elsewhere,  # type: ignore[arg-type]
        )

    def reduce(
        self, mine: str | None, *, patient: bool = True, clock: Clock | None = None, **elsewhere: object
    ) -> tuple[list[torch.Tensor], AverageResult]:
        """The outputs and cost of a replica of this slot, over the tensors that it has contributed."""
        row = self.rows[self.slots.index(mine)] if mine is not None else self.rows[0]
        own = [tensor.clone() for tensor in row]
        encoded = encode(own, self.index) if mine is not None else None
        sources = [replace(source, local=encoded if source.slot == mine else None) for source in self.sources]
        scatter = self.scatter(mine, patient=patient, **elsewhere)
        with closing(Workspace()) as workspace:
            cost = reduce_scatter(
                self.store, scatter, sources, self.index, own, workspace=workspace, clock=clock or SystemClock()
            )
        return own, cost

    def all_gather(self) -> tuple[list[torch.Tensor], AverageResult]:
        outputs = [torch.zeros_like(tensor) for tensor in self.rows[0]]
        with closing(Workspace()) as workspace:
            return outputs, average(self.store, self.sources, self.index, outputs, workspace=workspace)

    def together(self, slots: Sequence[str | None]) -> list[tuple[list[torch.Tensor], AverageResult]]:
        with ThreadPoolExecutor(len(slots)) as pool:
            return list(pool.map(self.reduce, slots))


def large(codec: Codec = "none", elements: int = 900_000) -> Index:
    return index_for([torch.zeros(elements), torch.zeros(3, 1000), torch.zeros(7)], codec)


def units(fleet: Fleet, slot: str) -> list[str]:
    """The keys of the units that a slot has published."""
    parts = {keys.payload(0, source.slot, part.digest) for source in fleet.sources for part in source.parts}
    return [entry.key for entry in fleet.store.list(f"{keys.payloads_prefix(0)}{slot}/") if entry.key not in parts]


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_exact_codecs_give_the_bits_of_all_gather(codec: Codec, streams: int) -> None:
    fleet = Fleet(large(codec), 4, weights=[1.0, 3.0, 0.5, 1.0], streams=streams)
    expected, cost = fleet.all_gather()
    for outputs, result in fleet.together([*fleet.slots, None]):
        assert result.digest == cost.digest
        assert all(map(torch.equal, outputs, expected))


@given(
    st.lists(
        st.tuples(st.sampled_from(["float32", "float16", "bfloat16", "int64"]), st.integers(0, 30_000)),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(CODECS),
    st.sampled_from([1, 2]),
    st.integers(1, 5),
    st.integers(0, 4),
)
@settings(max_examples=40, deadline=None)
def test_all_replicas_end_with_the_same_bits(
    kinds: list[tuple[str, int]], codec: Codec, layout: Layout, members: int, late: int
) -> None:
    specs = [
        TensorSpec(f"t{number}", dtype, (count,), "sum" if dtype == "int64" else "avg")
        for number, (dtype, count) in enumerate(kinds)
    ]
    fleet = Fleet(Index(tuple(specs), codec, layout), members)
    # One after the other: the first makes all units, the next ones those that are not published.
    results = [fleet.reduce(slot, patient=False) for slot in [*fleet.slots[late:], *fleet.slots[:late], None]]
    assert len({result.digest for _, result in results}) == 1
    for outputs, _ in results:
        assert all(map(torch.equal, outputs, results[0][0]))


def test_quantized_average_is_within_two_roundings() -> None:
    fleet = Fleet(large("int8"), 4)
    exact = sum(row[0] for row in fleet.rows) / 4
    outputs, _ = fleet.together(fleet.slots)[0]
    assert (outputs[0] - exact).norm() / exact.norm() < 0.02


def test_each_member_reads_a_share_of_the_others() -> None:
    fleet = Fleet(large(elements=4 << 20), 4)
    fleet.store.poll_cap = 60.0  # on a busy machine, too, no member takes over another one's units
    whole = fleet.sources[0].parts[0].total_bytes
    results = fleet.together(fleet.slots)
    assert all(result.downloaded_bytes < 1.7 * whole for _, result in results), "3 times the contribution by all-gather"
    assert {len(units(fleet, slot)) for slot in fleet.slots} == {4, 5}


def test_members_elsewhere_read_nothing_but_the_average() -> None:
    fleet = Fleet(large("int8", 4 << 20), 4)
    expected = Fleet(fleet.index, 4).reduce("r-1", patient=False)[1].digest
    whole = sum(part.total_bytes for part in fleet.sources[0].parts)
    fleet.store.poll_cap = 60.0  # on a busy machine, too, no member makes what others are to make
    fleet.makers = ["r-0", "r-2"]
    results = dict(zip(fleet.slots, fleet.together(fleet.slots), strict=True))
    assert {result.digest for _, result in results.values()} == {expected}
    assert not units(fleet, "r-1")
    for slot in ("r-1", "r-3"):
        assert results[slot][1].downloaded_bytes < 1.05 * whole


def test_member_elsewhere_reads_units_that_another_maker_took_over() -> None:
    fleet, clock = Fleet(large(), 3), FakeClock()
    fleet.makers = ["r-0", "r-1"]
    fleet.reduce("r-0", clock=FakeClock())  # and then makes the units of r-1, which makes none
    began = clock.now()
    _, cost = fleet.reduce("r-2", clock=clock, at_work=lambda _: True, limit_s=300.0)
    assert clock.now() - began < 5.0
    assert cost.digest == fleet.all_gather()[1].digest


def test_member_elsewhere_waits_for_makers_at_work_up_to_its_limit() -> None:
    fleet, clock = Fleet(large(), 3), FakeClock()
    fleet.makers, began = ["r-0"], clock.now()
    fleet.reduce("r-2", clock=clock, at_work=lambda _: True, limit_s=20.0)
    assert 20.0 <= clock.now() - began < 25.0


def test_member_elsewhere_looks_again_after_a_look_as_long_as_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, clock = Fleet(large(), 3), FakeClock()
    fleet.makers = ["r-0"]
    read = fleet.store.read

    def slow(*arguments: object) -> memoryview | None:
        monkeypatch.setattr(fleet.store, "read", read)
        absent = read(*arguments)  # type: ignore[arg-type]
        fleet.reduce("r-0", clock=FakeClock())
        clock.advance(30.0)
        return absent

    monkeypatch.setattr(fleet.store, "read", slow)
    fleet.reduce("r-2", clock=clock, at_work=lambda _: True, limit_s=20.0)
    assert units(fleet, "r-0")
    assert not units(fleet, "r-2")


def test_units_of_dead_makers_are_made_by_any_member() -> None:
    fleet = Fleet(large(), 3)
    fleet.makers = ["r-1"]
    assert {result.digest for _, result in fleet.together(["r-0", "r-2"])} == {fleet.all_gather()[1].digest}


def test_units_of_a_dead_member_are_made_by_the_others() -> None:
    fleet = Fleet(large(elements=4 << 20), 4)
    expected = fleet.all_gather()[1].digest
    alive = [slot for slot in fleet.slots if slot != "r-1"]
    assert {result.digest for _, result in fleet.together(alive)} == {expected}
    assert units(fleet, "r-1") == []


def test_a_replica_alone_makes_everything() -> None:
    fleet = Fleet(large(), 5)
    assert fleet.reduce("r-3")[1].digest == fleet.all_gather()[1].digest


@pytest.mark.parametrize("position", [0, 30, 60, 75, 5000])
def test_damaged_unit_is_made_again(position: int) -> None:
    fleet = Fleet(large(), 3)
    expected = fleet.all_gather()[1].digest
    fleet.reduce("r-0", patient=False)
    (key, *_) = units(fleet, "r-0")
    data = bytearray(fleet.store.read(key) or b"")
    data[position] ^= 1
    fleet.store.delete(key)
    assert fleet.store.create(key, bytes(data))
    assert fleet.reduce("r-1", patient=False)[1].digest == expected


@pytest.mark.parametrize(
    ("codec", "layout"), [("none", 1), ("int8", 1), *((codec, 2) for codec in CODECS if codec != "sparse")]
)
def test_spot_check_confirms_sound_units(codec: Codec, layout: Layout) -> None:
    elements = {"int4": 2_500_000, "int2": 4_500_000}.get(codec, 1_500_000)
    fleet = Fleet(replace(large(codec, elements), layout=layout), 4, weights=[1.0, 3.0, 0.5, 1.0])
    fleet.store.poll_cap = 60.0  # on a busy machine, too, no member takes over another one's units
    samples = [result.sample for _, result in fleet.together(fleet.slots)]
    assert [sample is not None for sample in samples] == [True, False, False, False], "r-0 has the turn"
    (sample, *_) = samples
    assert sample is not None
    assert sample.slot != "r-0"
    assert is_confirmed(fleet.store, fleet.sources, fleet.index, sample)


def test_spot_check_confirms_sound_quantized_units_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_layout, "UNITS", 1)
    fleet = Fleet(replace(large("int4", 8_400_000), layout=2), 2)
    assert fleet.index.unit_bytes == 2 * BLOCK_BYTES
    fleet.reduce("r-1", patient=False)
    sample = fleet.reduce("r-0")[1].sample
    assert sample is not None
    assert (sample.unit, sample.slot) == (1, "r-1")
    assert is_confirmed(fleet.store, fleet.sources, fleet.index, sample)


def falsify(fleet: Fleet) -> str:
    """Put a wrong result under the key of unit 1, which r-1 has made, with a digest that is right. The key."""
    name = UnitName(0, 0, DECISION, 0, 1, len(plan_of(fleet.index, fleet.index.unit_bytes)))
    key = name.key("r-1")
    body = bytearray(unseal(name, fleet.store.read(key) or memoryview(b""), key))
    body[-1] ^= 1
    fleet.store.delete(key)
    fleet.store.create(key, seal(name, [body]))
    return key


def test_spot_check_finds_a_unit_that_is_sound_and_wrong() -> None:
    fleet = Fleet(large(elements=600_000), 2)
    fleet.reduce("r-1", patient=False)
    falsify(fleet)
    sample = fleet.reduce("r-0")[1].sample
    assert sample is not None
    assert not is_confirmed(fleet.store, fleet.sources, fleet.index, sample)


def test_spot_check_gives_up_an_outage_long_before_the_deadline() -> None:
    fleet, clock = Fleet(large(elements=600_000), 2), FakeClock()
    fleet.reduce("r-1", patient=False)
    sample = fleet.reduce("r-0")[1].sample
    assert sample is not None

    def fail(*_: object) -> None:
        raise Retryable("outage")

    fleet.store.spoil = fail
    began, store = clock.now(), Retrying(fleet.store, clock, deadline_s=600.0)
    assert spot_check(store, fleet.sources, fleet.index, sample, rank=0, by="r-0") is None
    assert clock.now() - began < 60.0


@pytest.mark.parametrize("layout", [1, 2])
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_recomputed_average_names_the_wrong_unit(codec: Codec, layout: Layout) -> None:
    fleet = Fleet(replace(large(codec, 1_500_000), layout=layout), 3)
    digest = fleet.together(fleet.slots)[0][1].digest

    def check() -> tuple[str, list[WrongUnit]]:
        name = partial(UnitName, 0, 0, DECISION, 0)
        return wrong_units(fleet.store, fleet.sources, fleet.index, name, lambda _: True)

    assert check() == (digest, [])
    key = falsify(fleet)
    again, (wrong,) = check()
    assert (again, wrong.key, wrong.slot) == (digest, key, "r-1")
    assert "the contributions give other bytes" in wrong.why


def test_units_of_one_owner_are_taken_over_by_several() -> None:
    scatter = Fleet(large(elements=100), 4).scatter("r-0")
    taken = [scatter.second(unit) for unit in range(32) if scatter.owner(unit) == "r-1"]
    assert Counter(taken) == {"r-0": 2, "r-2": 3, "r-3": 3}
    alone = replace(scatter, makers=["r-1"])
    assert {alone.second(unit) for unit in range(32)} == {"r-0", "r-2", "r-3"}


def test_unit_is_bound_to_its_name() -> None:
    name = UnitName(7, 1, DECISION, 0, 3, 9)
    data = memoryview(b"".join(bytes(memoryview(part)) for part in seal(name, [b"abc", b"def"])))
    assert bytes(unseal(name, data, "k")) == b"abcdef"
    for other in (name._replace(unit=4), name._replace(units=8), name._replace(decision="cd" * 32)):
        with pytest.raises(Corrupt, match="key=k"):
            unseal(other, data, "k")
    with pytest.raises(Corrupt, match="key=k"):
        unseal(name, data[:-1], "k")


def test_units_are_the_same_for_every_store() -> None:
    assert large(elements=100).unit_bytes == BLOCK_BYTES
    assert large(elements=63 << 20).unit_bytes == 4 * BLOCK_BYTES
    assert Index((TensorSpec("t", "float32", (1 << 30,)),)).unit_bytes == 8 * BLOCK_BYTES
    assert Index((TensorSpec("t", "float32", (1 << 32,)),), "int2").unit_bytes == BLOCK_BYTES


def test_an_hour_of_standstill_is_no_measure_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other member is dead, and its unit is made after some minutes, not after an hour and a half."""
    fleet, clock = Fleet(large(), 2), FakeClock()
    began = clock.now()
    read, stood = fleet.store.read, list[float]()

    def read_slowly(*arguments: object, **more: object) -> object:
        if not stood:
            stood.append(3600.0)
            clock.advance(3600.0)
        return read(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(fleet.store, "read", read_slowly)
    outputs, _ = fleet.reduce("r-0", clock=clock)
    assert stood
    assert clock.now() - began <= 3600.0 + MAX_PATIENCE_S + 1.0
    monkeypatch.undo()
    assert all(torch.equal(mine, whole) for mine, whole in zip(outputs, fleet.all_gather()[0], strict=True))
