"""Checks `failover: automatic`: the run may leave a lost store by itself only if it cannot go on twice.

Reads the document; does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.spec.replication_section import EVERY_ROUND, PEERS, REPLICATION
from skerry.infra.spec.target_kinds import TargetKinds, kinds_of_groups
from skerry.runtime.log.run_record import majority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.spec.model import Spec
    from skerry.infra.spec.replication_section import FurtherPlace
    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

AUTOMATIC: Final = "automatic"
_WHERE: Final[Where] = ("failover",)


def failover_line(spec: Spec) -> FurtherPlace | None:
    """The line of the mirror beside which a run goes on by itself; None without failover."""
    if spec.failover is None:
        return None
    lines = (line for line in spec.replication if not line.is_peers and line.each_round and line.max_usd is None)
    return next(lines, None)


def problems(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Yields the reasons for which the run cannot go on by itself, or could go on in two stores."""
    if document.value(_WHERE) != AUTOMATIC:
        if document.value(("failover_after",)) is not None:
            yield document.problem(
                ("failover_after",), "has an effect only with failover: automatic; remove it", key=True
            )
        return
    named = [kind for kind in kinds_of_groups(document) if isinstance(kind, str)]
    if local := next((kind for kind in named if kind in kinds.names and kind not in kinds.deployed), None):
        text = f"needs replicas that are jobs, and {local} runs on this machine, which is lost as a whole"
        yield document.problem(_WHERE, f"{text}; remove it, and use `skerry restore`")
    if not any(_keeps_each_round(document, index) for index in range(len(document.entries((REPLICATION,))))):
        line = "replication: [{to: gs://acme-dr/runs, log: every round}]"
        text = "needs a mirror that loses no closed round, without max_usd, at which copying ends"
        yield document.problem(_WHERE, f"{text}; write e.g. {line}")
    if document.value(limit := ("limits", "max_cost_usd")) is not None:
        text = "would end the copies of the mirror from which a run with failover: automatic goes on"
        yield document.problem(limit, f"{text}; remove one of the two, and bound the run by limits.max_hours", key=True)
    yield from _too_few(document)


def _keeps_each_round(document: Document, index: int) -> bool:
    line: Where = (REPLICATION, index)
    to, log, max_usd = (document.value((*line, name)) for name in ("to", "log", "max_usd"))
    return to != PEERS and log == EVERY_ROUND and max_usd is None


def _too_few(document: Document) -> Iterator[Problem]:
    """The replicas that a majority leaves behind must not be enough for a round."""
    counts = [document.integer(("replicas", index, "count")) for index in range(len(document.entries(("replicas",))))]
    known = [count for count in counts if count is not None and count > 0]
    where: Where = ("faults", "min_replicas")
    written = document.value(where)
    least = 1 if written is None else document.integer(where)
    if len(known) != len(counts) or not counts or least is None:
        return
    others = sum(known) - majority(sum(known))
    if least <= others:
        text = (
            f"{others} of {sum(known)} replicas, which a majority leaves behind, could go on alone with min_replicas: "
            f"{least}; write e.g. faults.min_replicas: {others + 1}"
        )
        yield document.problem(_WHERE if written is None else where, text)
