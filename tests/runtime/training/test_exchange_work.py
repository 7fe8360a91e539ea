"""The Work that allreduce returns."""

from __future__ import annotations

import torch

from skerry.runtime.training.exchange_work import ExchangeWork


def ignore(_: Exception) -> None:
    """Errors are not what this test is about."""


def test_callbacks_run_in_order_when_the_work_is_waited_for_and_not_before() -> None:
    seen: list[str] = []
    work = ExchangeWork(torch.zeros(1), lambda: True, ignore)
    future = work.get_future()
    future.then(lambda done: seen.append(f"first {done.value().item():g}") or "one").then(
        lambda done: seen.append(f"second {done.value()}") or "two"
    )
    assert seen == []
    assert work.wait()
    assert seen == ["first 0", "second one"]
    assert future.value() == "two"


def test_waiting_twice_runs_callbacks_once() -> None:
    seen: list[int] = []
    work = ExchangeWork(torch.zeros(1), lambda: True, ignore)
    work.get_future().then(lambda _: seen.append(1))
    work.wait()
    work.synchronize()
    assert seen == [1]


def test_a_callback_that_raises_is_reported_and_the_future_still_completes() -> None:
    errors: list[Exception] = []
    work = ExchangeWork(torch.zeros(1), lambda: True, errors.append)

    def broken(_: object) -> None:
        raise KeyError("broken")

    work.get_future().then(broken)
    assert not work.wait()
    assert isinstance(errors[0], KeyError)
    assert work.get_future().done()


def test_failed_exchange_returns_false_and_completes_the_future() -> None:
    work = ExchangeWork(torch.ones(1), lambda: False, ignore)
    assert not work.wait()
    assert work.get_future().done()
