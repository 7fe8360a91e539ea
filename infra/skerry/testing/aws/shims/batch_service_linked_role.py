"""moto 5.2.5 refuses a compute environment without a serviceRole; AWS creates and uses its service-linked role."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import BatchBackend

if TYPE_CHECKING:
    from skerry.testing.aws.shims.patching import Patches

_NAME: Final = "AWSServiceRoleForBatch"


def install(patches: Patches) -> None:
    """Install the shim: find or create the role if none is given."""

    def create_compute_environment(self: Any, *, service_role: str | None, **rest: Any) -> Any:
        return moto_create(self, service_role=service_role or _role(self.iam_backend), **rest)

    moto_create: Any = patches.replace(BatchBackend, "create_compute_environment", create_compute_environment)


def _role(iam: Any) -> str:
    for role in iam.get_roles():
        if role.path == "/aws-service-role/batch.amazonaws.com/":
            return str(role.arn)
    created = iam.create_service_linked_role("batch.amazonaws.com", "", "")
    created.name = _NAME  # moto's has a small b
    return str(created.arn)
