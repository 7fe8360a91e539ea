"""Runs commands of Slurm: on this machine, or on a login node through ssh. Errors are translated.

A command is a line of sh with its words as arguments, so that nothing is quoted twice. It starts in the home folder,
with the environment of the operator here, and with that of a login there.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.handler_helpers import NO_LIMIT
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from skerry.runtime.clock import Clock

HERE: Final = "localhost"
"""The region of jobs that are submitted on this machine."""
_TIMEOUT_S: Final = 60.0
_SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--")
# Before it is what the login itself prints, by a file such as .bashrc.
_BEGIN: Final = "skerry-begin"
_OF_SSH: Final = 255
_NO_PROGRAM: Final = 127
# Slurm's own texts have no codes. The first pattern that matches counts.
_BUSY: Final = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (refused|timed out|reset)|slurm_receive_msg"
    r"|slurmctld.*(not responding|unavailable)|temporarily unable|zero bytes were transmitted|unable to connect",
    re.IGNORECASE,
)
_REFUSED: Final = re.compile(
    r"permission denied|access/permission|not authorized|invalid account or account/partition|user not found",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The end of a command."""

    code: int
    out: str
    err: str


class Cluster:
    """The commands of one cluster. login: a destination of ssh; None runs them here. execute: runs one command."""

    def __init__(
        self,
        clock: Clock,
        environment: Mapping[str, str],
        login: str | None = None,
        execute: Callable[[Sequence[str], str], Answer] | None = None,
        calls: AbstractContextManager[object] = NO_LIMIT,
    ) -> None:
        self.clock = clock
        self._calls = calls
        self._environment = dict(environment)
        self._login = login
        self._execute = self._run if execute is None else execute

    @property
    def name(self) -> str:
        """The region of its jobs."""
        return HERE if self._login is None else self._login

    def call(self, line: str, words: Sequence[str] = (), text: str = "") -> str:
        """Return the output of a line of sh, in which $1 is the first of `words`. text: its standard input.

        Raises Retryable if the cluster does not answer, Unauthorized if it refuses the user, Invalid otherwise.
        """
        begin = "" if self._login is None else f"echo {_BEGIN} && "
        shell = ["sh", "-c", f"cd && export LC_ALL=C && {begin}{line}", "sh", *words]
        try:
            with self._calls:
                answer = self._execute(shell if self._login is None else [*_SSH, self._login, shlex.join(shell)], text)
        except FileNotFoundError as error:
            raise Invalid(f"no such program on this machine: {error.filename}; install it") from error
        except subprocess.TimeoutExpired as error:
            raise Retryable(f"{self.name} did not answer within {_TIMEOUT_S:.0f} s") from error
        if answer.code == 0:
            return answer.out if self._login is None else answer.out.partition(f"{_BEGIN}\n")[2]
        raise self._error(answer)

    def _error(self, answer: Answer) -> Exception:
        message = " ".join(answer.err.split()) or f"exit code {answer.code}"
        text = f"{self.name}: {message}"
        if _REFUSED.search(message):
            return Unauthorized(text)
        if answer.code == _OF_SSH and self._login is not None:
            return Retryable(f"{text}; try `ssh {self._login}`")
        if _BUSY.search(message):
            return Retryable(text)
        if answer.code == _NO_PROGRAM:
            return Invalid(f"{text}; run skerry where Slurm's commands are, or write `login:`")
        return Invalid(text)

    def _run(self, words: Sequence[str], text: str) -> Answer:
        done = subprocess.run(  # noqa: S603  sh or ssh, with words that are quoted
            words,
            input=text,
            env=self._environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
        return Answer(code=done.returncode, out=done.stdout, err=done.stderr)
