"""Where replicas run. Targets know nothing of each other; importing this imports none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.infra.target import Target
    from skerry.runtime.clock import Clock

# Those whose replicas run as jobs, without this machine.
_DEPLOYED: Final = {"aws_batch": "skerry.infra.targets.aws_batch"}


def open_target(kind: str, clock: Clock, environment: Mapping[str, str]) -> Target:
    """The target of this kind, one of `spec.DEPLOYED`. Asks nothing."""
    return importlib.import_module(_DEPLOYED[kind]).open_target(clock, environment)
