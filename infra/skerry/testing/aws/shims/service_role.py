"""moto 5.2.5 refuses a compute environment without a serviceRole; AWS takes its service-linked role, and makes it."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from moto.batch.models import BatchBackend

if TYPE_CHECKING:
    from skerry.infra.testing.shims.patches import Patches

_NAME: Final = "AWSServiceRoleForBatch"


def install(patches: Patches) -> None:
    """Find or make the role where none is named."""

    def create_compute_environment(self: Any, *, service_role: str | None, **rest: Any) -> Any:
        return moto_s(self, service_role=service_role or _role(self.iam_backend), **rest)

    moto_s: Any = patches.replace(BatchBackend, "create_compute_environment", create_compute_environment)


def _role(iam: Any) -> str:
    for role in iam.get_roles():
        if role.path == "/aws-service-role/batch.amazonaws.com/":
            return str(role.arn)
    made = iam.create_service_linked_role("batch.amazonaws.com", "", "")
    made.name = _NAME  # moto's has a small b
    return str(made.arn)
