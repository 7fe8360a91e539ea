"""A server that gives prepared answers, so that a session's handling of each can be seen."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tests.kit.http_server import HttpReply, HttpServer

if TYPE_CHECKING:
    from collections.abc import Callable


class Answers(HttpServer):
    """Gives answers in order; the last one repeats."""

    def __init__(self) -> None:
        super().__init__(lambda _: HttpReply(*self._next()))
        self.give((200, b"{}"))

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}"

    def give(self, *answers: tuple[int, bytes]) -> None:
        """Answer with these statuses and bodies from now on, and forget earlier requests."""
        self._answers = list(answers)
        self.requests.clear()

    def _next(self) -> tuple[int, bytes]:
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def at_once(ask: Callable[[], Any]) -> list[Any]:
    """The results of four calls in four threads."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(ask())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
