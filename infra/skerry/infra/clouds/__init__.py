"""Clouds: the resources that hold a run, and the handlers that make them. Importing it imports no cloud's SDK."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.target import Home
    from skerry.runtime.clock import Clock

# By the scheme of the run's store.
_HOMES: Final = {"s3": "skerry.infra.clouds.aws.home"}


def open_home(run_uri: str, clock: Clock, environment: Mapping[str, str]) -> Home:
    """The cloud that a run's store lies in. Asks nothing. Raises Invalid if replicas elsewhere could not reach it."""
    scheme = run_uri.partition("://")[0]
    if scheme not in _HOMES:
        schemes = ", ".join(f"{known}://" for known in _HOMES)
        raise Invalid(f"jobs in a cloud cannot reach {run_uri}; write a store in {schemes}")
    return importlib.import_module(_HOMES[scheme]).open_home(clock, environment)
