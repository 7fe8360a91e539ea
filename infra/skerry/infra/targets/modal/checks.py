"""Checks before an apply: the token, the Secrets by name, and AWS's provider of Modal's tokens. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.infra.clouds.handler_helpers import Absent
from skerry.infra.provision.target_and_store_interfaces import Check
from skerry.infra.targets.modal.options import ModalTarget
from skerry.infra.targets.modal.resource_graph import ISSUER
from skerry.infra.targets.shared.aws_checks import provider_check
from skerry.runtime.errors import SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.clouds.aws.session import Aws
    from skerry.infra.spec.model import Replicas
    from skerry.infra.targets.modal.modal_client import ModalWorkspace


def checks(workspace: ModalWorkspace, aws: Aws, groups: Sequence[Replicas]) -> Iterator[Check]:
    """See Target.checks."""
    try:
        name = workspace.name()
    except SkerryError as error:
        refused = isinstance(error, Unauthorized)
        yield Check(name="Modal", ok=False if refused else None, text=str(error))
        return
    yield Check(name="Modal", ok=True, text=f"the token is of the workspace {name}")
    targets = [ModalTarget.of(group) for group in groups]
    for secret, environment in dict.fromkeys(
        (name, target.environment) for target in targets for name in target.secrets
    ):
        yield _secret_check(workspace, secret, environment)
    if any(target.workspace is not None for target in targets):
        name = "OIDC provider of Modal"
        try:
            yield provider_check(aws, name, ISSUER, ISSUER, stops_jobs=True)
        except SkerryError as error:
            yield Check(name=name, ok=None, text=str(error))


def _secret_check(workspace: ModalWorkspace, secret: str, environment: str) -> Check:
    name = f"Secret {secret}"
    try:
        workspace.check_secret(secret, environment)
    except Absent:
        advice = f"create it: modal secret create --env {environment} {secret} AWS_ACCESS_KEY_ID=... AWS_SECRET_..."
        text = f"there is no such Secret in {environment}"
        return Check(name=name, ok=False, text=text, advice=advice, stops_jobs=True)
    except SkerryError as error:
        return Check(name=name, ok=None, text=str(error))
    return Check(name=name, ok=True, text=f"exists in {environment}")
