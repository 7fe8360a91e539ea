"""Tests that the rest of a sparse contribution is sent later, once, if the decision lists the contribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.tensors.byte_layout import Index
from skerry.runtime.tensors.error_feedback import DECAY, ErrorFeedback
from skerry.runtime.tensors.payload_encoder import Encoded, encode, spec_of
from skerry.runtime.tensors.reduce import Source, average
from skerry.runtime.tensors.sum_by_pieces import Workspace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Part

INDEX = Index((spec_of("large", torch.empty(7000)), spec_of("small", torch.empty(8))), "sparse")


def delta(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7000, generator=generator), torch.randn(8, generator=generator)]


def contributed(feedback: ErrorFeedback, round_number: int, tensors: list[torch.Tensor], fragment: int = 0) -> Encoded:
    feedback.begin(round_number, fragment)
    feedback.add(tensors, INDEX)
    encoded = encode(tensors, INDEX)
    feedback.keep(tensors, encoded)
    return encoded


def sent(encoded: Encoded) -> torch.Tensor:
    """The large tensor as a reader of the contribution gets it."""
    result = [torch.empty(7000), torch.empty(8)]
    source = Source(slot="a", weight=1.0, round=0, parts=encoded.parts, local=encoded)
    average(MemoryStore(), [source], INDEX, result, workspace=Workspace())
    return result[0]


def added(feedback: ErrorFeedback, round_number: int, fragment: int = 0) -> torch.Tensor:
    """The sum that the feedback adds to the large tensor of a contribution."""
    tensors = [torch.zeros(7000), torch.zeros(8)]
    feedback.begin(round_number, fragment)
    feedback.add(tensors, INDEX)
    assert not tensors[1].any()
    return tensors[0]


def after(counted: Sequence[Part] | None = None, *, rounds: int = 1) -> tuple[ErrorFeedback, Encoded, torch.Tensor]:
    """A feedback after so many rounds that counted, and then one with this result; its last contribution; its sum."""
    feedback = ErrorFeedback()
    for number in range(rounds):
        feedback.settle(number, 0, [contributed(feedback, number, delta(number)).parts])
    tensors = delta(rounds)
    encoded = contributed(feedback, rounds, tensors)
    feedback.settle(rounds, 0, [] if counted is None else [counted])
    return feedback, encoded, tensors[0]


def test_what_a_counted_contribution_left_out_is_added_to_the_next() -> None:
    feedback = ErrorFeedback()
    first = delta(0)
    encoded = contributed(feedback, 0, first)
    feedback.settle(0, 0, [encoded.parts])
    left = (first[0] - sent(encoded)) * DECAY
    assert torch.equal(added(feedback, 1), left)
    second = delta(1)
    again = contributed(feedback, 1, second)
    assert torch.equal(second[0], delta(1)[0] + left)
    feedback.settle(1, 0, [again.parts])
    assert torch.equal(added(feedback, 2), (second[0] - sent(again)) * DECAY)


def test_contribution_that_did_not_count_leaves_what_was_left_before() -> None:
    before = ErrorFeedback()
    before.settle(0, 0, [contributed(before, 0, delta(0)).parts])
    feedback, _, _ = after(None)
    assert torch.equal(added(feedback, 2), added(before, 1))
    assert added(feedback, 2).any()


def test_contribution_of_an_earlier_incarnation_ends_the_feedback() -> None:
    feedback, encoded, _ = after(contributed(ErrorFeedback(), 1, delta(7)).parts)
    assert not added(feedback, 2).any()
    assert encoded.parts


def test_rounds_that_were_not_seen_end_the_feedback() -> None:
    feedback, _, _ = after(None)
    assert not added(feedback, 3).any()
    feedback.settle(3, 0, [])
    assert not added(feedback, 4).any()


def test_fragments_keep_their_own() -> None:
    feedback = ErrorFeedback()
    for number in range(2):
        feedback.settle(number, number, [contributed(feedback, number, delta(number), fragment=number).parts])
    assert not torch.equal(added(feedback, 2, fragment=0), added(feedback, 2, fragment=1))
    assert not added(feedback, 2, fragment=2).any()


def test_second_attempt_at_a_round_replaces_the_first() -> None:
    feedback = ErrorFeedback()
    contributed(feedback, 0, delta(5))
    tensors = delta(6)
    encoded = contributed(feedback, 0, tensors)
    feedback.settle(0, 0, [encoded.parts])
    feedback.settle(0, 0, [])  # the attempt after the decision follows it
    assert torch.equal(added(feedback, 1), (tensors[0] - sent(encoded)) * DECAY)


def test_saved_feedback_goes_on_after_a_restart() -> None:
    feedback = ErrorFeedback()
    feedback.settle(0, 0, [contributed(feedback, 0, delta(0)).parts])
    saved = feedback.state_dict()
    encoded = contributed(feedback, 1, delta(1))
    restarted = ErrorFeedback()
    restarted.load_state_dict(saved)
    assert torch.equal(added(restarted, 1), added(feedback, 1))
    restarted.settle(1, 0, [encoded.parts])  # the round counted what the earlier incarnation contributed
    assert not added(restarted, 2).any()


def test_other_codecs_keep_nothing() -> None:
    index, tensors = Index((spec_of("large", torch.empty(7000)),), "int8"), delta(0)[:1]
    feedback = ErrorFeedback()
    encoded = encode(tensors, index)
    feedback.keep(tensors, encoded)
    feedback.settle(0, 0, [encoded.parts])
    assert feedback.state_dict() == {"round": 1, "left": []}
