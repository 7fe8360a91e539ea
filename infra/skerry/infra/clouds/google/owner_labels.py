"""Labels that name a resource's run, key and generation; a resource without labels has them in its description.

Labels take neither a run's URI nor an address. A run is named by the last part of its URI and a digest of all of it, an
address by its key, with characters that labels do not take as hexadecimal. Does no I/O.
Sources: "Requirements for labels" (63 characters of a-z, 0-9, _ and -); the discovery documents for descriptions (256).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.handler_helpers import tagged_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import Desired, StateRecord

RUN_LABEL: Final = "skerry-run"
KEY_LABEL: Final = "skerry-key"
GENERATION_LABEL: Final = "skerry-generation"

_LONGEST: Final = 63
_READABLE: Final = 30
_NOT_IN_LABELS: Final = re.compile(r"[^a-z0-9_-]")
_ENCODED: Final = re.compile(r"_([0-9a-f]{2})")
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_DESCRIPTION_BYTES: Final = 256
_MARK: Final = re.compile(r"\[skerry run=(?P<run>\S+) key=(?P<key>\S*) generation=(?P<generation>\d+)\]")


@dataclass(frozen=True, kw_only=True)
class OwnerLabel:
    """The labels of a resource. run: as `run_mark`. key: of its address; None if it was too long for a label."""

    run: str
    key: str | None
    generation: int

    def owner(self, run: str) -> str:
        """The given run's URI if the resource is its own, else a description of the other run."""
        return run if self.run == run_mark(run) else f"with the label {self.run}"


def run_mark(run: str) -> str:
    """The name of a run in labels, unique to it."""
    name = _NOT_IN_LABELS.sub("-", run.rstrip("/").rpartition("/")[2].lower())[:_READABLE].strip("-_")
    return f"{name}-{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def labels(desired: Desired) -> dict[str, str]:
    """The labels of a resource: its owner, and the user's own tags in the characters of labels."""
    own = {
        RUN_LABEL: run_mark(desired.run),
        KEY_LABEL: _key(desired),
        GENERATION_LABEL: str(desired.generation),
    }
    return {_label_key(name): as_label(value) for name, value in sorted(desired.extra.items())} | own


def as_label(text: str) -> str:
    """The text in the characters that labels take."""
    return _NOT_IN_LABELS.sub("_", text.lower())[:_LONGEST]


def of_labels(labels: Mapping[str, str]) -> OwnerLabel | None:
    """The owner in these labels; None without one."""
    if RUN_LABEL not in labels:
        return None
    return _mark(labels[RUN_LABEL], labels.get(KEY_LABEL, ""), labels.get(GENERATION_LABEL, "0"))


def description(desired: Desired, before: str | None = None) -> str:
    """A description that ends in the owner. before: the existing description; by default the resource's purpose."""
    mark = f"[skerry run={run_mark(desired.run)} key={_key(desired)} generation={desired.generation}]"
    why = desired.resource.why or desired.resource.address if before is None else _MARK.sub("", before)
    room = _DESCRIPTION_BYTES - len(mark) - 1
    return f"{why.strip().encode()[:room].decode(errors='ignore')} {mark}".strip()


def of_description(text: str) -> OwnerLabel | None:
    """The owner in a description; None without one."""
    match = _MARK.search(text)
    return None if match is None else _mark(match["run"], match["key"], match["generation"])


def owned_record(
    kind: type[Resource], mark: OwnerLabel, *, name: str, region: str, outputs: Mapping[str, str]
) -> StateRecord:
    """The state record of a resource that was found by its labels."""
    address, generation = f"{kind.KIND}.{mark.key or name}", str(mark.generation)
    return tagged_record(kind, address=address, name=name, generation=generation, region=region, outputs=outputs)


def _mark(run: str, key: str, generation: str) -> OwnerLabel:
    plain = _ENCODED.sub(lambda match: chr(int(match[1], 16)), key).encode("latin-1").decode(errors="replace")
    return OwnerLabel(
        run=run,
        key=plain or None,
        generation=int(generation) if generation.isdigit() else 0,
    )


def _key(desired: Desired) -> str:
    encoded = "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in desired.resource.key.encode())
    # A key that is too long is omitted; its resource is then identified by its name.
    return encoded if len(encoded) <= _LONGEST else ""


def _label_key(text: str) -> str:
    plain = as_label(text)
    return plain if plain[:1].isalpha() else f"tag-{plain}"[:_LONGEST]
