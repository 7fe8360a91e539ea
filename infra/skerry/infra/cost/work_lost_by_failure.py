"""Answers for each part of a run that can be lost: from where the run goes on, and how much work is gone. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.infra.cost.prices import title
from skerry.infra.spec.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.infra.spec.model import Faults, SpecFile
    from skerry.infra.spec.replication_section import FurtherPlace

NOTHING = "nothing"


def after_loss(spec: SpecFile, uri: str) -> str:
    """The step by which the run goes on from the mirror at this URI."""
    if uri != spec.failover_mirror:
        return "`skerry restore`"
    return f"{format_duration(spec.spec.failover_after)}, by itself"


@dataclass(frozen=True, kw_only=True)
class Place:
    """The store, or a mirror. uri: of the run or mirror. cloud, region: None if unknown. line: None for the store.

    costs: to keep it, for people. copied, checkpoint: rounds of the run that are in it, and its newest checkpoint; None
    before they are read. after: the step by which the run goes on from there.
    """

    uri: str
    cloud: str | None
    region: str | None
    line: FurtherPlace | None = None
    costs: str = "-"
    copied: int | None = None
    checkpoint: int | None = None
    after: str = "`skerry restore`"

    @property
    def bucket(self) -> str:
        """The bucket's name, or the folder."""
        scheme, _, rest = self.uri.partition("://")
        return rest.rpartition("/")[0] if scheme == "file" else rest.partition("/")[0]

    @property
    def at_most(self) -> int:
        """The rounds that are lost with the store at most, beyond those that are still being copied."""
        return 0 if self.line is None or self.line.each_round else self.line.rounds

    @property
    def restorable(self) -> int | None:
        """The round from which the run would go on now; None if unknown, or if there is nothing to restore."""
        if self.checkpoint is None or self.line is None or not self.line.each_round:
            return self.checkpoint
        return self.copied


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A row of the table: a loss, from where the run goes on, after which step, and the work that is lost.

    costs: to keep the place from which it goes on.
    """

    lost: str
    goes_on_from: str
    after: str
    work_lost: str
    costs: str


def losses(
    home: Place, mirrors: Sequence[Place], peers: FurtherPlace | None, faults: Faults, rounds: int | None = None
) -> tuple[Loss, ...]:
    """The rows of the table, the smallest loss first. rounds: closed in the run; None before it is read."""
    in_round = "<= 1 round of one replica"
    if faults.keep_unfinished is not None:
        in_round = f"<= {format_duration(faults.keep_unfinished)} of one replica"
    machine = Loss(lost="a machine", goes_on_from="the store", after="its restart", work_lost=in_round, costs="-")
    process = Loss(lost="a process", goes_on_from="the store", after="its restart", work_lost=in_round, costs="-")
    if peers is not None:
        kept = "memory" if peers.memory is not False else "disk"
        process = Loss(
            lost="a process",
            goes_on_from=f"the {kept} of its machine",
            after="its restart",
            work_lost=f"<= {format_duration(peers.time)} of one replica",
            costs=f"{peers.copies or 2} copies of the state in {kept}",
        )
    return (process, machine, *_losses_of_the_store(home, mirrors, rounds))


def loss_lines(rows: Iterable[Loss]) -> Iterator[str]:
    """The table for people, with aligned columns."""
    heads = Loss(
        lost="if this is lost",
        goes_on_from="the run goes on from",
        after="after",
        work_lost="work lost",
        costs="it costs to keep",
    )
    cells = [(row.lost, row.goes_on_from, row.after, row.work_lost, row.costs) for row in (heads, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    for row in cells:
        padded = [text.ljust(width) for text, width in zip(row[:4], widths, strict=True)]
        yield "  ".join((*padded, row[4])).rstrip()


def _losses_of_the_store(home: Place, mirrors: Sequence[Place], rounds: int | None) -> Iterator[Loss]:
    shown: set[str] = set()
    if home.cloud is None:
        yield _store_loss(f"the folder {home.bucket}", mirrors, shown, rounds)
    else:
        cloud = title(home.cloud)
        elsewhere = [place for place in mirrors if place.cloud != home.cloud]
        far = [place for place in mirrors if place in elsewhere or place.region not in (None, home.region)]
        own = [place for place in mirrors if place.line is not None and place.line.brought and place not in elsewhere]
        yield _store_loss(f"the bucket {home.bucket}", mirrors, shown, rounds)
        if home.region:
            yield _store_loss(f"the region {home.region}", far, shown, rounds)
        account = _store_loss(f"the account at {cloud}", elsewhere or own, shown, rounds)
        if own and not elsewhere:
            account = Loss(
                lost=account.lost,
                goes_on_from=f"{account.goes_on_from}, if it is of another account",
                after=account.after,
                work_lost=account.work_lost,
                costs=account.costs,
            )
        yield account
        yield _store_loss(cloud, elsewhere, shown, rounds)
    if mirrors:
        yield _store_loss("the store and all mirrors", (), shown, rounds)


def _store_loss(lost: str, left: Sequence[Place], shown: set[str], rounds: int | None) -> Loss:
    """shown: mirrors whose costs are in an earlier row."""
    ready = [place for place in left if rounds is None or place.restorable is not None]
    if not ready:
        return Loss(lost=lost, goes_on_from=NOTHING, after="-", work_lost="the run", costs="-")
    # Before a mirror is read, the one that loses least; then the one that has most.
    best = min(ready, key=lambda place: (-(place.restorable or 0), place.at_most))
    base = best.uri.rpartition("/")[0]
    if rounds is not None and best.restorable is not None:
        start, work = f"round {best.restorable}, {base}", f"{max(0, rounds - best.restorable)} rounds now"
    elif best.at_most:
        start, work = f"round r - {best.at_most}, {base}", f"<= {best.at_most} rounds"
    else:
        start, work = f"round r, {base}", "rounds not copied yet"
    costs = "-" if best.uri in shown else best.costs
    shown.add(best.uri)
    return Loss(lost=lost, goes_on_from=start, after=best.after, work_lost=work, costs=costs)
