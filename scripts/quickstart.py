"""Runs the quickstart's spec, kills one replica half-way, and reads from the store whether anything was lost.

Started by scripts/quickstart, which makes the environment. Each call is a run of its own; it is destroyed at the end
unless it is to be kept, or went wrong. Its report and its model stay; the model is loaded once with plain torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console

from skerry.infra import targets
from skerry.infra.cli import run_text
from skerry.infra.cli.live_run_table import open_screen
from skerry.infra.cli.run_screen import RunScreen
from skerry.infra.local import up
from skerry.infra.local.destroy import destroy
from skerry.infra.local.up_destroy_events import LogLines
from skerry.infra.observe.digests_agree import digests_equal
from skerry.infra.observe.history import read_history
from skerry.infra.run import check_machine_and_store
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.runtime import export
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import SkerryError
from skerry.runtime.log import keys
from skerry.runtime.log.records import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.infra.cli.live_run_table import Screen
    from skerry.infra.local.supervisor import Supervisor
    from skerry.infra.local.up_destroy_events import Event, Summary
    from skerry.infra.observe.run_view import RunView
    from skerry.infra.spec.model import SpecFile
    from skerry.runtime.store import Store

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "infra/examples"
RESULTS, MODEL, REPORT = ROOT / "build/quickstart", "model.pt", "run.html"
SKERRY = (sys.executable, "-c", "from skerry.infra.cli.fast_help_entry_point import main; main()")
SAME_LOSS = 0.002
# A round takes about three seconds; half-way is to be seen in the round in which it is.
LOOK_S = 0.3
# Each replica writes a line for every step of the protocol; these and warnings are what a reader wants of them.
SHOWN = (" joined ", " checkpoint_loaded ", " caught_up ", " ended ", " WARNING ", " ERROR ", "Error")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The last line. lost_rounds: asked for and not closed. digests_equal: every round's receipts agree.

    held_out: the loss on files that no replica trains on, by the replicas. exported: the same by the exported model.
    same_text: these files were the same; a container's Python has other ones.
    """

    rounds: int
    replicas: int
    kills: int
    restarts: int
    lost_rounds: int
    digests_equal: bool
    loss_first: float | None
    loss_last: float | None
    held_out: float | None
    exported: float | None
    same_text: bool
    model: str
    report: str
    seconds: float
    store: str

    @property
    def ok(self) -> bool:
        """True if everything that the quickstart promises has happened."""
        return self.kills == 1 and self.lost_rounds == 0 and self.digests_equal and self.is_exported

    @property
    def is_exported(self) -> bool:
        """The exported model has the loss of the replicas, on the same files."""
        if self.held_out is None or self.exported is None:
            return False
        return not self.same_text or abs(self.held_out - self.exported) < SAME_LOSS


class Story:
    """Follows the run, prints its events, and kills one replica half-way."""

    def __init__(self, screen: Screen, console: Console, half_way: int, victim: str) -> None:
        self._screen = screen
        self._console = console
        self._half_way = half_way
        self._victim = victim
        self.supervisor: Supervisor | None = None
        self.kills = 0
        self.held_out: dict[str, float] = {}
        self.text: int | None = None

    def report(self, report: Event) -> None:
        """Show it; of what replicas write, only what a reader wants."""
        if isinstance(report, LogLines):
            for line in report.lines:
                if line.startswith('{"slot"'):
                    result = json.loads(line)
                    self.held_out[report.slot] = float(result["held_out"])
                    self.text = result["text"]
            shown = tuple(line for line in report.lines if _is_shown(line))
            if not shown:
                return
            report = LogLines(slot=report.slot, lines=shown)
        self._screen.report(report)

    def view(self, view: RunView) -> None:
        """Show it, and kill the victim once half of the rounds are closed."""
        self._screen.view(view)
        if self.supervisor is not None and not self.kills and self._half_way <= view.closed and not view.finished:
            self.kills = 1
            self._console.print(
                f"\n[bold red]round {view.closed}: SIGKILL to {self._victim}[/], as if its machine was lost. "
                "The others go on; it is started again, loads a checkpoint and follows the log.\n",
                soft_wrap=True,
            )
            self.supervisor.kill(self._victim)


def main() -> int:
    """Run it; 0 if nothing was lost, 1 if something was, 2 for options that cannot be."""
    options = _options()
    clock = SystemClock()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    overrides = [f"run=quickstart-{clock.nonce()[:8]}"]
    overrides += [f"outer.rounds={options.rounds}"] if options.rounds else []
    overrides += [f"replicas[0].count={options.replicas}"] if options.replicas else []
    overrides += [f"store={options.store}"] if options.store else []
    try:
        spec = check_machine_and_store.load(
            EXAMPLES / ("docker.yaml" if options.docker else "quickstart.yaml"), targets.kinds(), overrides, clock
        )
    except SpecInvalid as error:
        sys.stderr.writelines(f"{problem}\n" for problem in error.problems)
        return 2
    console.print(
        f"{len(spec.replica_slots)} replicas, {spec.spec.outer.rounds} rounds, store {spec.run_uri}", soft_wrap=True
    )
    verdict = _train(spec, clock, console)
    if verdict.ok and not options.keep:
        destroy(spec, clock)
    else:
        console.print(f"kept: {verdict.store}, logs in {spec.work_folder / 'logs'}", soft_wrap=True)
    console.print(json.dumps(asdict(verdict)), soft_wrap=True, markup=False)
    return 0 if verdict.ok else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", add_help=False)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--store")
    parser.add_argument("--docker", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 4:
        parser.error("--rounds: at least 4, so that there is a half-way to be seen")
    if options.replicas is not None and options.replicas < 2:
        parser.error("--replicas: at least 2, so that a replica survives")
    return options


def _train(spec: SpecFile, clock: SystemClock, console: Console) -> Verdict:
    rounds = spec.spec.outer.rounds or 0
    screen = open_screen(console, clock)
    story = Story(screen, console, rounds // 2, spec.replica_slots[-1].slot)
    tell = up.Callbacks(on_event=story.report, on_view=story.view)
    with up.launch(spec, os.environ, clock, tell, poll_s=LOOK_S) as launch:
        story.supervisor = launch.supervisor
        with screen:
            summary = launch.supervise()
            screen.view(summary.view)
        verdict = _verdict(launch.store, summary, story, rounds, _exported(launch.store, spec))
    if not console.is_terminal:  # there the last drawing stays
        console.print(RunScreen(view=summary.view))
    for line in run_text.summary_lines(summary):
        console.print(line, soft_wrap=True, markup=False)
    console.print(_in_words(verdict), soft_wrap=True, markup=False)
    return verdict


def _exported(store: Store, spec: SpecFile) -> tuple[float | None, int | None]:
    """Write the report and the model, and return the model's loss by plain torch, and on which text."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    try:
        export.write(store, RESULTS / MODEL, force=True)
    except SkerryError:
        return None, None  # the run did not come so far, which the summary explains
    report = [*SKERRY, "report", store.uri, "-o", str(RESULTS / REPORT)]
    subprocess.run(report, stdout=subprocess.DEVNULL, check=True)  # noqa: S603  our own command
    train = [sys.executable, str(spec.code_path / "train.py"), "--evaluate", str(RESULTS / MODEL)]
    ended = subprocess.run(train, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  our own script
    result = json.loads(ended.stdout)
    return float(result["held_out"]), result["text"]


def _verdict(
    store: Store, summary: Summary, story: Story, rounds: int, exported: tuple[float | None, int | None]
) -> Verdict:
    slots = [replica.slot for replica in summary.view.replicas]
    closed = {keys.round_of(entry.key) for entry in store.list(keys.COMMITS)}
    # A killed incarnation leaves no outcome, and a later one starts with a trained model: only first starts count.
    first = [_outcome(store, slot) for slot in slots]
    return Verdict(
        rounds=rounds,
        replicas=len(slots),
        kills=story.kills,
        restarts=sum(result.restarts for result in summary.results),
        lost_rounds=len(set(range(rounds)) - closed),
        digests_equal=digests_equal(read_history(store).rounds, rounds),
        loss_first=_mean(outcome.loss_first for outcome in first if outcome is not None),
        loss_last=_mean(replica.loss for replica in summary.view.replicas),
        held_out=_mean(story.held_out.values()),
        exported=exported[0],
        same_text=exported[1] == story.text,
        model=str(RESULTS / MODEL),
        report=str(RESULTS / REPORT),
        seconds=round(summary.wall_s, 1),
        store=summary.view.uri,
    )


def _outcome(store: Store, slot: str) -> Outcome | None:
    key = keys.outcome(slot, 0)
    data = store.read(key)
    return None if data is None else Outcome.parse(data, key)


def _mean(values: Iterable[float | None]) -> float | None:
    result = [value for value in values if value is not None]
    return round(fmean(result), 4) if result else None


def _in_words(verdict: Verdict) -> str:
    bits = "the same bits in every replica after each" if verdict.digests_equal else "NOT the same bits in all replicas"
    lost = f"{verdict.lost_rounds} of {verdict.rounds} rounds lost"
    lines = [f"{verdict.kills} replica killed, {verdict.restarts} started again, {lost}, {bits}"]
    if verdict.exported is not None:
        same = "as" if verdict.is_exported else "NOT as"
        same = same if verdict.same_text else "on other files than"
        lines.append(f"the report, for a browser: {verdict.report}")
        lines.append(f"the trained model: {verdict.model}")
        lines.append(
            f"its held-out loss in plain torch: {verdict.exported}, {same} in the replicas ({verdict.held_out})"
        )
    lines += ["next: `skerry init`, `skerry up` in a folder of your own; docs/tutorial-first-run.md shows it"]
    return "\n".join(lines)


def _is_shown(line: str) -> bool:
    return not line.startswith('{"slot"') and any(word in line for word in SHOWN)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (SkerryError, OSError) as error:
        sys.exit(f"quickstart: {error}")
