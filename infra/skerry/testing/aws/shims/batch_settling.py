"""moto 5.2.5 changes queues and compute environments at once.

On AWS they are CREATING, UPDATING or DELETING for a while, and further changes are refused meanwhile. The sandbox's
setting `settling` is the number of descriptions that this takes; with 0 the shim changes nothing.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend

from skerry.testing.aws.shims.batch_deleting import check_deletion

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.testing.aws.shims.patching import Patches


@dataclass(kw_only=True)
class _Transition:
    """A change in progress. looks: descriptions that still report it. then: the effect at its end."""

    status: str
    looks: int
    then: Callable[[], None] | None = None


def install(patches: Patches, looks: Callable[[], int]) -> None:
    """Install the shim for both kinds. looks: returns how many descriptions a change takes."""
    for kind, noun, plural in (
        ("compute_environment", "computeEnvironment", "compute_environments"),
        ("job_queue", "jobQueue", "job_queues"),
    ):
        _Kind(looks, kind, noun, plural).install(patches)


class _Kind:
    def __init__(self, looks: Callable[[], int], kind: str, noun: str, plural: str) -> None:
        self._looks = looks
        self._kind, self._noun, self._plural = kind, noun, plural

    def install(self, patches: Patches) -> None:
        for verb, status in (("create", "CREATING"), ("update", "UPDATING"), ("delete", "DELETING")):
            name = f"{verb}_{self._kind}"
            patches.replace(BatchBackend, name, self._changing(getattr(BatchBackend, name), verb, status))
        name = f"describe_{self._plural}"
        patches.replace(BatchBackend, name, self._describing(getattr(BatchBackend, name)))
        if self._kind == "compute_environment":
            _require_valid_environments(patches)

    def _changing(self, moto_method: Any, verb: str, status: str) -> Any:
        def change(backend: Any, *arguments: Any, **named: Any) -> Any:
            if verb == "create":
                resource = moto_method(backend, *arguments, **named)
                self._begin(resource, status)
                return resource
            name = arguments[0] if arguments else next(iter(named.values()))
            resource = getattr(backend, f"get_{self._kind}")(name)
            if resource is not None and _transition(resource) is not None:
                raise ClientException("Cannot change, resource is being modified.")
            if verb == "update" or resource is None or self._looks() == 0:
                answer = moto_method(backend, *arguments, **named)
                if resource is not None:
                    self._begin(resource, status)
                return answer
            check_deletion(backend, resource)  # refused now, not when it is due
            self._begin(resource, status, then=lambda: moto_method(backend, *arguments, **named))
            return None

        return change

    def _begin(self, resource: Any, status: str, then: Callable[[], None] | None = None) -> None:
        if self._looks():
            resource.skerry_transition = _Transition(status=status, looks=self._looks(), then=then)

    def _describing(self, moto_method: Any) -> Any:
        def describe(backend: Any, names: list[str] | None = None) -> list[dict[str, Any]]:
            descriptions: list[dict[str, Any]] = []
            for description in moto_method(backend, names):
                transition = _transition(getattr(backend, f"get_{self._kind}")(description[f"{self._noun}Arn"]))
                if transition is None:
                    descriptions.append(description)
                elif transition.looks > 0:
                    transition.looks -= 1
                    descriptions.append({**description, "status": transition.status, "statusReason": ""})
                elif transition.then is None:
                    descriptions.append(description)
                else:
                    transition.then()
            return descriptions

        return describe


def _transition(resource: Any) -> _Transition | None:
    """Return the resource's unfinished change, if any."""
    transition: _Transition | None = getattr(resource, "skerry_transition", None)
    if transition is not None and transition.looks == 0 and transition.then is None:
        return None
    return transition


def _require_valid_environments(patches: Patches) -> None:
    def create_job_queue(backend: Any, *arguments: Any, compute_env_order: Any, **named: Any) -> Any:
        for entry in compute_env_order or ():
            environment = backend.get_compute_environment(entry["computeEnvironment"])
            if environment is not None and _transition(environment) is not None:
                raise ClientException(f"{environment.arn} is not valid")
        return moto_method(backend, *arguments, compute_env_order=compute_env_order, **named)

    moto_method: Any = patches.replace(BatchBackend, "create_job_queue", create_job_queue)
