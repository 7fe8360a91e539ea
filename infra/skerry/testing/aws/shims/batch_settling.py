"""moto 5.2.5's queues and compute environments are VALID at once and gone at once.

On AWS they are CREATING, UPDATING or DELETING for a while, and whatever is asked of them meanwhile is refused. How many
descriptions that takes is the sandbox's setting; with 0 this changes nothing.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moto.batch.exceptions import ClientException
from moto.batch.models import BatchBackend

from skerry.infra.testing.shims.batch_deleting import check_deletion

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.testing.shims.patches import Patches


@dataclass(kw_only=True)
class _Way:
    """On the way to being valid, or gone. looks: descriptions that still tell it so. then: what happens at its end."""

    status: str
    looks: int
    then: Callable[[], None] | None = None


def install(patches: Patches, looks: Callable[[], int]) -> None:
    """Let both kinds take as many looks as `looks` says when they are changed."""
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
            _queues_want_valid_ones(patches)

    def _changing(self, moto_s: Any, verb: str, status: str) -> Any:
        def change(backend: Any, *arguments: Any, **named: Any) -> Any:
            if verb == "create":
                made = moto_s(backend, *arguments, **named)
                self._begin(made, status)
                return made
            name = arguments[0] if arguments else next(iter(named.values()))
            found = getattr(backend, f"get_{self._kind}")(name)
            if found is not None and _way(found) is not None:
                raise ClientException("Cannot change, resource is being modified.")
            if verb == "update" or found is None or self._looks() == 0:
                answer = moto_s(backend, *arguments, **named)
                if found is not None:
                    self._begin(found, status)
                return answer
            check_deletion(backend, found)  # refused now, not when it is due
            self._begin(found, status, then=lambda: moto_s(backend, *arguments, **named))
            return None

        return change

    def _begin(self, one: Any, status: str, then: Callable[[], None] | None = None) -> None:
        if self._looks():
            one.skerry_way = _Way(status=status, looks=self._looks(), then=then)

    def _describing(self, moto_s: Any) -> Any:
        def describe(backend: Any, names: list[str] | None = None) -> list[dict[str, Any]]:
            told: list[dict[str, Any]] = []
            for one in moto_s(backend, names):
                way = _way(getattr(backend, f"get_{self._kind}")(one[f"{self._noun}Arn"]))
                if way is None:
                    told.append(one)
                elif way.looks > 0:
                    way.looks -= 1
                    told.append({**one, "status": way.status, "statusReason": ""})
                elif way.then is None:
                    told.append(one)
                else:
                    way.then()
            return told

        return describe


def _way(one: Any) -> _Way | None:
    """The way it still has to go."""
    way: _Way | None = getattr(one, "skerry_way", None)
    if way is not None and way.looks == 0 and way.then is None:
        return None
    return way


def _queues_want_valid_ones(patches: Patches) -> None:
    def create_job_queue(backend: Any, *arguments: Any, compute_env_order: Any, **named: Any) -> Any:
        for one in compute_env_order or ():
            found = backend.get_compute_environment(one["computeEnvironment"])
            if found is not None and _way(found) is not None:
                raise ClientException(f"{found.arn} is not valid")
        return moto_s(backend, *arguments, compute_env_order=compute_env_order, **named)

    moto_s: Any = patches.replace(BatchBackend, "create_job_queue", create_job_queue)
