"""Removes work of moto that every request or every new account repeats and that no run of skerry needs."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto has few types.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moto import settings
from moto.core import responses

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches


def install(patches: Patches) -> None:
    """Create accounts without the 1,300 images of machines, and list the methods of a service only once."""
    patches.replace(settings, "ec2_load_default_amis", _no_images)
    patches.replace(responses, "method_names_from_class", _METHOD_NAMES)


def _no_images() -> bool:
    return False


_METHOD_NAMES = functools.cache(responses.method_names_from_class)
