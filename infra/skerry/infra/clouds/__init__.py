"""Clouds: the resources that hold a run, and the handlers that create them. Importing this package imports no SDK."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, TypedDict

from skerry.runtime import store
from skerry.runtime.errors import Invalid, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.target_and_store_interfaces import StoreCloud
    from skerry.infra.spec.model import Spec, SpecFile
    from skerry.runtime.clock import Clock
    from skerry.runtime.store import Store

# The name is the one in identities, price tables, options and kinds of resources. Values: module and URI scheme.
_CLOUDS: Final = {
    "aws": ("skerry.infra.clouds.aws.run_bucket_and_image_repository", "s3"),
    "google": ("skerry.infra.clouds.google.run_bucket_and_image_repository", "gs"),
    "disk": ("skerry.infra.clouds.disk.run_folder", "file"),
}

NAMES: Final = tuple(_CLOUDS)


def under_rules(resources: Iterable[Resource], spec: Spec, keys: Collection[str] = ()) -> list[Resource]:
    """The resources as the rules of a company in the spec demand them. keys: that encrypt the run's buckets now."""
    changed = list(resources)
    for rules in _rules():
        changed = [rules.under_rules(resource, spec, keys) for resource in changed]
    return changed


def rule_problems(resources: Iterable[Resource]) -> list[str]:
    """Returns why a cloud would refuse resources under the rules: a key is in another region than its bucket."""
    return [text for resource in resources for rules in _rules() if (text := rules.problem_of(resource)) is not None]


def _rules() -> Sequence[Any]:
    return [importlib.import_module(f"skerry.infra.clouds.{module}.company_rules") for module in ("aws", "google")]


def check_allowed(file: SpecFile, access: OperatorAccess, further: Iterable[str] = ()) -> None:
    """Raise Unauthorized if the operator's access is to an account that the spec does not allow.

    Checks the clouds of the run's store, state, mirrors and groups, and `further` ones. Only a cloud with a rule is
    called, and only for the account: all places in a cloud use the same one. A login of the spec is tried first.
    """
    spec = file.spec
    stores = (file.run_uri, *file.mirrors, *(() if file.state_uri is None else (file.state_uri,)))
    used = {home_of(uri) for uri in stores if is_home(uri)} | {group.target.CLOUD for group in spec.replicas}
    for cloud, allowed in {"aws": spec.aws.allowed_accounts, "google": spec.google.allowed_projects}.items():
        if cloud not in used.union(further):
            continue
        access.log_in(cloud)
        if not allowed:
            continue
        account = _open(cloud, access).identity()[cloud]
        if account not in allowed:
            raise Unauthorized(
                f"{cloud} account {account} is not among those that the spec allows: {', '.join(allowed)}; "
                "use other credentials"
            )


def home_of(run_uri: str) -> str:
    """The name of the cloud that holds a run's store. Raises Invalid for a store outside of the clouds."""
    scheme = run_uri.partition("://")[0]
    for name, (_, own) in _CLOUDS.items():
        if scheme == own:
            return name
    schemes = ", ".join(f"{own}://" for _, own in _CLOUDS.values())
    raise Invalid(f"jobs in a cloud cannot reach {run_uri}; use a store in {schemes}")


def is_home(run_uri: str) -> bool:
    """Return True for a store in one of the clouds."""
    return run_uri.partition("://")[0] in {scheme for _, scheme in _CLOUDS.values()}


def open_home(run_uri: str, access: OperatorAccess) -> StoreCloud:
    """The cloud that holds a run's store. Makes no calls. Raises as `home_of`."""
    return _open(home_of(run_uri), access)


def open_store(uri: str, access: OperatorAccess, variables: Mapping[str, str], deadline_s: float) -> Store:
    """The store at a URI, as the principal that all other calls are made as. variables: of its home, for its client."""
    return store.open_store(uri, deadline_s=deadline_s, **_client(uri, access, variables))


def list_folders(uri: str, access: OperatorAccess, variables: Mapping[str, str]) -> Sequence[str]:
    """The names of the folders directly below a URI, sorted. variables: as `open_store`. Nothing is retried."""
    return store.list_folders(uri, **_client(uri, access, variables))


class _Client(TypedDict):
    clock: Clock
    environment: Mapping[str, str]
    credentials: store.CredentialProvider | None


def _client(uri: str, access: OperatorAccess, variables: Mapping[str, str]) -> _Client:
    credentials = open_home(uri, access).credentials() if is_home(uri) else None
    return _Client(clock=access.clock, environment={**access.environment, **variables}, credentials=credentials)


def _open(cloud: str, access: OperatorAccess) -> StoreCloud:
    module, _ = _CLOUDS[cloud]
    return importlib.import_module(module).open_home(access)
