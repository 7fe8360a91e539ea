"""The drawing of a run, compared with golden files: SKERRY_TEST_GOLDEN=1 writes them anew."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.infra.cli.example_run import ExampleRun

from skerry.infra.cli.compute_cost_so_far import HourlyPrice, Spending, TrafficPrices, machine_price, spending
from skerry.infra.cli.run_screen import MIN_WIDTH, RunScreen
from skerry.infra.cost.estimate import Cost
from skerry.infra.cost.prices import load
from skerry.infra.observe.history import read_history
from skerry.infra.observe.observer import Observer
from skerry.infra.observe.read_changed_settings import RunSettings
from skerry.infra.observe.run_view import Machine, MachineTime, ReplicaView, RunView

GOLDEN = Path(__file__).parent / "golden"
FOOTER = "a look every 2 s; Ctrl-C ends the watching, not the run"
TO_THE_BUCKET = ("a GB to the bucket",)
PRICES = {"g6e.xlarge": HourlyPrice(0.74), "g2-standard-8": HourlyPrice(0.85)}


@pytest.fixture(scope="module")
def view() -> RunView:
    run = ExampleRun()
    observer = Observer(run.store, RunSettings(first=run.run), run.clock, read_history(run.store))
    observer.view()
    return observer.view()


def price_of(machine: Machine) -> HourlyPrice | None:
    return PRICES.get(machine.machine or "")


def drawn(view: RunView, width: int, height: int | None, money: Spending | None = None) -> list[str]:
    screen = RunScreen(view=view, spending=money, height=height, footer=FOOTER)
    return [line.plain.rstrip() for line in screen.lines(width, dt.UTC)]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (160, 50)])
def test_screen_equals_its_golden_file(view: RunView, width: int, height: int) -> None:
    lines = drawn(view, width, height, spending(view, price_of))
    golden = GOLDEN / f"watch-{width}x{height}.txt"
    text = "\n".join(lines) + "\n"
    if os.environ.get("SKERRY_TEST_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()
    assert len(lines) == height


@pytest.mark.parametrize("width", [80, 100, 160])
def test_row_has_the_share_of_the_current_round_its_cloud_and_price(view: RunView, width: int) -> None:
    lines = drawn(view, width, 50, spending(view, price_of))
    header = next(line for line in lines if line.startswith("replica"))
    rows = {line.split()[0]: line for line in lines[lines.index(header) + 1 :] if line}

    def cells(slot: str, *names: str) -> list[str]:
        ends = [header.index(name) + len(name) for name in names]
        return [rows[slot][:end].split("  ")[-1].strip() for end in ends]

    assert cells("batch-0", "share", "$/h") == ["75 %", "0.74"]
    assert cells("vertex-1", "share", "$/h") == ["-", "0.85"], "it has trained nothing of this round"
    begin = header.index("cloud")
    assert [rows[slot][begin:].split()[0] for slot in ("batch-0", "vertex-1")] == ["aws", "google"]
    assert width == 80 or "batch-2, vertex-0" in rows["batch-1"]


@pytest.mark.parametrize("size", ["80x24", "160x50"])
def test_page_about_watching_shows_the_golden_screens(size: str) -> None:
    page = (Path(__file__).parents[3] / "docs/watch.md").read_text()
    assert f"```text\n{(GOLDEN / f'watch-{size}.txt').read_text()}```" in page, "copy the golden files to the page"


@pytest.mark.parametrize("height", [8, 12, 24, 35, 36, 70])
def test_every_size_is_filled_and_never_exceeded(view: RunView, height: int) -> None:
    for width in range(MIN_WIDTH, 220, 7):
        lines = drawn(view, width, height, spending(view, price_of))
        assert len(lines) == height
        assert max(map(len, lines)) <= width


def test_screen_is_printed_as_it_is_drawn(view: RunView) -> None:
    console = Console(width=80, record=True, color_system="truecolor", force_terminal=True, file=io.StringIO())
    console.print(RunScreen(view=view, height=24, footer=FOOTER))
    printed = [line.rstrip() for line in console.export_text().splitlines()]
    assert printed[2:18] == drawn(view, 80, 24)[2:18], "times of events are of this machine's zone"


def test_low_screen_shows_replicas_that_need_attention_first(view: RunView) -> None:
    fleet = [ReplicaView(slot=f"a-{index}", incarnation=0, phase="train", round=3) for index in range(64)]
    fleet[40] = replace(fleet[40], silent=True, silent_s=31.0)
    fleet[63] = replace(fleet[63], outcome="failed", reason="ValueError: bad sample\nin shard 17")
    lines = drawn(replace(view, replicas=tuple(fleet)), 80, 24)
    rows = [line for line in lines if line.startswith("a-")]
    assert [row.split("  ")[0].strip() for row in rows] == [
        *(f"a-{index}" for index in range(len(rows) - 2)),
        "a-40",
        "a-63",
    ]
    assert f"{64 - len(rows)} more: {64 - len(rows)} train" in lines
    wide = drawn(replace(view, replicas=tuple(fleet)), 80, 90)
    assert sum(line.startswith("a-") for line in wide) == 64
    assert any("ValueError: bad sample" in line for line in wide)


def test_low_screen_has_replicas_and_events(view: RunView) -> None:
    lines = [line.plain for line in RunScreen(view=replace(view, replicas=view.replicas[:2]), height=16).lines(80)]
    assert [line.split()[0] for line in lines if line.startswith("batch-")] == ["batch-0", "batch-1"]
    assert sum("closed with 4 of 6" in line for line in lines) == 2


def test_narrow_terminal_gets_lines_of_text(view: RunView) -> None:
    lines = drawn(view, MIN_WIDTH - 1, 24)
    assert lines[0].startswith("tiny-gpt: 128 of 200 rounds done")
    assert lines[-1].startswith("vertex-1 state=joining")


def test_new_run_is_drawn_without_numbers() -> None:
    empty = RunView(
        run="tiny", uri="s3://b/tiny", rounds=None, closed=0, work=0.0, due=None, participants=None,
        replicas=(ReplicaView(slot="a-0"),), agreement=None,
    )  # fmt: skip
    lines = drawn(empty, 80, 24)
    assert lines[0] == "tiny  round 0"
    assert "a-0      not seen     -" in lines, lines
    assert any(line.startswith("bits   no round is closed yet") for line in lines)


def test_loss_of_an_earlier_round_is_not_shown_as_the_last(view: RunView) -> None:
    lost = replace(view, recent=(*view.recent[:-1], replace(view.recent[-1], loss=None)), losses=view.losses[:-1])
    assert lost.losses[-1][0] == 126
    assert drawn(lost, 80, 24)[1].startswith(f"loss {lost.losses[-1][1]:.3f} in round 126, none since")


def test_differing_bits_and_the_end_are_named(view: RunView) -> None:
    assert view.agreement is not None
    end = replace(view, closed=200, agreement=replace(view.agreement, state=False))
    lines = drawn(end, 80, 24)
    assert lines[0].endswith("100.0 %  finished")
    assert "bits   round 127, 4 replicas: average equal, state DIFFERENT" in lines


def test_price_of_a_machine_includes_its_attached_accelerators(tmp_path: Path) -> None:
    machines = {
        "g6e.xlarge": 2.0,
        "n1-standard-8": 0.4,
        "nvidia-tesla-t4": 0.35,
        "g2-standard-8": 0.9,
        "nvidia-l4": 9.0,
    }
    own = tmp_path / "prices.json"
    region = {"machines": machines, "spot": {"g6e.xlarge": 0.7}}
    own.write_text(json.dumps({"format": 1, "cloud": "some", "regions": {"here": region}}))
    table = load("some", own)

    def price(kind: str, **options: Any) -> HourlyPrice | None:
        return machine_price(table, "here", kind, Machine(**options))

    assert price("g6e.xlarge", spot=False) == HourlyPrice(2.0)
    assert price("g6e.xlarge", spot=True) == HourlyPrice(0.7)
    assert price("g2-standard-8", accelerator="nvidia-l4", accelerators=1) == HourlyPrice(0.9)
    assert price("n1-standard-8", accelerator="nvidia-tesla-t4", accelerators=2) == HourlyPrice(pytest.approx(1.1))
    assert price("n1-standard-8", accelerator="nvidia-tesla-v100", accelerators=1) is None
    assert price("g2-standard-8", spot=True) == HourlyPrice(0.9, at_most=True)
    assert price("g9-new") is None


def test_upper_bound_of_a_price_is_shown_as_one(view: RunView) -> None:
    money = spending(view, lambda _: HourlyPrice(1.0, at_most=True))
    assert money.text.startswith("at most $")
    assert money.an_hour(view.replicas[0].machine) == "≤1.00"


def test_dollars_are_of_machines_with_a_known_price(view: RunView) -> None:
    known, unknown = Machine(cloud="aws", machine="g6e.xlarge"), Machine(cloud="aws", machine="new.xlarge")
    times = (MachineTime(machine=known, hours=10.0, running=2), MachineTime(machine=unknown, hours=5.0, running=1))
    money = spending(replace(view, machine_times=times[:1], left_s=7200.0), price_of)
    assert (money.text, money.an_hour(known)) == ("$7.40 of about $10.36", "0.74")
    money = spending(replace(view, machine_times=times, left_s=None), price_of)
    assert (money.text, money.an_hour(unknown)) == ("$7.40 + unpriced machines", "-")
    assert spending(replace(view, machine_times=times[1:]), price_of).text == ""
    paused = replace(view, elapsed_s=90_000.0, running_s=7200.0)
    assert spending(paused, price_of, estimated=2.0).estimate == 4.0, "machines cost nothing between two `up`s"


def test_traffic_costs_what_the_place_that_it_leaves_asks_for(view: RunView) -> None:
    routes = TrafficPrices(region="us-east-1", bucket=load("aws"), prices_of=load)

    def cost(cloud: str | None, region: str | None) -> Cost:
        machine = Machine(cloud=cloud, region=region, machine="g6e.xlarge")
        time = MachineTime(machine=machine, hours=1.0, running=0, uploaded_bytes=10**10, downloaded_bytes=3 * 10**10)
        return routes.cost_of(time)

    assert cost("aws", "us-east-1") == Cost(), "free within the region"
    assert cost("aws", "us-west-2").usd == pytest.approx(10 * 0.02 + 30 * 0.02)
    assert cost("google", "us-central1").usd == pytest.approx(10 * 0.12 + 30 * 0.09), "to the internet, both ways"
    assert cost("local", None) == Cost(known=pytest.approx(30 * 0.09), missing=TO_THE_BUCKET)
    assert cost("aws", None).missing == cost(None, None).missing == (*TO_THE_BUCKET, "a GB from the bucket")
    far = Machine(cloud="google", region="us-central1", machine="g2-standard-8")
    times = (MachineTime(machine=far, hours=10.0, running=1, uploaded_bytes=10**10, downloaded_bytes=3 * 10**10),)
    half = replace(view, machine_times=times, left_s=36000.0, rounds=2 * view.closed)
    assert spending(half, price_of).text == "$8.50 of about $17.00"
    assert spending(half, price_of, routes).text == "$12.40 of about $24.80"
    unknown = replace(half, machine_times=(replace(times[0], machine=None),))
    assert spending(unknown, price_of, routes).text == ""
