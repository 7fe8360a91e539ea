"""What every command of `skerry` has in common: its arguments, its exit codes, and how it asks.

Exit codes: 0 ok, 1 failed, 2 bad usage or spec. With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from skerry.infra import render
from skerry.infra.errors import SpecInvalid, in_short
from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Generator

FAILED: Final = 1
BAD_USAGE: Final = 2

SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec.", show_default=True)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field: outer.rounds=40.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, for programs.")]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    ok: bool
    problems: tuple[str, ...]


@contextlib.contextmanager
def errors_as_exit_codes(
    *, as_json: bool = False, what: str = "the store", bad_usage: int = BAD_USAGE
) -> Generator[None]:
    """Expected errors end the process with their message and the documented code, without a traceback.

    what: whom a call that got no answer was made to. bad_usage: the code where 2 means something else.
    """
    try:
        yield
    except SpecInvalid as error:
        raise _failed([str(problem) for problem in error.problems], bad_usage, as_json=as_json) from error
    except Invalid as error:
        raise _failed([str(error)], bad_usage, as_json=as_json) from error
    except BrokenPipeError:
        raise  # typer ends quietly for `skerry logs | head`
    except Retryable as error:
        raise _failed([f"cannot reach {what} ({in_short(error)}); try again"], FAILED, as_json=as_json) from error
    except (SkerryError, OSError) as error:
        raise _failed([str(error)], FAILED, as_json=as_json) from error
    except KeyboardInterrupt as error:
        raise _failed(["interrupted"], FAILED, as_json=as_json) from error


def confirm(question: str, *, flag: str) -> None:
    """Ask on a terminal; raise Invalid naming `flag` where nobody can be asked, or if the answer is no."""
    if not sys.stdin.isatty():
        raise Invalid(f"{question} Nobody can be asked here: add {flag}")
    if not typer.confirm(question):
        raise Invalid("left as it was")


def _failed(problems: list[str], code: int, *, as_json: bool) -> typer.Exit:
    for problem in problems:
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(render.as_json(_Failure(ok=False, problems=tuple(problems))))
    return typer.Exit(code)
