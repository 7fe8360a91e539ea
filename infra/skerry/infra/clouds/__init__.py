"""Clouds: the resources that hold a run, and the handlers that make them. Importing it imports no cloud's SDK."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.spec import Replicas
    from skerry.infra.target import Home
    from skerry.runtime.clock import Clock

# By its name, as identities, price tables, options and kinds of resources have it: its home, and its stores' scheme.
_CLOUDS: Final = {
    "aws": ("skerry.infra.clouds.aws.home", "s3"),
    "google": ("skerry.infra.clouds.google.home", "gs"),
}

NAMES: Final = tuple(_CLOUDS)


def home_of(run_uri: str) -> str:
    """The name of the cloud that a run's store lies in. Raises Invalid if replicas elsewhere could not reach it."""
    scheme = run_uri.partition("://")[0]
    for name, (_, own) in _CLOUDS.items():
        if scheme == own:
            return name
    schemes = ", ".join(f"{own}://" for _, own in _CLOUDS.values())
    raise Invalid(f"jobs in a cloud cannot reach {run_uri}; write a store in {schemes}")


def open_home(run_uri: str, clock: Clock, environment: Mapping[str, str], groups: Sequence[Replicas] = ()) -> Home:
    """The cloud that a run's store lies in. Asks nothing. Raises as `home_of`.

    groups: of the run's spec; where they run may say whose cloud it is.
    """
    module, _ = _CLOUDS[home_of(run_uri)]
    return importlib.import_module(module).open_home(clock, environment, groups)
