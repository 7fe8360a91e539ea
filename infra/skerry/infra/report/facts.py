"""The facts of a report: what the page shows, `--json` prints and tests compare. Pure data.

Texts from the bucket are as they were read; `page` escapes and shortens them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from skerry.infra.spec.store_uri import FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.participation import Figures
    from skerry.infra.observe.run_view import Mark, RoundView

Level: TypeAlias = Literal["good", "warning", "bad", "unknown"]
Trend: TypeAlias = Literal["falling", "level", "rising", "unknown"]
State: TypeAlias = Literal["finished", "running", "stopped", "empty"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a question of the reader: in a few words, then in sentences."""

    question: str
    short: str
    sentences: tuple[str, ...]
    level: Level


@dataclass(frozen=True, kw_only=True)
class Point:
    """A figure of one round over the replicas that report it: mean, lowest, highest."""

    round: int
    mean: float
    lowest: float
    highest: float
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A figure over the rounds that have it. held_out: its name says that it is measured on held-out data.

    by_replica: (round, value) of each slot; empty for the metrics of a script.
    """

    name: str
    points: tuple[Point, ...]
    held_out: bool = False
    by_replica: Mapping[str, tuple[tuple[int, float], ...]] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The loss at the begin and at the end. lowest: (round, loss). last: the mean of the last `window` rounds.

    change: from the mean of the `window` rounds before to `last`, as a share of it; None with too few rounds.
    """

    first: float
    last: float
    window: int
    lowest: tuple[int, float]
    change: float | None
    trend: Trend


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """A closed round. hours: since the first start of a replica; None if the store has no times.

    tokens: of all replicas since the first round.
    """

    view: RoundView
    hours: float | None
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbouring rounds, first to last, in which a replica has the same part.

    why: its reason to abstain, or the reason for which its start ended.
    """

    first: int
    last: int
    mark: Mark
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class ReplicaFacts:
    """One slot. state: now, in words. text: its absences and their reasons; empty if it took whole part at once.

    of: rounds that it could take part in, in_average: those that have its work. restarts: rounds in which a later start
    first took part, having loaded the shared state. seconds: by part of its time, over all rounds with known times.
    """

    slot: str
    state: str
    text: str
    starts: int
    of: int
    in_average: int
    cut: int
    figures: Figures
    stretches: tuple[Stretch, ...]
    restarts: tuple[int, ...]
    seconds: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, kw_only=True)
class MachineCost:
    """The starts of the run on one kind of machine. usd_an_hour: None if its price is unknown."""

    machine: str
    hours: float
    running: int
    usd_an_hour: float | None

    @property
    def own(self) -> bool:
        """True if it is the operator's own: no cloud bills it."""
        return self.machine == "local"

    @property
    def unpriced(self) -> str:
        """For a table, in place of a price."""
        return "no price" if self.own else "unknown"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate from a spec. usd_an_hour: all replicas; usd_limit: the most; None if unknown.

    bytes_a_round, usd_traffic_a_round: without failures, for the size of the model that the caller gave.
    """

    usd_an_hour: float | None = None
    usd_limit: float | None = None
    bytes_a_round: float | None = None
    usd_traffic_a_round: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Dollars for machines and traffic. usd: with known prices, None without any. to_come: at the current pace
    until the end. complete: the prices of all machines are known. traffic_usd: the known part of traffic, in usd; None
    if the bucket's region is unknown. unpriced: traffic without a known price. requests_usd: at most, not in usd.
    estimate: None without a spec of a cloud.
    """

    machines: tuple[MachineCost, ...] = ()
    usd: float | None = None
    to_come: float | None = None
    complete: bool = False
    traffic_usd: float | None = None
    unpriced: tuple[str, ...] = ()
    requests_usd: float | None = None
    estimate: Estimate | None = None

    @property
    def own(self) -> bool:
        """True if all machines are the operator's own: no cloud has billed any."""
        return bool(self.machines) and all(machine.own for machine in self.machines)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes and requests of all receipts. Heartbeats and starts are not in it."""

    uploaded_bytes: int
    downloaded_bytes: int
    requests: int


@dataclass(frozen=True, kw_only=True)
class Code:
    """A packed code folder. uploaded_at: first time, since the epoch; None if the bucket does not have it.

    replicas: slots, and the rounds with work of them by starts that ran it. guessed: some of these starts are of an old
    log, which does not name their code: they count for the newest at their beginning.
    """

    digest: str
    uploaded_at: float | None
    replicas: tuple[tuple[tuple[str, ...], str], ...]
    guessed: bool = False


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Starts on the same host. machine: cloud, region, type; "-" if the log does not name it."""

    machine: str
    host: str
    slots: tuple[str, ...]
    starts: int


@dataclass(frozen=True, kw_only=True)
class ReportFacts:
    """A run on one page. age_s: since the first start, until the last closed round. running_s: the time in which a
    replica ran, without the pause between two `up`s. goodput: seconds of training in an average, of all seconds of the
    replicas; None if no times are known. hidden: share of the exchanges' time that ran
    behind training; None in old logs. settings: those of run.json, then each change.

    examined: every record was read for the findings, not roll-ups alone. versions: what is known of programs.
    differing: rounds after which the replicas' bits were not equal.
    """

    run: str
    uri: str
    state: State
    headline: str
    closed: int
    rounds: int | None
    created: str
    made_at: float
    age_s: float | None
    running_s: float | None
    answers: tuple[Answer, ...]
    history: tuple[RoundFacts, ...]
    loss: Curve
    metrics: tuple[Curve, ...]
    metrics_left_out: int
    convergence: Convergence | None
    replicas: tuple[ReplicaFacts, ...]
    contributions: int
    possible: int
    complete: int
    goodput: float | None
    hidden: float | None
    costs: Costs
    traffic: Traffic
    settings: tuple[tuple[str, str], ...]
    changes: tuple[str, ...]
    codes: tuple[Code, ...]
    versions: tuple[tuple[str, str], ...]
    hardware: tuple[Hardware, ...]
    findings: tuple[Finding, ...]
    examined: bool
    differing: tuple[int, ...]
    seconds: Mapping[str, float] = field(hash=False)

    @property
    def in_folder(self) -> bool:
        """True if the store is a folder: no cloud bills its traffic."""
        return self.uri.startswith(FILE)

    @property
    def missing(self) -> int:
        """Contributions that no average has."""
        return self.possible - self.contributions
