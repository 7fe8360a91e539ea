"""Builds the body of the request that creates a job of Hugging Face. Pure. Golden files show it.

Tests check it against what `huggingface_hub.HfApi.run_job` sends. It holds the names of secrets; `service` puts in
their values when it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from skerry.infra.targets.shared.labelled_jobs import labels

if TYPE_CHECKING:
    from skerry.infra.provision.handler import Desired
    from skerry.infra.targets.shared.resolve_refs import Tree

SPACES: Final = "hf.co/spaces/"
"""The beginning of the image of a Space."""


def job(desired: Desired) -> Tree:
    """The body of POST /api/jobs/{namespace}.

    One attempt: more would repeat a job whatever its exit code. The time limit is always sent, because the default is
    30 minutes.
    """
    settings = desired.settings
    image = str(settings["image"])
    is_space = image.startswith(SPACES)
    return {
        **({"spaceId": image.removeprefix(SPACES)} if is_space else {"dockerImage": image}),
        "command": settings["command"],
        "arguments": [],
        "environment": settings["environment"],
        "secrets": settings["secrets"],
        "flavor": settings["flavor"],
        "timeoutSeconds": settings["timeout_s"],
        "attempts": 1,
        "labels": labels(desired),
    }
