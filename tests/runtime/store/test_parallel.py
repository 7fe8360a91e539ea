"""Requests beside the caller's own work: their order, their limit and their errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from skerry.runtime.errors import Retryable
from skerry.runtime.store.memory import MemoryStore
from skerry.runtime.store.parallel import BackgroundRequests, RequestWindow

if TYPE_CHECKING:
    from skerry.runtime.store.interface import Profile


class Streams(MemoryStore):
    """A memory store whose profile recommends so many requests at once."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self._streams = streams

    @property
    def profile(self) -> Profile:
        return replace(super().profile, streams=self._streams)


def test_background_request_runs_while_the_caller_goes_on() -> None:
    store, gate = Streams(2), threading.Event()
    with BackgroundRequests(store) as requests:
        requests.submit(lambda: gate.wait(300) and store.create("a", b"1"))
        assert store.read("a") is None
        gate.set()
    assert store.read("a") == b"1"


def test_one_stream_runs_requests_in_the_callers_thread() -> None:
    threads: list[int] = []
    with BackgroundRequests(Streams(1)) as requests:
        requests.submit(lambda: threads.append(threading.get_ident()))
    assert threads == [threading.get_ident()]


@pytest.mark.parametrize("streams", [1, 3])
def test_error_of_a_background_request_is_raised(streams: int) -> None:
    def fail() -> None:
        raise Retryable("busy")

    with pytest.raises(Retryable, match="busy"), BackgroundRequests(Streams(streams)) as requests:
        requests.submit(fail)


@pytest.mark.parametrize("streams", [1, 2])
def test_window_answers_every_request_with_its_key(streams: int) -> None:
    answers: dict[str, int] = {}
    with RequestWindow[str, int](Streams(streams)) as window:
        for number, name in enumerate(["a", "b", "c"]):
            while not window.has_room:
                answer = window.next()
                assert answer is not None
                answers |= [answer]
            window.submit(name, lambda number=number: number)
        while (answer := window.next()) is not None:
            answers |= [answer]
    assert answers == {"a": 0, "b": 1, "c": 2}
    assert window.has_room
