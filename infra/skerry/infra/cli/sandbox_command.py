"""The command `skerry sandbox`: plays AWS and Google Cloud in memory, for the other commands in another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
from typing import TYPE_CHECKING, Annotated, Final

import typer

from skerry.infra.cli.common import AsJson, errors_as_exit_codes
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

# What would lead a client past the sandbox, to the user's own account.
_OWN: Final = (
    "AWS_PROFILE",
    "AWS_ROLE_ARN",
    "AWS_SESSION_TOKEN",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "GOOGLE_APPLICATION_CREDENTIALS",
)
_ENDS: Final = (signal.SIGINT, signal.SIGTERM)


def sandbox(
    *,
    aws: Annotated[bool, typer.Option("--aws", help="Only AWS.")] = False,
    google: Annotated[bool, typer.Option("--google", help="Only Google Cloud.")] = False,
    run_jobs: Annotated[
        bool, typer.Option("--run-jobs", help="Run jobs as containers of this machine's Docker. Without it they wait.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Play AWS and Google Cloud in memory until Ctrl-C, to try commands without an account.

    Prints the lines that lead a shell there: `skerry sandbox | tee sandbox.env`, then in another terminal
    `source sandbox.env`. Everything that is created there is gone afterwards.
    """
    both = aws == google
    with errors_as_exit_codes(as_json=as_json), contextlib.ExitStack() as stack:
        # Blocked before any thread starts: only the wait below gets them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        environment = _start(stack, aws=aws or both, google=google or both, run_jobs=run_jobs)
        typer.echo(json.dumps(dict(environment)) if as_json else "\n".join(_shell_lines(environment)))
        jobs = "are containers of this machine" if run_jobs else "wait, because --run-jobs is not set"
        typer.echo(f"the sandbox is ready; jobs {jobs}; end it with Ctrl-C", err=True)
        signal.sigwait(_ENDS)
        typer.echo("the sandbox ends, and everything in it is gone", err=True)


def _start(stack: contextlib.ExitStack, *, aws: bool, google: bool, run_jobs: bool) -> Mapping[str, str]:
    """Start the clouds, which end with the stack, and return the variables of their operator."""
    for name in _OWN:  # moto opens a session when it is imported, which fails for a profile that is not there
        os.environ.pop(name, None)
    try:
        # Moto takes a second and a half, and is only there with the extra.
        from skerry.testing.both_clouds import Clouds  # noqa: PLC0415
        from skerry.testing.google import GoogleSandbox  # noqa: PLC0415
        from skerry.testing.sandbox import Sandbox  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise Invalid(f"the sandbox needs {error.name}: pip install 'skerry[testing]'") from error

    playing_aws = stack.enter_context(Sandbox(containers=run_jobs, enforce_iam=True)) if aws else None
    playing_google = stack.enter_context(GoogleSandbox(containers=run_jobs)) if google else None
    for cloud in filter(None, (playing_aws, playing_google)):
        cloud.any_image = True
    if playing_aws is not None and playing_google is not None:
        return Clouds(aws=playing_aws, google=playing_google).environment
    return next(cloud.environment for cloud in (playing_aws, playing_google) if cloud is not None)


def _shell_lines(environment: Mapping[str, str]) -> list[str]:
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    return [f"unset {' '.join(_OWN)}", *exports]
