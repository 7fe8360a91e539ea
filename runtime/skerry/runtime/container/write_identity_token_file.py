"""Writes an identity token that a platform gives in a variable into a file, from which clients of AWS exchange it."""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Final

from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import MutableMapping

TOKEN_FILE: Final = "AWS_WEB_IDENTITY_TOKEN_FILE"  # noqa: S105  the name of a variable


def write_token_file(environment: MutableMapping[str, str]) -> None:
    """Write the token, if the launcher names its variable, and set the variable of the file there and in this process.

    Only this user may read the file. Call it after root is dropped. Raises Invalid if the platform gave no token.
    """
    name = environment.get(contract.TOKEN_VARIABLE)
    if not name:
        return
    token = environment.get(name)
    if not token:
        raise Invalid(f"{name} has no identity token, and {contract.TOKEN_VARIABLE} names it; check the platform's job")
    handle, path = tempfile.mkstemp(prefix="skerry-token-")
    with os.fdopen(handle, "w") as file:
        file.write(token)
    # obstore reads it from the process's own environment.
    environment[TOKEN_FILE] = os.environ[TOKEN_FILE] = path
