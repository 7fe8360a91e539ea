"""Writes the facts of a run as one HTML page that needs no network and has no script. Pure.

The page forbids scripts and requests to itself by its Content-Security-Policy, in addition to the escaping of all text.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Final

from skerry.infra.cost.prices import rounded
from skerry.infra.number_text import count_text, duration, short_number, size_text
from skerry.infra.report.answers import PART_TEXTS, shorter_rounds
from skerry.infra.report.html_table import table
from skerry.infra.report.loss_charts import COLOURS, has_lines, heat_map, loss_charts, losses_in_order, metric_chart
from skerry.infra.report.loss_charts import overlaid as overlaid_metric
from skerry.infra.report.plot import escaped, sentence
from skerry.infra.report.round_charts import (
    MARKS,
    PARTS,
    differences,
    participation_grid,
    seconds_of_rounds,
    shares_of_replicas,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from skerry.infra.observe.doctor.findings import Finding
    from skerry.infra.report.facts import Answer, ReportFacts

_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LEVELS: Final = {"finished": "good", "running": "unknown", "stopped": "bad", "empty": "unknown"}
_ANCHORS: Final = ("loss", "replicas", "cost", "time")
_OF_KIND: Final = 5
_MARK_TEXTS: Final = {
    "trained": "in the average, a whole round",
    "cut": "in the average, a shorter round",
    "late": "late, not in the average",
    "abstained": "abstained",
    "absent": "absent",
    "killed": "missing after its start failed or was killed",
}


def page(facts: ReportFacts) -> str:
    """The whole page."""
    style = resources.files("skerry.infra.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = [_loss, _replicas, _time, _cost, _findings, _settings] if facts.history else [_findings, _settings]
    body = "".join(part for section in (_head, *sections, _footer) for part in section(facts))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="generator" content="skerry report"><title>{escaped(facts.run)}: {escaped(facts.headline)}</title>'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )


def _head(facts: ReportFacts) -> Iterator[str]:
    level = _LEVELS[facts.state]
    yield f'<h1>{escaped(facts.run)}: <span class="{level}">{escaped(facts.headline)}</span></h1>'
    span = "" if facts.age_s is None else f", {duration(facts.age_s)} from the first start to the last closed round"
    origin = f"created {facts.created[:16].replace('T', ' ')} UTC, {len(facts.replicas)} replicas{span}"
    yield f'<p class="dim wrap">{escaped(facts.uri)}</p><p class="dim wrap">{escaped(origin)}</p>'
    if errors := sum(finding.severity == "error" for finding in facts.findings):
        yield f'<p class="bad">The log is damaged: <a href="#findings">{errors:,} errors found by skerry doctor</a></p>'
    yield '<div class="tiles">'
    yield from (
        f"<div><b>{escaped(value)}</b>{escaped(name)}<span>{escaped(more)}</span></div>"
        for name, value, more in _tiles(facts)
    )
    yield '</div><div class="answers">'
    for answer, anchor in zip(facts.answers, _ANCHORS, strict=True):
        yield from _answer(answer, anchor)
    yield "</div>"


def _answer(answer: Answer, anchor: str) -> Iterator[str]:
    yield f'<div class="answer"><h2><a href="#{anchor}">{escaped(answer.question)}</a></h2>'
    yield f'<strong class="{answer.level}">{escaped(answer.short)}</strong>'
    yield from (f"<p>{sentence(text, 600)}</p>" for text in answer.sentences)
    yield "</div>"


def _tiles(facts: ReportFacts) -> Iterator[tuple[str, str, str]]:
    lengths = [item.view.seconds for item in facts.history if item.view.seconds is not None]
    pace = f"median {duration(median(lengths))}" if lengths else ""
    yield "rounds", f"{facts.closed:,}", ", ".join(filter(None, [f"of {facts.rounds:,}" if facts.rounds else "", pace]))
    losses = [short_number(point.mean) for point in facts.loss.points]
    yield "loss", losses[-1] if losses else "-", f"from {losses[0]}" if losses else ""
    share = facts.contributions / facts.possible if facts.possible else 0.0
    yield "participation", f"{100 * share:.1f} %", f"{facts.missing:,} of {facts.possible:,} contributions missing"
    goodput = "-" if facts.goodput is None else f"{100 * facts.goodput:.1f} %"
    yield "goodput", goodput, "training that is in an average"
    tokens = facts.history[-1].tokens if facts.history else 0
    rate = f"{count_text(tokens / facts.age_s)} a second" if tokens and facts.age_s else ""
    yield "tokens", count_text(tokens) if tokens else "-", rate
    traffic = facts.traffic
    both = f"{size_text(traffic.uploaded_bytes)} up, {size_text(traffic.downloaded_bytes)} down"
    yield "traffic", size_text(traffic.uploaded_bytes + traffic.downloaded_bytes), both
    usd = "unknown" if facts.costs.usd is None else rounded(facts.costs.usd)
    of = "machines" if facts.costs.traffic_usd is None else "machines and traffic"
    if facts.costs.own:
        usd, of = (
            ("none", "your own machines and folder")
            if facts.in_folder
            else ("unknown", "your own machines, but a bucket")
        )
    elif not facts.costs.complete:
        of = "machines without a price are not counted"
    yield "dollars", usd, of


def _loss(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="loss">Loss</h2>'
    if not facts.loss.points:
        yield "<p>The log has no losses: the script did not call <code>replica.log(loss=...)</code>.</p>"
    else:
        yield '<div class="tabs">'
        charts = loss_charts(facts)
        for number, name in enumerate(charts):
            checked = "" if number else " checked"
            yield f'<input type="radio" name="x" id="x{number}"{checked}><label for="x{number}">against {name}</label>'
        yield from (f'<div class="panel panel{number}">{chart}</div>' for number, chart in enumerate(charts.values()))
        yield "</div>"
        yield from _loss_legend(facts)
    metrics = facts.metrics
    if metrics:
        yield "<h3>Metrics of the script <small>by round, mean of the replicas and their range</small></h3>"
        yield '<div class="small">'
        for curve in metrics:
            held = ", held out" if curve.held_out else ""
            last = f"{short_number(curve.points[-1].mean)}, {len(curve.points):,} rounds{held}"
            yield f"<div><h3>{escaped(curve.name, 64)} <small>{last}</small></h3>"
            yield f"{metric_chart(curve, facts.history[-1].view.round)}</div>"
        yield "</div>"
    if facts.metrics_left_out:
        yield f'<p class="dim">{facts.metrics_left_out} more metrics are in <code>--export csv</code>.</p>'


def _loss_legend(facts: ReportFacts) -> Iterator[str]:
    entries = [("var(--text)", "mean of the replicas")]
    if has_lines(facts):
        entries += [(colour, slot) for colour, (slot, _) in zip(COLOURS, losses_in_order(facts), strict=False)]
    else:
        entries.append(("#5b8fc7", "range of the replicas"))
    held_out = overlaid_metric(facts)
    if held_out is not None:
        entries.append(("var(--good)", f"{held_out.name}, held out"))
    yield _legend(entries)
    if not has_lines(facts):
        chart, full = heat_map(facts)
        yield f"<h3>Loss of each replica <small>against the mean of the round; full colour is {full} away</small></h3>"
        yield chart
        yield _legend([("#2b6cc4", "below the mean"), ("#d6dade", "as the mean"), ("#d63b3b", "above the mean")])


def _replicas(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="replicas">Replicas in each round</h2>'
    yield participation_grid(facts)
    present = {stretch.mark for replica in facts.replicas for stretch in replica.stretches}
    entries = [(colour, _MARK_TEXTS[mark]) for mark, colour in MARKS.items() if mark in present]
    yield _legend(entries)
    if any(replica.restarts for replica in facts.replicas):
        yield '<p class="dim">\u25b2: the first round after a restart, with the state of a checkpoint.</p>'
    if differences(facts):
        text = "its bits differ from the others' for the first time; the finding says when it has healed."
        yield f'<p class="dim">\u25c6: {text}</p>'
    columns = (
        "replica",
        "now",
        "starts",
        "in rounds",
        "shorter rounds",
        "tokens",
        "loss",
        "up",
        "down",
        "absences and their reasons",
    )
    rows = [
        (
            replica.slot,
            replica.state,
            f"{replica.starts}",
            f"{replica.in_average:,} of {replica.of:,}",
            shorter_rounds(replica) or "none",
            f"{replica.figures.tokens:,}",
            " to ".join(
                short_number(loss)
                for loss in (replica.figures.loss_first, replica.figures.loss_last)
                if loss is not None
            ),
            size_text(replica.figures.uploaded_bytes),
            size_text(replica.figures.downloaded_bytes),
            replica.text or "none",
        )
        for replica in sorted(facts.replicas, key=lambda replica: not replica.text)
    ]
    yield table(columns, rows, numbers={2, 3, 5, 7, 8}, wide={9})


def _time(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="time">Where the time goes</h2>'
    if not facts.seconds:
        yield "<p>The log has no times of phases.</p>"
        return
    chart, more = shares_of_replicas(facts)
    left_out = f"; {more} replicas that train more are left out" if more else ""
    yield f"<h3>Time of each replica <small>% of the run{left_out}</small></h3>{chart}"
    yield _legend([(PARTS[part], ": ".join(filter(None, [part, PART_TEXTS.get(part)]))) for part in facts.seconds])
    yield '<div class="pair"><div><h3>Seconds of a round <small>mean of the replicas that took part</small></h3>'
    yield seconds_of_rounds(facts)
    yield "</div><div><h3>The same without training <small>seconds</small></h3>"
    yield seconds_of_rounds(facts, ("train",))
    yield "</div></div>"
    if (facts.hidden or 0.0) >= 0.001:
        yield '<p class="dim">Of an exchange beside training, only the time for which training waits is counted.</p>'


def _cost(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="cost">Cost</h2>'
    rows = [
        (
            cost.machine,
            f"{cost.hours:,.2f}",
            f"{cost.running}",
            cost.unpriced if cost.usd_an_hour is None else rounded(cost.usd_an_hour),
            cost.unpriced if cost.usd_an_hour is None else rounded(cost.usd_an_hour * cost.hours),
        )
        for cost in facts.costs.machines
    ]
    yield table(("machine", "hours", "running now", "$ an hour", "$"), rows, numbers={1, 2, 3, 4}, wide=set())
    if facts.costs.estimate is None:
        yield '<p class="dim">For a run in a cloud, name its spec in place of the URI to compare with the estimate.</p>'


def _findings(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="findings">Findings of <code>skerry doctor</code></h2>'
    if not facts.examined:
        text = f"{facts.closed:,} rounds are drawn from roll-ups, so their records were not examined: skerry doctor"
        yield f'<p class="wrap">{escaped(f"{text} {facts.uri}, or skerry report --full")}</p>'
    if not facts.findings:
        good = (
            "the log is complete, and the replicas agree" if facts.examined else "every replica took part as it should"
        )
        yield f'<p class="good">None: {good}.</p>'
        return
    shown = first_of_each_kind(facts.findings)
    counts = Counter(finding.severity for finding in facts.findings)
    many = {severity: "s" if count > 1 and severity != "info" else "" for severity, count in counts.items()}
    yield f"<p>{', '.join(f'{count:,} {severity}{many[severity]}' for severity, count in counts.items())}</p>"
    rows = [
        (
            finding.severity,
            finding.kind,
            "" if finding.round is None else f"{finding.round:,}",
            finding.slot or "",
            finding.text,
            finding.next,
        )
        for finding in shown
    ]
    yield table(("severity", "finding", "round", "replica", "what", "what to do"), rows, numbers={2}, wide={4, 5})
    if len(shown) < len(facts.findings):
        text = f"The first {_OF_KIND} of each kind are shown; all of them: skerry doctor {facts.uri}"
        yield f'<p class="dim wrap">{escaped(text)}</p>'


def first_of_each_kind(findings: Iterable[Finding]) -> list[Finding]:
    """At most _OF_KIND findings of each kind: damage often repeats in every round."""
    counts: Counter[str] = Counter()
    shown: list[Finding] = []
    for finding in findings:
        counts[finding.kind] += 1
        if counts[finding.kind] <= _OF_KIND:
            shown.append(finding)
    return shown


def _settings(facts: ReportFacts) -> Iterator[str]:
    yield '<h2 id="settings">Settings, code and machines</h2><div class="pair"><div><h3>Settings</h3>'
    yield table((), facts.settings, numbers=set(), wide={1})
    yield from (f"<p>Changed {escaped(change)}.</p>" for change in facts.changes)
    yield "</div><div><h3>Code by round</h3>"
    if facts.codes:
        rows = [
            (
                "; ".join(f"{', '.join(slots)}: {rounds}" for slots, rounds in code.replicas) or "none",
                code.digest,
                _moment(code.uploaded_at) if code.uploaded_at else "not in the bucket",
            )
            for code in facts.codes
        ]
        yield table(("replicas: rounds", "sha256", "first uploaded"), rows, numbers=set(), wide={0, 1})
        if any(code.guessed for code in facts.codes):
            yield (
                '<p class="dim">The log of an older skerry does not name the code of a start: counted is the code '
                "that was the newest when it began.</p>"
            )
    else:
        yield "<p>No packed code in the bucket: the image has it.</p>"
    yield "<h3>Versions</h3>"
    yield table((), facts.versions, numbers=set(), wide={1})
    yield "</div></div><h3>Machines</h3>"
    hardware = [
        (item.machine if item.machine != "-" else "unknown", item.host, ", ".join(item.slots), f"{item.starts}")
        for item in facts.hardware
    ]
    yield table(("machine", "host", "replicas", "starts"), hardware, numbers={3}, wide={2})


def _footer(facts: ReportFacts) -> Iterator[str]:
    yield (
        f"<footer>Written by <code>skerry report</code> on {_moment(facts.made_at)} from the bucket alone. Times are "
        "the store's own. No script, and nothing is loaded from a network.</footer>"
    )


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    parts = (f'<span><i style="background:{colour}"></i>{escaped(text, 80)}</span>' for colour, text in entries)
    return f'<div class="legend">{"".join(parts)}</div>'


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
