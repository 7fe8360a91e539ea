"""Checks of a valid Job that its schema cannot express, with the words of the API server 1.36.2."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Documents of the API have no types.

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from skerry.testing.kubernetes.refusals import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NAME: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_VALUE: Final = r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?"
_NAME_RULE: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'example.com', regex used for validation is '{_NAME}')"
)
_VALUE_RULE: Final = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and "
    f"end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is "
    f"'{_VALUE}')"
)
_ACTIONS: Final = ("Count", "FailIndex", "FailJob", "Ignore")
# The pods' names and the label with the job's name are made of it.
_LONGEST_JOB: Final = 63
_LONGEST: Final = 253


def check_semantics(kind: str, body: Mapping[str, Any]) -> None:
    """Refuse an object with values that the server does not accept."""
    name = str(body["metadata"].get("name", ""))
    problems = list(_metadata_problems(kind, name, body["metadata"]))
    if kind == "Job":
        problems += _job_problems(body["spec"])
    if problems:
        what = f"{kind}.batch" if kind == "Job" else kind
        text = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise Refused(422, f'{what} "{name}" is invalid: {text}')


def _metadata_problems(kind: str, name: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    if not re.fullmatch(_NAME, name):
        yield f'metadata.name: Invalid value: "{name}": {_NAME_RULE}'
    longest = _LONGEST_JOB if kind == "Job" else _LONGEST
    if len(name) > longest:
        yield f'metadata.name: Invalid value: "{name}": must be no more than {longest} characters'
    yield from _label_problems("metadata.labels", metadata)


def _label_problems(where: str, metadata: Mapping[str, Any]) -> Iterator[str]:
    for value in (metadata.get("labels") or {}).values():
        if not re.fullmatch(_VALUE, value):
            yield f'{where}: Invalid value: "{value}": {_VALUE_RULE}'
        elif len(value) > _LONGEST_JOB:
            yield f'{where}: Invalid value: "{value}": must be no more than {_LONGEST_JOB} characters'


def _job_problems(spec: Mapping[str, Any]) -> Iterator[str]:
    template: Mapping[str, Any] = spec["template"]
    pod: Mapping[str, Any] = template["spec"]
    yield from _label_problems("spec.template.labels", template.get("metadata") or {})
    policy = spec.get("podFailurePolicy")
    restart = pod.get("restartPolicy")
    if policy is not None and restart != "Never":
        rule = 'only "Never" is supported when podFailurePolicy is specified'
        yield f'spec.template.spec.restartPolicy: Invalid value: "{restart}": {rule}'
    elif restart not in {"Never", "OnFailure"}:
        yield 'spec.template.spec.restartPolicy: Required value: valid values: "OnFailure", "Never"'
    for number, rule in enumerate((policy or {}).get("rules", ())):
        where = f"spec.podFailurePolicy.rules[{number}]"
        if rule["action"] not in _ACTIONS:
            names = ", ".join(f'"{action}"' for action in _ACTIONS)
            yield f'{where}.action: Unsupported value: "{rule["action"]}": supported values: {names}'
        codes = rule.get("onExitCodes") or {}
        if codes.get("operator") == "In" and 0 in codes.get("values", ()):
            place = codes["values"].index(0)
            yield f"{where}.onExitCodes.values[{place}]: Invalid value: 0: must not be 0 for the In operator"
    if policy is not None and spec.get("podReplacementPolicy", "Failed") != "Failed":
        value = spec["podReplacementPolicy"]
        yield f'spec.podReplacementPolicy: Unsupported value: "{value}": supported values: "Failed"'
    volumes = {volume["name"] for volume in pod.get("volumes") or ()}
    for number, container in enumerate(pod["containers"]):
        yield from _container_problems(f"spec.template.spec.containers[{number}]", container, volumes)


def _container_problems(where: str, container: Mapping[str, Any], volumes: set[str]) -> Iterator[str]:
    if not container.get("image"):
        yield f"{where}.image: Required value"
    resources: Mapping[str, Any] = container.get("resources") or {}
    limits: Mapping[str, Any] = resources.get("limits") or {}
    for name in resources.get("requests") or {}:
        if "/" in name and name not in limits:
            yield f"{where}.resources.limits: Required value: Limit must be set for non overcommitable resources"
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        if mount["name"] not in volumes:
            yield f'{where}.volumeMounts[{number}].name: Not found: "{mount["name"]}"'
