"""`skerry-replica`: runs a replica in a container of the replica image, or checks whether a machine can run one.

run      run the replica that the environment describes; a command after -- wins over SKERRY_COMMAND
train    the same, under the name that SageMaker uses
check    check GPUs, torch, disk, clock, credentials and the store; the last line is JSON
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback

from skerry.runtime import contract
from skerry.runtime.contract import ExitCode


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `skerry-replica` and `python -m skerry.runtime`."""
    parser = argparse.ArgumentParser(
        prog="skerry-replica", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (("run", "run a replica"), ("train", "the same, as SageMaker calls it")):
        run = commands.add_parser(verb, help=text)
        run.add_argument("command", nargs="*", help=f"the command to run, after --; default: ${contract.COMMAND}")
    check = commands.add_parser("check", help="check whether this machine can take part")
    check.add_argument("uri", nargs="?", help=f"the run's prefix; default: ${contract.RUN_URI}")
    check.add_argument("--json", action="store_true", help="only the line of JSON")
    options = parser.parse_args(arguments)
    if options.verb == "check":
        uri = options.uri or os.environ.get(contract.RUN_URI)
        if not uri:
            parser.error(f"give a URI or set {contract.RUN_URI}")
        return _check(uri, only_json=options.json)
    return _run(options.command)


def _run(command: list[str]) -> int:
    # Process 1 loses a signal that it neither handles nor blocks; imports take most of a second.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    from skerry.runtime.clock import SystemClock  # noqa: PLC0415  after the mask
    from skerry.runtime.container.run import run  # noqa: PLC0415  after the mask

    try:
        return int(run(command, dict(os.environ), SystemClock()))
    except Exception:  # noqa: BLE001  the end of main: a fault of skerry's must not end the run
        traceback.print_exc()
        return int(ExitCode.RETRY)


def _check(uri: str, *, only_json: bool) -> int:
    from skerry.runtime.clock import SystemClock  # noqa: PLC0415  `run` must set its signal mask without them
    from skerry.runtime.container import check  # noqa: PLC0415  same
    from skerry.runtime.container.identify_replica import ML  # noqa: PLC0415  same
    from skerry.runtime.container.privileges import drop_privileges  # noqa: PLC0415  same

    environment = dict(os.environ)
    # Check as the user that will run the script.
    messages = drop_privileges(environment, ML)
    if not only_json:
        sys.stdout.writelines(f"user       {line}\n" for line in messages)
    report = check.check_machine(uri, environment, SystemClock())
    if not only_json:
        sys.stdout.writelines(f"{line}\n" for line in check.lines(report))
    sys.stdout.write(json.dumps(check.as_document(report)) + "\n")
    return int(ExitCode.DONE if report.ok else ExitCode.PERMANENT)


if __name__ == "__main__":
    sys.exit(main())
