"""Computes the facts of a report from the history of a run and what else is known of it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.machine_times import machine_of
from skerry.infra.observe.pace_of_recent_rounds import PHASES, hidden_share, marks, phases_of, round_views
from skerry.infra.observe.participation import count_parts, ranges
from skerry.infra.observe.replica_state_text import place, state
from skerry.infra.report.answers import answers
from skerry.infra.report.curves import convergence, loss_curve, metric_curves
from skerry.infra.report.facts import Code, Costs, Hardware, ReplicaFacts, ReportFacts, RoundFacts, Stretch, Traffic
from skerry.infra.spec.store_uri import FILE
from skerry.runtime.failure_text import shortened
from skerry.runtime.log.run_record import codec_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.observe.history import RunHistory, Start
    from skerry.infra.observe.participation import ReplicaParticipation
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import ReplicaView, RoundView, RunView
    from skerry.infra.report.facts import State
    from skerry.runtime.log.run_record import Run
    from skerry.runtime.log.summarize_round import RoundHistory

# A page with more charts is no overview; the export has all of them.
_METRICS: Final = 24
_REASONS: Final = 2
_QUOTED: Final = 240
_SETTINGS: Final = (
    ("rounds", "rounds"),
    ("sync_every", "inner steps of a round"),
    ("fragments", "fragments"),
    ("outer_lr", "outer learning rate"),
    ("outer_momentum", "outer momentum"),
    ("codec", "codec"),
    ("reduction", "reduction"),
    ("weighting", "weighting"),
    ("max_norm", "largest norm"),
    ("work", "work due, in rounds of a replica"),
    ("min_replicas", "fewest replicas"),
    ("grace_s", "grace, seconds"),
    ("start_window_s", "start window, seconds"),
    ("checkpoint_every", "checkpoint every, rounds"),
    ("keep_checkpoints", "checkpoints kept"),
    ("keep_every", "kept for good every, rounds"),
    ("keep_unfinished_s", "saves within a round, seconds"),
)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """All that a report is computed from.

    view: the run as `watch` shows it. codes: (digest, first upload in seconds since the epoch). examined: every
    record was read for the findings, not roll-ups alone. versions: of programs, by name.
    """

    history: RunHistory
    view: RunView
    settings: RunSettings
    codes: Sequence[tuple[str, float]] = ()
    findings: tuple[Finding, ...] = ()
    examined: bool = True
    costs: Costs = field(default_factory=Costs)
    versions: tuple[tuple[str, str], ...] = ()


def build_facts(sources: Sources) -> ReportFacts:
    """The facts of a run at one time."""
    history, view, run = sources.history, sources.view, sources.settings.now
    views = round_views(history.rounds, history.starts)
    seconds = seconds_by_replica(history.rounds, views)
    taken = count_parts(history.run.slots, history.rounds, history.starts, history.heartbeats)
    loss = loss_curve(history.rounds)
    metrics, left_out = metric_curves(history.rounds, history.starts, _METRICS)
    by_replica, shown = _by_replica(history.rounds), {replica.slot: replica for replica in view.replicas}
    began_at = min((start.began_at for start in history.starts), default=None)
    elapsed = _elapsed(history.rounds, began_at)
    age_s = next((seconds for seconds in reversed(elapsed) if seconds is not None), None)
    phase = _state(view)
    facts = ReportFacts(
        run=run.name,
        uri=history.uri,
        state=phase,
        headline=_headline(view, phase),
        closed=len(history.rounds),
        rounds=run.rounds,
        created=run.created,
        made_at=view.now_at,
        age_s=age_s,
        running_s=age_s if view.running_s is None else view.running_s,
        answers=(),
        history=_rounds(history.rounds, views, elapsed),
        loss=loss,
        metrics=metrics,
        metrics_left_out=left_out,
        convergence=convergence(loss.points),
        replicas=tuple(
            _replica(
                part,
                by_replica.get(part.slot, []),
                [start for start in history.starts if start.slot == part.slot],
                shown.get(part.slot),
                seconds.get(part.slot, {}),
            )
            for part in taken.replicas
        ),
        contributions=sum(part.of - len(part.missing) for part in taken.replicas),
        possible=sum(part.of for part in taken.replicas),
        complete=taken.complete,
        goodput=_goodput(history.rounds, views),
        hidden=hidden_share(history.rounds),
        costs=sources.costs,
        traffic=_traffic(history.rounds),
        settings=_settings(sources.settings.first, history.uri),
        changes=tuple(_changes(sources.settings)),
        codes=_codes(sources.codes, history),
        versions=(*_versions(history.starts), *sources.versions),
        hardware=_hardware(history.starts),
        findings=sources.findings,
        examined=sources.examined,
        differing=tuple(
            item.round for item in history.rounds if item.averages_equal is False or item.state_equal is False
        ),
        seconds=_added(seconds.values()),
    )
    return answers(facts)


def seconds_by_replica(rounds: Sequence[RoundHistory], views: Sequence[RoundView]) -> dict[str, dict[str, float]]:
    """The seconds of each replica by part of its time, over the rounds with known times.

    away: rounds that it has no record of. other: without a record, as loading a checkpoint or starting.
    """
    spent: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    whole: defaultdict[str, float] = defaultdict(float)
    names = {phase: part for part, phases in PHASES.items() for phase in phases}
    for item, view in zip(rounds, views, strict=True):
        if view.seconds is None:
            continue
        for replica in item.replicas:
            whole[replica.slot] += view.seconds
            phases = {"away": view.seconds} if replica.part == "absent" else phases_of(replica)
            for phase, seconds in phases.items():
                spent[replica.slot][names.get(phase, "other")] += seconds
    if not any(part not in {"away", "other"} for parts in spent.values() for part in parts):
        return {}  # no replica reports times
    for slot, parts in spent.items():
        parts["other"] += max(0.0, whole[slot] - sum(parts.values()))
    return {slot: {part: parts[part] for part in PHASES if parts[part]} for slot, parts in spent.items()}


def stretches(rounds: Sequence[RoundHistory], starts: Sequence[Start]) -> tuple[Stretch, ...]:
    """The parts of one replica in its rounds, neighbouring equal ones joined. rounds: with this replica only."""
    ended = {start.incarnation: start.outcome for start in starts if start.outcome is not None}
    joined: list[Stretch] = []
    last_seen = starts[0].incarnation if starts else -1
    slot = rounds[0].replicas[0].slot if rounds else ""
    for item, part in zip(rounds, marks(slot, rounds, starts), strict=True):
        (replica,) = item.replicas
        mark, why = part or replica.part, replica.reason or ""
        last_seen = last_seen if replica.incarnation is None else replica.incarnation
        outcome = ended.get(last_seen) if replica.part == "absent" else None
        if outcome is not None and outcome.status != "done":
            why = outcome.reason
        previous = joined[-1] if joined else None
        if previous is not None and (previous.mark, previous.why, previous.last + 1) == (mark, why, item.round):
            joined[-1] = replace(previous, last=item.round)
        else:
            joined.append(Stretch(first=item.round, last=item.round, mark=mark, why=why))
    return tuple(joined)


def _by_replica(rounds: Sequence[RoundHistory]) -> dict[str, list[RoundHistory]]:
    """The rounds of each slot, with its own part only."""
    by_replica: defaultdict[str, list[RoundHistory]] = defaultdict(list)
    for item in rounds:
        for replica in item.replicas:
            by_replica[replica.slot].append(replace(item, replicas=(replica,)))
    return by_replica


def _replica(
    part: ReplicaParticipation,
    rounds: Sequence[RoundHistory],
    starts: Sequence[Start],
    view: ReplicaView | None,
    seconds: Mapping[str, float],
) -> ReplicaFacts:
    own = stretches(rounds, starts)
    return ReplicaFacts(
        slot=part.slot,
        state="not seen" if view is None else state(view),
        text=_absences(part.text, own),
        starts=part.starts,
        of=part.of,
        in_average=part.of - len(part.missing),
        cut=part.cut,
        figures=part.figures,
        stretches=own,
        restarts=_restarts(rounds),
        seconds=seconds,
    )


def _absences(text: str, parts: Sequence[Stretch]) -> str:
    """The account of a replica's participation, with reasons of starts that were made up for."""
    reasons = dict.fromkeys(part.why for part in parts if part.why and shortened(part.why, _QUOTED) not in text)
    return "; ".join(filter(None, [text, *(shortened(reason, _QUOTED) for reason in [*reasons][-_REASONS:])]))


def _restarts(rounds: Sequence[RoundHistory]) -> tuple[int, ...]:
    """The rounds in which a later start of a replica is first recorded. rounds: with this replica only."""
    restarts: list[int] = []
    highest = 0
    for item in rounds:
        number = item.replicas[0].incarnation
        if number is not None and number > highest:
            restarts.append(item.round)
            highest = number
    return tuple(restarts)


def _elapsed(rounds: Sequence[RoundHistory], began_at: float | None) -> list[float | None]:
    """The seconds from the first start to the end of each round; None if one of the times is unknown.

    A clock that is set back, as of a folder's machine, adds nothing: no round ends before the one before it.
    """
    elapsed: list[float | None] = []
    before, total = began_at, 0.0
    for item in rounds:
        if before is None or item.closed_at is None:
            elapsed.append(None)
            continue
        total += max(0.0, item.closed_at - before)
        before = item.closed_at
        elapsed.append(total)
    return elapsed


def _rounds(
    rounds: Sequence[RoundHistory], views: Sequence[RoundView], elapsed: Sequence[float | None]
) -> tuple[RoundFacts, ...]:
    tokens = 0
    facts: list[RoundFacts] = []
    for item, view, seconds in zip(rounds, views, elapsed, strict=True):
        tokens += sum(replica.telemetry.tokens for replica in item.replicas if replica.telemetry is not None)
        facts.append(RoundFacts(view=view, hours=None if seconds is None else seconds / 3600, tokens=tokens))
    return tuple(facts)


def _goodput(rounds: Sequence[RoundHistory], views: Sequence[RoundView]) -> float | None:
    useful = whole = 0.0
    for item, view in zip(rounds, views, strict=True):
        if view.seconds is None:
            continue
        whole += view.seconds * len(item.replicas)
        useful += sum(
            replica.telemetry.train_s for replica in item.replicas if replica.in_average and replica.telemetry
        )
    return min(1.0, useful / whole) if useful and whole else None


def _traffic(rounds: Sequence[RoundHistory]) -> Traffic:
    parts = [replica for item in rounds for replica in item.replicas]
    return Traffic(
        uploaded_bytes=sum(replica.uploaded_bytes for replica in parts),
        downloaded_bytes=sum(replica.downloaded_bytes for replica in parts),
        requests=sum(replica.requests for replica in parts),
    )


def _state(view: RunView) -> State:
    if view.finished and view.closed:
        return "finished"
    if any(replica.at_work and not replica.silent for replica in view.replicas):
        return "running"
    return "stopped" if view.closed else "empty"


def _headline(view: RunView, phase: State) -> str:
    of = "" if view.rounds is None else f" of {view.rounds:,}"
    if not view.closed:
        return "no round is closed yet"
    if phase == "finished":
        return f"finished: {view.closed:,} rounds"
    text = "running" if phase == "running" else "stopped, not finished"
    return f"{text}: {view.closed:,}{of} rounds"


def _settings(run: Run, uri: str) -> tuple[tuple[str, str], ...]:
    values = [(title, _shown(getattr(run, name))) for name, title in _SETTINGS]
    if run.codec == "auto":
        chosen = codec_for("auto", is_local=uri.startswith(FILE))
        values = [(title, f"auto: {chosen}" if title == "codec" else value) for title, value in values]
    digest = [] if run.spec is None else [("spec, sha256", run.spec)]
    return (*((title, value) for title, value in values if value), *digest, ("run, nonce", run.nonce))


def _shown(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _changes(settings: RunSettings) -> list[str]:
    return [
        f"from round {change.from_round:,} on: {', '.join(texts.values())} (by {change.by}, {change.created})"
        for change, texts in settings.differences
    ]


def _codes(codes: Sequence[tuple[str, float]], history: RunHistory) -> tuple[Code, ...]:
    """The codes in the order of their uploads, each with the replicas and rounds of the starts that ran it."""
    ordered = sorted(codes, key=lambda item: item[1])
    times = [uploaded_at for _, uploaded_at in ordered]
    code_of: dict[tuple[str, int], str] = {}
    guessed: set[str] = set()
    for start in history.starts:
        named = None if start.software is None else start.software.code
        newest = bisect_right(times, start.began_at) - 1
        if named is None and start.software is None and newest >= 0:
            named = ordered[newest][0]
            guessed.add(named)
        if named is not None:
            code_of[start.slot, start.incarnation] = named
    rounds: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for item in history.rounds:
        for replica in item.replicas:
            code = code_of.get((replica.slot, -1 if replica.incarnation is None else replica.incarnation))
            if replica.in_average and code is not None:
                rounds[code][replica.slot].append(item.round)
    uploads: dict[str, float | None] = {**dict.fromkeys(code_of.values()), **dict(ordered)}
    result: list[Code] = []
    for digest in sorted(uploads, key=lambda digest: uploads[digest] or 0.0):
        alike: defaultdict[str, list[str]] = defaultdict(list)
        for slot, numbers in rounds[digest].items():
            alike[ranges(numbers)].append(slot)
        replicas = tuple((tuple(slots), text) for text, slots in alike.items())
        result.append(Code(digest=digest, uploaded_at=uploads[digest], replicas=replicas, guessed=digest in guessed))
    return tuple(result)


def _versions(starts: Sequence[Start]) -> Iterator[tuple[str, str]]:
    """The versions of each program in the starts of the replicas; with their slots where there are several."""
    for name, program in (("torch", "torch"), ("skerry", "skerry"), ("python", "Python")):
        slots: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for start in starts:
            if version := getattr(start.software, name, None):
                slots[version][start.slot] = None
        if len(slots) == 1:
            yield program, next(iter(slots))
        elif slots:
            yield program, "; ".join(f"{version}: {', '.join(names)}" for version, names in slots.items())


def _hardware(starts: Sequence[Start]) -> tuple[Hardware, ...]:
    groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for start in starts:
        machine = machine_of(start.place)
        accelerator = "" if machine is None or machine.machine is None else machine.accelerator or ""
        text = " ".join(filter(None, (place(machine), accelerator)))
        groups[text, start.host].append(start.slot)
    return tuple(
        Hardware(machine=machine, host=host, slots=tuple(Counter(slots)), starts=len(slots))
        for (machine, host), slots in groups.items()
    )


def _added(replicas: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for parts in replicas:
        for part, seconds in parts.items():
            total[part] += seconds
    return {part: total[part] for part in PHASES if total[part]}
