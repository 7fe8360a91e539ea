"""The model of simulated replicas: tensors that record which inner steps are in them.

Element n of the first tensor counts inner step n of a slot; the others are random, so that a wrong byte,
weight or order of summation shows. The second half reads payloads back from raw bytes and averages them, knowing
nothing of the runtime's codec but its format: it is what the runtime is held against.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from functools import cache, reduce
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from unittest.mock import patch

import numpy as np
import torch
import xxhash

from skerry.runtime.checkpointing.shared_state import FRAGMENT
from skerry.runtime.tensors import byte_layout
from skerry.runtime.tensors.byte_layout import Index, TensorSpec
from skerry.runtime.tensors.tensors_sent_together import TensorBatch

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    import numpy.typing as npt

    Floats: TypeAlias = npt.NDArray[np.float32]

Document: TypeAlias = "dict[str, Any]"
Shared: TypeAlias = "tuple[str, ...]"
"""The shared state: for each fragment, a text that is a digest of the averages of its closed rounds, in order."""

STEPS: Final = 512
"""More than any slot of a simulated run has taken."""
STATE_BYTES: Final = 64
"""Length of a fragment's text in the shared state."""
SIZES: Final = (STEPS, 4, 1)
"""Elements of each tensor."""
TENSORS_PER_PART: Final = {1: 3, 2: 2, 3: 1}
"""By the number of parts of a payload."""
_PREAMBLE: Final = struct.Struct("<8sQQ")
_ALIGNMENT: Final = 64


@cache
def index_of(parts: int, names: str = "tensor") -> Index:
    """The tensors of a run whose payloads have so many parts: real ones have several from 64 MiB on."""
    specs = tuple(TensorSpec(f"{names}-{number}-of-{parts}", "float32", (size,)) for number, size in enumerate(SIZES))
    index = Index(tensors=specs)
    with patch.object(byte_layout, "MAX_SLICES", TENSORS_PER_PART[parts]):
        assert len(index.parts) == parts, "laid out once, and kept in the index"
    return index


class Batch(TensorBatch):
    """The tensors of one exchange, with the simulation's own index, for its layout."""

    def __init__(self, index: Index) -> None:
        super().__init__("none", index.layout)
        self._index = index

    def index(self) -> Index:
        """The simulation's own."""
        return self._index


class Model:
    """One incarnation's progress in each fragment, or bucket of gradients, since its last exchange."""

    def __init__(self, *, parts: int, fragments: int, draw: random.Random) -> None:
        self.index = index_of(parts)
        self._random = draw
        self._flat = [torch.zeros(sum(SIZES)) for _ in range(fragments)]

    def step(self, number: int) -> None:
        """Inner step of this number; every fragment is trained."""
        noise = torch.tensor([self._random.uniform(-1.0, 1.0) for _ in SIZES[1:]])
        for flat in self._flat:
            flat[number] += 1.0
            flat[STEPS : STEPS + len(noise)] += noise

    def take(self, fragment: int) -> torch.Tensor:
        """Takes what was trained of a fragment. It is then as if it had never been trained."""
        flat, self._flat[fragment] = self._flat[fragment], torch.zeros(sum(SIZES))
        return flat

    def copies(self) -> list[torch.Tensor]:
        """Copies what was trained of each fragment."""
        return [flat.clone() for flat in self._flat]

    def put_back(self, fragment: int, flat: torch.Tensor) -> None:
        """As if this had been trained of a fragment."""
        self._flat[fragment] = flat.clone()

    def forget(self) -> None:
        """Take the shared parameters for all fragments."""
        for fragment in range(len(self._flat)):
            self.take(fragment)

    def key(self) -> tuple[bytes, ...]:
        """All that is in it, for comparing."""
        return tuple(flat.numpy().tobytes() for flat in self._flat)


# From raw bytes.


def header_bytes(body: bytes) -> int:
    """Returns the length that the header gives; 0 if there is no header."""
    if len(body) < _PREAMBLE.size:
        return 0
    _, _, length = _PREAMBLE.unpack_from(body)
    return -(-(_PREAMBLE.size + length) // _ALIGNMENT) * _ALIGNMENT


def fault_of(body: bytes, part: Document, index: str) -> str | None:
    """Names the fault of a payload object that a record describes; None if it has none."""
    if len(body) != part["total_bytes"]:
        return "length"
    head = body[: part["header_bytes"]]
    if xxhash.xxh3_128_hexdigest(head) != part["digest"]:
        return "header"
    magic, version, length = _PREAMBLE.unpack_from(head)
    header = json.loads(head[_PREAMBLE.size : _PREAMBLE.size + length])
    if (magic, version, header["index"]) != (b"skerry\r\n", 1, index):
        return "kind"
    # All bodies here are shorter than one block.
    return None if header["blocks"] == [xxhash.xxh3_128_hexdigest(body[len(head) :])] else "body"


def floats_of(bodies: Sequence[bytes], parts: Sequence[Document]) -> Floats:
    """The elements of all tensors of a sound contribution."""
    sizes = iter(SIZES)
    tensors: list[Floats] = []
    for body, part in zip(bodies, parts, strict=True):
        offset = part["header_bytes"]
        for _ in range(TENSORS_PER_PART[len(parts)]):
            if (size := next(sizes, None)) is None:
                break
            tensors.append(np.frombuffer(body, dtype="<f4", count=size, offset=offset))
            offset += -(-4 * size // _ALIGNMENT) * _ALIGNMENT
    return np.concatenate(tensors)


def steps_in(content: Floats) -> frozenset[int]:
    """The inner steps in the elements of a fragment."""
    return frozenset[int](np.flatnonzero(content[:STEPS]).tolist())


def averaged(weights: Sequence[float], contributions: Sequence[Floats]) -> bytes:
    """The weighted mean in float32, summed in the order given, each product rounded."""
    total = contributions[0] * np.float32(weights[0])
    for weight, contribution in zip(weights[1:], contributions[1:], strict=True):
        total = total + contribution * np.float32(weight)
    return (total / np.float32(math.fsum(weights))).tobytes()


def state_of(shared: Shared, *, has_fragments: bool = True) -> dict[str, object]:
    """Returns the shared state by key: one entry for each fragment as DiLoCo registers it, or that of a script."""
    prefix = FRAGMENT if has_fragments else "model "
    return {
        f"{prefix}{fragment}": {"shared": torch.tensor(list(text.encode()), dtype=torch.uint8)}
        for fragment, text in enumerate(shared)
    }


def shared_in(body: bytes, part: Document) -> Shared:
    """Returns the shared state in a checkpoint's part: for each fragment, one tensor of 64 bytes."""
    data = body[part["header_bytes"] :]
    return tuple(data[start : start + STATE_BYTES].decode() for start in range(0, len(data), STATE_BYTES))


def forged(body: bytes, part: Document) -> bytes:
    """Returns the same part with another state of the last fragment, right by its own digests."""
    head, data = body[: part["header_bytes"]], body[part["header_bytes"] :]
    other = data[:-STATE_BYTES] + fold(data[-STATE_BYTES:].decode(), b"forged").encode()
    before, after = (xxhash.xxh3_128_hexdigest(content).encode() for content in (data, other))
    return head.replace(before, after) + other


def fold(text: str, average: bytes) -> str:
    """Returns a fragment's text after a round: a digest of the text before it and of the round's average."""
    return hashlib.sha256(text.encode() + average).hexdigest()


def folded(shared: Shared, round_number: int, *averages: bytes, outer: bytes = b"") -> Shared:
    """Returns the shared state after a round with these exchanges, which changes its fragment alone.

    outer: the outer step, if its settings are not run.json's.
    """
    changed = round_number % len(shared)
    parts = (*averages, outer) if outer else averages
    return tuple(reduce(fold, parts, text) if number == changed else text for number, text in enumerate(shared))
