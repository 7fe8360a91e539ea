"""What marks a thing of Google's as a run's own: labels where there are labels, the end of a description elsewhere.

Labels take neither a run's URI nor an address, so a run is told by the last part of its URI and a digest of all of it,
and an address by its key, with what a label does not take written as hexadecimal. Does no I/O.
Sources: "Requirements for labels" (63 characters of a-z, 0-9, _ and -); the discovery documents for descriptions (256).
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.handler import Made

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.graph import Resource
    from skerry.infra.handler import Wanted

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
class Mark:
    """Whose something is. run: as `run_mark` tells it. key: of its address, None if that was too long to be kept."""

    run: str
    key: str | None
    generation: int

    def owner(self, run: str) -> str:
        """The run's URI if it is that one's, else what is known of another."""
        return run if self.run == run_mark(run) else f"with the label {self.run}"


def run_mark(run: str) -> str:
    """How labels name a run; no other run has it."""
    name = _NOT_IN_LABELS.sub("-", run.rstrip("/").rpartition("/")[2].lower())[:_READABLE].strip("-_")
    return f"{name}-{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def labels(wanted: Wanted) -> dict[str, str]:
    """Those of a resource: whose it is, and the user's own tags as labels can tell them."""
    own = {
        RUN_LABEL: run_mark(wanted.run),
        KEY_LABEL: _key(wanted),
        GENERATION_LABEL: str(wanted.generation),
    }
    return {_label_key(name): as_label(value) for name, value in sorted(wanted.extra.items())} | own


def as_label(text: str) -> str:
    """The nearest value that a label takes."""
    return _NOT_IN_LABELS.sub("_", text.lower())[:_LONGEST]


def of_labels(told: Mapping[str, str]) -> Mark | None:
    """The mark in these labels; None if they have none."""
    if RUN_LABEL not in told:
        return None
    return _mark(told[RUN_LABEL], told.get(KEY_LABEL, ""), told.get(GENERATION_LABEL, "0"))


def description(wanted: Wanted, before: str | None = None) -> str:
    """A description that ends in the mark. before: what it was; else it says what the resource is for."""
    mark = f"[skerry run={run_mark(wanted.run)} key={_key(wanted)} generation={wanted.generation}]"
    why = wanted.resource.why or wanted.resource.address if before is None else _MARK.sub("", before)
    room = _DESCRIPTION_BYTES - len(mark) - 1
    return f"{why.strip().encode()[:room].decode(errors='ignore')} {mark}".strip()


def of_description(told: str) -> Mark | None:
    """The mark in a description; None if it has none."""
    found = _MARK.search(told)
    return None if found is None else _mark(found["run"], found["key"], found["generation"])


def found(kind: type[Resource], mark: Mark, *, name: str, region: str, outputs: Mapping[str, str]) -> Made:
    """What is known of a resource that was found by its mark."""
    return Made(
        address=f"{kind.KIND}.{mark.key or name}",
        kind=kind.KIND,
        name=name,
        generation=mark.generation,
        region=region,
        life=kind.LIFE,
        brought=False,
        settings={},
        outputs=outputs,
        needs=(),
    )


def _mark(run: str, key: str, generation: str) -> Mark:
    plain = _ENCODED.sub(lambda one: chr(int(one[1], 16)), key).encode("latin-1").decode(errors="replace")
    return Mark(
        run=run,
        key=plain or None,
        generation=int(generation) if generation.isdigit() else 0,
    )


def _key(wanted: Wanted) -> str:
    encoded = "".join(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in wanted.resource.key.encode())
    # One that does not fit is left out; its resource is then known by its name.
    return encoded if len(encoded) <= _LONGEST else ""


def _label_key(text: str) -> str:
    plain = as_label(text)
    return plain if plain[:1].isalpha() else f"tag-{plain}"[:_LONGEST]
