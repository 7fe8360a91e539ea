"""Links that replicas record by chance, if run.json says so, and the check that each reduction follows from them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, cast

from tests.simulation.training import SIZES

from skerry.runtime.log import keys
from skerry.runtime.store.link_meter import LinkMeter, LinkSpeed

if TYPE_CHECKING:
    import random

    from tests.simulation.invariants import Checker
    from tests.simulation.scenario import Scenario
    from tests.simulation.training import Document
    from tests.simulation.world import Process

    from skerry.runtime.store.memory import MemoryStore

LINKS: Final = (None, None, None, *[LinkSpeed(1e9, 0.03)] * 3, LinkSpeed(1.0, 0.03), LinkSpeed(40.0, 2.0))
"""The contributions of a simulated run have some hundred bytes."""


class DrawnLink(LinkMeter):
    """Another link for each contribution."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._draw = draw

    @property
    def speed(self) -> LinkSpeed | None:
        """One of LINKS."""
        return self._draw.choice(LINKS)


class LinkCheck:
    """Checks links, and the reduction of every decision of a run in which it is chosen."""

    def __init__(self, checker: Checker, store: MemoryStore, scenario: Scenario) -> None:
        self._checker = checker
        self._store = store
        self._parts = scenario.settings[0].parts
        self._has_links = scenario.run.links is not None
        self._decided = checker.checks["exchanges"]
        checker.watch_records("exchanges", self.created)

    def created(self, by: Process, began: int, key: str, body: bytes) -> None:
        """Check a decision that has just been created."""
        self._decided(by, began, key, body)
        record = json.loads(body)
        place = record["round"], record["exchange"]
        links = [self._link(keys.contribution(*place, share["slot"])) for share in record["members"]]
        expected = self._expected(links)
        by.world.facts[f"chosen {expected}" if self._has_links else "chosen without links"] += 1
        if any(links) and not self._has_links:
            self._checker.broken("older versions", f"a member of {key} has a link, which run.json does not announce")
        if record["reduction"] != expected:
            self._checker.broken("reduction", f"{by.name} chose {record['reduction']} for links {links}: {key}")

    def _link(self, key: str) -> Document | None:
        contribution = cast("Document", json.loads(bytes(self._store.read(key) or b"{}")))
        return contribution.get("link")

    def _expected(self, links: list[Document | None]) -> str:
        members, size = len(links), 4.0 * sum(SIZES)
        most = -(-self._parts // members)
        gathered_s = scattered_s = 0.0
        for link in links:
            rate, request_s = (125e6, 0.03) if link is None else (link["bytes_per_s"], link["request_s"])
            others = size * (members - 1)
            gathered_s = max(gathered_s, others / rate)
            read = others * most / self._parts + size * (1 - most / self._parts)
            scattered_s = max(scattered_s, read / rate + 4 * request_s + 0.05)
        return "reduce_scatter" if scattered_s < gathered_s else "all_gather"
