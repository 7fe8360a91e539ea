"""The option `secrets` of targets without an identity in any cloud, whose replicas need keys of the store.

The spec and the state have the names of variables only. The values are read from the operator's environment when a job
is created, and sent as secrets of the service. Does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from skerry.infra.spec.section import shaped
from skerry.infra.targets.shared import check_bucket_name
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

_VARIABLE: Final = shaped(r"[A-Za-z_][A-Za-z0-9_]{0,127}", "the name of a variable, not its value")
AWS_KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""The variables that open a store in S3."""
_EXAMPLE: Final = {"AWS_ACCESS_KEY_ID": "REPLICA_KEY_ID", "AWS_SECRET_ACCESS_KEY": "REPLICA_SECRET_KEY"}

Secrets = Annotated[dict[Annotated[str, _VARIABLE], Annotated[str, _VARIABLE]], Field(examples=[_EXAMPLE])]


def store_problems(
    document: Document, groups: Sequence[int], *, service: str, keyless: Callable[[Where], bool]
) -> Iterator[Problem]:
    """A store that jobs of the service cannot open. keyless: whether a target opens one in S3 without keys."""
    store = document.value(("store",))
    if not isinstance(store, str):
        return
    scheme, _, rest = store.partition("://")
    problem = f"jobs on {service} reach a store in S3"
    if scheme == "s3":
        problem = check_bucket_name.s3_problem(rest.partition("/")[0]) or ""
    if problem:
        yield document.problem(("store",), f"{problem}; write e.g. store: s3://my-bucket/runs")
        return
    for index in groups:
        where: Where = ("replicas", index, "target")
        secrets = document.value((*where, "secrets"))
        missing = [name for name in AWS_KEYS if not isinstance(secrets, dict) or name not in secrets]
        if missing and not keyless(where):
            text = f"jobs on {service} have no identity in AWS, and need keys for the store"
            example = ", ".join(f"{name}: {variable}" for name, variable in _EXAMPLE.items())
            yield document.problem(where, f"{text}; write secrets: {{{example}}}, the names of variables of yours")


def values_of(secrets: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The values of secrets. Raises Invalid, naming every variable that the operator's environment lacks."""
    if missing := missing_variables(secrets, environment):
        raise Invalid(f"secrets of jobs are not in your environment: {', '.join(missing)}; set them")
    return {name: environment[variable] for name, variable in secrets.items()}


def missing_variables(secrets: Mapping[str, str], environment: Mapping[str, str]) -> list[str]:
    """The variables that the operator's environment lacks."""
    return [variable for variable in dict.fromkeys(secrets.values()) if not environment.get(variable)]
