"""`skerry-replica check`: can this machine take part in a run? Prints what it finds as JSON; exit code 20 if not."""

from __future__ import annotations

import argparse
import json
import os
import sys

from skerry.runtime import contract
from skerry.runtime.clock import SystemClock
from skerry.runtime.contract import ExitCode
from skerry.runtime.errors import SkerryError
from skerry.runtime.journal import read_run
from skerry.runtime.store import open_store
from skerry.runtime.store.probe import probe


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `skerry-replica` and `python -m skerry.runtime`."""
    parser = argparse.ArgumentParser(prog="skerry-replica", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="open the run's store, prove that it honours conditions, read the run")
    check.add_argument("uri", nargs="?", help=f"the run's prefix; default: ${contract.RUN_URI}")
    options = parser.parse_args(arguments)
    uri = options.uri or os.environ.get(contract.RUN_URI)
    if not uri:
        parser.error(f"give a URI or set {contract.RUN_URI}")
    try:
        clock = SystemClock()
        store = open_store(uri, clock=clock)
        probe(store, clock)
        run = read_run(store)
    except SkerryError as error:
        sys.stdout.write(json.dumps({"ok": False, "store": uri, "error": f"{type(error).__name__}: {error}"}) + "\n")
        return int(ExitCode.PERMANENT)
    found = None if run is None else {"name": run.name, "rounds": run.rounds, "slots": list(run.slots)}
    sys.stdout.write(json.dumps({"ok": True, "store": store.uri, "run": found}) + "\n")
    return int(ExitCode.DONE)


if __name__ == "__main__":
    sys.exit(main())
