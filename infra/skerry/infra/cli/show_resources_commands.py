"""Commands that show the resources of a deployed run: state list, state show, output, graph. They change nothing."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.infra import targets
from skerry.infra.cli.common import CLOUD, DEFAULT_SPEC, AsJson, Overrides, SpecPath, errors_as_exit_codes
from skerry.infra.deploy.prepared_deployment import prepare
from skerry.infra.deploy.read_clouds import read_graph, read_state
from skerry.infra.provision.plan import deletion_needs
from skerry.infra.run import check_machine_and_store
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.state import Entry

state_app = typer.Typer(name="state", help="The resources that the run has: list, show.", no_args_is_help=True)
Planned = Annotated[bool, typer.Option("--planned", help="Of the spec, instead of the state.")]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="As `skerry state list` prints it.")]


def register(app: typer.Typer) -> None:
    """Add these commands to `app`."""
    app.command()(output)
    app.command()(graph)
    app.add_typer(state_app)


@state_app.command(name="list")
def list_(path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, as_json: AsJson = False) -> None:
    """List the resources in the state, each with its name in the cloud."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        entries = _entries(prepare_deployed(path, overrides or ()))
        if as_json:
            names = {str(entry.id): entry.record.name for entry in entries}
            typer.echo(json.dumps({"ok": True, "resources": names}))
            return
        width = max((len(str(entry.id)) for entry in entries), default=0)
        for entry in entries:
            phase = "" if entry.phase.value == "ready" else f"  ({entry.phase.value})"
            typer.echo(f"{entry.id!s:<{width}}  {entry.record.name}{phase}")


@state_app.command()
def show(
    address: Address, path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, as_json: AsJson = False
) -> None:
    """Show what the state records of a resource: its settings, its outputs and what it needs."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        entries = _entries(prepare_deployed(path, overrides or ()))
        chosen = [entry for entry in entries if address in (str(entry.id), entry.record.address)]
        if not chosen:
            raise Invalid(f"the state has no resource {address}; `skerry state list` lists them all")
        records = [_document(entry) for entry in chosen]
        typer.echo(json.dumps({"ok": True, "resources": records}) if as_json else json.dumps(records[-1], indent=2))


def output(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    name: Annotated[
        str | None, typer.Option("--name", metavar="ADDRESS.OUTPUT", help="Only this value, for scripts.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the values that clouds gave to the resources of the run: names, ids, ARNs."""
    with errors_as_exit_codes(as_json=as_json, service=CLOUD):
        entries = _entries(prepare_deployed(path, overrides or ()))
        values = {
            f"{entry.record.address}.{key}": text for entry in entries for key, text in entry.record.outputs.items()
        }
        if name is not None and name not in values:
            raise Invalid(f"no output {name}; `skerry output` lists them all")
        if as_json:
            shown = values if name is None else {name: values[name]}
            typer.echo(json.dumps({"ok": True, "outputs": shown}))
        elif name is not None:
            typer.echo(values[name])
        else:
            for key, text in values.items():
                typer.echo(f"{key} = {text}")


def graph(path: SpecPath = DEFAULT_SPEC, overrides: Overrides = None, *, planned: Planned = False) -> None:
    """Print the resources and what each needs, for Graphviz: skerry graph | dot -Tsvg."""
    with errors_as_exit_codes(service=CLOUD):
        deployment = prepare_deployed(path, overrides or ())
        state = None if planned else read_state(deployment)
        if state is None:
            resources = read_graph(deployment, deployment.spec.spec.limits.max_hours)
            needs: Mapping[str, Iterable[str]] = resources.needs
        else:
            needs = deletion_needs(state.entries)
        typer.echo("\n".join(_dot(deployment.run, needs)))


def _dot(run: str, needs: Mapping[str, Iterable[str]]) -> list[str]:
    """The lines of a graph in the language of Graphviz. JSON strings without control characters are its strings."""
    nodes = [f"  {json.dumps(address)};" for address in sorted(needs)]
    edges = [
        f"  {json.dumps(address)} -> {json.dumps(needed)};"
        for address in sorted(needs)
        for needed in sorted(needs[address])
    ]
    return [f"digraph {json.dumps(run)} {{", "  rankdir=LR;", "  node [shape=box];", *nodes, *edges, "}"]


def _entries(deployment: Deployment) -> Sequence[Entry]:
    state = read_state(deployment)
    if state is None:
        raise Invalid(f"no state at {deployment.spec.state_uri or deployment.run}: `skerry apply` writes it")
    return state.entries


def _document(entry: Entry) -> dict[str, object]:
    record = entry.record
    return {
        "address": record.address,
        "generation": record.generation,
        "name": record.name,
        "region": record.region,
        "yours": record.brought,
        "phase": entry.phase.value,
        "condition": entry.condition.value,
        "outputs": dict(record.outputs),
        "needs": list(record.needs),
        "settings": record.settings,
    }


def prepare_deployed(path: Path, overrides: Sequence[str], at_once: int | None = None) -> Deployment:
    """The deployment of a spec, checked on this machine. Raises Invalid for a spec that runs on this machine.

    at_once: calls to a cloud in flight.
    """
    spec = check_machine_and_store.load_deployed(path, targets.kinds(), overrides)
    if not spec.deployed:
        raise Invalid(f"{path} runs on this machine, so there is nothing to create first: `skerry up {path}`")
    return prepare(spec, SystemClock(), os.environ, at_once)
