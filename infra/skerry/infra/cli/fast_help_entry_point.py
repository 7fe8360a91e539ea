"""The entry point of `skerry` as installed: help, version and completion from a table, else it starts the application.

`app` has the commands themselves and what they need. It is imported when one of them is called, or asked for its help.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from skerry.infra.cli.common import CARE, CLOUD_PANEL, START, WATCH

if TYPE_CHECKING:
    from collections.abc import Mapping

# The order of `skerry --help`. Each text is the first sentence of the command's own help.
COMMANDS: Final[Mapping[str, Mapping[str, str]]] = {
    START: {
        "init": "Write a commented sample spec, and a training script next to it.",
        "validate": "Check a spec and its code, and report every problem at once.",
        "up": "Start or continue the run and wait until it is over.",
        "schema": "Print the JSON Schema of a spec, for editors.",
    },
    WATCH: {
        "watch": "Show a run live, from its bucket alone, on any machine.",
        "status": "Show the progress of the run, read from its store alone.",
        "report": "Write a run as one page: its loss, absences, cost and times.",
        "logs": "Print the lines that the replicas wrote.",
        "doctor": "Examine the run's log and report what is wrong, where, and what to do.",
        "runs": "List the runs under a prefix of a store.",
        "artifacts": "List or get the files that the script saved with `replica.save`.",
        "export": "Write the trained model to a file, checked against the log.",
    },
    CLOUD_PANEL: {
        "estimate": "Show what the run costs: machines, traffic, storage.",
        "plan": "Show what `apply` would change, in which account, which rights it grants, and what it costs.",
        "show": "Show a saved plan.",
        "apply": "Change the clouds.",
        "cancel": "Stop the jobs and keep everything else.",
        "import": "Tag an existing resource as part of this run: `apply` then changes it, and `destroy` deletes it.",
        "sandbox": "Play AWS and Google Cloud in memory until Ctrl-C, to try commands without an account.",
        "output": "Print the values that clouds gave to the resources of the run: names, ids, ARNs.",
        "state": "The resources that the run has: list, show.",
        "graph": "Print the resources and what each needs, for Graphviz: skerry graph | dot -Tsvg.",
        "unlock": "Unlock the state after an apply crashed on another machine.",
        "image": "The replica image: push what `scripts/image build` has built.",
    },
    CARE: {
        "extend": "Add rounds to a run, or change its outer learning rate and momentum, also after its end.",
        "pin": "Keep a round's checkpoint until it is unpinned; or list the pins.",
        "unpin": "Unpin a checkpoint: it is deleted with the others of its age.",
        "replicate": "Copy a run to another store, from which `restore` can continue it.",
        "restore": "Make a run of a mirror, which continues the lost one.",
        "destroy": "Delete the run: its jobs or processes, its objects in the store, its folder on this machine.",
    },
}


class _CommandTable(TyperGroup):
    """Shows the table's commands, and runs those of `app`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command of `app` with the name that the table knows. Raises a usage error for any other name."""
        name, _, rest = super().resolve_command(ctx, args)
        from skerry.infra.cli.app import app  # noqa: PLC0415  loads all commands

        return name, None if name is None else typer.main.get_group(app).commands[name], rest


root = typer.Typer(
    name="skerry",
    cls=_CommandTable,
    help="DiLoCo training on ordinary jobs that cannot reach each other, only a bucket.",
    epilog="Exit codes: 0 ok, 1 failed, 2 bad usage or spec, 3 done, but not by all replicas, 4 push an image first.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `skerry` command."""
    # The runtime's events are for a replica's log; here they are reported as text or raised as errors.
    logging.getLogger("skerry").addHandler(logging.NullHandler())
    root(prog_name="skerry")


def _print_version(wanted: bool) -> None:  # noqa: FBT001  typer calls it so
    if wanted:
        from importlib import metadata  # noqa: PLC0415  costs as much as all of the help

        typer.echo(f"skerry {metadata.version('skerry')}")
        raise typer.Exit


@root.callback()
def _options(
    _version: Annotated[  # noqa: FBT002  typer calls it so
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the name of a command."""


def _fill_table() -> None:
    for panel, commands in COMMANDS.items():
        for name, text in commands.items():
            root.command(name, help=text, rich_help_panel=panel)(lambda: None)


_fill_table()
