"""The callback for Lightning's Trainer in this process: what it refuses, and how a script with it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.kit.managers import begin_run, contributions
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry.runtime.contract import Contract
from skerry.runtime.log import keys
from skerry.runtime.log.records import MAX_METRICS, Outcome
from skerry.runtime.replica import connect
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.runtime.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Lightning


@pytest.fixture(scope="module")
def pl() -> Any:
    return pytest.importorskip("lightning.pytorch")


def begin(tmp_path: Path, **changes: object) -> Store:
    store = open_store(tmp_path.as_uri())
    settings: dict[str, object] = {"rounds": 3, "sync_every": 4, "start_window_s": 0.0}
    begin_run(store, ["r-0"], **(settings | changes))
    return store


def fit(
    tmp_path: Path,
    pl: Any,
    start: int = 0,
    optimizers: int = 1,
    validates: Sequence[str] = (),
    logs: Sequence[str] = (),
    **options: Any,
) -> Outcome:
    """Train replica r-0 in a Trainer, until the script ends. Returns its outcome."""
    from skerry.runtime.integrations.lightning import DiLoCoCallback  # noqa: PLC0415  takes seconds

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.log("train_loss", loss)
            replica.log(**dict.fromkeys(logs, 1.0))
            return loss

        def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
            for name in validates:
                self.log(name, self.net(batch[0]).square().mean())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(optimizers)]

    contract = Contract(run_uri=tmp_path.as_uri(), slot="r-0", index=0, replicas=1)
    data = DataLoader(TensorDataset(torch.ones(64, 4)), 4)
    try:
        with connect(contract.environment()) as replica:
            if not validates:
                replica.evaluate(lambda: {"val_loss": 2.0}, every=2)
            torch.manual_seed(0)
            module = Module()
            count = options.pop("fragments", 1)
            fragments = list(module.net)[:count] if count > 1 else None
            callback = DiLoCoCallback(replica, fragments, options.pop("tokens", None))
            trainer = pl.Trainer(
                accelerator="cpu",
                max_epochs=-1,
                callbacks=[callback],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **options,
            )
            trainer.fit(module, data, data if validates else None)
    except SystemExit:
        if optimizers > 1:  # then it has not joined the run
            raise
    key = keys.outcome("r-0", start)
    return Outcome.parse(open_store(tmp_path.as_uri()).read(key) or b"", key)


def test_trainer_ends_with_the_run(tmp_path: Path, pl: Any) -> None:
    store = begin(tmp_path, fragments=2, weighting="tokens")
    outcome = fit(tmp_path, pl, fragments=2, tokens=lambda batch: len(batch[0]))
    assert (outcome.status, outcome.round, outcome.tokens) == ("done", 3, 3 * 2 * 4)
    telemetry = [each.telemetry for each in contributions(store) if each.telemetry is not None]
    assert [each.tokens for each in telemetry] == [8] * 3
    evaluated = {"val_loss": 2.0}
    assert [each.metrics for each in telemetry] == [{}, {}, evaluated]
    assert outcome.metrics == evaluated, "also after the last round"


def test_what_a_validation_logs_is_recorded(tmp_path: Path, pl: Any) -> None:
    store = begin(tmp_path)
    outcome = fit(tmp_path, pl, validates=["loss", "accuracy", "x" * 1000], val_check_interval=4, limit_val_batches=2)
    telemetry = [each.telemetry for each in contributions(store) if each.telemetry is not None]
    names = {"val_loss", "accuracy"}  # not `loss`, which is the training's, and not what the training has logged
    assert [each.metrics.keys() for each in telemetry] == [set(), names, names]
    assert outcome.metrics is not None
    assert outcome.metrics.keys() == names, "also after the last round"
    losses = [each.metrics["val_loss"] for each in telemetry[1:]] + [outcome.metrics["val_loss"]]
    assert len(set(losses)) == len(losses), "each validation has figures of its own"
    assert telemetry[0].loss is not None
    assert max(losses) < telemetry[0].loss


def test_figures_of_a_validation_leave_room_for_those_of_the_script(tmp_path: Path, pl: Any) -> None:
    store = begin(tmp_path)
    many = [f"figure {number}" for number in range(MAX_METRICS)]
    own = [f"own_{number}" for number in range(8)]
    outcome = fit(tmp_path, pl, validates=[*many, "valid_loss"], logs=own, val_check_interval=4, limit_val_batches=1)
    (*_, last) = contributions(store)
    assert last.telemetry is not None
    assert last.telemetry.metrics.keys() == {"valid_loss", *many[:23], *own}
    assert (outcome.status, [*(outcome.metrics or {})]) == ("done", ["valid_loss", *many[:23]])


def test_trainer_that_starts_after_the_last_round_ends_as_done(tmp_path: Path, pl: Any) -> None:
    begin(tmp_path)
    assert fit(tmp_path, pl).status == "done"
    outcome = fit(tmp_path, pl, start=1)
    assert (outcome.status, outcome.round, outcome.tokens) == ("done", 3, 0)


def test_trainer_that_ends_before_the_run_is_started_again(tmp_path: Path, pl: Any) -> None:
    begin(tmp_path)
    outcome = fit(tmp_path, pl, max_steps=5)
    assert (outcome.status, outcome.exit_code) == ("retry", 10)
    assert "the trainer ended before the run: raise its max_steps or epochs" in outcome.reason
    assert fit(tmp_path, pl, start=1).status == "done"


def test_tokens_as_weights_need_tokens(tmp_path: Path, pl: Any) -> None:
    begin(tmp_path, weighting="tokens")
    outcome = fit(tmp_path, pl)
    assert (outcome.status, outcome.exit_code) == ("failed", 20)
    assert "the trainer counts none: give the callback tokens=lambda batch" in outcome.reason


def test_module_with_two_optimizers_is_refused(tmp_path: Path, pl: Any, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path)
    with pytest.raises(SystemExit, match="20"):
        fit(tmp_path, pl, optimizers=2)
    assert "Invalid: DiLoCo needs a module with one optimizer that Lightning steps" in capsys.readouterr().err


def test_other_number_of_fragments_is_refused(tmp_path: Path, pl: Any, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path, fragments=2)
    with pytest.raises(SystemExit, match="20"):
        fit(tmp_path, pl, optimizers=2)
    assert "Invalid: the run exchanges 2 fragments, the callback has 1" in capsys.readouterr().err
