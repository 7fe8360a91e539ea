"""Reads an entry point and its arguments, as a user passes them to `launch_replicas`, into the words of a command.

An entry point is a script (`train.py`), a dotted module (`package.train`), or a command (`torchrun train.py`).
Arguments are words, or a mapping that becomes options. Does no I/O.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from skerry.infra.run.executor import EntrypointArguments

RENDEZVOUS: Final = "rendezvous"
"""The option that names the prefix where the replicas meet. An executor without a run takes it as its run."""
RANK_ENV: Final = "rank_env"
"""The option that names a variable; every executor sets it to the index of each replica."""
_PYTHON: Final = "python"
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Entrypoint:
    """command: the words to run. rank_variable: the name after RANK_ENV. rendezvous: the URI after RENDEZVOUS."""

    command: tuple[str, ...]
    rank_variable: str | None = None
    rendezvous: str | None = None


def read_entrypoint(entrypoint: str, arguments: EntrypointArguments) -> Entrypoint:
    """The command of an entry point.

    In a mapping, None and False leave an option out, and True makes it a flag; names stay as they are:
    `{"lr": 0.1, "resume": True}` is `--lr 0.1 --resume`. Raises Invalid for an entry point without a word, for a rank
    variable of an impossible name, and for a value that is none of these.
    """
    program = shlex.split(entrypoint)
    if len(program) == 1 and program[0].endswith(".py"):
        program = [_PYTHON, *program]
    elif _MODULE.fullmatch(entrypoint):
        program = [_PYTHON, "-m", entrypoint]
    if not program:
        raise Invalid("no entry point: write a script, a dotted module or a command")
    if not isinstance(arguments, Mapping):
        return Entrypoint(command=(*program, *arguments))
    variable, rendezvous = arguments.get(RANK_ENV), arguments.get(RENDEZVOUS)
    if variable is not None and not (isinstance(variable, str) and _VARIABLE.fullmatch(variable)):
        raise Invalid(f"not the name of a variable: {RANK_ENV}={variable!r}")
    words = [word for name, value in arguments.items() for word in _option(name, value)]
    return Entrypoint(
        command=(*program, *words),
        rank_variable=variable,
        rendezvous=rendezvous if isinstance(rendezvous, str) else None,
    )


def _option(name: str, value: object) -> list[str]:
    match value:
        case None | False:
            return []
        case True:
            return [f"--{name}"]
        case str() | int() | float():
            return [f"--{name}", str(value)]
        case _:
            raise Invalid(f"cannot pass {name}={value!r} as an option: use text, a number or a bool")
