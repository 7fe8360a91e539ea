"""A DiLoCo run over slow links with one fragment in flight, and the share of its exchanges that training hides.

Two fragments are exchanged in turn, each behind the inner steps that follow (`fragment_sync_delay`). An inner step is
a pause of fixed length. Needs the links of `common.link`.
"""
# ruff: noqa: PLC0415  loads what it measures late

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from common.link import enter, hub
from skerry.runtime.log import keys
from skerry.runtime.log.records import Receipt
from skerry.runtime.log.summarize_round import EXPOSED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.log.records import Codec, Reduction
    from skerry.runtime.store.interface import Store

FRAGMENTS: Final = 2
WARM_UP: Final = 2
"""Rounds: replicas appear in the first, and the second is the first with a measured link."""


@dataclass(frozen=True, kw_only=True)
class HiddenCase:
    """elements: of a fragment. steps: inner steps from one exchange to the next; delay: those behind an exchange."""

    codec: Codec
    reduction: Reduction
    replicas: int
    elements: int
    rounds: int
    steps: int
    delay: int
    step_s: float
    port: int


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """Means of a replica and exchange, in seconds. hidden: the share of an exchange that training did not wait for.

    least: of a single exchange. behind_s: the time that training gives to an exchange.
    """

    name: str
    exchanges: int
    exchange_s: float
    exposed_s: float
    hidden: float
    least: float
    behind_s: float


def measure(case: HiddenCase) -> Hidden:
    """Train, and read the receipts. Raises RuntimeError if a replica does not finish."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_replica, args=(case, rank)) for rank in range(case.replicas)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"a replica ended with {process.exitcode}")
    store = _store(case, "127.0.0.1")
    return of_receipts(case, [_receipt(store, number, rank) for number in _measured(case) for rank in _ranks(case)])


def of_receipts(case: HiddenCase, receipts: Sequence[Receipt]) -> Hidden:
    """The figures of a run."""
    whole = [sum(seconds for phase, seconds in each.seconds.items() if phase != EXPOSED) for each in receipts]
    exposed = [min(each.seconds[EXPOSED], total) for each, total in zip(receipts, whole, strict=True)]
    return Hidden(
        name=f"{case.reduction}, {case.codec}",
        exchanges=len(receipts),
        exchange_s=round(sum(whole) / len(whole), 2),
        exposed_s=round(sum(exposed) / len(exposed), 2),
        hidden=round(1 - sum(exposed) / sum(whole), 3),
        least=round(1 - max(part / total for part, total in zip(exposed, whole, strict=True)), 3),
        behind_s=round(case.delay * case.step_s, 2),
    )


def describe(result: Hidden) -> str:
    """One line."""
    return (
        f"{result.name:22} {result.hidden:4.0%} of {result.exchange_s:.2f} s hidden behind {result.behind_s:.1f} s of "
        f"training, at least {result.least:.0%} of each of {result.exchanges} exchanges"
    )


def _measured(case: HiddenCase) -> range:
    return range(WARM_UP, WARM_UP + case.rounds)


def _ranks(case: HiddenCase) -> range:
    return range(case.replicas)


def _receipt(store: Store, number: int, rank: int) -> Receipt:
    key = keys.receipt(number, f"r-{rank}")
    return Receipt.parse(store.read(key) or b"", key)


def _store(case: HiddenCase, host: str) -> Store:
    from skerry.runtime.store import open_store

    os.environ.update(
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",  # noqa: S106
        AWS_ENDPOINT_URL=f"http://{host}:{case.port}",
    )
    return open_store(f"s3://wan/hidden-{case.reduction}-{case.codec}")


def _replica(case: HiddenCase, rank: int) -> None:
    from torchft.local_sgd import DiLoCo

    from skerry.runtime.manager import ObjectStoreManager

    enter(rank)
    torch.set_num_threads(1)
    manager = ObjectStoreManager(
        _store(case, hub(rank)),
        replica_id=f"r-{rank}",
        min_replica_size=case.replicas,
        timeout=timedelta(minutes=5),
        codec=case.codec,
        reduction=case.reduction,
        checkpoint_every=1000,  # only exchanges are to use the link
    )
    fragments = [nn.Linear(case.elements, 1, bias=False) for _ in range(FRAGMENTS)]
    inner = torch.optim.SGD([weight for part in fragments for weight in part.parameters()], lr=1e-3)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in fragments]
    noise = torch.randn(1, case.elements, generator=torch.Generator().manual_seed(rank))
    sync_every = FRAGMENTS * case.steps
    with DiLoCo(manager, [*fragments], inner, [*outer], sync_every=sync_every, fragment_sync_delay=case.delay):  # pyright: ignore[reportArgumentType]
        while manager.current_step() < WARM_UP + case.rounds:
            time.sleep(case.step_s)
            for part in fragments:
                part.weight.grad = noise
            inner.step()  # pyright: ignore[reportUnknownMemberType]
    manager.shutdown()
    os._exit(0)  # nothing of it is of interest any more
