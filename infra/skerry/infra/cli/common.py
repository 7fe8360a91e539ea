"""Shared by all commands of `skerry`: common arguments, exit codes, JSON output, questions to the operator.

Exit codes: 0 ok, 1 failed, 2 bad usage or spec, 3 finished but not by all replicas, 4 an image must be pushed first.
With --json the last line on stdout is for programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.text import Text

from skerry.infra.spec_and_store_errors import PushFirst, SpecInvalid, in_short
from skerry.runtime.errors import Invalid, Retryable, SkerryError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from _typeshed import DataclassInstance

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.spec.model import SpecFile

FAILED: Final = 1
BAD_USAGE: Final = 2
NOT_BY_ALL: Final = 3
PUSH_FIRST: Final = 4

START: Final = "Start here"
WATCH: Final = "Watch"
CLOUD_PANEL: Final = "Cloud"
CARE: Final = "Care"
"""The panels of `skerry --help`, in this order."""

CLOUD: Final = "the cloud"
"""The service of `errors_as_exit_codes` for a run whose replicas are jobs in clouds."""

DEFAULT_SPEC: Final = Path("skerry.yaml")
SpecPath = Annotated[Path, typer.Argument(metavar="SPEC", help="The spec.", show_default=True)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field: outer.rounds=40.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show the protocol's own events too, not only what the script prints.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout, for programs.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The spec, or the URI of the run.")]
Approved = Annotated[bool, typer.Option("--auto-approve", help="Do not ask.")]
TakeOver = Annotated[
    bool, typer.Option("--take-over", help="Take over the run if it is live elsewhere, without being asked.")
]


@dataclass(frozen=True, kw_only=True)
class _Failure:
    ok: bool
    problems: tuple[str, ...]


@contextlib.contextmanager
def errors_as_exit_codes(
    *, as_json: bool = False, service: str = "the store", bad_usage: int = BAD_USAGE
) -> Generator[None]:
    """End the process with the message of an expected error and its documented exit code, without a traceback.

    service: named when a request got no answer. bad_usage: the code of Invalid, for a command where 2 has a meaning.
    """
    try:
        yield
    except SpecInvalid as error:
        raise _failed([str(problem) for problem in error.problems], bad_usage, as_json=as_json) from error
    except PushFirst as error:
        raise _failed([str(error)], PUSH_FIRST, as_json=as_json) from error
    except Invalid as error:
        raise _failed([str(error)], bad_usage, as_json=as_json) from error
    except BrokenPipeError:
        raise  # typer ends quietly for `skerry logs | head`
    except Retryable as error:
        raise _failed([f"cannot reach {service} ({in_short(error)}); try again"], FAILED, as_json=as_json) from error
    except (SkerryError, OSError) as error:
        raise _failed([str(error)], FAILED, as_json=as_json) from error
    except KeyboardInterrupt as error:
        raise _failed(["interrupted"], FAILED, as_json=as_json) from error


def confirm(question: str, *, flag: str) -> None:
    """Ask on a terminal. Raises Invalid if the answer is no, or if there is no terminal; the text then names `flag`."""
    if not sys.stdin.isatty():
        raise Invalid(f"{question} There is no terminal to ask on: add {flag}")
    if not typer.confirm(question):
        raise Invalid("nothing was changed")


def ask_take_over(text: str, *, approved: bool) -> None:
    """Ask whether to take over a live run. Raises Invalid if not, or without a terminal. approved: do not ask."""
    if not approved:
        confirm(f"{text}. Take it over? The replicas there will end.", flag="--take-over")


def is_uri(run: str) -> bool:
    """True for the URI of a run, False for the path of a spec."""
    return "://" in run


def load_spec(path: str, overrides: Sequence[str]) -> SpecFile:
    """The spec at `path`, checked without a look at this machine and the store. Raises SpecInvalid."""
    # Not at the top: the entry point imports this module for its texts, and a spec needs many others.
    from skerry.infra import targets  # noqa: PLC0415
    from skerry.infra.spec import model  # noqa: PLC0415

    return model.load(Path(path), targets.kinds(), overrides)


def run_uri(run: str, overrides: Sequence[str]) -> str:
    """The run's own prefix, from its URI or from a spec. A relative file:// URI starts at this folder, as in a spec.

    Raises Unauthorized as `open_access`.
    """
    if not is_uri(run):
        spec = load_spec(run, overrides)
        open_access(spec)
        return spec.run_uri
    if overrides:
        raise Invalid("--set changes a spec, but the run is named by its URI; leave one of them out")
    return absolute(run)


def open_access(spec: SpecFile) -> OperatorAccess:
    """The operator's sessions with the clouds. Raises Unauthorized if the spec does not allow the account of one."""
    from skerry.infra import clouds  # noqa: PLC0415  as above
    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess  # noqa: PLC0415  as above
    from skerry.runtime.clock import SystemClock  # noqa: PLC0415  as above

    access = OperatorAccess.of(spec, SystemClock(), os.environ)
    clouds.check_allowed(spec, access)
    return access


def absolute(uri: str) -> str:
    """The URI without a trailing slash; a relative file:// path starts at this folder."""
    from skerry.infra.spec.store_uri import store_uri  # noqa: PLC0415  as above

    return store_uri(Path(), uri)


def as_typed(command: str, path: Path, overrides: Sequence[str]) -> str:
    """A command for the spec that a person named, in the words of that person's shell."""
    spec = [] if path == DEFAULT_SPEC else [str(path)]
    sets = [word for override in overrides for word in ("--set", override)]
    return shlex.join(["skerry", command, *spec, *sets])


def to_json(value: DataclassInstance, **more: object) -> str:
    """A frozen dataclass as one line of JSON. more: further keys."""
    return json.dumps({**dataclasses.asdict(value), **more}, default=_json)


def print_lines(lines: Iterable[Text | str], console: Console | None = None) -> None:
    """Print lines as they are: no markup, no emoji for `:name:`, no wrapping, no highlighting."""
    console = Console() if console is None else console
    for line in lines:
        console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)


def _json(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def _failed(problems: list[str], code: int, *, as_json: bool) -> typer.Exit:
    for problem in problems:
        typer.echo(problem, err=True)
    if as_json:
        typer.echo(to_json(_Failure(ok=False, problems=tuple(problems))))
    return typer.Exit(code)
