"""Deliberate bugs of the roll-ups of closed rounds; see `mutants_of_rounds`."""
# A broken version is made by reaching inside, and by lambdas in the place of methods.
# pyright: reportPrivateUsage=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulation.kit import Patch, mutant

from skerry.runtime.checkpointing.roll_up_writer import RollUpWriter
from skerry.runtime.log.roll_up import RollUp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.recorded_starts import StartRecord
    from skerry.runtime.log.summarize_round import RecordedRound


@mutant("roll_up_writer", "a roll-up is written before its receipts")
def _(patch: Patch) -> None:
    patch.setattr(RollUpWriter, "_has_receipts", lambda *_: True)


@mutant("roll_up", "a roll-up takes a part of a round for a whole one")
def _(patch: Patch) -> None:
    make = RollUp.of

    def whole(
        run: str,
        writer: str,
        commit: str,
        rounds: Sequence[RecordedRound],
        starts: Sequence[StartRecord] | None = None,
    ) -> RollUp:
        return make(run, writer, commit, [_with_whole_rounds(item) for item in rounds], starts)

    patch.setattr(RollUp, "of", whole)


def _with_whole_rounds(item: RecordedRound) -> RecordedRound:
    replicas = tuple(
        replace(replica, share=1.0, part="trained") if replica.in_average else replica
        for replica in item.history.replicas
    )
    return replace(item, history=replace(item.history, replicas=replicas))
