"""Tags on AWS resources: written in the services' list form, and read back into the owner and the state record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.handler_helpers import tagged_record
from skerry.infra.provision.handler import ADDRESS_TAG, GENERATION_TAG, RUN_TAG
from skerry.infra.provision.target_and_store_interfaces import is_named_by, named_job

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.handler import StateRecord

PATH: Final = "/skerry/"
"""The IAM path of all created roles and profiles: listing it spares the account's other ones."""


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Tags in the form that most services take."""
    return [{"Key": key, "Value": tags[key]} for key in sorted(tags)]


def tags_in(listed: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The reverse of `tag_list`."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in listed}


def owned_record(
    kind: type[Resource], *, name: str, region: str, tags: Mapping[str, str], outputs: Mapping[str, str]
) -> StateRecord:
    """The state record of a resource that was found by its tags."""
    address, generation = tags.get(ADDRESS_TAG, f"{kind.KIND}.{name}"), tags.get(GENERATION_TAG, "0")
    return tagged_record(kind, address=address, name=name, generation=generation, region=region, outputs=outputs)


def owned_job(
    kind: type[Resource], run: str, *, name: str, region: str, tags: Mapping[str, str], outputs: Mapping[str, str]
) -> StateRecord | None:
    """The state record of a job of this run, by its tags or, if its tags were removed, by its name. None for others."""
    if owner_of(tags) is None and is_named_by(run, name):
        key, generation = named_job(run, name)
        tags = {ADDRESS_TAG: f"{kind.KIND}.{key}", GENERATION_TAG: str(generation)}
    elif owner_of(tags) != run:
        return None
    return owned_record(kind, name=name, region=region, tags=tags, outputs=outputs)


def owner_of(tags: Mapping[str, str]) -> str | None:
    """The run that these tags name."""
    return tags.get(RUN_TAG)
