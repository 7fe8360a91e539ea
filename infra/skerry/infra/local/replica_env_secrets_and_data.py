"""The inputs of replicas on this machine: variables, values of secrets from the operator's environment, and folders.

Values are passed to processes and to the Docker engine in their environment, never on a command line, and are written
to no file. Reads the environment that it is given, and looks for folders.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.infra.spec.env_secrets_and_data import inputs_of
from skerry.runtime import contract
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from skerry.infra.spec.env_secrets_and_data import Inputs
    from skerry.infra.spec.model import SpecFile


@dataclass(frozen=True, kw_only=True)
class ReplicaInputs:
    """The inputs of one replica. variables: values of secrets included. folders: absolute; replicas only read them."""

    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    folders: tuple[Path, ...] = ()


def read_inputs(spec: SpecFile, environment: Mapping[str, str]) -> dict[str, ReplicaInputs]:
    """The inputs of each replica, by slot. environment: the operator's.

    Raises Invalid naming a variable that is not set, or a folder that does not exist.
    """
    read: dict[str, ReplicaInputs] = {}
    slots = iter(spec.replica_slots)
    for group in spec.spec.replicas:
        inputs = inputs_of(spec.spec, group)
        folders = inputs.folders(spec.folder)
        data = {name: str(folders.get(name, uri)) for name, uri in inputs.data.items()}
        for name, folder in folders.items():
            if not folder.exists():
                raise Invalid(f"no data {name}: {folder} does not exist; correct its path in the spec")
        variables = {
            **inputs.env,
            **_values(inputs, environment),
            **{f"{contract.DATA}{name.upper()}": place for name, place in data.items()},
        }
        of_group = ReplicaInputs(variables=variables, folders=tuple(folders.values()))
        read |= {next(slots).slot: of_group for _ in range(group.count)}
    return read


def _values(inputs: Inputs, environment: Mapping[str, str]) -> dict[str, str]:
    missing = sorted({secret.name for secret in inputs.secrets.values() if not environment.get(secret.name)})
    if missing:
        raise Invalid(f"secrets need variables that are not set: {', '.join(missing)}; export them, then run it again")
    return {name: environment[secret.name] for name, secret in inputs.secrets.items()}
