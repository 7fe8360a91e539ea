"""Every recipe of `skerry init --from`, run as a user runs it; a killed replica comes back to the same bits."""

from __future__ import annotations

import importlib.util
import math
import re
import signal
from typing import TYPE_CHECKING, Final

import pytest
from tests.recipes.recipe_run import KILLED, ROUNDS, SETTINGS, STEPS, RecipeRun, wandb_records
from tests.support.command_line import invoke

from skerry.infra.cli import recipes_for_init

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

PEAK: Final = 3e-3
TOTAL: Final = ROUNDS * STEPS
# The held-out loss of a recipe, by the name that its script or framework gives it.
HELD_OUT: Final = {"hf": "eval_loss", "lightning": "val_loss", "loop": "val_loss"}


def constant(_: int) -> float:
    return PEAK


def warm_up_and_cosine(step: int) -> float:
    if step < 40:
        return PEAK * (step + 1) / 40
    return PEAK * (0.55 + 0.45 * math.cos(math.pi * (step - 40) / (TOTAL - 40)))


def cosine(step: int) -> float:
    return PEAK * (1 + math.cos(math.pi * step / TOTAL)) / 2


def hf_cosine(step: int) -> float:
    """transformers' own, with 20 steps of warm-up."""
    if step < 20:
        return PEAK * step / 20
    return PEAK * (1 + math.cos(math.pi * (step - 20) / (TOTAL - 20))) / 2


def assert_rates(run: RecipeRun, rate: Callable[[int], float]) -> None:
    """Each replica had the run's learning rate at the first step of each round."""
    expected = pytest.approx([rate(number * STEPS) for number in range(ROUNDS)])
    assert run.telemetry("learning_rate") == {"local-0": expected, KILLED: expected}


def assert_losses(run: RecipeRun) -> None:
    """Both replicas report a falling loss, and about the same in each round."""
    losses = run.telemetry("loss")
    for mine, other in zip(losses["local-0"], losses[KILLED], strict=True):
        assert mine == pytest.approx(other, rel=0.5)
    assert all(of_slot[-1] < 0.7 * of_slot[0] for of_slot in losses.values())


@pytest.mark.parametrize(
    ("recipe", "rate"),
    [
        ("loop", constant),
        ("data-loader", constant),
        ("schedule", warm_up_and_cosine),
        ("mixed-precision", constant),
        ("hf", hf_cosine),
        ("lightning", cosine),
    ],
)
def test_recipe_trains_and_a_killed_replica_rejoins(tmp_path: Path, recipe: str, rate: Callable[[int], float]) -> None:
    run = RecipeRun(tmp_path, recipe)
    run.train(kill_after=2)
    assert_rates(run, rate)
    assert_losses(run)
    assert set(run.telemetry("steps")["local-0"]) == {STEPS}
    if recipe == "data-loader":
        assert_data_position(run)
    if recipe == "hf":
        assert_losses_of_the_trainer(run)
    if recipe in HELD_OUT:
        assert_held_out_loss(run, HELD_OUT[recipe])


def assert_data_position(run: RecipeRun) -> None:
    """The restarted replica has trained on as many items as its steps take, from where it was saved."""
    assert f"after {TOTAL * 64} items" in run.log_of("local-0")
    log = run.log_of(KILLED, 1)
    loaded = re.findall(r"local_state_loaded round=(\d+)", log)
    saved = int(loaded[0]) if loaded else 0  # a replica that is killed while it saves begins its shard anew
    first = int(re.findall(r"contributed round=(\d+)", log)[0])
    assert f"after {(saved + ROUNDS - first) * STEPS * 64} items" in log


def assert_losses_of_the_trainer(run: RecipeRun) -> None:
    """The Trainer's own log has the mean loss of the steps since its last line, also right after the restart."""
    logged = [float(text) for text in re.findall(r"'loss': '([\d.e-]+)'", run.log_of(KILLED, 1))]
    recorded = run.telemetry("loss")[KILLED]
    assert logged
    assert logged == pytest.approx(recorded[-len(logged) :], rel=0.01)


def assert_held_out_loss(run: RecipeRun, name: str) -> None:
    """The replica that evaluates after five rounds has recorded it, and the report takes it as held out."""
    metrics = run.telemetry("metrics")
    assert metrics == {"local-0": [{}] * 5 + [{name: metrics["local-0"][5][name]}] + [{}] * 2, KILLED: [{}] * ROUNDS}
    assert 0 < metrics["local-0"][5][name] < run.telemetry("loss")["local-0"][0]
    page = run.spec.parent / "page.html"
    invoke("report", run.spec, "--output", page)
    assert f"Held-out {name}: " in page.read_text()


def test_mixed_precision_with_float16_scales_the_loss(tmp_path: Path) -> None:
    run = RecipeRun(tmp_path, "mixed-precision")
    text = run.script.read_text()
    run.script.write_text(text.replace("PRECISION = torch.bfloat16", "PRECISION = torch.float16"))
    run.train()
    assert_losses(run)


def test_script_from_torchft_trains_and_a_killed_replica_rejoins(tmp_path: Path) -> None:
    run = RecipeRun(tmp_path, "torchft")
    run.train(kill_after=2)
    assert_rates(run, constant)
    assert_losses(run)
    losses = run.telemetry("loss")
    assert losses["local-0"][0] != losses[KILLED][0], "each replica trains on its own data"
    for start in (0, 1):
        assert "catch_up_missing" not in run.log_of(KILLED, start)
    assert "caught_up" in run.log_of(KILLED, 1) or "checkpoint_loaded" in run.log_of(KILLED, 1)


def test_script_from_torchft_trains_the_rounds_of_the_spec(tmp_path: Path) -> None:
    run = RecipeRun(tmp_path, "torchft")
    run.train()
    assert invoke("extend", run.spec, *SETTINGS, "--rounds", ROUNDS + 2).exit_code == 0
    run.train(rounds=ROUNDS + 2)
    assert [len(losses) for losses in run.telemetry("loss").values()] == [ROUNDS + 2] * 2


def test_tensorboard_shows_each_step_of_a_killed_replica_once(tmp_path: Path) -> None:
    # Imported here, because collecting the tests imports this file.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    run = RecipeRun(tmp_path, "tensorboard")
    run.train(kill_after=2)
    events = EventAccumulator(str(run.folder / "tensorboard/my-run" / KILLED)).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(TOTAL))


def test_wandb_has_each_step_of_a_stopped_replica_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, and after a SIGTERM: at a SIGKILL its process is killed, too, before it has written the last seconds."""
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415  as above

    for name, value in {"MODE": "offline", "CONFIG_DIR": str(tmp_path), "CACHE_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = RecipeRun(tmp_path, "wandb")
    run.train(kill_after=2, by=signal.SIGTERM)
    kept: list[int] = []
    files = sorted((run.folder / "wandb").glob(f"offline-run-*-{KILLED}/*.wandb"))
    for file in files:
        records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
        (tracked,) = {(r.run.run_id, r.run.run_group, r.run.display_name) for r in records if r.HasField("run")}
        assert re.fullmatch(rf"my-run-[0-9a-f]{{8}}-{KILLED}", tracked[0])
        assert tracked[1:] == ("my-run", KILLED)
        steps = [record.history.step.num for record in records if record.HasField("history")]
        assert steps == sorted(set(steps))
        kept += [step for step in steps if not kept or step > kept[-1]]  # W&B's own rule
    assert len(files) == 2
    assert kept == list(range(TOTAL))


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not in the environment")
def test_semi_synchronous_torchtitan_trains_and_a_killed_replica_rejoins(tmp_path: Path) -> None:
    run = RecipeRun(tmp_path, "torchtitan")
    run.train(kill_after=2)
    assert_losses(run)


def test_every_recipe_has_a_file_and_every_file_is_a_recipe() -> None:
    folder = recipes_for_init.folder()
    assert sorted(recipes_for_init.FILES.values()) == sorted(
        path.name for path in folder.iterdir() if path.name.endswith(".py")
    )
