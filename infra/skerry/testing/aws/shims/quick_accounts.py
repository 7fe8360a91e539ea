"""moto 5.2.5 spends most of the time of a new account and of a request on what no deployer of skerry reads.

A region gets some seventy machine images with their snapshots, 80 ms; Batch chooses images itself. And each request
lists the methods of its service's class, 0.5 ms; a class keeps them.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moto import settings
from moto.core import responses, utils

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Install the shim for every account and request from now on."""
    patches.replace(settings, "ec2_load_default_amis", lambda: False)
    patches.replace(responses, "method_names_from_class", functools.cache(utils.method_names_from_class))
