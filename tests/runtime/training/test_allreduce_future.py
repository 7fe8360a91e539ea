"""The Work that allreduce returns."""

from __future__ import annotations

import torch

from skerry.runtime.training.allreduce_future import ExchangeWork


def work_of(*, succeeds: bool = True) -> tuple[ExchangeWork, list[Exception]]:
    """A work, and the errors that it reports."""
    errors: list[Exception] = []
    return ExchangeWork(torch.zeros(1), lambda: succeeds, errors.append), errors


def test_callbacks_run_once_in_order_when_the_work_is_waited_for() -> None:
    seen: list[str] = []
    work, _ = work_of()
    future = work.get_future()
    future.then(lambda done: seen.append(f"first {done.value().item():g}") or "one").then(
        lambda done: seen.append(f"second {done.value()}") or "two"
    )
    assert seen == []
    assert work.wait()
    work.synchronize()
    assert seen == ["first 0", "second one"]
    assert future.value() == "two"


def test_callback_that_raises_is_reported_and_the_future_completes() -> None:
    work, errors = work_of()

    def fail(_: object) -> None:
        raise KeyError("broken")

    work.get_future().then(fail)
    assert not work.wait()
    assert isinstance(errors[0], KeyError)
    assert work.get_future().done()


def test_failed_exchange_returns_false_and_completes_the_future() -> None:
    work, _ = work_of(succeeds=False)
    assert not work.wait()
    assert work.get_future().done()
