"""Checks before an apply: the token, the namespaces, the flavors, and the variables with the secrets. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.hf_jobs.options import HfJobsTarget, gpus_of
from skerry.infra.targets.shared.store_secrets_option import missing_variables
from skerry.runtime.errors import SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from huggingface_hub import JobHardwareInfo

    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.hf_jobs.jobs_api import Hub


def checks(hub: Hub, environment: Mapping[str, str], groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    try:
        user, hardware = hub.user(), hub.hardware()
    except SkerryError as error:
        refused = isinstance(error, Unauthorized)
        advice = "make a token that may write, and set HF_TOKEN or run `hf auth login`" if refused else ""
        yield Check(name="Hugging Face", ok=False if refused else None, text=str(error), advice=advice)
        return
    own = namespaces_of(user)
    yield Check(name="Hugging Face", ok=True, text=f"the token is of {user.get('name')}")
    for namespace in dict.fromkeys(HfJobsTarget.of(group).namespace for group in groups):
        yield _namespace_check(namespace, own)
    for group in groups:
        yield flavor_check(group, hardware)
        yield _secrets_check(group, environment)


def namespaces_of(user: Mapping[str, Any]) -> tuple[str, ...]:
    """The user and the organizations of a token."""
    return (str(user.get("name")), *(str(row.get("name")) for row in user.get("orgs") or ()))


def flavor_check(group: Replicas, hardware: Sequence[JobHardwareInfo]) -> Check:
    """Check that a group's flavor exists, and has as many GPUs as its replicas have ranks. Pure."""
    target, name = HfJobsTarget.of(group), f"flavor of {group.name}"
    own = next((row for row in hardware if row.name == target.flavor), None)
    if own is None:
        advice = f"write flavor: {' or '.join(row.name for row in hardware)}"
        return Check(name=name, ok=False, text=f"there is no flavor {target.flavor}", advice=advice, stops_jobs=True)
    gpus = 0 if own.accelerator is None else int(own.accelerator.quantity)
    text = f"{own.pretty_name}: {own.cpu}, {own.ram}, disk {own.ephemeral_storage}"
    if gpus != gpus_of(target.flavor):
        text = f"{text}; it has {gpus} GPUs, and a replica would have {max(1, gpus_of(target.flavor))} ranks"
        return Check(name=name, ok=False, text=text, advice="choose another flavor, and report this")
    return Check(name=name, ok=True, text=text)


def _namespace_check(namespace: str, own: Sequence[str]) -> Check:
    name = f"namespace {namespace}"
    if namespace in own:
        return Check(name=name, ok=True, text="the token's user may have jobs in it")
    advice = f"write namespace: {' or '.join(own)}, or use a token of a member"
    return Check(name=name, ok=False, text="the token's user is not a member of it", advice=advice, stops_jobs=True)


def _secrets_check(group: Replicas, environment: Mapping[str, str]) -> Check:
    name = f"secrets of {group.name}"
    secrets = HfJobsTarget.of(group).secrets
    if missing := missing_variables(secrets, environment):
        text = f"not in your environment: {', '.join(missing)}"
        return Check(name=name, ok=False, text=text, advice="set them, so that jobs can be created", stops_jobs=True)
    return Check(name=name, ok=True, text=f"{len(secrets)} in your environment; jobs get them as secrets")
