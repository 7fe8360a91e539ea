"""`skerry estimate`: what a spec costs before anything is made. Asks clouds what machines hold, and for spot prices.

Traffic follows from the size of the model, which no spec tells: without it everything is told for a billion parameters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from skerry.infra import preflight, prices
from skerry.infra.deploy.deployment import Deployment
from skerry.infra.estimate import BILLION, Crew, Estimate, Upkeep, Volume, cost_problem, parse_parameters
from skerry.infra.plan import wanted
from skerry.infra.terminal import FAILED, AsJson, Overrides, SpecPath, errors_as_exit_codes
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.target import Rate

_DEFAULT = Path("skerry.yaml")
OwnPrices = Annotated[
    Path | None, typer.Option("--prices", metavar="FILE", help=f"Your own prices, as JSON; else ${prices.VARIABLE}.")
]
Parameters = Annotated[
    str | None, typer.Option("--parameters", metavar="COUNT", help="Of the model: 124M, 1.3B. For traffic and storage.")
]


def estimate(
    path: SpecPath = _DEFAULT,
    overrides: Overrides = None,
    *,
    parameters: Parameters = None,
    own_prices: OwnPrices = None,
    as_json: AsJson = False,
) -> None:
    """Say what the run costs: machines, traffic, storage. Makes nothing; what is not known is said to be unknown."""
    with errors_as_exit_codes(as_json=as_json, what="the cloud"):
        if parameters is not None:
            parse_parameters(parameters)  # a typing error is told before clouds are asked
        found = preflight.load_deployed(path, overrides or ())
        if not found.deployed:
            raise Invalid(f"{path} runs on this machine: there is nothing to pay")
        environment = with_own_prices(os.environ, own_prices)
        deployment = Deployment(found, SystemClock(), environment)
        rates = deployment.rates
        told = estimate_of(deployment, rates, environment, parameters)
        problem = cost_problem(found.spec.limits, rates)
        if as_json:
            typer.echo(json.dumps({**told.document(), "problems": [] if problem is None else [problem]}))
        else:
            console = Console()
            for line in told.lines():
                console.print(line, soft_wrap=True, highlight=False, markup=False)
            if problem is not None:
                console.print(f"problem: {problem}", style="red", soft_wrap=True, highlight=False, markup=False)
        if problem is not None:
            raise typer.Exit(FAILED)


def with_own_prices(environment: Mapping[str, str], own_prices: Path | None) -> Mapping[str, str]:
    """What clouds and targets are opened with, so that a file named on the command line counts."""
    return environment if own_prices is None else {**environment, prices.VARIABLE: str(own_prices)}


def estimate_of(
    deployment: Deployment, rates: Sequence[Rate], environment: Mapping[str, str], parameters: str | None = None
) -> Estimate:
    """All that is known of the run's cost. Asks where the bucket is.

    environment: names the user's own prices. parameters: 1.3B; None tells traffic and storage of each billion.
    """
    cloud = deployment.home_name
    volume = Volume(
        spec=deployment.spec.spec,
        parameters=BILLION if parameters is None else parse_parameters(parameters),
        region=bucket_region(deployment),
        crews=_crews(deployment, prices.own_file(environment)),
    )
    upkeep = Upkeep(volume=volume, prices=prices.load(cloud, prices.own_file(environment)))
    return Estimate(rates=tuple(rates), upkeep=upkeep, parameters=parameters)


def bucket_region(deployment: Deployment) -> str:
    """Where the run's bucket is, or will be made."""
    bucket = deployment.bucket
    (seen,) = deployment.handlers[bucket.KIND].read([wanted(bucket, {}, deployment.run)])
    return bucket.region if seen is None else seen.outputs.get("region", bucket.region)


def _crews(deployment: Deployment, own_prices: Path | None) -> tuple[Crew, ...]:
    """The groups, and where they are as the bucket's cloud sees it."""
    found: list[Crew] = []
    for group in deployment.spec.spec.replicas:
        region, cloud = str(getattr(group.target, "region", "")), group.target.CLOUD
        if not region or cloud is None:
            found.append(Crew(name=group.name, count=group.count, region=None))
        elif cloud == deployment.home_name:
            found.append(Crew(name=group.name, count=group.count, region=region))
        else:
            away = prices.load(cloud, own_prices).transfer(region, None)
            found.append(Crew(name=group.name, count=group.count, region=None, away=away))
    return tuple(found)
