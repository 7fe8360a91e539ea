"""Reads the versions of the programs that run this process, without importing them."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from typing import TYPE_CHECKING

from skerry.runtime.contract import CODE
from skerry.runtime.log.records import VERSION_CHARACTERS, Software

if TYPE_CHECKING:
    from collections.abc import Mapping


def read_software(variables: Mapping[str, str]) -> Software:
    """The programs of this process. variables: of its environment."""
    code = variables.get(CODE, "")
    return Software(
        python=platform.python_version()[:VERSION_CHARACTERS],
        skerry=_version("skerry"),
        torch=_version("torch"),
        code=code if re.fullmatch("[0-9a-f]{64}", code) else None,
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)[:VERSION_CHARACTERS] or None
    except metadata.PackageNotFoundError:
        return None
