from __future__ import annotations

import json
import math
import pickle
import threading
from collections import OrderedDict, namedtuple
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.codec.payloads import BusyStore, filled
from tests.support.logs import run_record
from tests.support.managers import Island, commits, decisions, together

from skerry.runtime import checkpoint, keys
from skerry.runtime.clock import SystemClock
from skerry.runtime.codec.layout import BLOCK_BYTES, ITEM_BYTES, TensorSpec
from skerry.runtime.codec.tensors import byte_view
from skerry.runtime.errors import Corrupt, Invalid, Unauthorized
from skerry.runtime.garbage import Retention
from skerry.runtime.journal import open_run
from skerry.runtime.records import GENESIS, CheckpointManifest
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from skerry.runtime.store.interface import Data, Span

FIELDS = {
    "run": "0" * 32,
    "commit": GENESIS,
    "members": ("a", "b"),
    "batches": 7,
    "writer": "a",
    "nonce": "1" * 32,
}


def same(one: object, other: object) -> bool:
    """Equal in type, order and bits, all the way down."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bytes(byte_view(one.detach().contiguous().view(-1))) == bytes(byte_view(other.contiguous().view(-1)))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def trained() -> dict[str, object]:
    """What a real replica keeps: a model and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 1,
        "random": torch.get_rng_state(),
    }


def saved(
    state: object, store: MemoryStore | None = None, round_number: int = 3
) -> tuple[MemoryStore, CheckpointManifest]:
    store = store or MemoryStore()
    assert checkpoint.save(store, round_number=round_number, state=state, **FIELDS)
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    return store, manifest


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
TENSORS = st.builds(
    lambda dtype, shape, seed: filled(TensorSpec("t", dtype, tuple(shape)), seed),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
STATES = st.recursive(
    st.one_of(SCALARS, TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(2, 9), st.none()), inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(STATES)
@settings(max_examples=150)
def test_any_state_comes_back_in_type_order_and_bits(state: object) -> None:
    tree, tensors = checkpoint.flatten(state)
    assert same(state, checkpoint.restore(tree, tensors))
    store, manifest = saved(state)
    back = checkpoint.load(store, manifest)
    assert same(state, back)
    assert checkpoint.state_digest(back) == checkpoint.state_digest(state)


def test_a_trained_model_and_its_optimizer_come_back() -> None:
    state = trained()
    store, manifest = saved(state)
    assert same(state, checkpoint.load(store, manifest))
    assert (manifest.round, manifest.members, manifest.batches, manifest.writer) == (3, ("a", "b"), 7, "a")


def test_floats_come_back_exactly_and_not_finite_ones_too() -> None:
    state = [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 1e16]
    assert same(state, checkpoint.restore(*checkpoint.flatten(state)))
    tensor = torch.tensor([math.nan, math.inf, -0.0])
    store, manifest = saved({"x": tensor})
    assert same({"x": tensor}, checkpoint.load(store, manifest))


def test_a_snapshot_shares_nothing_with_the_state() -> None:
    state = trained()
    before = pickle.dumps(state)
    copy = checkpoint.snapshot(state)
    assert same(state, copy)
    for value in copy["model"].values():
        value.zero_()
    copy["optimizer"]["param_groups"][0]["lr"] = 9.0
    assert pickle.dumps(state) == before


def test_the_digest_ignores_the_order_of_insertion_and_nothing_else() -> None:
    base = {"a": torch.arange(3), "b": [1, 2.0], 4: None}
    digest = checkpoint.state_digest(base)
    assert checkpoint.state_digest({4: None, "b": [1, 2.0], "a": torch.arange(3)}) == digest
    others: list[object] = [
        {**base, "a": torch.arange(3) + 1},
        {**base, "a": torch.arange(3).int()},
        {**base, "a": torch.arange(3).view(3, 1)},
        {**base, "b": [2.0, 1]},
        {**base, "b": (1, 2.0)},
        {**base, "b": [1, 2]},
        {"a": base["a"], "b": base["b"], "4": None},
        [base],
    ]
    assert len({digest, *map(checkpoint.state_digest, others)}) == len(others) + 1


def test_a_digest_reads_values_not_memory() -> None:
    base = torch.randn(6, 4)
    assert checkpoint.state_digest({"x": base.t()}) == checkpoint.state_digest({"x": base.t().contiguous()})


Pair = namedtuple("Pair", "x y")  # noqa: PYI024  the kind of value that users have


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "builtins.object"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
        (Pair(1, 2), "Pair"),
        (torch.float32, "dtype"),
        (torch.Size([2]), "Size"),
        (1 << 5000, "int"),
        (torch.zeros(2, dtype=torch.complex64), "view_as_real"),
        (torch.zeros(2).to_sparse(), "sparse"),
        ({1.5: 0}, "float"),
        ({(1, 2): 0}, "tuple"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_path(value: object, told: str) -> None:
    for act in (checkpoint.flatten, checkpoint.snapshot, checkpoint.state_digest, saved):
        with pytest.raises(Invalid, match=rf"state\.here\.0.*{told}|{told}.*state\.here\.0"):
            act({"here": [value]})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[object] = []
    state.append(state)
    with pytest.raises(Invalid, match="deep"):
        checkpoint.flatten(state)


NODES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 5), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["t", "f", "l", "u", "d", "o", "x"]), inner, max_size=2),
    ),
    max_leaves=10,
)


@given(NODES)
@settings(max_examples=300)
def test_any_tree_gives_a_state_or_corrupt(node: object) -> None:
    try:
        state = checkpoint.restore(json.dumps(node), [torch.zeros(1), torch.zeros(1)])
    except Corrupt:
        return
    assert len(checkpoint.flatten(state)[1]) == 2


@pytest.mark.parametrize(
    "tree",
    [
        "",
        "[",
        "NaN",
        "[" * 100_000,
        '{"l":[' * 200 + "]}" * 200,
        '{"t":0}',
        '{"l":[{"t":0},{"t":0}]}',
        '{"l":[{"t":0},{"t":2}]}',
        '{"l":[{"t":0},{"t":-1}]}',
        '{"l":[{"t":0},{"t":true}]}',
        '{"l":[{"t":0},{"t":1},{"f":"0x1p99999"}]}',
        '{"l":[{"t":0},{"t":1},1.5]}',
        '{"d":[["a",{"t":0}],["a",{"t":1}]]}',
        '{"d":[[{"t":0},{"t":1}]]}',
        '{"l":[{"t":0},{"t":1}],"u":[]}',
        "9" * 10_000,
    ],
)
def test_hostile_trees_are_corrupt(tree: str) -> None:
    with pytest.raises(Corrupt):
        checkpoint.restore(tree, [torch.zeros(1), torch.zeros(1)])


def test_a_checkpoint_is_invisible_until_its_manifest_stands() -> None:
    class Dying(MemoryStore):
        def create(self, key: str, data: Data) -> bool:
            if key.endswith("manifest.json"):
                raise KeyboardInterrupt
            return super().create(key, data)

    store = Dying()
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(store, round_number=1, state=trained(), **FIELDS)
    assert len(store.list(keys.CHECKPOINTS)) == 1, "its part is there"
    assert checkpoint.complete(store) == []


def test_the_second_to_save_a_round_learns_that_it_was_not_first() -> None:
    store, manifest = saved({"x": torch.zeros(3)})
    assert not checkpoint.save(store, round_number=3, state={"x": torch.ones(3)}, **FIELDS)
    assert checkpoint.manifest(store, 3) == manifest
    assert same({"x": torch.zeros(3)}, checkpoint.load(store, manifest))


def test_complete_checkpoints_are_listed_newest_first() -> None:
    store = MemoryStore()
    assert checkpoint.complete(store) == []
    for number in (0, 2, 10):
        saved({"round": number, "x": torch.full((2,), number)}, store, number)
    store.create(keys.checkpoint_part(11, "0" * 32), b"of a writer that died")
    store.create("checkpoints/notes.txt", b"not ours")
    assert checkpoint.complete(store) == [10, 2, 0]
    assert checkpoint.manifest(store, 11) is None
    second = checkpoint.manifest(store, 2)
    assert second is not None
    assert checkpoint.load(store, second)["round"] == 2


def test_a_manifest_under_another_rounds_key_is_corrupt() -> None:
    store, manifest = saved({"x": 1})
    store.create(keys.checkpoint_manifest(4), manifest.to_bytes())
    with pytest.raises(Corrupt, match=keys.checkpoint_manifest(4)):
        checkpoint.manifest(store, 4)


def test_states_without_tensors_and_tensors_without_elements_are_checkpoints() -> None:
    for state in ({}, {"step": 3}, {"x": torch.zeros(0, 3)}, torch.zeros(()), [torch.zeros(0), torch.zeros(1)]):
        store, manifest = saved(state)
        assert same(state, checkpoint.load(store, manifest))


@pytest.mark.parametrize("streams", [1, 4])
def test_large_states_come_back_piece_by_piece_and_parts_join(streams: int) -> None:
    state = {"a": torch.arange(3 << 20), "b": torch.arange(40 << 20, dtype=torch.uint8), "c": torch.tensor(1.5)}
    store = BusyStore(streams=streams, piece_bytes=4 * BLOCK_BYTES)
    store, manifest = saved(state, store)
    assert len(manifest.parts) == 2
    assert same(state, checkpoint.load(store, manifest))


@pytest.mark.parametrize("where", ["header", "body", "short", "absent"])
def test_damage_is_corrupt_naming_the_key(where: str) -> None:
    def spoil(_number: int, _key: str, span: Span | None, view: memoryview) -> int | None:
        if span is None:
            return None
        part = manifest.parts[0]
        if where == "short":
            return max(0, min(len(view), part.total_bytes - 1 - span.start))
        target = 100 if where == "header" else part.total_bytes - 1
        if span.start <= target < span.start + len(view):
            view[target - span.start] ^= 1
        return None

    store = BusyStore(spoil=spoil)
    store, manifest = saved({"x": torch.zeros(1000)}, store)
    key = keys.checkpoint_part(3, manifest.parts[0].digest)
    if where == "absent":
        store.delete(key)
    with pytest.raises(Corrupt, match=f"key={key}"):
        checkpoint.load(store, manifest)


@pytest.mark.parametrize(
    "change",
    [
        {"index": "0" * 32},
        {"tree": '{"t":1}'},
        {"tree": "{"},
        {"parts": ()},
    ],
)
def test_a_manifest_that_does_not_fit_its_parts_is_corrupt(change: dict[str, object]) -> None:
    store, manifest = saved(torch.zeros(1000))
    with pytest.raises(Corrupt, match=f"key={keys.checkpoint_manifest(3)}"):
        checkpoint.load(store, manifest.model_copy(update=change))


def test_a_part_of_another_checkpoint_is_refused() -> None:
    store, first = saved([torch.zeros(20 << 20)])
    _, second = saved([torch.ones(20 << 20)], store, 4)
    for part in first.parts:
        body = store.read(keys.checkpoint_part(3, part.digest))
        assert body is not None
        store.create(keys.checkpoint_part(4, part.digest), body)
    mixed = second.model_copy(update={"parts": (second.parts[0], first.parts[0])})
    with pytest.raises(Corrupt, match="key=checkpoints/00000004/"):
        checkpoint.load(store, mixed)


def test_a_state_with_too_many_entries_is_refused_before_anything_is_stored() -> None:
    store = MemoryStore()
    with pytest.raises(Invalid, match="too many entries"):
        checkpoint.save(store, round_number=0, state={f"{i:0100d}": i for i in range(50_000)}, **FIELDS)
    assert not store.list("")


def test_nothing_of_a_checkpoint_is_a_pickle() -> None:
    store, manifest = saved(trained())
    bodies = [bytes(store.read(entry.key) or b"") for entry in store.list("")]
    assert CheckpointManifest.parse(bodies[-1], "k") == manifest
    for body in bodies:
        with pytest.raises((pickle.UnpicklingError, ValueError, KeyError, EOFError, IndexError, AttributeError)):
            pickle.loads(body)  # noqa: S301  that it fails is the test


# Among real managers.


def spoil(store: MemoryStore, round_number: int) -> None:
    """One flipped bit in the last byte of a checkpoint: nothing but its digest tells."""
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    key = keys.checkpoint_part(round_number, manifest.parts[-1].digest)
    body = bytearray(store.read(key) or b"")
    body[-1] ^= 1
    store.replace(key, body)


def is_at_the_head_of(store: MemoryStore, other: Island) -> int:
    """A new replica reaches the same bits before its first inner step; returns how many rounds it had to follow."""
    late = Island(store, "late", seed=9, minimum=1)
    with late.diloco:
        followed = late.manager.catch_up(late.inner)
    late.manager.shutdown()
    assert late.steps == 0
    assert all(torch.equal(late.originals[name], original) for name, original in other.originals.items())
    assert all(torch.equal(dict(late.model.named_parameters())[name], one) for name, one in other.originals.items())
    return followed


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_any_of_the_newest_checkpoints_may_be_damaged_and_the_log_leads_on(damaged: int) -> None:
    """Although all that is not needed for it has been deleted."""
    store = MemoryStore(clock=SystemClock())
    terms = Retention(last=3, age_s=0.0)
    survivor = Island(store, "a", minimum=1, checkpoint_every=2, retention=terms)
    for number in range(1, 12):
        survivor.train(number, close=False)
        written = survivor.manager._course._recorder._checkpoint
        if written is not None:
            written.result(timeout=10)
    assert checkpoint.complete(store) == [10, 8, 6, 0]
    assert {keys.round_of(entry.key) for entry in store.list(keys.PAYLOADS)} == set(range(6, 11))
    for number in checkpoint.complete(store)[:damaged]:
        spoil(store, number)
    assert is_at_the_head_of(store, survivor) == 1 + 2 * damaged
    survivor.manager.shutdown()


@pytest.mark.parametrize("left", ["a part alone", "a manifest without its part"])
def test_a_newest_checkpoint_that_is_not_whole_is_passed_over(left: str) -> None:
    store = MemoryStore()
    survivor = Island(store, "a", minimum=1).train(4)
    newest, older = checkpoint.complete(store)[:2]
    found = checkpoint.manifest(store, newest)
    assert found is not None
    if left == "a part alone":
        store.delete(keys.checkpoint_manifest(newest))
        assert checkpoint.complete(store)[0] == older
    else:
        store.delete(keys.checkpoint_part(newest, found.parts[0].digest))
    assert is_at_the_head_of(store, survivor) == 4 - older


def test_checkpoints_that_make_way_while_one_is_read_are_listed_again() -> None:
    class Slow(MemoryStore):
        """While the first part of a checkpoint is read, the run goes on and the checkpoint is deleted."""

        def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
            if self.armed and key.startswith(keys.CHECKPOINTS) and not key.endswith(".json"):
                self.armed = False
                survivor.train(6)
                for number in checkpoint.complete(self)[1:]:
                    for entry in self.list(keys.since(keys.CHECKPOINTS, number)):
                        self.delete(entry.key)
            return super().read(key, span, into)

        armed = False

    store = Slow()
    survivor = Island(store, "a", minimum=1, grace_s=0.1).train(3, close=False)
    store.armed = True
    followed = is_at_the_head_of(store, survivor)
    assert not store.armed
    # One that falls due while another is on its way is left out, so the newest need not be that of the last round.
    assert followed == 6 - checkpoint.complete(store)[0]
    survivor.manager.shutdown()


def test_the_last_checkpoint_of_a_run_is_not_left_out_while_another_is_on_its_way() -> None:
    store = SlowUpload(3)
    open_run(store, run_record(SystemClock(), slots=("a",), rounds=4))
    Island(store, "a", minimum=1, grace_s=0.1, checkpoint_every=3).train(4)
    assert checkpoint.complete(store) == [4, 3, 0]


def test_when_all_replicas_die_the_run_resumes_with_no_committed_round_lost() -> None:
    """They die at once, in the middle of a round, with a checkpoint half written; deleted is all that may be."""
    store = PowerCut(clock=SystemClock())
    terms = {"retention": Retention(last=2, age_s=0.0), "checkpoint_every": 3}
    islands = [Island(store, f"r-{i}", seed=i, **terms) for i in range(3)]

    def until_the_end(island: Island) -> None:
        with pytest.raises(Unauthorized):
            island.train(100, close=False)

    store.after_commits = 8
    together([lambda island=island: until_the_end(island) for island in islands])
    for island in islands:  # as when a process is gone: nothing of it reaches the store any more
        island.manager.shutdown(wait=True)
    store.after_commits = None
    before, head = decisions(store)[:8], commits(store)
    assert len(head) == 8
    assert checkpoint.complete(store)[0] < 8, "there is something to follow"
    back = together([lambda i=i: Island(store, f"r-{i}", seed=i + 10, **terms).train(11) for i in range(3)])
    assert decisions(store)[:8] == before
    assert commits(store)[:8] == head
    assert len(commits(store)) == 11
    assert all(torch.equal(one.originals["weight"], back[0].originals["weight"]) for one in back)
    assert all(island.manager.current_step() == 11 for island in back)


class PowerCut(MemoryStore):
    """Once so many rounds are closed, nobody reaches it any more."""

    after_commits: int | None = None

    def create(self, key: str, data: Data) -> bool:
        self._check()
        return super().create(key, data)

    def replace(self, key: str, data: Data) -> None:
        self._check()
        super().replace(key, data)

    def read(self, key: str, span: Span | None = None, into: memoryview | None = None) -> memoryview | None:
        self._check()
        return super().read(key, span, into)

    def _check(self) -> None:
        if self.after_commits is not None and keys.commit(self.after_commits - 1) in self._objects:
            raise Unauthorized("the power is out")


class SlowUpload(MemoryStore):
    """The checkpoint of a round is on its way until the next round is closed, and some heartbeats longer."""

    def __init__(self, round_number: int) -> None:
        super().__init__()
        self._round = round_number
        self._beats = 0
        self._goes_on = threading.Event()

    def create(self, key: str, data: Data) -> bool:
        if key.startswith(keys.since(keys.CHECKPOINTS, self._round)):
            self._goes_on.wait(timeout=5)
        return super().create(key, data)

    def replace(self, key: str, data: Data) -> None:
        super().replace(key, data)
        self._beats += key.startswith(keys.HEARTBEATS) and keys.commit(self._round) in self._objects
        if self._beats >= 4:
            self._goes_on.set()
