"""Estimates the cost of a run: machines per hour, their maximum, and the run's traffic, requests and storage. Pure.

An unknown price is reported as unknown, never counted as zero. Bytes are those of a round without failures: each
replica sends its contribution once and reads the contributions of all others. Numbers of requests were measured (two to
four replicas, rounds of 4 s and 24 s, a store that is polled as often as S3).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.cost.prices import ADVICE, rounded, title
from skerry.infra.cost.work_lost_by_failure import loss_lines
from skerry.runtime.errors import Invalid
from skerry.runtime.log.records import MAKERS_SHARE
from skerry.runtime.log.run_record import codec_for
from skerry.runtime.tensors.byte_layout import BLOCKS, WIRE_TYPES
from skerry.runtime.tensors.choose_reduction import ExchangeBytes, cheaper_reduction

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry.infra.cost.prices import Price, Prices
    from skerry.infra.cost.work_lost_by_failure import Loss
    from skerry.infra.provision.target_and_store_interfaces import Rate
    from skerry.infra.spec.model import Spec
    from skerry.runtime.log.records import Codec

BILLION: Final = 1e9
_GB: Final = 1e9
# The runtime writes checkpoints in parts of 64 MiB, one object each, and contributions above 1 MiB in up to 32 of
# 256 KiB to 8 MiB.
_PART_BYTES: Final = 64 << 20
_UNITS: Final = 32
_ONE_UNIT: Final = 1 << 20
_LEAST_UNIT: Final = 256 << 10
_LARGEST_UNIT: Final = 8 << 20
_ITEM_BYTES: Final[Mapping[Codec, float]] = {
    "none": 4,
    "bf16": 2,
    **{codec: WIRE_TYPES[wire].item_bytes / WIRE_TYPES[wire].elements for codec, wire in BLOCKS.items()},
}
# Of a parameter in a published average.
_REDUCED_BYTES: Final = dict.fromkeys(("none", "bf16"), 4.0) | dict.fromkeys(BLOCKS, _ITEM_BYTES["int8"])
_FLOAT: Final = 4
_ADAMW: Final = 8
# The number of saves of its inner optimizer that a replica stores.
_PRIVATE_SAVES: Final = 2
# Requests of a replica in a round, without parts and pieces: records, listings, a heartbeat at each change; and reads,
# some of them once per replica. A save adds some more.
_WRITES: Final = 15
_READS: Final = 12
_READS_PER_REPLICA: Final = 6
_WRITES_PER_SAVE: Final = 3
# As in `checkpointing.garbage_collector`.
_COLLECTORS: Final = 8
_HEARTBEAT_S: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An amount of dollars. missing: the items with unknown prices; then `known` is only a part of the amount."""

    known: float = 0.0
    missing: tuple[str, ...] = ()

    @property
    def usd(self) -> float | None:
        """The amount; None if it is not wholly known."""
        return None if self.missing else self.known

    def __add__(self, other: Cost) -> Cost:
        """The sum; unknown if a summand is."""
        missing = dict.fromkeys((*self.missing, *other.missing))
        return Cost(known=self.known + other.known, missing=tuple(missing))

    def __mul__(self, factor: float) -> Cost:
        """The multiple."""
        return Cost(known=self.known * factor, missing=self.missing)

    def __str__(self) -> str:
        """For people, with the missing items."""
        if not self.missing:
            return rounded(self.known)
        known = f"{rounded(self.known)} plus " if self.known else ""
        return f"unknown: {known}the cost of {' and '.join(self.missing)}"


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """The traffic-related facts of a group of replicas. region: None is outside of the bucket's cloud.

    away: the price of a GB from that other cloud to the internet; None is unknown.
    """

    name: str
    count: int
    region: str | None
    away: Price | None = None


@dataclass(frozen=True, kw_only=True)
class ExchangeTraffic:
    """The bytes that a replica writes and reads in an exchange. scatters: it averages a share of the contributions."""

    scatters: bool
    sent_bytes: float
    read_bytes: float


@dataclass(frozen=True, kw_only=True)
class Volume:
    """The bytes and requests of a run. parameters: of the model. region: the bucket's."""

    spec: Spec
    parameters: float
    region: str
    groups: tuple[MachineGroup, ...]

    @property
    def replicas(self) -> int:
        """The number of all replicas."""
        return sum(group.count for group in self.groups)

    @property
    def codec(self) -> Codec:
        """The codec that the replicas will use."""
        return codec_for(self.spec.outer.codec, is_local=self.spec.store.startswith("file://"))

    @property
    def contribution_bytes(self) -> float:
        """The contribution of a replica in a round: one fragment."""
        return self.parameters / self.spec.outer.fragments * _ITEM_BYTES[self.codec]

    @property
    def exchange(self) -> ExchangeTraffic:
        """The bytes of a replica in an exchange."""
        mine, members = self.contribution_bytes, self.replicas
        average = self.parameters / self.spec.outer.fragments * _REDUCED_BYTES[self.codec]
        proposed = self.spec.outer.reduction
        if self.codec == "sparse":  # there is no other exchange of it
            proposed = "all_gather"
        elif proposed == "auto":  # before any link is measured
            proposed = cheaper_reduction(ExchangeBytes(mine, average, _parts(mine)), [None] * members)
        if proposed == "all_gather":
            return ExchangeTraffic(scatters=False, sent_bytes=mine, read_bytes=(members - 1) * mine)
        read = (mine + average) * (members - 1) / members
        return ExchangeTraffic(scatters=True, sent_bytes=mine + average / members, read_bytes=read)

    def exchange_of(self, group: MachineGroup) -> ExchangeTraffic:
        """The bytes of a replica of this group in an exchange, which differ if one region averages for all."""
        makers = sum(other.count for other in self.groups if other.region == self.region)
        nearby = self.spec.outer.reduce_in == self.region and MAKERS_SHARE * makers >= self.replicas
        if not (makers and nearby and self.exchange.scatters):
            return self.exchange
        mine, average = (
            self.contribution_bytes,
            self.parameters / self.spec.outer.fragments * _REDUCED_BYTES[self.codec],
        )
        if group.region != self.region:
            return ExchangeTraffic(scatters=True, sent_bytes=mine, read_bytes=average)
        read = (mine * (self.replicas - 1) + average * (makers - 1)) / makers
        return ExchangeTraffic(scatters=True, sent_bytes=mine + average / makers, read_bytes=read)

    @property
    def checkpoint_bytes(self) -> float:
        """The shared state: weights and outer momentum."""
        return self.parameters * _FLOAT * (2 if self.spec.outer.momentum else 1)

    @property
    def private_bytes(self) -> float:
        """The private state of a replica: the moments of its inner optimizer."""
        return self.parameters * _ADAMW

    @property
    def stored_bytes(self) -> float:
        """The contents of the store while garbage is collected."""
        faults = self.spec.faults
        # Each replica deletes its own payloads, as so many do at each checkpoint in rotation.
        rounds = (faults.keep_checkpoints + math.ceil(self.replicas / _COLLECTORS)) * faults.checkpoint_every
        return (
            (faults.keep_checkpoints + 1) * self.checkpoint_bytes
            + rounds * self.replicas * self.contribution_bytes
            + _PRIVATE_SAVES * self.replicas * self.private_bytes
        )

    def sent_bytes(self, group: MachineGroup) -> float:
        """The bytes that a group writes in a round; one replica in rotation writes the checkpoint."""
        saved = self.private_bytes + self.checkpoint_bytes / self.replicas
        return group.count * (self.exchange_of(group).sent_bytes + saved / self.spec.faults.checkpoint_every)

    def read_bytes(self, group: MachineGroup) -> float:
        """The bytes that a group reads in a round."""
        return group.count * self.exchange_of(group).read_bytes

    @property
    def writes(self) -> int:
        """The requests of a round that write or list."""
        parts = _parts(self.contribution_bytes) * (1 + (1 / self.replicas if self.exchange.scatters else 0))
        saved = _pieces(self.private_bytes, _PART_BYTES) + _pieces(self.checkpoint_bytes, _PART_BYTES) / self.replicas
        saved += _WRITES_PER_SAVE
        return math.ceil(self.replicas * (_WRITES + parts + saved / self.spec.faults.checkpoint_every))

    @property
    def reads(self) -> int:
        """The requests of a round that read."""
        # With reduce-scatter: my share of each contribution of the others, and their shares of the average.
        share = 2 / self.replicas if self.exchange.scatters else 1
        pieces = (self.replicas - 1) * _parts(self.contribution_bytes) * share
        return math.ceil(self.replicas * (_READS + _READS_PER_REPLICA * self.replicas + pieces))


@dataclass(frozen=True, kw_only=True)
class TrafficRoute:
    """The traffic of a round in one direction. internet: it leaves a cloud and is charged there."""

    way: str
    size_bytes: float
    cost: Cost
    internet: bool


@dataclass(frozen=True, kw_only=True)
class StorageCost:
    """The cost of the store and of the traffic to it."""

    volume: Volume
    prices: Prices

    @property
    def routes(self) -> tuple[TrafficRoute, ...]:
        """The traffic of a round that leaves a region, at the price of the region that it leaves."""
        routes: list[TrafficRoute] = []
        for group in self.volume.groups:
            if group.region == self.volume.region:
                continue
            internet = group.region is None
            bucket, machines = self.volume.region, group.region or self._outside(group)
            if internet:
                bucket = f"{title(self.prices.cloud)} ({bucket})"
            out = group.away if group.region is None else self.prices.transfer(group.region, self.volume.region)
            back = self.prices.transfer(self.volume.region, group.region)
            ways = [(f"{machines} to {bucket}", self.volume.sent_bytes(group), out)]
            if self.volume.replicas > 1:
                ways.append((f"{bucket} to {machines}", self.volume.read_bytes(group), back))
            for way, size, price in ways:
                cost = cost_of(size / _GB, price, f"a GB from {way}")
                routes.append(TrafficRoute(way=way, size_bytes=size, cost=cost, internet=internet))
        return tuple(routes)

    @property
    def transfer(self) -> Cost:
        """The cost of all that traffic."""
        return sum((route.cost for route in self.routes), Cost())

    @property
    def requests(self) -> Cost:
        """The cost of the requests of a round."""
        return self._requests(self.volume.writes, self.volume.reads)

    @property
    def heartbeats_per_hour(self) -> Cost:
        """The cost of heartbeats: each replica writes one regularly, and reads whether it was replaced."""
        beats = self.volume.replicas * 3600 / _HEARTBEAT_S
        return self._requests(beats, beats)

    @property
    def per_round(self) -> Cost:
        """The cost of traffic and requests of a round."""
        return self.transfer + self.requests

    @property
    def storage_per_month(self) -> Cost:
        """The cost of the stored bytes."""
        region = self.volume.region
        return cost_of(self.volume.stored_bytes / _GB, self.prices.storage(region), f"storage in {region}")

    @property
    def missing(self) -> tuple[str, ...]:
        """The items with unknown prices."""
        return (self.per_round + self.storage_per_month + self.heartbeats_per_hour).missing

    def _outside(self, group: MachineGroup) -> str:
        """The place of a group outside of the bucket's cloud, for people."""
        target = next((replicas.target for replicas in self.volume.spec.replicas if replicas.name == group.name), None)
        cloud = None if target is None else target.CLOUD
        return "outside" if cloud is None else f"{title(cloud)} ({getattr(target, 'region', '')})"

    def _requests(self, writes: float, reads: float) -> Cost:
        region = self.volume.region
        written = cost_of(writes / 1000, self.prices.write(region), f"a write in {region}")
        return written + cost_of(reads / 1000, self.prices.read(region), f"a read in {region}")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Costs in US dollars. upkeep: None if the store is unknown. parameters: None estimates for a billion.

    notes: further lines for the reader. mirrors: for programs, and mirror_lines for people. losses: the table, without
    which none is shown.
    """

    rates: tuple[Rate, ...]
    upkeep: StorageCost | None = None
    parameters: str | None = None
    notes: tuple[str, ...] = ()
    mirrors: tuple[Mapping[str, object], ...] = ()
    mirror_lines: tuple[str, ...] = ()
    losses: tuple[Loss, ...] = ()

    @property
    def machines(self) -> Cost:
        """The cost of all machines for an hour."""
        return sum((_hour(rate, 1.0) for rate in self.rates), Cost())

    @property
    def per_hour(self) -> float | None:
        """All machines together; None if a price is unknown."""
        return self.machines.usd

    @property
    def cap(self) -> float | None:
        """The maximum for all machines at these prices; None without a time limit or with an unknown price."""
        if any(rate.cap_hours is None for rate in self.rates):
            return None
        return sum((_hour(rate, rate.cap_hours or 0.0) for rate in self.rates), Cost()).usd

    def lines(self, *, with_total: bool = True) -> Iterator[str]:
        """The estimate for people."""
        if not self.rates:
            return
        yield "it costs, while all replicas run:"
        for rate in self.rates:
            price = "unknown" if rate.per_hour is None else f"{rounded(rate.per_hour)}/h"
            yield f"  {rate.group}: {rate.count} x {rate.what}: {price} ({rate.source})"
        if with_total:
            yield f"  {self.total}"
        if self.upkeep is not None:
            yield from self._upkeep_lines(self.upkeep)
        yield from self.mirror_lines
        if self.machines.missing or (self.upkeep is not None and self.upkeep.missing):
            yield ADVICE
        yield from (f"  {note}" for note in self.notes)
        if self.mirrors:
            yield from loss_lines(self.losses)

    @property
    def total(self) -> str | None:
        """All machines in an hour, and at most; None without machines."""
        if not self.rates:
            return None
        machines = self.machines
        total = f"{rounded(machines.known)}/h"
        if machines.missing:
            total = f"unknown, {total} without {' and '.join(machines.missing)}" if machines.known else "unknown"
        return f"together {total}; {self._maximum()}"

    def document(self) -> dict[str, Any]:
        """The estimate for programs; equal for equal specs and prices."""
        return {
            "machines": [dataclasses.asdict(rate) for rate in self.rates],
            "per_hour_usd": self.per_hour,
            "known_per_hour_usd": self.machines.known,
            "cap_usd": self.cap,
            "upkeep": None if self.upkeep is None else self._upkeep_document(self.upkeep),
            "notes": list(self.notes),
            "mirrors": list(self.mirrors),
            "losses": [dataclasses.asdict(loss) for loss in self.losses],
        }

    def _maximum(self) -> str:
        if any(rate.cap_hours is None for rate in self.rates):
            return "no time limit: `limits: {max_hours: 24}` sets one"
        hours = max(rate.cap_hours or 0.0 for rate in self.rates)
        maximum = "unknown" if self.cap is None else f"{rounded(self.cap)} at these prices"
        again = any(rate.each_start for rate in self.rates)
        more = "; `skerry up` may restart them: `limits: {max_hours: 24}` limits all starts" if again else ""
        return f"at most {maximum}, because they are stopped after {hours:.4g} h{more}"

    def _upkeep_lines(self, upkeep: StorageCost) -> Iterator[str]:
        codec = upkeep.volume.codec
        fragments = upkeep.volume.spec.outer.fragments
        part = "" if fragments == 1 else f", one of {fragments} fragments"
        of = "every billion parameters" if self.parameters is None else f"{self.parameters} parameters"
        yield f"traffic of a round, for {of}, sent as {'float32' if codec == 'none' else codec}{part}:"
        exchange = upkeep.volume.exchange
        yield f"  each replica sends {_size(exchange.sent_bytes)} and reads {_size(exchange.read_bytes)}"
        yield from self._route_lines(upkeep)
        yield f"  {upkeep.volume.writes:,} requests that write, {upkeep.volume.reads:,} that read: {upkeep.requests}"
        yield f"  together {upkeep.per_round}{self._compared(upkeep)}{self._all_rounds(upkeep)}"
        stored = f"in the store {_size(upkeep.volume.stored_bytes)}: {upkeep.storage_per_month}"
        yield stored if upkeep.storage_per_month.missing else f"{stored} a month"
        yield from self._assumed(upkeep)

    @staticmethod
    def _route_lines(upkeep: StorageCost) -> Iterator[str]:
        if not upkeep.routes:
            yield f"  all of it within {upkeep.volume.region}: free"
        within = [route for route in upkeep.routes if not route.internet]
        if within:
            size = sum(route.size_bytes for route in within)
            yield f"  from region to region {_size(size)}: {sum((route.cost for route in within), Cost())}"
        for way in dict.fromkeys(route.way for route in upkeep.routes if route.internet):
            same = [route for route in upkeep.routes if route.way == way]
            size = sum(route.size_bytes for route in same)
            yield f"  from {way} over the internet {_size(size)}: {sum((route.cost for route in same), Cost())}"

    def _compared(self, upkeep: StorageCost) -> str:
        per_hour, per_round = self.per_hour, upkeep.per_round.usd
        if not per_hour or not per_round:
            return ""
        seconds = per_round / per_hour * 3600
        duration = f"{seconds:,.2g} s" if seconds < 100 else f"{seconds / 60:,.0f} min"
        return f", as much as the machines in {duration}"

    @staticmethod
    def _all_rounds(upkeep: StorageCost) -> str:
        rounds = upkeep.volume.spec.outer.rounds
        return "" if rounds is None or upkeep.per_round.missing else f"; {rounds} rounds: {upkeep.per_round * rounds}"

    @staticmethod
    def _assumed(upkeep: StorageCost) -> Iterator[str]:
        faults, beats = upkeep.volume.spec.faults, upkeep.heartbeats_per_hour
        every = f"a checkpoint every {_rounds(faults.checkpoint_every)}"
        yield f"assumed: float32 weights, AdamW, {every}; no failures"
        yield f"heartbeats: {beats if beats.missing else f'{beats} an hour'}"
        if faults.keep_every is not None:
            size = _size(upkeep.volume.checkpoint_bytes)
            yield f"not counted: {size} more are permanent every {_rounds(faults.keep_every)} (faults.keep_every)"
        if faults.keep_unfinished is not None:
            size = _size(upkeep.volume.parameters * _FLOAT + upkeep.volume.private_bytes)
            yield f"not counted: each replica sends {size} at each save within a round (faults.keep_unfinished)"
        if faults.make_up:
            yield "not counted: rounds that compensate for kills, outages and slow replicas (faults.make_up)"

    def _upkeep_document(self, upkeep: StorageCost) -> dict[str, Any]:
        return {
            "parameters": upkeep.volume.parameters,
            "given": self.parameters is not None,
            "region": upkeep.volume.region,
            "contribution_bytes": upkeep.volume.contribution_bytes,
            "between_regions_bytes": sum(route.size_bytes for route in upkeep.routes if not route.internet),
            "internet_bytes": sum(route.size_bytes for route in upkeep.routes if route.internet),
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


def parse_parameters(text: str) -> float:
    """The number of parameters in a text: 124M, 1.3B, 70b, 1e9. Raises Invalid."""
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    unit = units.get(text[-1:].upper(), 1.0)
    try:
        count = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e15:
        raise Invalid(f"not a number of parameters: {text!r}; write it like 124M or 1.3B")
    return count


def _hour(rate: Rate, hours: float) -> Cost:
    return Cost(missing=(rate.group,)) if rate.per_hour is None else Cost(known=rate.per_hour * hours)


def cost_of(amount: float, price: Price | None, what: str) -> Cost:
    """The cost of an amount at a price; `what` is missing if the price is unknown."""
    return Cost(missing=(what,)) if price is None else Cost(known=amount * price.usd)


def _parts(size_bytes: float) -> int:
    """The objects of a contribution: the units in which it is sent and reduced."""
    if size_bytes <= _ONE_UNIT:
        return 1
    return max(min(_UNITS, _pieces(size_bytes, _LEAST_UNIT)), _pieces(size_bytes, _LARGEST_UNIT))


def _pieces(size_bytes: float, piece_bytes: int) -> int:
    return max(1, math.ceil(size_bytes / piece_bytes))


def _size(size_bytes: float) -> str:
    unit, factor = next((pair for pair in (("TB", 1e12), ("GB", 1e9)) if size_bytes >= pair[1]), ("MB", 1e6))
    return f"{size_bytes / factor:,.1f} {unit}"


def _rounds(count: int) -> str:
    return "round" if count == 1 else f"{count} rounds"
