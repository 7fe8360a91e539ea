"""The command `skerry estimate`: what a spec costs before anything is created.

Traffic depends on the model's size, which is not in the spec: without --parameters it is per billion parameters.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skerry.infra import clouds, targets
from skerry.infra.cli.common import DEFAULT_SPEC, FAILED, AsJson, Overrides, SpecPath, errors_as_exit_codes, print_lines
from skerry.infra.cost import prices
from skerry.infra.cost.estimate import BILLION, Estimate, MachineGroup, StorageCost, Volume, parse_parameters
from skerry.infra.cost.mirror_costs import MirrorCost
from skerry.infra.cost.time_limit_from_cost import cost_problem, limits_of
from skerry.infra.cost.work_lost_by_failure import Place, after_loss, losses
from skerry.infra.deploy.prepared_deployment import prepare
from skerry.infra.deploy.read_clouds import read_bucket_region, read_rates
from skerry.infra.run import check_machine_and_store
from skerry.infra.spec.store_uri import FILE
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.cost.work_lost_by_failure import Loss
    from skerry.infra.deploy.prepared_deployment import Deployment
    from skerry.infra.provision.target_and_store_interfaces import Rate

OwnPrices = Annotated[
    Path | None, typer.Option("--prices", metavar="FILE", help=f"Your own prices, as JSON; else ${prices.VARIABLE}.")
]
Parameters = Annotated[
    str | None, typer.Option("--parameters", metavar="COUNT", help="Of the model: 124M, 1.3B. For traffic and storage.")
]


def estimate(
    path: SpecPath = DEFAULT_SPEC,
    overrides: Overrides = None,
    *,
    parameters: Parameters = None,
    own_prices: OwnPrices = None,
    as_json: AsJson = False,
) -> None:
    """Show what the run costs: machines, traffic, storage. Creates nothing; an unknown price is shown as unknown."""
    with errors_as_exit_codes(as_json=as_json, service="the cloud"):
        if parameters is not None:
            parse_parameters(parameters)  # report a typing error before a cloud is asked
        spec = check_machine_and_store.load_deployed(path, targets.kinds(), overrides or ())
        if not spec.deployed:
            raise Invalid(f"{path} runs on this machine and costs nothing")
        environment = os.environ if own_prices is None else {**os.environ, prices.VARIABLE: str(own_prices)}
        deployment = prepare(spec, SystemClock(), environment)
        rates = read_rates(deployment)
        estimated = estimate_of(deployment, rates, environment, parameters)
        problem = cost_problem(limits_of(spec.spec), rates)
        problems = [] if problem is None else [problem]
        problems += [route.problem for route in deployment.mirror_routes() if route.problem is not None]
        if as_json:
            typer.echo(json.dumps({**estimated.document(), "problems": problems}))
        else:
            print_lines([*estimated.lines(), *(Text(f"problem: {text}", style="red") for text in problems)])
        if problems:
            raise typer.Exit(FAILED)


def estimate_of(
    deployment: Deployment, rates: Sequence[Rate], environment: Mapping[str, str], parameters: str | None = None
) -> Estimate:
    """The cost of a run as far as it is known. Reads where the bucket is.

    environment: names the user's own prices. parameters: 1.3B; None gives traffic and storage per billion.
    """
    rates = [replace(rate, group=deployment.spec.spec.group_name(rate.group)) for rate in rates]
    own_prices = prices.own_file(environment)
    if deployment.spec.run_uri.startswith(FILE):  # a disk has no price for each byte and request
        return Estimate(rates=tuple(rates), parameters=parameters)
    volume = Volume(
        spec=deployment.spec.spec,
        parameters=BILLION if parameters is None else parse_parameters(parameters),
        region=read_bucket_region(deployment),
        groups=_machine_groups(deployment, own_prices),
    )
    upkeep = StorageCost(volume=volume, prices=prices.load(deployment.home_name, own_prices))
    mirrors = tuple(MirrorCost(route=route, volume=volume) for route in deployment.mirror_routes())
    return Estimate(
        rates=tuple(rates),
        upkeep=upkeep,
        parameters=parameters,
        mirrors=tuple(mirror.document() for mirror in mirrors),
        mirror_lines=tuple(line for mirror in mirrors for line in mirror.lines()),
        losses=planned_losses(deployment, mirrors),
    )


def planned_losses(deployment: Deployment, mirrors: Sequence[MirrorCost]) -> tuple[Loss, ...]:
    """The table of losses of a deployment, before anything runs."""
    spec, home = deployment.spec, deployment.bucket()
    places = [
        Place(
            uri=mirror.route.uri,
            cloud=clouds.home_of(mirror.route.uri),
            region=deployment.mirrors()[mirror.route.uri].region,
            line=mirror.route.line,
            costs=mirror.in_words,
            after=after_loss(spec, mirror.route.uri),
        )
        for mirror in mirrors
    ]
    store = Place(uri=spec.run_uri, cloud=deployment.home_name, region=home.region)
    return losses(store, places, spec.peers, spec.spec.faults)


def _machine_groups(deployment: Deployment, own_prices: Path | None) -> tuple[MachineGroup, ...]:
    """The groups with their regions, as far as they are in the bucket's cloud, or with their price of egress."""
    groups: list[MachineGroup] = []
    for group in deployment.spec.spec.replicas:
        region, cloud = str(getattr(group.target, "region", "")), group.target.CLOUD
        if not region or cloud is None or cloud not in clouds.NAMES:  # the nodes of a cluster have no prices
            groups.append(MachineGroup(name=group.name, count=group.count, region=None))
        elif cloud == deployment.home_name:
            groups.append(MachineGroup(name=group.name, count=group.count, region=region))
        else:
            away = prices.load(cloud, own_prices).transfer(region, None)
            groups.append(MachineGroup(name=group.name, count=group.count, region=None, away=away))
    return tuple(groups)
