"""Formats the state of a run: one line of progress, a table or lines of its replicas, and the summary of an `up`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from skerry.infra.number_text import short_number
from skerry.infra.run.restart_policy import ReplicaFate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.infra.local.up_destroy_events import Leftovers, ReplicaResult, Summary
    from skerry.infra.observe.participation import Figures, Participation
    from skerry.infra.observe.run_view import ReplicaView, RunView

_COLUMNS: tuple[str, ...] = ("replica", "state", "round", "step", "loss", "tok/s", "waiting for", "up MB", "down MB")
NOT_BY_ALL_TEXT = ", but not by all replicas (exit code 3): a replica failed, or missed half or more of the rounds"


def progress(view: RunView) -> str:
    """The run in one line."""
    moving = [replica for replica in view.replicas if replica.at_work and not replica.silent]
    rates = [replica.tokens_per_s for replica in moving if replica.tokens_per_s is not None]
    losses = [replica.loss for replica in view.replicas if replica.loss is not None]
    parts = [f"{_of(view.closed, view.rounds)} rounds done{_made_up(view)}"]
    if view.participants is not None:
        parts.append(f"{view.participants} of {len(view.replicas)} replicas in the last")
    if losses:
        parts.append(f"mean loss {short_number(sum(losses) / len(losses))}")
    if rates:
        parts.append(f"{sum(rates):,.0f} tokens/s")
    return ", ".join(parts)


def plain(view: RunView) -> list[str]:
    """The run and its replicas as lines: slot, then name=value; values have no spaces, except a quoted state."""
    lines = [f"{view.run}: {progress(view)}", f"store: {view.uri}", f"receipts: {agreement_text(view)}"]
    for replica in view.replicas:
        _, state, *rest = _cells(replica)
        words = (
            f"{name.replace(' ', '_')}={value.replace(' ', '')}" for name, value in zip(_COLUMNS[2:], rest, strict=True)
        )
        lines.append(" ".join([replica.slot, f'state="{state}"' if " " in state else f"state={state}", *words]))
    return lines


def agreement_text(view: RunView) -> str:
    """The newest round with receipts of two replicas, and whether their average and state are equal."""
    agreement = view.agreement
    if agreement is None:
        return "no receipts of two replicas in the last rounds" if view.closed else "no round is closed yet"
    average = "equal" if agreement.average else "DIFFERENT"
    state = "" if agreement.state is None else f", state {'equal' if agreement.state else 'DIFFERENT'}"
    return f"round {agreement.round}, {len(agreement.slots)} replicas: average {average}{state}"


def summary_lines(summary: Summary) -> list[str]:
    """Describes the result of `up`: the run, each replica, and what to do next."""
    view = summary.view
    failed = [result for result in summary.results if result.fate is ReplicaFate.FAILED]
    lines = participation_lines(summary.participation, view.rounds, failed, figures=True)
    if summary.participation is None:
        lines.insert(0, progress(view))
    lines[0] = f"{view.run}: {lines[0]}{_made_up(view)}; receipts: {agreement_text(view)}"
    if summary.unseen is not None:
        lines.append(f"the store could not be read at the end; this is the last known state: {summary.unseen}")
    if not summary.results:
        lines.append("the run is already finished, so nothing was started; `skerry destroy` deletes it")
    elif summary.ok:
        lines.append(f"done in {summary.wall_s:.1f} s{'' if summary.by_all else NOT_BY_ALL_TEXT}")
    else:
        if all(result.fate is ReplicaFate.DONE for result in summary.results) and summary.unseen is None:
            closed = f"{_of(view.closed, view.rounds)} rounds are closed{_made_up(view)}"
            lines.append(f"replicas ended with 0 but {closed}; does the script call connect()?")
        lines.append(f"not done after {summary.wall_s:.1f} s; `skerry up` continues it, `skerry logs` shows why")
    return lines


def model_lines(view: RunView | None, export: str) -> list[str]:
    """Names the command that writes the model to a file, once the run is finished. export: its first words."""
    return [f"the trained model as a file: {export} -o model.safetensors"] if view is not None and view.finished else []


def participation_lines(
    taken: Participation | None,
    rounds: int | None,
    failed: Sequence[ReplicaResult] = (),
    *,
    figures: bool = False,
) -> list[str]:
    """Describes which replicas took part in which rounds: the same lines for `up`, `status` and `watch`.

    rounds: of the whole run. failed: the replicas that are not restarted any more. figures: also a line for each
    replica that took part in all of its rounds.
    """
    if taken is None:
        unknown = "the replicas that were missing in rounds are not known, because the log could not be read"
        return [unknown, *(f"warning: {result.slot}: {_failure(result)}" for result in failed)]
    results = {result.slot: result for result in failed}
    lines = [taken.headline(rounds)]
    for replica in taken.replicas:
        result = results.get(replica.slot)
        ended = "" if result is None else f"failed ({result.reason})" if replica.reasons else _failure(result)
        parts = "; ".join(filter(None, [ended, replica.text]))
        numbers = figures_text(replica.figures) if figures else ""
        if parts:
            lines.append(f"warning: {replica.slot}: {parts}{f'; {numbers}' if numbers else ''}")
        elif figures:
            lines.append(f"  {replica.slot}: {f'in all {replica.of} rounds, {numbers}' if numbers else 'no round'}")
    return lines


def figures_text(figures: Figures) -> str:
    """The training of a replica over all its starts: loss 4.031 to 1.640, 99 tokens, 1.2 MB up, 0.8 MB down."""
    losses = [short_number(loss) for loss in (figures.loss_first, figures.loss_last) if loss is not None]
    parts = [f"loss {' to '.join(losses)}"] if losses else []
    if figures.tokens:
        parts.append(f"{figures.tokens:,} tokens")
    if figures.uploaded_bytes or figures.downloaded_bytes:
        parts.append(f"{megabytes(figures.uploaded_bytes)} up, {megabytes(figures.downloaded_bytes)} down")
    return ", ".join(parts)


def _failure(result: ReplicaResult) -> str:
    last = f": {result.last_line}" if result.last_line else ""
    return f"failed ({result.reason}){last}"


def to_remove(remains: Leftovers) -> str:
    """Describes in one line what `destroy` would remove."""
    parts = [f"{remains.objects} objects ({megabytes(remains.size_bytes)}) at {remains.uri}"]
    if remains.processes:
        parts.append(f"{remains.processes} processes")
    if remains.folder is not None:
        parts.append(f"the folder {remains.folder}")
    return ", ".join([*parts, *(f"the mirror at {uri}" for uri in remains.mirrors)])


def megabytes(size_bytes: int) -> str:
    """A size in megabytes: 12.3 MB."""
    return f"{size_bytes / 1e6:.1f} MB"


def _cells(replica: ReplicaView) -> tuple[str, ...]:
    return (
        replica.slot,
        _state(replica),
        "-" if replica.round is None else str(replica.round),
        "-" if replica.inner_step is None else str(replica.inner_step),
        "-" if replica.loss is None else short_number(replica.loss),
        "-" if replica.tokens_per_s is None else f"{replica.tokens_per_s:,.0f}",
        ", ".join(replica.waiting_for) or "-",
        f"{replica.uploaded_bytes / 1e6:.1f}",
        f"{replica.downloaded_bytes / 1e6:.1f}",
    )


def _state(replica: ReplicaView) -> str:
    if replica.outcome is not None:
        return replica.outcome
    if replica.phase is None:
        return "not seen"
    return f"{replica.phase}, silent {replica.silent_s:.0f} s" if replica.silent else replica.phase


def _made_up(view: RunView) -> str:
    """The share of the run's work that is done; empty if its rounds alone end it."""
    if view.due is None:
        return ""
    # Rounded down: 100 % only when the run is finished.
    share = 1.0 if view.finished else min(0.999, view.work / view.due)
    return f", {math.floor(1000 * share) / 10:.1f} % trained"


def _of(closed: int, rounds: int | None) -> str:
    return str(closed) if rounds is None else f"{closed} of {rounds}"
