"""Saves state to the store and loads it, without pickle: a JSON skeleton plus the tensors as payload parts.

A checkpoint is complete or invisible: its parts are created first, its manifest last. Loaded values have the same bits
and types as the saved ones; tensors are plain (no Parameter) and in CPU memory. The skeleton:

    null, true, 12, "text"     themselves
    {"f": "0x1.8p+1"}          float, by its hexadecimal text: exact, inf and nan too
    {"t": 3}                   tensor number 3
    {"l": [...]}  {"u": [...]} list, tuple
    {"d": [[key, value]...]}   dict in its order; {"o": ...} OrderedDict. Keys: str, int, bool, None
"""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections import OrderedDict
from contextlib import closing
from typing import TYPE_CHECKING, Final, TypeAlias, cast

import torch
import xxhash

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log import keys
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES
from skerry.runtime.log.records import CheckpointManifest, Shard
from skerry.runtime.ranks.interface import SingleRank, combine_digests
from skerry.runtime.tensors.byte_layout import BLOCK_BYTES, MAX_NAME_BYTES, Index
from skerry.runtime.tensors.codecs.elements import TORCH_DTYPES
from skerry.runtime.tensors.host_copies import copies_on_host, on_host
from skerry.runtime.tensors.payload_encoder import Encoder, byte_view, flat_view, is_plain, spec_of
from skerry.runtime.tensors.payload_format import index_from_headers
from skerry.runtime.tensors.payload_reader import Reader, RemotePayload, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from skerry.runtime.ranks.interface import Channel
    from skerry.runtime.store.interface import Store
    from skerry.runtime.tensors.payload_encoder import Encoded

State: TypeAlias = object
"""Nested dict, OrderedDict, list and tuple of tensors, int, float, bool, str and None; anything else is Invalid."""

MAX_DEPTH: Final = 64
"""Real states are 6 deep; a deeper tree contains itself, or is hostile."""
MAX_INT_BITS: Final = 4096
"""Python refuses to read longer numbers from text (its guard against quadratic time)."""

_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"


def flatten(state: State) -> tuple[str, list[torch.Tensor]]:
    """Returns the JSON skeleton of `state`, and its tensors (not copies) in the order of their numbers.

    Raises Invalid, naming the path, for a type that State does not allow.
    """
    skeleton = _Skeleton(sort=False)
    return _text(skeleton.node(state, "state", 0)), skeleton.tensors


def restore(tree: str, tensors: Sequence[torch.Tensor]) -> State:
    """Rebuilds a state from its skeleton and tensors. Raises Corrupt unless `flatten` could have made `tree`."""
    try:
        parsed = cast("_Json", json.loads(tree, parse_constant=_no_constant))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"tree of a state does not parse: {error}") from error
    builder = _Builder(tensors)
    state = builder.value(parsed, "state", 0)
    if builder.unused:
        raise Corrupt(f"tree of a state does not use its tensors: first={min(builder.unused)} of {len(tensors)}")
    return state


def snapshot(state: State) -> State:
    """Copies `state` to CPU memory, so that training may continue. Raises the errors of `flatten`."""
    tree, tensors = flatten(state)
    return restore(tree, copies_on_host([tensor.detach() for tensor in tensors]))


def state_digest(state: State) -> str:
    """Returns the xxh3-128 of the state's values, types, shapes and bytes; the order inside dicts does not matter."""
    skeleton = _Skeleton(sort=True)
    digest = xxhash.xxh3_128(_text(skeleton.node(state, "state", 0)).encode())
    for path, tensor in zip(skeleton.paths, on_host(skeleton.tensors), strict=True):
        spec = spec_of(path, tensor)
        digest.update(_text([spec.dtype, list(spec.shape)]).encode())
        digest.update(byte_view(_in_order(tensor)))
    return digest.hexdigest()


def save(
    store: Store,
    *,
    run: str,
    round_number: int,
    commit: str,
    members: Sequence[str],
    batches: int,
    writer: str,
    nonce: str,
    state: State,
    folder: str = keys.CHECKPOINTS,
    healed: bool = False,
    before_manifest: Callable[[], None] | None = None,
    ranks: Channel | None = None,
) -> bool:
    """Stores `state` as the checkpoint of `round_number` closed rounds. Returns False if its manifest exists already.

    Parts first, manifest last; a repeat after a crash writes the same parts again, at no cost to readers.
    folder: key prefix, by default that of shared checkpoints. healed: see CheckpointManifest. before_manifest: an
    error that it raises leaves the checkpoint invisible. ranks: each saves its shard; the manifest follows when all
    have.
    Raises Invalid, naming the path, if the state cannot be stored, and the store's errors.
    """

    def manifest_of(shards: Sequence[Shard]) -> bytes:
        manifest = CheckpointManifest(
            run=run,
            round=round_number,
            commit=commit,
            members=tuple(members),
            batches=batches,
            index=combine_digests([shard.index for shard in shards]),
            parts=tuple(part for shard in shards for part in shard.parts),
            tree=shards[0].tree if len(shards) == 1 else "",
            shards=tuple(shards) if len(shards) > 1 else (),
            writer=writer,
            nonce=nonce,
            healed=healed or None,
        )
        manifest = manifest.sealed().to_bytes()
        if len(manifest) > MAX_RECORD_BYTES:
            raise Invalid(
                f"state has too many entries for one checkpoint: bytes={len(manifest)} limit={MAX_RECORD_BYTES} "
                f"ranks={len(shards)}; remove what is not needed to continue from the state"
            )
        return manifest

    def put() -> Shard:
        tree, index, encoded = _encoded(state)
        shard = Shard(index=index.digest, parts=encoded.parts, tree=tree)
        manifest_of([shard])  # before anything is written
        for number, part in enumerate(encoded.parts):
            store.create(keys.checkpoint_part(round_number, part.digest, folder), encoded.data(number))
        return shard

    def publish(shards: Sequence[Shard]) -> bool:
        manifest = manifest_of(shards)
        if before_manifest is not None:
            before_manifest()
        return store.create(keys.checkpoint_manifest(round_number, folder), manifest)

    return (ranks or SingleRank()).reduce_on_rank0("save a checkpoint", put, publish)


def complete(store: Store, folder: str = keys.CHECKPOINTS) -> list[int]:
    """Returns the rounds with a complete checkpoint, newest first. Costs one listing."""
    numbers = (_manifest_round(entry.key, folder) for entry in reversed(store.list(folder)))
    return [number for number in numbers if number is not None]


def manifest(store: Store, round_number: int, folder: str = keys.CHECKPOINTS) -> CheckpointManifest | None:
    """Reads the manifest of one checkpoint; None if it does not exist. Raises Corrupt, naming the key, if damaged."""
    key = keys.checkpoint_manifest(round_number, folder)
    data = store.read(key)
    if data is None:
        return None
    parsed = CheckpointManifest.parse(data, key)
    if parsed.round != round_number:
        raise Corrupt(f"manifest under another round's key: key={key} round={parsed.round}")
    return parsed


def load(store: Store, manifest: CheckpointManifest, folder: str = keys.CHECKPOINTS, rank: int = 0) -> State:
    """Loads the state of a checkpoint into CPU memory, piece by piece; every block is verified.

    rank: selects the shard if several ranks saved it.
    Raises Corrupt, naming key and field, if anything is damaged or missing, and the store's errors.
    """
    key = keys.checkpoint_manifest(manifest.round, folder)
    shard = manifest.shards[rank] if manifest.shards else manifest
    where = f"checkpoint={manifest.round}"
    remotes = [
        RemotePayload(keys.checkpoint_part(manifest.round, part.digest, folder), part, None, number, where)
        for number, part in enumerate(shard.parts)
    ]
    reader = Reader()
    try:
        # Memory is allocated only after all headers agree on the sizes.
        headers = [reader.header(store, remote) for remote in remotes]
        index = index_from_headers(headers, [remote.key for remote in remotes])
        if index.digest != shard.index or index.codec != "none":
            raise Corrupt(
                f"parts differ from the manifest: key={key} index={shard.index} found={index.digest} "
                f"codec={index.codec}"
            )
        tensors = _read(store, reader, remotes, index)
    finally:
        reader.close()
    try:
        return restore(shard.tree, tensors)
    except Corrupt as error:
        raise Corrupt(f"manifest is damaged: key={key} tree: {error}") from error


def _encoded(state: State) -> tuple[str, Index, Encoded]:
    """Returns the tree of a state, the index of its tensors, and their bytes."""
    skeleton = _Skeleton(sort=False)
    tree = _text(skeleton.node(state, "state", 0))
    specs = [
        spec_of(_name(number, path), tensor, "keep")
        for number, (path, tensor) in enumerate(zip(skeleton.paths, skeleton.tensors, strict=True))
    ]
    index = Index(tuple(specs))
    tensors = [_in_order(tensor).view(tensor.shape) for tensor in on_host(skeleton.tensors)]
    return tree, index, Encoder(finite=False).encode(tensors, index)


class _Skeleton:
    """Turns a state into JSON nodes, and collects its tensors and their paths. sort: dicts by key, for digests."""

    def __init__(self, *, sort: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self._sort = sort

    def node(self, value: object, path: str, depth: int) -> _Json:
        """Returns the node of one value."""
        if depth > MAX_DEPTH:
            raise Invalid(f"state is nested too deeply: path={path[:200]} depth={depth}; does it contain itself?")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)  # exact: a subclass would be loaded as another type
        if kind in {list, tuple}:
            items = cast("Sequence[object]", value)
            nodes = [self.node(item, f"{path}.{position}", depth + 1) for position, item in enumerate(items)]
            return {"l" if kind is list else "u": nodes}
        if kind in {dict, OrderedDict}:
            return {"d" if kind is dict else "o": self._pairs(cast("dict[object, object]", value), path, depth)}
        if kind is float:
            return {"f": cast("float", value).hex()}
        return self._plain(value, path)

    def _tensor(self, value: torch.Tensor, path: str) -> _Json:
        spec_of(path, value)  # reports a dtype that cannot be stored, with its path
        if value.layout != torch.strided:
            raise Invalid(f"state cannot be stored: path={path[:200]} layout={value.layout}; use dense tensors")
        self.tensors.append(value)
        self.paths.append(path)
        return {"t": len(self.tensors) - 1}

    def _pairs(self, items: dict[object, object], path: str, depth: int) -> list[_Json]:
        named: list[tuple[_Json, str, object]] = []
        for key, value in items.items():
            if type(key) is float:
                raise Invalid(f"key cannot be stored: path={path} key={key!r} type=float; use str, int, bool or None")
            named.append((self._plain(key, f"{path} key"), f"{path}.{key}", value))
        if self._sort:
            named.sort(key=lambda entry: _text(entry[0]))
        return [[key, self.node(value, inside, depth + 1)] for key, inside, value in named]

    def _plain(self, value: object, path: str) -> _Json:
        if value is None or type(value) in {bool, str}:
            return cast("_Json", value)
        if type(value) is int and value.bit_length() <= MAX_INT_BITS:
            return value
        raise Invalid(
            f"state cannot be stored: path={path[:200]} type={type(value).__module__}.{type(value).__qualname__}; "
            "use tensors, int, float, bool, str, None, and dict, list, tuple of them"
        )


class _Builder:
    """Turns JSON nodes back into a state. Everything that `_Skeleton` would not write is Corrupt."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.unused = set(range(len(tensors)))
        self._tensors = tensors

    def value(self, node: _Json, path: str, depth: int) -> object:
        """Returns the value of one node."""
        if depth > MAX_DEPTH:
            raise Corrupt(f"tree of a state is nested too deeply: path={path[:200]} depth={depth}")
        if not isinstance(node, dict):
            return self._plain(node, path)
        if len(node) != 1:
            raise Corrupt(f"bad node: path={path[:200]} tags={sorted(node)[:3]}")
        ((tag, inner),) = node.items()
        match tag, inner:
            case "t", int():
                return self._tensor(inner, path)
            case "f", str():
                return _float(inner, path)
            case (("l" | "u"), list()):
                items = [self.value(item, f"{path}.{position}", depth + 1) for position, item in enumerate(inner)]
                return items if tag == "l" else tuple(items)
            case (("d" | "o"), list()):
                pairs = self._pairs(inner, path, depth)
                return pairs if tag == "d" else OrderedDict(pairs)
            case _:
                raise Corrupt(f"bad node: path={path[:200]} tag={tag[:16]!r} holding={type(inner).__name__}")

    def _pairs(self, nodes: list[_Json], path: str, depth: int) -> dict[object, object]:
        pairs: dict[object, object] = {}
        for position, pair in enumerate(nodes):
            if not isinstance(pair, list) or len(pair) != 2:
                raise Corrupt(f"bad pair: path={path[:200]} position={position}")
            key = self._plain(pair[0], f"{path} key")
            if key in pairs:
                raise Corrupt(f"duplicate key: path={path[:200]} key={str(key)[:64]!r}")
            pairs[key] = self.value(pair[1], f"{path}.{key}", depth + 1)
        return pairs

    def _tensor(self, number: int, path: str) -> torch.Tensor:
        if number not in self.unused or isinstance(number, bool):
            raise Corrupt(f"bad tensor number: path={path[:200]} tensor={number} of {len(self._tensors)}")
        self.unused.remove(number)
        return self._tensors[number]

    @staticmethod
    def _plain(node: _Json, path: str) -> bool | int | str | None:
        if node is None or isinstance(node, (bool, int, str)):
            return node
        raise Corrupt(f"bad value: path={path[:200]} type={type(node).__name__}")


def _read(store: Store, reader: Reader, remotes: Sequence[RemotePayload], index: Index) -> list[torch.Tensor]:
    tensors = [torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for spec in index.tensors]
    views = [byte_view(flat_view(tensor)) for tensor in tensors]
    chunk = max(1, store.profile.piece_bytes // BLOCK_BYTES) * BLOCK_BYTES
    requests = [
        Request(remote, start, min(start + chunk, layout.body_bytes))
        for remote, layout in zip(remotes, index.parts, strict=True)
        for start in range(0, layout.body_bytes, chunk)
    ]
    with closing(reader.read(store, requests)) as bodies:
        for request, body in zip(requests, bodies, strict=True):
            layout = index.parts[request.remote.number]
            for place in layout.between(request.start, request.stop, index.item_bytes):
                size = index.item_bytes[place.tensor]
                views[place.tensor][place.first * size : (place.first + place.count) * size] = body[
                    place.begin : place.end
                ]
    return tensors


def _in_order(host: torch.Tensor) -> torch.Tensor:
    """Returns the [N] elements of a CPU tensor in order, without a copy where possible."""
    return flat_view(host) if is_plain(host) else host.detach().resolve_neg().reshape(-1)


def _name(number: int, path: str) -> str:
    """Returns a printable name, unique by its number."""
    text = f"{number}:{path}".encode("ascii", "replace").decode()
    return "".join(character if character.isprintable() else "?" for character in text)[:MAX_NAME_BYTES]


def _float(text: str, path: str) -> float:
    try:
        return float.fromhex(text)
    except (ValueError, OverflowError) as error:
        raise Corrupt(f"bad float: path={path[:200]} text={text[:32]!r}") from error


def _manifest_round(key: str, folder: str) -> int | None:
    """Returns the round of a manifest's key; None for a part or a foreign object."""
    try:
        round_number = keys.round_of(key)
    except Invalid:
        return None
    return round_number if key == keys.checkpoint_manifest(round_number, folder) else None


def _text(node: _Json) -> str:
    return json.dumps(node, separators=(",", ":"), allow_nan=False)


def _no_constant(text: str) -> None:
    raise ValueError(f"unsupported number: {text}")
