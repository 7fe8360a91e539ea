"""Checkpoints: any state is restored exactly, damage is noticed, and replicas join from what is left."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict, namedtuple
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.managers import Island, assert_same_parameters, begin_run, join_at_head, wait_until_saved
from tests.kit.stores import HookedStore, damage, flip
from tests.runtime.tensors.payloads import BusyStore, filled

from skerry.runtime.checkpointing import checkpoint
from skerry.runtime.checkpointing.garbage_collector import Retention
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.records import GENESIS, CheckpointManifest
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, ITEM_BYTES, TensorSpec
from skerry.runtime.tensors.payload_encoder import byte_view

FIELDS = {
    "run": "0" * 32,
    "commit": GENESIS,
    "members": ("a", "b"),
    "batches": 7,
    "writer": "a",
    "nonce": "1" * 32,
}


def same(left: object, right: object) -> bool:
    """Returns True if both have the same types, order and bits at every depth."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and bytes(byte_view(left.detach().contiguous().view(-1))) == bytes(byte_view(right.contiguous().view(-1)))
        )
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(map(repr, left)) == list(map(repr, right)) and all(map(same, left.values(), right.values()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def trained_state() -> dict[str, object]:
    """The state of a model and its optimizer after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.randn(5, 30)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}


def saved(
    state: object, store: MemoryStore | None = None, round_number: int = 3
) -> tuple[MemoryStore, CheckpointManifest]:
    """Save a state. Returns the store and the checkpoint's manifest."""
    store = store or MemoryStore()
    assert checkpoint.save(store, round_number=round_number, state=state, **FIELDS)
    return store, manifest_of(store, round_number)


def manifest_of(store: MemoryStore, round_number: int) -> CheckpointManifest:
    manifest = checkpoint.manifest(store, round_number)
    assert manifest is not None
    return manifest


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
def test_loaded_state_has_the_same_types_order_and_bits(state: object) -> None:
    tree, tensors = checkpoint.flatten(state)
    assert same(state, checkpoint.restore(tree, tensors))
    store, manifest = saved(state)
    back = checkpoint.load(store, manifest)
    assert same(state, back)
    assert checkpoint.state_digest(back) == checkpoint.state_digest(state)


@pytest.mark.parametrize(
    "state",
    [
        trained_state(),
        [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 1e16],
        {"x": torch.tensor([math.nan, math.inf, -0.0])},
        {},
        {"step": 3},
        {"x": torch.zeros(0, 3)},
        torch.zeros(()),
        [torch.zeros(0), torch.zeros(1)],
    ],
    ids=lambda state: str(state)[:20],
)
def test_trained_not_finite_and_empty_states_are_restored(state: object) -> None:
    store, manifest = saved(state)
    assert same(state, checkpoint.load(store, manifest))
    assert (manifest.round, manifest.members, manifest.batches, manifest.writer) == (3, ("a", "b"), 7, "a")


def test_snapshot_shares_no_memory_with_the_state() -> None:
    state = trained_state()
    before, copy = deepcopy(state), checkpoint.snapshot(state)
    assert same(state, copy)
    for value in copy["model"].values():
        value.zero_()
    copy["optimizer"]["param_groups"][0]["lr"] = 9.0
    assert same(state, before)


def test_digest_ignores_only_insertion_order() -> None:
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


def test_digest_depends_on_values_not_memory_layout() -> None:
    base = torch.randn(6, 4)
    assert checkpoint.state_digest({"x": base.t()}) == checkpoint.state_digest({"x": base.t().contiguous()})


Pair = namedtuple("Pair", "x y")  # noqa: PYI024  users have such values


@pytest.mark.parametrize(
    ("value", "kind"),
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
def test_unsupported_value_is_refused_with_its_path(value: object, kind: str) -> None:
    for act in (checkpoint.flatten, checkpoint.snapshot, checkpoint.state_digest, saved):
        with pytest.raises(Invalid, match=rf"state\.entry\.0.*{kind}|{kind}.*state\.entry\.0"):
            act({"entry": [value]})


def test_state_that_contains_itself_is_refused() -> None:
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
def test_any_tree_restores_or_raises_corrupt(node: object) -> None:
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


def test_checkpoint_is_invisible_until_its_manifest_exists() -> None:
    def fail(verb: str, key: str) -> None:
        if verb == "create" and key.endswith("manifest.json"):
            raise KeyboardInterrupt

    store = HookedStore(fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(store, round_number=1, state=trained_state(), **FIELDS)
    assert len(store.list(keys.CHECKPOINTS)) == 1, "only the part exists"
    assert checkpoint.complete(store) == []


def test_second_save_of_a_round_returns_false() -> None:
    store, manifest = saved({"x": torch.zeros(3)})
    assert not checkpoint.save(store, round_number=3, state={"x": torch.ones(3)}, **FIELDS)
    assert checkpoint.manifest(store, 3) == manifest
    assert same({"x": torch.zeros(3)}, checkpoint.load(store, manifest))


def test_complete_checkpoints_are_listed_newest_first() -> None:
    store = MemoryStore()
    assert checkpoint.complete(store) == []
    for number in (0, 2, 10):
        saved({"round": number, "x": torch.full((2,), number)}, store, number)
    store.create(keys.checkpoint_part(11, "0" * 32), b"of a dead writer")
    store.create("checkpoints/notes.txt", b"a note")
    assert checkpoint.complete(store) == [10, 2, 0]
    assert checkpoint.manifest(store, 11) is None
    assert checkpoint.load(store, manifest_of(store, 2))["round"] == 2


def test_manifest_under_another_rounds_key_is_corrupt() -> None:
    store, manifest = saved({"x": 1})
    store.create(keys.checkpoint_manifest(4), manifest.to_bytes())
    with pytest.raises(Corrupt, match=keys.checkpoint_manifest(4)):
        checkpoint.manifest(store, 4)


@pytest.mark.parametrize("streams", [1, 4])
def test_large_states_load_in_pieces_across_parts(streams: int) -> None:
    state = {"a": torch.arange(3 << 20), "b": torch.arange(40 << 20, dtype=torch.uint8), "c": torch.tensor(1.5)}
    store = BusyStore(streams=streams, piece_bytes=4 * BLOCK_BYTES)
    store, manifest = saved(state, store)
    assert len(manifest.parts) == 2
    assert same(state, checkpoint.load(store, manifest))


@pytest.mark.parametrize("fault", ["header", "body", "short", "absent"])
def test_damage_raises_corrupt_with_the_key(fault: str) -> None:
    store, manifest = saved({"x": torch.zeros(1000)})
    key = keys.checkpoint_part(3, manifest.parts[0].digest)
    match fault:
        case "absent":
            store.delete(key)
        case "short":
            store.replace(key, bytes(store.read(key) or b"")[:-1])
        case _:
            damage(store, key, 100 if fault == "header" else -1)
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
def test_manifest_that_contradicts_its_parts_is_corrupt(change: dict[str, object]) -> None:
    store, manifest = saved(torch.zeros(1000))
    with pytest.raises(Corrupt, match=f"key={keys.checkpoint_manifest(3)}"):
        checkpoint.load(store, manifest.model_copy(update=change))


def test_flipped_bit_of_a_manifest_is_never_read() -> None:
    store, manifest = saved({"x": torch.zeros(10), "lr": 0.1, "step": 7})
    key = keys.checkpoint_manifest(3)
    data = bytes(store.read(key) or b"")
    for position in range(len(data)):
        store.replace(key, flip(data, position))
        with pytest.raises(Corrupt, match=key):
            checkpoint.manifest(store, 3)
    unsealed = manifest.model_copy(update={"seal": None})
    store.replace(key, unsealed.to_bytes())  # as of an older version
    assert checkpoint.manifest(store, 3) == unsealed


def test_part_of_another_checkpoint_is_refused() -> None:
    store, first = saved([torch.zeros(20 << 20)])
    _, second = saved([torch.ones(20 << 20)], store, 4)
    for part in first.parts:
        body = store.read(keys.checkpoint_part(3, part.digest))
        assert body is not None
        store.create(keys.checkpoint_part(4, part.digest), body)
    mixed = second.model_copy(update={"parts": (second.parts[0], first.parts[0])})
    with pytest.raises(Corrupt, match="key=checkpoints/00000004/"):
        checkpoint.load(store, mixed)


def test_too_large_state_is_refused_before_anything_is_stored() -> None:
    store = MemoryStore()
    with pytest.raises(Invalid, match="too many entries"):
        checkpoint.save(store, round_number=0, state={f"{i:0100d}": i for i in range(50_000)}, **FIELDS)
    assert not store.list("")


# Real managers.


def rounds_to_reach(store: MemoryStore, other: Island) -> int:
    """A new replica reaches the bits of `other` before its first inner step. Returns the rounds that it followed."""
    late, followed = join_at_head(store)
    assert_same_parameters([other, late])
    assert all(torch.equal(tensor, late.originals[name]) for name, tensor in late.model.named_parameters())
    return followed


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_join_survives_damage_to_any_recent_checkpoint(damaged: int) -> None:
    store = MemoryStore(clock=SystemClock())
    survivor = Island(store, "a", minimum=1, checkpoint_every=2, retention=Retention(last=3, age_s=0.0))
    for number in range(1, 12):
        survivor.train(number, close=False)
        wait_until_saved(survivor)
    assert checkpoint.complete(store) == [10, 8, 6, 0]
    assert {keys.round_of(entry.key) for entry in store.list(keys.PAYLOADS)} == set(range(6, 11))
    for number in checkpoint.complete(store)[:damaged]:
        damage(store, keys.checkpoint_part(number, manifest_of(store, number).parts[-1].digest))
    assert rounds_to_reach(store, survivor) == 1 + 2 * damaged


@pytest.mark.parametrize("deleted", ["manifest", "part"])
def test_incomplete_newest_checkpoint_is_skipped(deleted: str) -> None:
    store = MemoryStore()
    survivor = Island(store, "a", minimum=1).train(4)
    newest, older = checkpoint.complete(store)[:2]
    part = keys.checkpoint_part(newest, manifest_of(store, newest).parts[0].digest)
    store.delete(keys.checkpoint_manifest(newest) if deleted == "manifest" else part)
    assert rounds_to_reach(store, survivor) == 4 - older


def test_checkpoints_collected_during_a_load_are_listed_again() -> None:
    """While the first part of a checkpoint is read, the run continues and the checkpoint is deleted."""
    is_loading = False

    def collect_once(verb: str, key: str) -> None:
        nonlocal is_loading
        if is_loading and verb == "read" and key.startswith(keys.CHECKPOINTS) and not key.endswith(keys.MANIFEST):
            is_loading = False
            survivor.train(6)
            for number in checkpoint.complete(store)[1:]:
                for entry in store.list(keys.start_after(keys.CHECKPOINTS, number)):
                    store.delete(entry.key)

    store = HookedStore(collect_once)
    survivor = Island(store, "a", minimum=1, grace_s=0.1).train(3, close=False)
    is_loading = True
    followed = rounds_to_reach(store, survivor)
    assert not is_loading
    # A checkpoint that is due during another upload is skipped, so the newest may be of an earlier round.
    assert followed == 6 - checkpoint.complete(store)[0]


def test_last_checkpoint_waits_for_the_one_being_written() -> None:
    """The upload of round 3's ends after the next round is closed and four more heartbeats."""
    heartbeats: list[str] = []
    resumed = threading.Event()

    def delay_upload(verb: str, key: str) -> None:
        if verb == "create" and key.startswith(keys.start_after(keys.CHECKPOINTS, 3)):
            resumed.wait(300)
        elif verb == "replace" and MemoryStore.read(store, keys.commit(3)) is not None:
            heartbeats.append(key)
            if len(heartbeats) >= 4:
                resumed.set()

    store = HookedStore(delay_upload)
    begin_run(store, "a", rounds=4)
    Island(store, "a", minimum=1, grace_s=0.1, checkpoint_every=3).train(4)
    assert checkpoint.complete(store) == [4, 3, 0]
