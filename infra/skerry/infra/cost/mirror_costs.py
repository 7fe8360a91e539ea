"""Estimates the cost of the mirrors of a run: traffic out of the replicas' regions, and storage. Reads price files.

An unknown price is reported as unknown, never counted as zero. Any replica may copy, so the dearest group counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.cost import prices
from skerry.infra.cost.estimate import Cost, cost_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from skerry.infra.cost.estimate import Volume
    from skerry.infra.cost.prices import Price
    from skerry.infra.spec.model import Replicas
    from skerry.infra.spec.replication_section import FurtherPlace

_GB: Final = 1e9
# As `runtime.mirrors.mirror.KEPT`, whose module reads logs; a test keeps them equal.
KEPT: Final = 2


@dataclass(frozen=True, kw_only=True)
class MirrorRoute:
    """The traffic of a mirror. way: "us-east-1 to gs://acme-dr", for people. price: of a GB; None is unknown."""

    uri: str
    line: FurtherPlace
    way: str
    price: Price | None
    storage: Price | None

    @property
    def problem(self) -> str | None:
        """The reason why `max_usd` cannot be enforced; None if it can, or is not set."""
        if self.line.max_usd is None or self.price is not None:
            return None
        return (
            f"replication: max_usd of {self.line.to} cannot be enforced: unknown price of a GB from {self.way}; write "
            f"it in a file: --prices FILE or {prices.VARIABLE}, or remove max_usd"
        )


def route_of(
    uri: str, line: FurtherPlace, place: tuple[str, str], groups: Sequence[Replicas], own: Path | None
) -> MirrorRoute:
    """The dearest way to a mirror. place: its cloud and region. own: the user's file of prices."""
    cloud, region = place
    ways: list[tuple[str, Price | None]] = []
    for group in groups:
        source, start = group.target.CLOUD, str(getattr(group.target, "region", "") or "")
        known = source in prices.CLOUDS and bool(start)
        price = None
        if known and source is not None:
            price = prices.load(source, own).transfer(start, region if source == cloud else None)
        ways.append((f"{start if known else group.target.kind} to {line.to}", price))
    # An unknown price is the dearest, because it could be.
    way, price = max(ways, key=lambda pair: math.inf if pair[1] is None else pair[1].usd)
    return MirrorRoute(uri=uri, line=line, way=way, price=price, storage=prices.load(cloud, own).storage(region))


@dataclass(frozen=True, kw_only=True)
class MirrorCost:
    """The bytes and the dollars of one mirror."""

    route: MirrorRoute
    volume: Volume

    @property
    def copy_bytes(self) -> float:
        """A checkpoint with the private states of all replicas, if those are copied."""
        private = self.volume.private_bytes if self.route.line.private is not False else 0.0
        return self.volume.checkpoint_bytes + self.volume.replicas * private

    @property
    def interval(self) -> int:
        """Rounds between two copied checkpoints: only a checkpoint of the run can be copied."""
        own = self.volume.spec.faults.checkpoint_every
        return math.ceil(self.route.line.rounds / own) * own

    @property
    def log_bytes(self) -> float:
        """The payloads of a round, if they are copied."""
        return self.volume.replicas * self.volume.contribution_bytes if self.route.line.each_round else 0.0

    @property
    def per_copy(self) -> Cost:
        """The traffic of a copied checkpoint."""
        return self._traffic(self.copy_bytes)

    @property
    def per_round(self) -> Cost:
        """The traffic of a round, copies of checkpoints spread over their rounds."""
        return self._traffic(self.log_bytes + self.copy_bytes / self.interval)

    @property
    def storage_per_month(self) -> Cost:
        """The stored bytes: checkpoints, and the payloads of rounds since the oldest of them."""
        kept = KEPT * (self.copy_bytes + self.interval * self.log_bytes)
        return cost_of(kept / _GB, self.route.storage, f"storage at {self.route.line.to}")

    @property
    def in_words(self) -> str:
        """For people: "$0.72 a copy, $14.40 in all"; up to `max_usd`, and with the round at which that ends copying."""
        rounds, most = self.volume.spec.outer.rounds, self.route.line.max_usd
        each, total = self.per_round, None if rounds is None else self.per_round * rounds
        text = f"{self.per_copy} a copy" if not self.route.line.each_round else f"{each} a round"
        if each.missing:
            return str(each)
        if total is not None and (most is None or total.known <= most):
            return f"{text}, {total} in all"
        if most is None:
            return text
        if not each.known:
            return f"{text}, free"
        return f"{text}; ends at {prices.rounded(most)}, after {math.floor(most / each.known)} rounds"

    def lines(self) -> Iterator[str]:
        """The estimate for people."""
        yield f"mirror {self.route.uri}: {self.in_words}; stored: {self.storage_per_month} a month"

    def document(self) -> dict[str, object]:
        """The estimate for programs."""
        return {
            "uri": self.route.uri,
            "copy_bytes": self.copy_bytes,
            "log_bytes": self.log_bytes,
            "per_round_usd": self.per_round.usd,
            "storage_per_month_usd": self.storage_per_month.usd,
            "max_usd": self.route.line.max_usd,
            "unknown": list((self.per_round + self.storage_per_month).missing),
        }

    def _traffic(self, size_bytes: float) -> Cost:
        return cost_of(size_bytes / _GB, self.route.price, f"a GB from {self.route.way}")
