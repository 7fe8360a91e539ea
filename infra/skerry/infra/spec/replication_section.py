"""The section `replication` of a spec: further places that can carry a run on, and the checks of each line.

A line that protects against nothing new is a problem: it costs money and gives a false sense of safety. The checks read
the document; only `same_disk` looks at this machine, for folders.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from skerry.infra.spec import store_uri, units
from skerry.infra.spec.section import Section, or_default
from skerry.infra.spec.target_kinds import TargetKinds, kinds_of_groups
from skerry.runtime.log import keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

REPLICATION: Final = "replication"
PEERS: Final = "peers"
"""The place of copies at other ranks of the same replica."""
EVERY_ROUND: Final = "every round"
MOST_USD: Final = 10_000_000

_PEERS_EVERY: Final = timedelta(seconds=30)
_OF_PEERS: Final = ("copies", "apart", "memory")
_OF_STORES: Final = ("log", "private", "max_usd", "region", "byo")
_REGIONS: Final = {"aws": "us-west-2", "google": "europe-west4"}

Every: TypeAlias = int | timedelta


def _as_place(text: str) -> str:
    return text if text == PEERS else store_uri.as_store(text)


def _parse_every(value: object) -> Every:
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= keys.MAX_ROUND:
            raise ValueError(f"must be 1 to {keys.MAX_ROUND} rounds")
        return value
    try:
        time = units.parse_duration(value)
    except ValueError as error:
        raise ValueError(
            f"must be a number of rounds for a store, or a time with its unit for peers: {error}"
        ) from None
    if time < timedelta(seconds=1):
        raise ValueError("must be at least 1s")
    return time


class OwnBucket(Section):
    """Your own resources that hold a mirror: used and checked, never changed or deleted."""

    bucket: Annotated[bool, Field(examples=[True])] = False
    """The mirror's bucket is yours, perhaps of another account: it is not created, and `destroy` deletes only the copy
    in it."""


class FurtherPlace(Section):
    """A further place that can carry the run on when its store, or a part of a replica, is lost."""

    to: Annotated[str, AfterValidator(_as_place), Field(examples=["gs://acme-dr/runs"])]
    """peers: the other ranks of each replica; or a store, s3://, gs:// or file://, in which a mirror of the run is
    kept. A relative file:// path starts at the spec's folder."""
    every: (
        Annotated[
            Any,
            BeforeValidator(_parse_every),
            PlainSerializer(lambda value: units.format_duration(value) if isinstance(value, timedelta) else value),
            WithJsonSchema(
                {
                    "anyOf": [
                        {"type": "integer", "minimum": 1, "maximum": keys.MAX_ROUND},
                        {"type": "string", "pattern": units.DURATION_PATTERN},
                    ]
                }
            ),
            Field(examples=[10]),
        ]
        | None
    ) = None
    """Of a store: rounds between two copied checkpoints, 1 by default. Of peers: the time between two copies of the
    current round, 30s by default."""
    log: Annotated[Literal["every round", "checkpoints"], Field(examples=["every round"])] | None = None
    """Of a store: when closed rounds are copied with their payloads. every round: as soon as they are closed;
    checkpoints, the default: with each copied checkpoint, for less traffic."""
    private: Annotated[bool, Field(examples=[True])] | None = None
    """Of a store: also copy what each replica alone has, its inner optimizer and data position. True by default."""
    max_usd: Annotated[float, Field(gt=0, le=MOST_USD, allow_inf_nan=False, examples=[50])] | None = None
    """Of a store: copying ends when its traffic has cost this much, at the prices that `skerry plan` shows; null is no
    limit."""
    region: Annotated[str, Field(min_length=1, max_length=64, examples=["us-west-2"])] | None = None
    """Of a store: the region in which its bucket is created; null is that of the first group in its cloud."""
    byo: Annotated[OwnBucket, BeforeValidator(or_default)] | None = None
    """Of a store: your own resources that hold the mirror."""
    copies: Annotated[int, Field(ge=2, le=64, examples=[2])] | None = None
    """Of peers: the number of ranks that hold each state, its own included; 2 by default."""
    apart: Annotated[Literal["node"] | Annotated[int, Field(ge=1, le=65_536)], Field(examples=["node"])] | None = None
    """Of peers: the distance of the ranks that hold copies of each other's state. node, the default: on different
    machines, where a replica has several."""
    memory: Annotated[bool, Field(examples=[True])] | None = None
    """Of peers: keep the copies in memory, the default; false keeps them on a disk of the machine."""

    @property
    def is_peers(self) -> bool:
        """True for copies at other ranks, False for a mirror in a store."""
        return self.to == PEERS

    @property
    def rounds(self) -> int:
        """The rounds between two copied checkpoints of a mirror."""
        return self.every if isinstance(self.every, int) else 1

    @property
    def time(self) -> timedelta:
        """The time between two copies at peers."""
        return self.every if isinstance(self.every, timedelta) else _PEERS_EVERY

    @property
    def each_round(self) -> bool:
        """True if a mirror gets each closed round, and not with a checkpoint only."""
        return self.log == EVERY_ROUND

    @property
    def brought(self) -> bool:
        """True if the bucket of the mirror is the user's own."""
        return self.byo is not None and self.byo.bucket


Lines = Annotated[
    tuple[FurtherPlace, ...],
    BeforeValidator(lambda value: () if value is None else value),
    Field(max_length=16, examples=[[{"to": "gs://acme-dr/runs", "every": 10}]]),
]


def problems(document: Document, kinds: TargetKinds, folder: Path) -> Iterator[Problem]:
    """Every line that cannot be kept, or protects against nothing new. folder: the spec's."""
    yield from _outside_the_limit(document)
    places: list[tuple[str, Where]] = []
    home = document.value(("store",))
    if isinstance(home, str):
        places.append((home, ("store",)))
    for index in range(len(document.entries((REPLICATION,)))):
        line: Where = (REPLICATION, index)
        to = document.value((*line, "to"))
        if not isinstance(to, str):
            continue
        is_peers = to == PEERS
        yield from _wrong_fields(document, line, is_peers=is_peers)
        if is_peers:
            yield from _peers_problems(document, kinds, line)
            if any(place == PEERS for place, _ in places):
                yield document.problem((*line, "to"), "names peers again; write one line for them")
        else:
            yield from _unreachable(document, kinds, line, to)
            if (text := _nothing_new(document, kinds, folder, line, to, places)) is not None:
                yield document.problem((*line, "to"), text)
        places.append((to, line))


def _outside_the_limit(document: Document) -> Iterator[Problem]:
    """Mirrors that limits.max_cost_usd cannot bound: it bounds machines, and sets `max_usd` aside."""
    most = document.value(("limits", "max_cost_usd"))
    if not isinstance(most, int | float) or isinstance(most, bool) or document.value(("failover",)) is not None:
        return  # `check_automatic_failover` refuses the limit
    aside = 0.0
    lines = len(document.entries((REPLICATION,)))
    for index in range(lines):
        line: Where = (REPLICATION, index)
        to, usd = document.value((*line, "to")), document.value((*line, "max_usd"))
        if isinstance(usd, int | float) and not isinstance(usd, bool):
            aside += usd
            if aside >= most:
                text = f"leaves nothing of limits.max_cost_usd for machines: {aside:g} of {most:g}; lower it"
                yield document.problem((*line, "max_usd"), text)
                return
        elif isinstance(to, str) and to != PEERS:
            share = min((most - aside) / (lines + 1), 50)
            text = f"missing, and limits.max_cost_usd counts it; write e.g. max_usd: {share:.2g}"
            yield document.problem((*line, "max_usd"), text)


def _wrong_fields(document: Document, line: Where, *, is_peers: bool) -> Iterator[Problem]:
    """Fields of the other kind of place, which would have no effect."""
    of, kind = (_OF_STORES, "a store") if is_peers else (_OF_PEERS, "peers")
    for name in of:
        if document.value((*line, name)) is not None:
            yield document.problem((*line, name), f"has an effect only with `to:` {kind}; remove it", key=True)
    every = document.value((*line, "every"))
    if is_peers and isinstance(every, int):
        yield document.problem((*line, "every"), f"is a time for peers; got {every}; write e.g. every: 30s")
    if not is_peers and isinstance(every, str):
        yield document.problem(
            (*line, "every"), f"is a number of rounds for a store; got {every!r}; write e.g. every: 10"
        )


def _peers_problems(document: Document, kinds: TargetKinds, line: Where) -> Iterator[Problem]:
    by_name = dict(zip(kinds.names, kinds.options, strict=True))
    options = [by_name.get(kind) if isinstance(kind, str) else None for kind in kinds_of_groups(document)]
    ranks = [None if kind is None else kind.written_ranks(document, index) for index, kind in enumerate(options)]
    if not ranks or None in ranks:
        return
    counts = sorted({count for count in ranks if count is not None and count > 1})
    if not counts:
        text = "protects against nothing: every replica has one rank, and no peer"
        yield document.problem((*line, "to"), f"{text}; remove the line, or use machines with several GPUs")
        return
    written, apart = document.integer((*line, "copies")), document.integer((*line, "apart"))
    copies = written or 2
    if copies > counts[0]:
        yield document.problem((*line, "copies"), f"must be at most {counts[0]}, the ranks of a replica; got {copies}")
    elif (count := next((count for count in counts if count % copies), None)) is not None:
        text = f"cannot divide the {count} ranks of a replica into groups of {copies}"
        fitting = next((n for n in range(2, counts[0] + 1) if not any(count % n for count in counts)), None)
        remedy = "use machines with as many GPUs" if fitting is None else f"write e.g. copies: {fitting}"
        yield document.problem((*line, "copies"), f"{text}; {remedy}")
    elif apart is not None and (count := next((n for n in counts if n % (apart * copies)), None)) is not None:
        text = f"{copies} copies {apart} ranks apart need {apart * copies} ranks, or a multiple, not {count}"
        yield document.problem((*line, "apart"), f"leaves no peer: {text}; write e.g. apart: 1")


def _unreachable(document: Document, kinds: TargetKinds, line: Where, to: str) -> Iterator[Problem]:
    """A store that jobs cannot open."""
    scheme = to.partition("://")[0]
    by_name = dict(zip(kinds.names, kinds.options, strict=True))
    for index, kind in enumerate(kinds_of_groups(document)):
        options = by_name.get(kind) if isinstance(kind, str) else None
        if options is None or options.CLOUD is None:
            continue
        reached = options.mirror_schemes(document, index)
        if scheme in reached:
            continue
        text = f"cannot be opened by the jobs of replicas[{index}], which run on {kind}"
        store = str(document.value(("store",))).partition("://")[0]
        other = min(reached, key=lambda each: each == store, default=None)  # in the store's cloud its region may count
        remedy = f"write e.g. to: {other}://acme-dr/runs" if other else "remove the line"
        yield document.problem((*line, "to"), f"{text}; {remedy}")
        return
    region = document.value((*line, "region"))
    if region is not None and scheme not in store_uri.CLOUDS:
        yield document.problem((*line, "region"), f"has no effect for a store at {scheme}://; remove it", key=True)


def _nothing_new(
    document: Document, kinds: TargetKinds, folder: Path, line: Where, to: str, places: Sequence[tuple[str, Where]]
) -> str | None:
    """The reason why a mirror is lost together with an earlier place."""
    for other, where in places:
        named = "store" if where == ("store",) else f"replication[{where[-1]}]"
        if _bucket(folder, to) == _bucket(folder, other):
            what = "folder" if to.startswith(store_uri.FILE) else "bucket"
            return f"protects against nothing: it is in the {what} of {named}; name another {what}"
        if to.startswith(store_uri.FILE) and other.startswith(store_uri.FILE):
            if same_disk(folder, to, other):
                return (
                    f"protects against nothing: it is on the disk of {named}, and is lost with it; name a bucket, or "
                    "a folder of another disk or machine"
                )
            continue
        domain = _domain(document, kinds, line, to)
        if domain is not None and domain == _domain(document, kinds, where, other):
            cloud, region = domain
            return (
                f"protects against nothing that {named} does not: both are in {region}; write e.g. "
                f"region: {_REGIONS[cloud]}, or remove the line"
            )
    return None


def _bucket(folder: Path, place: str) -> str:
    """The bucket of a store, or its folder, as text to compare."""
    if place.startswith(store_uri.FILE):
        return store_uri.store_uri(folder, place).rstrip("/")
    scheme, _, rest = place.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _domain(document: Document, kinds: TargetKinds, where: Where, place: str) -> tuple[str, str] | None:
    """The cloud and the region of a bucket that is created; None for others, and if the spec does not decide them."""
    cloud = store_uri.CLOUDS.get(place.partition("://")[0])
    byo: Where = ("byo",) if where == ("store",) else (*where, "byo")
    if cloud is None or document.value((*byo, "bucket")) is True:
        return None
    region = document.value((*where, "region")) if where != ("store",) else None
    if region is None:
        by_name = dict(zip(kinds.names, kinds.options, strict=True))
        for index, kind in enumerate(kinds_of_groups(document)):
            options = by_name.get(kind) if isinstance(kind, str) else None
            if region is None and options is not None and cloud == options.CLOUD:
                region = document.value(("replicas", index, "target", "region"))
    return (cloud, region) if isinstance(region, str) else None


def same_disk(folder: Path, first: str, second: str) -> bool:
    """True if both folders are, or would be created, on one file system of this machine."""
    devices: set[int] = set()
    for place in (first, second):
        path = Path(unquote(store_uri.store_uri(folder, place).removeprefix(store_uri.FILE)))
        try:
            existing = next(part for part in (path, *path.parents) if part.exists())
            devices.add(existing.stat().st_dev)
        except (OSError, StopIteration):
            return False
    return len(devices) == 1
