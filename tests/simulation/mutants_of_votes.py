"""Deliberate bugs in how a replica that holds something else is found out, kept apart and healed: alarm, selfcheck."""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

from tests.simulation.kit import Patch, mutant

from skerry.runtime.checkpointing import receipt_comparison
from skerry.runtime.checkpointing.background_receipt_comparison import ReceiptComparisons
from skerry.runtime.checkpointing.checkpoint_loader import CheckpointLoader
from skerry.runtime.checkpointing.checkpoint_writer import CheckpointWriter
from skerry.runtime.checkpointing.divergence import DivergenceCheck
from skerry.runtime.training.contribute_and_average import Averager


@mutant("receipts", "the fewest are right")
def _(patch: Patch) -> None:
    split = receipt_comparison._split

    def reversed_vote(*args: Any) -> Any:
        verdict = split(*args)
        return (verdict[1], verdict[0], verdict[2]) if verdict is not None and verdict[0] else verdict

    patch.setattr(receipt_comparison, "_split", reversed_vote)


@mutant("divergence", "what was measured is not concluded from")
def _(patch: Patch) -> None:
    patch.setattr(DivergenceCheck, "_conclude", lambda *_: None)


@mutant("receipts", "a checkpoint is loaded at its writer's word")
def _(patch: Patch) -> None:
    patch.setattr(receipt_comparison.ReceiptEvidence, "check", lambda *_: None)


@mutant("divergence", "a replica that differs heals from any newest checkpoint")
def _(patch: Patch) -> None:
    candidates = CheckpointLoader._candidates
    patch.setattr(CheckpointLoader, "_candidates", lambda self, beyond, _, *args: candidates(self, beyond, None, *args))
    patch.setattr(DivergenceCheck, "evidence", lambda *_: receipt_comparison.ReceiptEvidence())


@mutant("divergence", "a replica that knows that it differs contributes")
def _(patch: Patch) -> None:
    run = Averager.run
    patch.setattr(Averager, "run", lambda self, *args, **given: run(self, *args, **(given | {"veto": None})))


@mutant("divergence", "without a majority the first member counts as right")
def _(patch: Patch) -> None:
    apply = DivergenceCheck._apply

    def believing(self: DivergenceCheck, verdict: Any) -> None:
        apply(self, verdict)
        self.cannot_recompute()

    patch.setattr(DivergenceCheck, "_apply", believing)


@mutant("divergence", "a state is recomputed from any newest checkpoint")
def _(patch: Patch) -> None:
    patch.setattr(CheckpointLoader, "_leads_on", lambda *_: True)
    patch.setattr(CheckpointLoader, "_undisputed_first", lambda _, candidates, **__: candidates)


@mutant("divergence", "a run ends without a comparison of its last rounds")
def _(patch: Patch) -> None:
    patch.setattr(ReceiptComparisons, "finish", lambda *_: None)


@mutant("divergence", "the last checkpoint stays as it was written before its author healed")
def _(patch: Patch) -> None:
    patch.setattr(CheckpointWriter, "_delete_wrong", lambda *_: None)
