"""Where replicas run. Targets know nothing of each other; importing this imports none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, get_args

from skerry.infra import clouds, placement

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.spec import Replicas
    from skerry.infra.target import Target
    from skerry.runtime.clock import Clock

# Those whose replicas run as jobs, without this machine.
_DEPLOYED: Final = {
    "aws_batch": "skerry.infra.targets.aws_batch",
    "sagemaker": "skerry.infra.targets.sagemaker",
    "vertex": "skerry.infra.targets.vertex",
}

# What the kinds of resources begin with, and the cloud that they lie in then.
_STARTS: Final = {
    **{name: name for name in clouds.NAMES},
    **{
        kind: model.CLOUD
        for model in get_args(placement.Target)
        for kind in get_args(model.model_fields["kind"].annotation)
    },
}


def cloud_of(kind: str) -> str:
    """The cloud that resources of this kind lie in: it begins with the cloud's name, or with that of a target there.

    Raises LookupError for a kind that says nothing of a cloud.
    """
    for start, cloud in _STARTS.items():
        if cloud is not None and kind.startswith(f"{start}_"):
            return cloud
    raise LookupError(kind)


def open_target(kind: str, clock: Clock, environment: Mapping[str, str], groups: Sequence[Replicas] = ()) -> Target:
    """The target of this kind, one of `spec.DEPLOYED`. groups: all of the run. Asks nothing."""
    return importlib.import_module(_DEPLOYED[kind]).open_target(clock, environment, groups)
