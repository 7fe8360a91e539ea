"""Equal digests, from the receipts of each round."""

from __future__ import annotations

from tests.kit.records import receipt

from skerry.infra.observe.digests_agree import digests_equal
from skerry.runtime.log.summarize_round import RoundHistory, RoundRecords, summarize_round


def history(number: int, **states: str) -> RoundHistory:
    receipts = [receipt(slot, number, state=state * 32) for slot, state in states.items()]
    return summarize_round(number, None, RoundRecords(receipts=receipts))


def test_digests_are_equal_if_receipts_agree_up_to_the_last_round() -> None:
    rounds = [history(0, a="a", b="a"), history(1, a="a", b="a"), history(2, a="a"), history(3, a="a", b="a")]
    assert digests_equal(rounds, 2)
    assert not digests_equal(rounds, 3), "the third round has one receipt, which is compared with nothing"
    assert digests_equal(rounds, 4), "b was killed before its receipt of the third round, and was there at the end"
    assert not digests_equal(rounds, 5), "the fifth round has no records"
    assert not digests_equal(rounds, 0)


def test_one_replica_with_another_state_is_seen() -> None:
    assert not digests_equal([history(0, a="a", b="a", c="b")], 1)
    assert not digests_equal([history(0, a="a", b="b"), history(1, a="a", b="a")], 2)
