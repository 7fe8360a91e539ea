"""Builds the replica image on an engine and gives it the names it is known by. Ships nothing."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from skerry.infra.engine import EngineFailed, Recipe
from skerry.infra.image import bill, normal, source
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.infra.engine import Engine
    from skerry.infra.image.source import Variant
    from skerry.runtime.clock import Clock

NAME: Final = "skerry"
OFFLINE_BASE: Final = "skerry-base:bookworm"
PUBLIC_BASE: Final = "python:3.11-slim-bookworm"
REVISION: Final = "org.opencontainers.image.revision"
BASES: Final = Path("images/replica/bases.lock")
# What the three layers above the base hold, in order.
_LAYERS: Final = ("torch and its closure", "what else a replica needs", "skerry")
# Handed on from the caller's environment to an online build. Never a token: arguments stay in a stage's history.
_INDEXES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to build. base: None takes the offline base if the engine has it, else the public one.

    online: pip fetches inside the build, instead of wheels from here. fresh: use nothing of the engine's cache.
    bill: write the bill of materials, too.
    """

    variant: Variant = "gpu"
    base: str | None = None
    online: bool = False
    fresh: bool = False
    bill: bool = True


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image on the engine. own_bytes: of our layer alone; all_bytes: as the engine counts, with the base.

    bill: the file that lists what is in it; None if none was wanted.
    """

    reference: str
    id: str
    revision: str
    base: str
    all_bytes: int
    own_bytes: int
    bill: str | None
    seconds: float


def build(
    engine: Engine, root: Path, order: Order, environment: Mapping[str, str], clock: Clock, tell: Callable[[str], None]
) -> Built:
    """The image of the files in `root`, tagged skerry:{variant}, and its bill. Raises EngineFailed if that fails."""
    began = clock.now()
    commit = source.commit_of(root)
    base = order.base or (OFFLINE_BASE if engine.images.has(OFFLINE_BASE) else PUBLIC_BASE)
    pinned = pinned_bases(root).get(base)
    if not order.online:
        source.fetch_wheels(root, order.variant, tell)
    source.build_wheel(root)
    if not engine.images.has(from_ := f"{base}@{pinned}" if pinned else base):
        engine.images.pull(from_, None, tell)
    reference = f"{NAME}:{order.variant}"
    half = f"{NAME}:{order.variant}-unnamed"
    arguments = {
        "BASE_IMAGE": from_,
        "VARIANT": order.variant,
        "VERSION": version(root),
        "REVISION": str(commit),
        "BASE_NAME": base,
        "BASE_DIGEST": pinned or str(engine.images.inspect(from_)["Id"]),
    }
    if order.online:
        arguments |= {"ONLINE": "1"} | {name: environment[name] for name in _INDEXES if environment.get(name)}
    with source.context(root, order.variant, environment, online=order.online) as context:
        recipe = Recipe(
            context=context,
            tag=half,
            arguments=arguments,
            # An offline build that would fetch something must fail, wherever it is made.
            network=None if order.online else "none",
            fresh=order.fresh,
        )
        engine.images.build(recipe, tell)
    image = engine.images.inspect(half)
    document = normal.configuration(image, _LAYERS, commit.seconds)
    engine.images.load(normal.archive(document, reference, len(image["RootFS"]["Layers"])))
    engine.images.remove(half)
    made = engine.images.inspect(reference)
    listed = bill.write(engine, root, reference, tell) if order.bill else None
    return Built(
        reference=reference,
        id=str(made["Id"]),
        revision=str(commit),
        base=from_,
        all_bytes=int(made["Size"]),
        own_bytes=_own_bytes(engine, reference),
        bill=None if listed is None else str(listed),
        seconds=round(clock.now() - began, 1),
    )


def version(root: Path) -> str:
    """The version that a checkout is of."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def pinned_bases(root: Path) -> dict[str, str]:
    """The digests of base images that `skerry image pin` has looked up, by name."""
    path = root / BASES
    if not path.is_file():
        return {}
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: digest for name, digest in lines}  # noqa: C416  a line of more words must not pass


def pin_bases(engine: Engine, root: Path, names: list[str]) -> dict[str, str]:
    """Look up the digest of each base in its registry, and write them down. Raises EngineFailed if one has none."""
    pins = pinned_bases(root) | {name: engine.images.digest_in_registry(name) for name in names}
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(pins.items()))
    (root / BASES).write_text(f"# Written by `scripts/image pin`: what each tag named when it was looked up.\n{lines}")
    return pins


def revision_of(engine: Engine, reference: str) -> str:
    """The commit that an image says it is of. Raises Invalid if it is no image of ours, or not here."""
    try:
        labels = cast("dict[str, str]", engine.images.inspect(reference)["Config"].get("Labels") or {})
    except EngineFailed as error:
        raise Invalid(f"no image {reference} on this engine; make it with `scripts/image build`") from error
    if REVISION not in labels:
        raise Invalid(f"{reference} is not an image of skerry: it has no label {REVISION}")
    return labels[REVISION]


def _own_bytes(engine: Engine, reference: str) -> int:
    """The size of the newest layer: the history of a normal configuration has one entry for each."""
    return int(engine.images.history(reference)[0]["Size"])
