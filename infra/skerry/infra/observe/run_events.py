"""Describes what happened in a run in plain words, from its rounds, starts and heartbeats. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.observe.read_changed_settings import shortened_list
from skerry.infra.observe.read_starts import seconds_since_epoch
from skerry.infra.observe.run_view import RunEvent

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from skerry.infra.observe.history import Start
    from skerry.infra.observe.read_changed_settings import RunSettings
    from skerry.infra.observe.run_view import RoundView
    from skerry.runtime.log.summarize_round import ReplicaRound, RoundHistory

EVENTS: Final = 40
"""Events of a view: more than a screen has lines for."""
_NO_OUTCOME: Final = "left no record: killed, out of memory or machine lost"


def run_events(
    rounds: Sequence[RoundHistory],
    recent: Sequence[RoundView],
    starts: Sequence[Start],
    notices: Mapping[str, tuple[str, float]],
    settings: RunSettings | None = None,
) -> tuple[RunEvent, ...]:
    """The last EVENTS, the newest first. notices: of replicas at work, and when each was first seen."""
    events = [*_of_starts(starts), *_of_rounds(rounds[-len(recent) :] if recent else (), recent)]
    events += [] if settings is None else _of_settings(settings, rounds)
    events += [RunEvent(at=at, about=slot, text=_line(notice), bad=True) for slot, (notice, at) in notices.items()]
    return tuple(sorted(events, key=lambda event: event.at, reverse=True)[:EVENTS])


def _of_starts(starts: Sequence[Start]) -> Iterator[RunEvent]:
    by_slot: dict[str, list[Start]] = {}
    for start in starts:
        by_slot.setdefault(start.slot, []).append(start)
    for slot, own in by_slot.items():
        for before, start in zip([None, *own], own, strict=False):
            if before is None:
                yield RunEvent(at=start.began_at, about=slot, text="started")
            else:
                killed = before.outcome is None
                why = f"; start {before.incarnation + 1} {_NO_OUTCOME}" if killed else ""
                text = f"start {start.incarnation + 1}{why}"
                yield RunEvent(at=start.began_at, about=slot, text=text, bad=killed)
            if start.outcome is not None and start.ended_at is not None:
                outcome = start.outcome
                text = "done" if outcome.status == "done" else _line(outcome.reason)
                if not text.startswith(outcome.status):  # "stopped on request" says it itself
                    text = f"{_ENDS[outcome.status]}: {text}"
                yield RunEvent(at=start.ended_at, about=slot, text=text, bad=outcome.status in {"failed", "retry"})


_ENDS: Final = {"retry": "ended and may be started again", "failed": "failed", "stopped": "stopped"}


def _of_settings(settings: RunSettings, rounds: Sequence[RoundHistory]) -> Iterator[RunEvent]:
    """Each change when it was made, or when the round began from which it holds. Rounds and work count at once."""
    closed_at = {item.round: item.closed_at for item in rounds}
    for change, texts in settings.differences:
        later = texts.keys() - {"rounds", "work"}
        begins_at = closed_at.get(change.from_round - 1) if later else None
        at = max(filter(None, (seconds_since_epoch(change.created), begins_at)), default=None)
        if at is not None:
            since = f" from round {change.from_round:,} on" if later else ""
            yield RunEvent(at=at, about="settings", text=f"{', '.join(texts.values())}{since} (by {change.by})")


def _of_rounds(rounds: Sequence[RoundHistory], recent: Sequence[RoundView]) -> Iterator[RunEvent]:
    """The rounds in which something differs from the round before, with what is new in them; and the last round."""
    # What lasts since before the first of these rounds is not new in it.
    before = _kind(rounds[0]) if rounds and rounds[0].round else _Kind()
    for item, view in zip(rounds, recent, strict=True):
        kind = _kind(item)
        new = _Kind(
            missing=kind.missing - before.missing,
            cut=kind.cut - before.cut,
            differs=kind.differs and not before.differs,
        )
        before = kind
        if view is recent[-1]:
            new = kind
        if item.closed_at is None or not (new.missing or new.cut or new.differs or view is recent[-1]):
            continue
        took = "" if view.seconds is None else f" in {view.seconds:.1f} s"
        text = f"closed with {view.members} of {view.replicas}{took}"
        text += _missing([replica for replica in item.replicas if (replica.slot, replica.part) in new.missing])
        cut = [
            f"{replica.slot} with {100 * replica.share:.0f} %" for replica in item.replicas if replica.slot in new.cut
        ]
        text += f"; ended early: {shortened_list(cut)}" if cut else ""
        text += "; the replicas' bits DIFFER: run `skerry doctor`" if new.differs else ""
        yield RunEvent(
            at=item.closed_at, about=f"round {item.round:,}", text=text, bad=bool(new.missing) or new.differs
        )


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The abnormal parts of a round: slots that are missing, by their part; that ended early; bits that differ."""

    missing: frozenset[tuple[str, str]] = frozenset()
    cut: frozenset[str] = frozenset()
    differs: bool = False


def _kind(item: RoundHistory) -> _Kind:
    return _Kind(
        missing=frozenset((replica.slot, replica.part) for replica in item.replicas if not replica.in_average),
        cut=frozenset(replica.slot for replica in item.replicas if replica.part == "cut"),
        differs=item.averages_equal is False or item.state_equal is False,
    )


def _missing(replicas: Sequence[ReplicaRound]) -> str:
    texts: list[str] = []
    for part in ("absent", "late", "abstained"):
        of_part = [replica for replica in replicas if replica.part == part]
        reasons = [_line(replica.reason) for replica in of_part if replica.reason]
        if of_part:
            why = f" ({reasons[0]})" if reasons else ""
            texts.append(f"; {part}: {shortened_list([replica.slot for replica in of_part])}{why}")
    return "".join(texts)


def _line(text: str) -> str:
    return text.splitlines()[0] if text else ""
