"""What a run costs: machines by the hour, the most they can come to, and what its traffic and storage add. Pure.

What is not known is said to be unknown, and never counted as nothing. Bytes are counted as a round moves them when
all goes well: each replica sends its contribution once and reads everybody else's. Numbers of requests were measured
(two to four replicas, rounds of 4 s and 24 s, a store that is looked at as often as S3 is).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.prices import VARIABLE, rounded, title
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.prices import Price, Prices
    from skerry.infra.spec import Limits, Spec
    from skerry.infra.target import Rate

BILLION: Final = 1e9
_GB: Final = 1e9
# What runtime's codec and checkpoints make of a model: an object for each part, a ranged read for each piece.
_PART_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 8 << 20
_ITEM_BYTES: Final = {"none": 4, "bf16": 2}
_FLOAT: Final = 4
_ADAMW: Final = 8
# A replica keeps so many saves of its own inner optimizer.
_PRIVATE_KEPT: Final = 2
# Of a replica in a round, without parts and pieces: records made, listings, a beat at each change; and reads, some of
# them for each replica there is. A save of its own takes some more.
_WRITES: Final = 15
_READS: Final = 12
_READS_OF_EACH: Final = 6
_WRITES_OF_A_SAVE: Final = 3
_HEARTBEAT_S: Final = 5.0
_SHORTEST_H: Final = 1 / 60
_OWN: Final = f"write unknown prices in a file: --prices FILE or {VARIABLE}"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An amount of dollars. missing: whose prices are unknown; then `known` is only a part of it."""

    known: float = 0.0
    missing: tuple[str, ...] = ()

    @property
    def usd(self) -> float | None:
        """The whole of it, if it is known."""
        return None if self.missing else self.known

    def __add__(self, other: Cost) -> Cost:
        """Both together; unknown if one of them is."""
        missing = dict.fromkeys((*self.missing, *other.missing))
        return Cost(known=self.known + other.known, missing=tuple(missing))

    def __mul__(self, factor: float) -> Cost:
        """So many of it."""
        return Cost(known=self.known * factor, missing=self.missing)

    def __str__(self) -> str:
        """For people, with what is missing."""
        if not self.missing:
            return rounded(self.known)
        known = f"{rounded(self.known)} and " if self.known else ""
        return f"unknown: {known}what {' and '.join(self.missing)} costs"


@dataclass(frozen=True, kw_only=True)
class Crew:
    """A group of replicas as far as traffic goes. region: None is outside of the bucket's cloud.

    away: what a GB costs that leaves that other cloud for the internet; None is unknown.
    """

    name: str
    count: int
    region: str | None
    away: Price | None = None


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What a run moves and keeps. parameters: of the model. region: the bucket's."""

    spec: Spec
    parameters: float
    region: str
    crews: tuple[Crew, ...]

    @property
    def replicas(self) -> int:
        """All of them."""
        return sum(crew.count for crew in self.crews)

    @property
    def contribution_bytes(self) -> float:
        """What a replica offers in a round: one fragment."""
        outer = self.spec.outer
        return self.parameters / outer.fragments * _ITEM_BYTES[outer.codec]

    @property
    def checkpoint_bytes(self) -> float:
        """The shared state: weights and outer momentum."""
        return self.parameters * _FLOAT * (2 if self.spec.outer.momentum else 1)

    @property
    def private_bytes(self) -> float:
        """What only one replica has: the moments of its inner optimizer."""
        return self.parameters * _ADAMW

    @property
    def stored_bytes(self) -> float:
        """What the store holds at once, when garbage is collected."""
        faults = self.spec.faults
        rounds = faults.keep_checkpoints * faults.checkpoint_every
        return (
            (faults.keep_checkpoints + 1) * self.checkpoint_bytes
            + rounds * self.replicas * self.contribution_bytes
            + _PRIVATE_KEPT * self.replicas * self.private_bytes
        )

    def sent_bytes(self, crew: Crew) -> float:
        """What a group sends to the store in a round; checkpoints are written by one replica, in rotation."""
        saved = self.private_bytes + self.checkpoint_bytes / self.replicas
        return crew.count * (self.contribution_bytes + saved / self.spec.faults.checkpoint_every)

    def read_bytes(self, crew: Crew) -> float:
        """What a group reads in a round: each replica what all others offer."""
        return crew.count * (self.replicas - 1) * self.contribution_bytes

    @property
    def writes(self) -> int:
        """Requests of a round that write or list."""
        parts = _pieces(self.contribution_bytes, _PART_BYTES)
        saved = _pieces(self.private_bytes, _PART_BYTES) + _pieces(self.checkpoint_bytes, _PART_BYTES) / self.replicas
        saved += _WRITES_OF_A_SAVE
        return math.ceil(self.replicas * (_WRITES + parts + saved / self.spec.faults.checkpoint_every))

    @property
    def reads(self) -> int:
        """Requests of a round that read."""
        pieces = (self.replicas - 1) * _pieces(self.contribution_bytes, _PIECE_BYTES)
        return math.ceil(self.replicas * (_READS + _READS_OF_EACH * self.replicas + pieces))


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What goes one way in a round. internet: it leaves a cloud, and is paid as such where it leaves."""

    way: str
    size_bytes: float
    cost: Cost
    internet: bool


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """What the store and the way to it cost."""

    volume: Volume
    prices: Prices

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Traffic of a round that leaves a region; who sends pays, by the price of the region it leaves."""
        found: list[Leg] = []
        for crew in self.volume.crews:
            if crew.region == self.volume.region:
                continue
            internet = crew.region is None
            here, there = self.volume.region, crew.region or self._outside(crew)
            if internet:
                here = f"{title(self.prices.cloud)} ({here})"
            out = crew.away if crew.region is None else self.prices.transfer(crew.region, self.volume.region)
            back = self.prices.transfer(self.volume.region, crew.region)
            ways = [(f"{there} to {here}", self.volume.sent_bytes(crew), out)]
            if self.volume.replicas > 1:
                ways.append((f"{here} to {there}", self.volume.read_bytes(crew), back))
            for way, size, price in ways:
                cost = _cost(size / _GB, price, f"a GB from {way}")
                found.append(Leg(way=way, size_bytes=size, cost=cost, internet=internet))
        return tuple(found)

    @property
    def transfer(self) -> Cost:
        """All of that traffic."""
        return sum((leg.cost for leg in self.legs), Cost())

    @property
    def requests(self) -> Cost:
        """Requests of a round."""
        return self._requests(self.volume.writes, self.volume.reads)

    @property
    def heartbeats_per_hour(self) -> Cost:
        """Every replica says regularly where it is, and looks whether it was replaced."""
        beats = self.volume.replicas * 3600 / _HEARTBEAT_S
        return self._requests(beats, beats)

    @property
    def per_round(self) -> Cost:
        """Traffic and requests of a round."""
        return self.transfer + self.requests

    @property
    def storage_per_month(self) -> Cost:
        """What is kept."""
        region = self.volume.region
        return _cost(self.volume.stored_bytes / _GB, self.prices.storage(region), f"storage in {region}")

    @property
    def missing(self) -> tuple[str, ...]:
        """Whose prices are unknown."""
        return (self.per_round + self.storage_per_month + self.heartbeats_per_hour).missing

    def _outside(self, crew: Crew) -> str:
        """Where a group is that is not in the bucket's cloud."""
        target = next((group.target for group in self.volume.spec.replicas if group.name == crew.name), None)
        cloud = None if target is None else target.CLOUD
        return "outside" if cloud is None else f"{title(cloud)} ({getattr(target, 'region', '')})"

    def _requests(self, writes: float, reads: float) -> Cost:
        region = self.volume.region
        written = _cost(writes / 1000, self.prices.write(region), f"a write in {region}")
        return written + _cost(reads / 1000, self.prices.read(region), f"a read in {region}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Costs in US dollars. upkeep: None if nothing is known of the store. parameters: None tells of each billion.

    notes: what else a reader has to know.
    """

    rates: tuple[Rate, ...]
    upkeep: Upkeep | None = None
    parameters: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def machines(self) -> Cost:
        """An hour of all machines."""
        return sum((_hour(rate, 1.0) for rate in self.rates), Cost())

    @property
    def per_hour(self) -> float | None:
        """All machines together; None if the price of one of them is unknown."""
        return self.machines.usd

    @property
    def cap(self) -> float | None:
        """The most the machines can come to at these prices; None if nothing ends them, or a price is unknown."""
        if any(rate.cap_hours is None for rate in self.rates):
            return None
        return sum((_hour(rate, rate.cap_hours or 0.0) for rate in self.rates), Cost()).usd

    def lines(self) -> Iterator[str]:
        """For people."""
        if not self.rates:
            return
        yield "it costs, while all replicas run:"
        for rate in self.rates:
            price = "unknown" if rate.per_hour is None else f"{rounded(rate.per_hour)}/h"
            yield f"  {rate.group}: {rate.count} x {rate.what}: {price} ({rate.source})"
        machines = self.machines
        total = f"{rounded(machines.known)}/h"
        if machines.missing:
            total = f"unknown, {total} without {' and '.join(machines.missing)}" if machines.known else "unknown"
        yield f"  together {total}; {self._most()}"
        if self.upkeep is not None:
            yield from self._upkeep_lines(self.upkeep)
        if machines.missing or (self.upkeep is not None and self.upkeep.missing):
            yield _OWN
        yield from (f"  {note}" for note in self.notes)

    def document(self) -> dict[str, Any]:
        """For programs. The same spec and the same prices give the same document."""
        return {
            "machines": [dataclasses.asdict(rate) for rate in self.rates],
            "per_hour_usd": self.per_hour,
            "known_per_hour_usd": self.machines.known,
            "cap_usd": self.cap,
            "upkeep": None if self.upkeep is None else self._upkeep_document(self.upkeep),
            "notes": list(self.notes),
        }

    def _most(self) -> str:
        if any(rate.cap_hours is None for rate in self.rates):
            return "without end: `limits: {max_hours: 24}` sets one"
        hours = max(rate.cap_hours or 0.0 for rate in self.rates)
        most = "unknown" if self.cap is None else f"{rounded(self.cap)} at these prices"
        again = any(rate.each_start for rate in self.rates)
        more = "; `skerry up` may start them again: `limits: {max_hours: 24}` bounds all starts" if again else ""
        return f"at most {most}, for they are stopped after {hours:.4g} h{more}"

    def _upkeep_lines(self, upkeep: Upkeep) -> Iterator[str]:
        codec = {"none": "as float32", "bf16": "as bf16"}[upkeep.volume.spec.outer.codec]
        fragments = upkeep.volume.spec.outer.fragments
        part = "" if fragments == 1 else f", one of {fragments} fragments"
        of = "every billion parameters" if self.parameters is None else f"{self.parameters} parameters"
        yield f"traffic of a round, for {of}, sent {codec}{part}:"
        others = (upkeep.volume.replicas - 1) * upkeep.volume.contribution_bytes
        yield f"  each replica sends {_size(upkeep.volume.contribution_bytes)} and reads {_size(others)}"
        yield from self._leg_lines(upkeep)
        yield f"  {upkeep.volume.writes:,} requests that write, {upkeep.volume.reads:,} that read: {upkeep.requests}"
        yield f"  together {upkeep.per_round}{self._compared(upkeep)}{self._all_rounds(upkeep)}"
        stored = f"kept in the store {_size(upkeep.volume.stored_bytes)}: {upkeep.storage_per_month}"
        yield stored if upkeep.storage_per_month.missing else f"{stored} a month"
        yield from self._assumed(upkeep)

    @staticmethod
    def _leg_lines(upkeep: Upkeep) -> Iterator[str]:
        if not upkeep.legs:
            yield f"  all of it within {upkeep.volume.region}: free"
        within = [leg for leg in upkeep.legs if not leg.internet]
        if within:
            size = sum(leg.size_bytes for leg in within)
            yield f"  from region to region {_size(size)}: {sum((leg.cost for leg in within), Cost())}"
        for way in dict.fromkeys(leg.way for leg in upkeep.legs if leg.internet):
            same = [leg for leg in upkeep.legs if leg.way == way]
            size = sum(leg.size_bytes for leg in same)
            yield f"  from {way} over the internet {_size(size)}: {sum((leg.cost for leg in same), Cost())}"

    def _compared(self, upkeep: Upkeep) -> str:
        hour, once = self.per_hour, upkeep.per_round.usd
        if not hour or not once:
            return ""
        seconds = once / hour * 3600
        told = f"{seconds:,.2g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
        return f", as much as the machines in {told}"

    @staticmethod
    def _all_rounds(upkeep: Upkeep) -> str:
        rounds = upkeep.volume.spec.outer.rounds
        return "" if rounds is None or upkeep.per_round.missing else f"; {rounds} rounds: {upkeep.per_round * rounds}"

    @staticmethod
    def _assumed(upkeep: Upkeep) -> Iterator[str]:
        faults, beats = upkeep.volume.spec.faults, upkeep.heartbeats_per_hour
        every = f"a checkpoint every {_rounds(faults.checkpoint_every)}"
        yield f"assumed: float32 weights, AdamW, {every}; nothing is lost or repeated"
        yield f"heartbeats come on top: {beats if beats.missing else f'{beats} an hour'}"
        if faults.keep_every is not None:
            size = _size(upkeep.volume.checkpoint_bytes)
            yield f"not counted: {size} more are kept for good every {_rounds(faults.keep_every)} (faults.keep_every)"
        if faults.keep_unfinished is not None:
            size = _size(upkeep.volume.parameters * _FLOAT + upkeep.volume.private_bytes)
            yield f"not counted: each replica sends {size} at each save within a round (faults.keep_unfinished)"
        if faults.make_up:
            yield "not counted: rounds that make up for kills, outages and slow replicas (faults.make_up)"

    def _upkeep_document(self, upkeep: Upkeep) -> dict[str, Any]:
        return {
            "parameters": upkeep.volume.parameters,
            "given": self.parameters is not None,
            "region": upkeep.volume.region,
            "contribution_bytes": upkeep.volume.contribution_bytes,
            "between_regions_bytes": sum(leg.size_bytes for leg in upkeep.legs if not leg.internet),
            "internet_bytes": sum(leg.size_bytes for leg in upkeep.legs if leg.internet),
            "writes": upkeep.volume.writes,
            "reads": upkeep.volume.reads,
            "transfer_usd": upkeep.transfer.usd,
            "requests_usd": upkeep.requests.usd,
            "per_round_usd": upkeep.per_round.usd,
            "heartbeats_per_hour_usd": upkeep.heartbeats_per_hour.usd,
            "stored_bytes": upkeep.volume.stored_bytes,
            "storage_per_month_usd": upkeep.storage_per_month.usd,
            "unknown": list(upkeep.missing),
        }


def hours_allowed(limits: Limits, rates: Sequence[Rate]) -> float | None:
    """How long the replicas may run, from the run's start; None is without end.

    rates: of all groups of the run. Raises Invalid if max_cost_usd is given and cannot be kept: a price is unknown, or
    it is used up within a minute.
    """
    if limits.max_cost_usd is None:
        return limits.max_hours
    unknown = [f"{rate.group} ({rate.source})" for rate in rates if rate.per_hour is None]
    if unknown:
        raise Invalid(
            f"limits.max_cost_usd cannot be kept: nobody knows what it costs to run {', '.join(unknown)}; {_OWN}, or "
            "give limits.max_hours instead"
        )
    total = sum(rate.per_hour or 0.0 for rate in rates)
    if not total:
        return limits.max_hours
    hours = limits.max_cost_usd / total
    if hours < _SHORTEST_H:
        raise Invalid(
            f"limits.max_cost_usd is used up after {hours * 3600:.0f} s at {rounded(total)}/h; allow more, or take "
            "fewer or cheaper machines"
        )
    return hours if limits.max_hours is None else min(hours, limits.max_hours)


def within(hours: float | None, rates: Sequence[Rate]) -> tuple[Rate, ...]:
    """Rates under the limit of the whole run, if it has one: it holds however often a job is made again."""
    if hours is None:
        return tuple(rates)
    return tuple(dataclasses.replace(rate, cap_hours=hours, each_start=False) for rate in rates)


def cost_problem(limits: Limits, rates: Sequence[Rate]) -> str | None:
    """Why max_cost_usd cannot be kept; None if it can, or is not given."""
    try:
        hours_allowed(limits, rates)
    except Invalid as error:
        return str(error)
    return None


def parse_parameters(text: str) -> float:
    """How many parameters `text` says: 124M, 1.3B, 70b, 1e9. Raises Invalid that says what to write."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        count = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e15:
        raise Invalid(f"no number of parameters: {text!r}; write it like 124M or 1.3B")
    return count


def _hour(rate: Rate, hours: float) -> Cost:
    return Cost(missing=(rate.group,)) if rate.per_hour is None else Cost(known=rate.per_hour * hours)


def _cost(amount: float, price: Price | None, what: str) -> Cost:
    return Cost(missing=(what,)) if price is None else Cost(known=amount * price.usd)


def _pieces(size_bytes: float, piece_bytes: int) -> int:
    return max(1, math.ceil(size_bytes / piece_bytes))


def _size(size_bytes: float) -> str:
    unit, factor = next((pair for pair in (("TB", 1e12), ("GB", 1e9)) if size_bytes >= pair[1]), ("MB", 1e6))
    return f"{size_bytes / factor:,.1f} {unit}"


def _rounds(count: int) -> str:
    return "round" if count == 1 else f"{count} rounds"
