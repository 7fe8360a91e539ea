"""A replica with the role that `apply` gives it mends a round, and deletes nothing that it may not create again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.clouds.test_replica_calls import MINE, OTHERS, PREFIX, opened, replica
from tests.kit.managers import begin_run, islands_of, stop_managers, train_all
from tests.kit.stores import flip

from skerry.runtime.log import keys
from skerry.runtime.log.log import RunLog, read_run
from skerry.runtime.mirrors.repair_from_copies import Copies, RoundMender
from skerry.runtime.store.memory import MemoryStore

if TYPE_CHECKING:
    from tests.infra.clouds.test_replica_calls import Replica

__all__ = ["replica"]

ROUND = 1


def test_mender_puts_back_its_own_payload_and_leaves_those_of_others(replica: Replica) -> None:
    copy = MemoryStore()
    begin_run(copy, [MINE, OTHERS], minimum=2, rounds=None)
    train_all(islands_of(copy, [MINE, OTHERS], grace_s=60.0), ROUND + 1, close=False)
    stop_managers()
    bucket = opened(f"{replica.scheme}://acme-runs/{PREFIX}", replica.operator)
    for entry in copy.list(""):
        bucket.create(entry.key, bytes(copy.read(entry.key) or b""))
    payloads = [entry.key for entry in copy.list(keys.payloads_prefix(ROUND))]
    whole = {key: bytes(copy.read(key) or b"") for key in payloads}
    for key in payloads:
        bucket.replace(key, flip(whole[key]))
    run = read_run(copy)
    assert run is not None
    mender = RoundMender(RunLog(replica.store(), run), MINE, ROUND, lambda: Copies([copy]), lambda: None)
    mended, failed = mender.mend(lambda: False)
    (mine,) = (key for key in payloads if keys.slot_of(key) == MINE)
    (others,) = (key for key in payloads if keys.slot_of(key) == OTHERS)
    assert ([item.key for item in mended], list(mender.copies), failed) == ([mine], [others], [])
    assert {key: bytes(bucket.read(key) or b"") for key in payloads} == {mine: whole[mine], others: flip(whole[others])}
