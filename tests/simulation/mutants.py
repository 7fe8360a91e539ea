"""Every deliberate bug that the invariants must notice. Never imported by anything but tests and the long search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.simulation import mutants_of_roll_ups, mutants_of_rounds, mutants_of_votes, mutants_of_work
from tests.simulation.kit import KEPT, Mutant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SOURCES: Final = (mutants_of_rounds, mutants_of_votes, mutants_of_work, mutants_of_roll_ups)
MUTANTS: Final[Sequence[Mutant]] = tuple(KEPT)
# A seed that shows it, tried before all others. Where a change of the code has made it another schedule, the test
# searches from seed 0, which can take minutes, and then fails with the seed to write here.
SHOWN_BY: Final[Mapping[str, int]] = {
    "a run ends without a comparison of its last rounds": 2172,
    "the last checkpoint stays as it was written before its author healed": 2560,
    "an answer that the key exists is trusted, without reading back": 4,
    "a create without an answer counts as done": 8,
    "a checkpoint is taken of live state, half a second later": 468,
    "a commit that a listing misses is a gap": 188,
    "dead replicas are waited for": 1,
    "whatever stands under the key counts as mine": 0,
    "records are overwritten instead of created": 0,
    "the loser of a create goes on with its own record": 24,
    "a restarted replica overwrites its slot's contribution": 0,
    "a replaced incarnation is not fenced": 9,
    "the loser of a claim takes the incarnation too": 150,
    "the grace window ends without a quorum": 5,
    "members are in the order in which they came": 0,
    "the loser of a proposal uses its own decision": 0,
    "a proposal lists payloads that were not looked for": 51,
    "the manifest of a contribution goes up before its payload": 0,
    "the reduction is chosen by the proposer's own link": 2025,
    "a link is recorded in a run of before links": 2009,
    "a commit names its writer": 0,
    "a commit names other averages than those of its exchanges": 0,
    "records of rounds below the kept checkpoints are deleted too": 3,
    "payloads go as soon as their round is closed": 9,
    "parts of a checkpoint go before its manifest": 20,
    "the fewest are right": 153,
    "a checkpoint is loaded at its writer's word": 925,
    "what was measured is not concluded from": 153,
    "a replica that differs heals from any newest checkpoint": 925,
    "a replica that knows that it differs contributes": 32,
    "without a majority the first member counts as right": 468,
    "a state is recomputed from any newest checkpoint": 468,
    "contributions are reduced in another order than the record's": 0,
    "weights of the record are ignored": 0,
    "a reduced unit is used without its digest": 2139,
    "units of two makers differ": 2001,
    "a spot check weighs all contributions alike": 2005,
    "the units of a dead member are made by no other": 1360,
    "units are made across a border although their maker is at work": 2055,
    "payloads are used without their digest": 15,
    "own bytes are taken from memory though the log has others": 132,
    "contributions are not checked before a proposal": 51,
    "work counts by its weight, and less when it is late": 6,
    "a run ends with its rounds, whatever was lost": 3,
    "a round ended early weighs as much as a whole one": 0,
    "a round is ended early although no quorum waits": 0,
    "a slow replica never ends its round early": 74,
    "inner steps of a round that is over count for the one that is followed next": 0,
    "inner steps of a failed round count for its next attempt": 15,
    "after an error a round is closed with the exchanges that were opened": 13,
    "a veto ends with its exchange": 32,
    "the work of a round is that of its first exchange": 16,
    "a save is resumed at every boundary, on top of what was trained since": 1,
    "a save is resumed into the current round, whichever it was made in": 9,
    "a save is resumed although the round that counts it is closed": 9,
    "resumed steps are counted and not put back": 9,
    "the state before the outer step is recorded": 0,
    "what was trained before a checkpoint is loaded is kept": 3,
    "no checkpoint is written out of turn for those behind": 54,
    "a finished replica leaves at once although others are behind": 360,
    "following leaves a round out": 3,
    "a checkpoint is visible before its parts": 0,
    "commits below a checkpoint are deleted": 0,
    "tokens of gradients that a failed round threw away count for its next attempt": 37,
    "only the first fragment of a checkpoint is loaded": 1,
    "each fragment is loaded from the state of the next one": 1,
    "a receipt covers the first fragment only": 1,
    "every exchange resets the work of the first fragment": 3,
    "a replica that follows keeps the outer step that it has": 68,
    "a change of the outer step is applied one round late": 1,
    "a change is used as soon as it is read": 1,
    "run.json alone says when a run is over": 11,
    "a roll-up is written before its receipts": 55,
    "a roll-up takes a part of a round for a whole one": 71,
}


def named(name: str) -> Mutant:
    """The mutant of this name."""
    (match,) = [mutant for mutant in MUTANTS if mutant.name == name]
    return match
