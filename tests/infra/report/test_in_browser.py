"""The page in headless Chromium: no message, no request, no overflow, and colours where the document has its cells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.report.browser import Browser, require
from tests.infra.report.histories import SmallRun, eventful
from tests.infra.report.test_page import HOSTILE
from tests.infra.runs import Skerry, write_spec
from tests.support.command_line import invoke

from skerry.infra.report.page import page
from skerry.infra.report.round_charts import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.infra.report.browser import Shown

pytestmark = pytest.mark.slow

MISUSE = Path(__file__).parents[1] / "misuse"
# The rectangle of each cell, in pixels of the page.
CELLS = """[...document.querySelectorAll('[data-mark]')].map(cell => {
    const box = cell.getBoundingClientRect();
    return {...cell.dataset, x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height};
})"""
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Texts of charts that leave the window, or that lie on another text of the same chart.
OUTSIDE = """[...document.querySelectorAll('.plot span')].filter(text => {
    const box = text.getBoundingClientRect();
    return box.width && (box.left < 0 || box.right > innerWidth);
}).map(text => text.textContent)"""
OVERLAPPING = """[...document.querySelectorAll('.plot')].flatMap(plot =>
    ['x', 'y'].flatMap(axis => {
        const boxes = [...plot.querySelectorAll('span.' + axis)].map(text => text.getBoundingClientRect());
        const edge = axis == 'x' ? ['left', 'right'] : ['top', 'bottom'];
        boxes.sort((a, b) => a[edge[0]] - b[edge[0]]);
        return boxes.slice(1).filter((box, i) => box.width && box[edge[0]] < boxes[i][edge[1]] - 1);
    })).length"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    require()
    with Browser() as opened:
        yield opened


def write(folder: Path, run: SmallRun) -> Path:
    path = folder / "run.html"
    path.write_text(page(run.facts()))
    return path


def check(browser: Browser, shown: Shown, path: Path) -> None:
    """Check what every page keeps to."""
    assert shown.messages == []
    assert shown.requests == [path.as_uri()]
    assert browser.evaluate(OVERFLOW) == 0
    assert browser.evaluate(OUTSIDE) == []
    assert browser.evaluate(OVERLAPPING) == 0


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1220, 2560])
def test_cells_have_their_colours_at_their_places(browser: Browser, tmp_path: Path, width: int, *, dark: bool) -> None:
    path = write(tmp_path, eventful())
    shown = browser.show(path, width, dark=dark)
    check(browser, shown, path)
    assert shown.colour(2, 2) == ("#14171b" if dark else "#ffffff")
    cells = browser.evaluate(CELLS)
    assert len(cells) == 12
    assert {cell["mark"] for cell in cells} == {"trained", "cut", "late", "abstained", "killed"}
    for cell in cells:
        # Off the centre, where the sign of a restart is.
        x, y = cell["x"] + cell["width"] / 2, cell["y"] + cell["height"] / 4
        assert shown.colour(x, y) == MARKS[cell["mark"]], cell
    one_round = next(cell for cell in cells if cell["mark"] == "late")
    whole = sum(cell["width"] for cell in cells if cell["y"] == one_round["y"])
    assert one_round["width"] == pytest.approx(whole / 40, abs=0.5)


def test_tabs_switch_the_axis_of_the_loss_without_a_script(browser: Browser, tmp_path: Path) -> None:
    shown = browser.show(write(tmp_path, eventful()), 1220)
    visible = "[...document.querySelectorAll('.panel')].map(panel => panel.offsetHeight > 0)"
    assert browser.evaluate(visible) == [True, False, False]
    browser.evaluate("document.querySelector('label[for=x1]').click()")
    assert browser.evaluate(visible) == [False, True, False]
    assert browser.evaluate("document.scripts.length") == 0
    assert shown.messages == []


def test_mean_of_the_loss_is_drawn_at_its_tick(browser: Browser, tmp_path: Path) -> None:
    run = SmallRun(rounds=11, slots=("a-0",), losses=dict.fromkeys(range(11), 3.0) | {0: 4.0, 10: 2.0}, metrics=())
    shown = browser.show(write(tmp_path, run), 1220)
    box = browser.evaluate(
        "(b => [b.x, b.y + scrollY, b.width, b.height])(document.querySelector('.plot svg').getBoundingClientRect())"
    )
    tick = browser.evaluate(
        "[...document.querySelector('.plot').querySelectorAll('.y')].filter(t => t.textContent == '3')"
        ".map(t => t.getBoundingClientRect()).map(b => b.y + scrollY + b.height / 2)[0]"
    )
    middle = box[0] + box[2] / 2
    dark = [y for y in range(int(box[1]), int(box[1] + box[3])) if shown.colour(middle, y) < "#404040"]
    assert dark, "the line of the mean crosses the middle"
    assert sum(dark) / len(dark) == pytest.approx(tick, abs=6), "it has the height of 3, but for its noise"


def test_hostile_texts_run_nothing(browser: Browser, tmp_path: Path) -> None:
    hostile = SmallRun(slots=("east-0", HOSTILE), parts={(HOSTILE, 3): "abstained"}, reason=HOSTILE, name=HOSTILE)
    path = write(tmp_path, hostile)
    shown = browser.show(path, 1220)
    assert shown.messages == []
    assert shown.requests == [path.as_uri()]
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("</span><script>alert('x')</script>")


def test_policy_of_the_page_refuses_a_script(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text(page(SmallRun(rounds=2).facts()).replace("<footer>", "<script>window.ran = 1</script><footer>"))
    shown = browser.show(path, 1220)
    assert browser.evaluate("window.ran === undefined")
    assert len(shown.messages) == 1
    assert "Content Security Policy" in shown.messages[0]


@pytest.mark.parametrize("width", [390, 1220])
def test_heat_maps_of_many_replicas_are_drawn(browser: Browser, tmp_path: Path, width: int) -> None:
    slots = tuple(f"node-{number}" for number in range(40))
    restless = {(slot, number): "absent" for number in range(0, 300, 2) for slot in slots}
    path = write(tmp_path, SmallRun(rounds=300, slots=slots, parts=restless))
    shown = browser.show(path, width)
    check(browser, shown, path)
    sizes = browser.evaluate("[...document.images].map(image => [image.naturalWidth, image.naturalHeight])")
    assert sizes == [[300, 40], [300, 40]]
    x, y, height = browser.evaluate("(b => [b.x, b.y + scrollY, b.height])(document.images[1].getBoundingClientRect())")
    assert shown.colour(x + 0.5, y + height / 2) == MARKS["absent"]


def test_run_with_a_killed_replica_is_reported(browser: Browser, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, "a-1=kill", count=3, restarts=2, code=MISUSE)
    settings = [f"--set={name}" for name in ("outer.rounds=8", "outer.sync_every=4", "faults.grace=5s")]
    with Skerry("up", str(spec), *settings, "--set=faults.start_window=2m") as running:
        code = running.end()
    assert code in {0, 3}, running.output
    path = tmp_path / "run.html"
    result = invoke("report", spec, *settings, "--set=faults.start_window=2m", "-o", path)
    assert result.exit_code == 0, result.output
    assert "finished: 8 rounds" in result.output
    shown = browser.show(path, 1220)
    check(browser, shown, path)
    text = browser.evaluate("document.body.innerText")
    assert "killed (signal SIGKILL)" in text
    killed = [cell for cell in browser.evaluate(CELLS) if cell["mark"] == "killed"]
    assert killed, text
    assert shown.colour(killed[0]["x"] + killed[0]["width"] / 2, killed[0]["y"] + 3) == MARKS["killed"]
    digests = [entry.name.removesuffix(".tar.gz") for entry in (tmp_path / "store/test-run/code").iterdir()]
    assert digests[0] in text
