"""The page as text: nothing of the bucket is markup, nothing is loaded, and its size is bounded."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser

from tests.infra.report.histories import SmallRun, eventful

from skerry.infra.observe.doctor.examine import examine_history
from skerry.infra.observe.doctor.findings import finding
from skerry.infra.report.color_grid_png import png_uri
from skerry.infra.report.facts import Curve, Point
from skerry.infra.report.loss_charts import metric_chart
from skerry.infra.report.page import page
from skerry.infra.report.plot import escaped, ticks
from skerry.infra.report.round_charts import participation_grid, seconds_of_rounds

HOSTILE = "</span><script>alert('x')</script><img src=x onerror=alert(1)>\" onload=\"alert(2)\x1b[31m\x00"
MEGABYTES_2 = 2_000_000
# Elements of HTML and SVG that the page uses.
ELEMENTS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "h1",
        "h2",
        "h3",
        "p",
        "div",
        "span",
        "a",
        "b",
        "strong",
        "small",
    ),
    *(
        "code",
        "label",
        "input",
        "svg",
        "path",
        "rect",
        "img",
        "i",
        "footer",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    ),
}


class Parsed(HTMLParser):
    """Elements and attributes of a page, and whether all are closed in order."""

    VOID = frozenset({"meta", "input", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes |= {(name, value or "") for name, value in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_loads_nothing() -> None:
    text = page(eventful().facts())
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.elements <= ELEMENTS
    assert not [
        value for name, value in parsed.attributes if name in {"src", "href"} and not value.startswith(("#", "data:"))
    ]
    assert "default-src 'none'" in text
    assert "url(" not in text
    assert "@import" not in text


def test_text_of_the_bucket_is_inert() -> None:
    slots = ("east-0", HOSTILE)
    hostile = SmallRun(
        slots=slots,
        parts={(HOSTILE, 3): "abstained"},
        kill=("east-0", 20, 22),
        reason=HOSTILE,
        metrics=(HOSTILE[:60],),
        name=HOSTILE,
    )
    findings = (finding("crashed", HOSTILE, HOSTILE, slot=HOSTILE),)
    text = page(hostile.facts(findings=findings, codes=[(HOSTILE, 5.0)], versions=((HOSTILE, HOSTILE),)))
    parsed = Parsed(text)
    assert parsed.open == []
    assert parsed.elements <= ELEMENTS
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "&lt;script&gt;alert" in text, "it is shown as what it is"


def test_long_texts_and_lists_are_cut() -> None:
    long = SmallRun(reason="x" * 100_000, parts={("east-0", 3): "abstained"}, metrics=tuple(f"m{n}" for n in range(32)))
    findings = tuple(finding("orphan", f"k{n}", "y" * 50_000, severity="info") for n in range(1000))
    text = page(long.facts(findings=findings))
    assert len(text) < 400_000
    assert "The first 5 of each kind are shown" in text
    assert "9 more metrics are in" in text


def test_large_runs_stay_below_two_megabytes() -> None:
    slots = tuple(f"node-{number}" for number in range(64))
    restless = {(slot, number): "absent" for number in range(0, 400, 3) for slot in slots[number % 2 :: 2]}
    text = page(SmallRun(rounds=400, slots=slots, parts=restless).facts())
    assert len(text.encode()) < MEGABYTES_2
    assert text.count("data:image/png") == 2, "the parts and the losses are pictures"
    assert text.count("<rect") + text.count("<path") < 5000


def test_replica_with_differing_bits_is_marked_with_its_healing() -> None:
    text = "its state differs from that of 3 of 4 replicas; it agrees again in round 9"
    differs = finding("states-differ", "receipts/00000007/east-1.json", text, round_number=7, slot="east-1")
    marked = page(SmallRun().facts(findings=(differs,)))
    assert re.search(rf'title="east-1, round 7: {text}">\u25c6<', marked)
    assert "\u25c6: its bits differ" in marked
    assert "\u25c6" not in page(SmallRun().facts(findings=()))


def test_line_of_a_replica_has_a_gap_where_it_was_away() -> None:
    text = page(SmallRun(kill=("west-1", 20, 22)).facts())
    lines = re.findall(r'<path class="line thin"[^>]* d="([^"]*)"', text)
    assert [line.count("M") for line in lines] == [1, 1, 1, 2] * 3, "against rounds, tokens and minutes"


def test_return_of_a_replica_is_marked_in_the_chart_of_the_loss() -> None:
    text = page(SmallRun(kill=("west-1", 20, 22)).facts())
    assert text.count('class="event"') == text.count('class="back"') == 3, "against rounds, tokens and minutes"
    assert ">west-1 killed, back in round 23<" in text
    lost = page(SmallRun(kill=("west-1", 20, 39)).facts())
    assert ">west-1 killed, not back<" in lost
    assert 'class="back"' not in lost


def test_number_of_a_round_is_below_the_middle_of_its_cell() -> None:
    facts = SmallRun().facts()
    for chart in (participation_grid(facts), seconds_of_rounds(facts)):
        labels = re.findall(r'class="x" style="left:([0-9.]+)%">([0-9]+)<', chart)
        assert labels == [("1.25", "0"), ("26.25", "10"), ("51.25", "20"), ("76.25", "30")], "of 40 rounds, to 39"


def test_bars_above_the_axis_are_named_with_their_values() -> None:
    history = SmallRun().history()
    late = {5: 40.0, 10: 30.0, 20: 90.0, 30: 60.0}
    rounds = tuple(
        replace(
            item,
            replicas=tuple(
                replace(part, seconds={"wait": late.get(item.round, 2.0 + item.round / 50)}) for part in item.replicas
            ),
        )
        for item in history.rounds
    )
    assert "\u2191 round 5: 40 s, round 20: 1 m 30 s, round 30: 1 m 00 s, 1 more<" in page(
        SmallRun().facts(history=replace(history, rounds=rounds))
    )


def test_lines_of_long_runs_are_thinned() -> None:
    text = page(SmallRun(rounds=2000, slots=("a-0", "a-1")).facts())
    paths = re.findall(r' d="([^"]*)"', text)
    assert sum(path.count("L") > 400 for path in paths) >= 3 * 3, "the mean and two replicas, on three axes"
    assert max(path.count("L") for path in paths) <= 2 * 602


def test_one_round_of_one_replica_can_be_drawn() -> None:
    text = page(SmallRun(rounds=1, slots=("a-0",)).facts())
    assert Parsed(text).open == []
    assert "Fewer than four rounds show no trend." in text


def test_page_of_a_run_without_rounds_has_its_settings() -> None:
    text = page(SmallRun(rounds=0).facts())
    assert Parsed(text).open == []
    assert "no round is closed yet" in text
    assert "outer learning rate" in text
    assert "<svg" not in text


def test_value_outside_of_the_axis_is_named() -> None:
    text = page(SmallRun(losses={0: 98_765.0}).facts())
    assert "\u2191 9.88e+04 in round 0" in text


def test_scale_of_a_small_chart_has_two_numbers_and_what_is_above() -> None:
    points = [
        Point(round=n, mean=9.0 if n < 2 else 0.33 + 0.0026 * n, lowest=0.3, highest=9.0, replicas=4) for n in range(40)
    ]
    chart = metric_chart(Curve(name="norm", points=tuple(points), by_replica={}), 39)
    assert len(re.findall('<span class="y"', chart)) >= 2
    assert "\u2191 9.000 in round 0, 2 rounds are above" in chart


def test_findings_are_counted_and_commands_in_them_are_code() -> None:
    findings = tuple(finding("missing-in-rounds", "key", "killed by `up`", severity="warning") for _ in range(2))
    text = page(SmallRun().facts(findings=findings))
    assert "<p>2 warnings</p>" in text
    assert "killed by <code>up</code>" in text


def test_page_from_roll_ups_names_the_limit_of_its_findings() -> None:
    run = SmallRun(kill=("west-1", 20, 22), differs=frozenset({7, 8}))
    findings = examine_history(run.history())
    shown = [(finding.severity, finding.kind, finding.round, finding.slot) for finding in findings]
    assert shown == [
        ("error", "averages-differ", 7, None),
        ("error", "states-differ", 7, None),
        ("warning", "missing-in-rounds", 20, "west-1"),
    ]
    text = page(run.facts(findings=findings, examined=False))
    assert "40 rounds are drawn from roll-ups, so their records were not examined: skerry doctor s3://acme" in text
    assert "receipts differ in rounds 7-8; <code>skerry doctor</code> names the replica" in text
    assert "None: every replica took part" in page(SmallRun().facts(examined=False))
    assert "drawn from roll-ups" not in page(SmallRun().facts())


def test_table_marks_unknown_prices_never_as_free() -> None:
    facts = SmallRun().facts()
    assert "$0.00" not in page(facts)
    assert "unknown" in facts.answers[2].short


def test_png_has_the_pixels_that_were_given() -> None:
    data = b64decode(png_uri([b"\0\1", b"\2\1"], ["", "#ff0000", "#0000ff"]).split(",", 1)[1])
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (2, 2)
    compressed = data[data.index(b"IDAT") + 4 : data.index(b"IEND") - 8]
    assert zlib.decompress(compressed) == b"\0\0\1\0\2\1"


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 40, whole=True) == [0, 10, 20, 30, 40]
    assert ticks(1.93, 2.31) == [2.0, 2.1, 2.2, 2.3]
    assert ticks(0, 3, whole=True) == [0, 1, 2, 3]
    assert ticks(5, 5) == [5]


def test_escaped_text_is_one_line_without_control_characters() -> None:
    assert escaped("a\n<b>\x07\u202e'") == "a &lt;b&gt;\ufffd\ufffd&#x27;"
    assert re.fullmatch(r"x{300}\.\.\.", escaped("x" * 400))
