"""The inputs of replicas: `env`, `secrets` and `data` of the run and of its groups, and the checks of their names.

An entry of a group replaces the run's entry of the same name. A spec holds references of secrets and never a value, so
messages about `env` and `secrets` never show a value. Only `missing_folders` does I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Final, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from skerry.infra.spec.section import Section, or_default, shaped
from skerry.infra.spec.store_uri import CLOUDS
from skerry.infra.spec.target_kinds import TargetKinds, kinds_of_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from skerry.infra.spec.model import Replicas, Spec
    from skerry.infra.spec.target_kinds import TargetOptions
    from skerry.infra.spec.yaml_document import Document, Where
    from skerry.infra.spec_and_store_errors import Problem

ENV: Final = "env"
SECRETS: Final = "secrets"
DATA: Final = "data"

# The strictest limits of all targets: 512 characters in a variable, and 100 variables with skerry's own.
LONGEST: Final = 512
_MOST: Final = 64
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_DATA_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_KEY_ARN: Final = r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[A-Za-z0-9-]+"
_SECRET_ARN: Final = r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[A-Za-z0-9/_+=.@-]+-[A-Za-z0-9]{6}"  # noqa: S105  a pattern
_PARAMETER_ARN: Final = r"arn:aws[a-z-]*:ssm:[a-z0-9-]+:\d{12}:parameter/[A-Za-z0-9/_.-]+"
_GOOGLE_SECRET: Final = r"projects/[a-z0-9.:-]+/secrets/[A-Za-z0-9_-]+/versions/(\d+|latest)"  # noqa: S105  a pattern
_SECRET_EXAMPLE: Final = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"  # noqa: S105  a name
_GOOGLE_EXAMPLE: Final = "projects/acme/secrets/hf/versions/1"
_CLUSTER_SECRET: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"  # noqa: S105  a pattern
_CLUSTER_KEY: Final = re.compile(r"[-._A-Za-z0-9]{1,253}")
# Characters that have a meaning in policies, or in the conditions of a bucket's policy.
_PREFIX: Final = re.compile(r"[A-Za-z0-9._/=+,@-]*")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")

Cloud: TypeAlias = str | None
# The cloud whose jobs can read a kind of secret; None is this machine.
_CLOUD_OF_SECRET: Final[Mapping[str, Cloud]] = {
    "aws_secretsmanager": "aws",
    "aws_ssm": "aws",
    "google_secret": "google",
    "kubernetes_secret": "kubernetes",
    "environment": None,
}
_EXAMPLES: Final[Mapping[Cloud, str]] = {
    "aws": f"{{aws_secretsmanager: {_SECRET_EXAMPLE}}}",
    "google": f"{{google_secret: {_GOOGLE_EXAMPLE}}}",
    "kubernetes": "{kubernetes_secret: hf, key: token}",
    None: "{environment: HF_TOKEN}",
}
_WORDS: Final = {"aws": "AWS", "google": "Google Cloud"}
_DATA_EXAMPLES: Final = {"aws": "s3://acme-data/corpus", "google": "gs://acme-data/corpus"}

_OWNED: Final = (
    (re.compile(r"SKERRY_.*"), "skerry sets it"),
    (
        re.compile(r"(AWS|AZURE|CLOUDSDK|ECS|GCE|GCLOUD|GOOGLE)_.*|STORAGE_EMULATOR_HOST"),
        "it selects the credentials of the store's clients",
    ),
    (
        re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|PET_.*"),
        "torchrun sets it for the ranks",
    ),
    (
        re.compile(r"(DYLD|LD)_.*|HOME|PATH|PYTHON(HOME|PATH|STARTUP|UNBUFFERED)|SHELL|USER"),
        "the interpreter and its libraries are found by it; set it in the image or the script",
    ),
)
_KEYS: Final = re.compile(
    r"-----BEGIN |\b(AKIA|ASIA)[A-Z0-9]{16}\b|\bhf_[A-Za-z0-9]{8,}|\bsk-[A-Za-z0-9_-]{8,}|\bgh[a-z]_[A-Za-z0-9]{16,}|"
    r"\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}|\bxox[a-z]-[\w-]{8,}|\bAIza[\w-]{30,}|\bya29\.[\w-]{8,}"
)


class Secret(Section):
    """The reference of a secret; the value itself is never in the spec."""

    aws_secretsmanager: (
        Annotated[
            str,
            Field(examples=[_SECRET_EXAMPLE]),
            shaped(_SECRET_ARN, "the whole ARN of a secret of AWS Secrets Manager, with its six last characters"),
        ]
        | None
    ) = None
    """The ARN of a secret in AWS Secrets Manager, for replicas on AWS."""
    aws_ssm: (
        Annotated[
            str,
            Field(examples=["arn:aws:ssm:us-east-1:123456789012:parameter/hf"]),
            shaped(_PARAMETER_ARN, "the ARN of a parameter of AWS Systems Manager"),
        ]
        | None
    ) = None
    """The ARN of a parameter in AWS Systems Manager, for replicas on AWS."""
    google_secret: (
        Annotated[
            str,
            Field(examples=[_GOOGLE_EXAMPLE]),
            shaped(_GOOGLE_SECRET, "projects/P/secrets/S/versions/V, with a number or latest"),
        ]
        | None
    ) = None
    """A version of a secret in Google's Secret Manager, for replicas on Google Cloud."""
    kubernetes_secret: (
        Annotated[str, Field(max_length=253, examples=["hf"]), shaped(_CLUSTER_SECRET, "the name of a Secret")] | None
    ) = None
    """The name of a Secret in the namespace of the replicas, for replicas on Kubernetes; `key` is its entry."""
    environment: (
        Annotated[
            str, Field(examples=["HF_TOKEN"]), shaped(_VARIABLE.pattern, "the name of a variable of your environment")
        ]
        | None
    ) = None
    """The name of a variable in the environment of `skerry up`, for replicas on this machine."""
    key: Annotated[str, Field(min_length=1, max_length=256, examples=["token"])] | None = None
    """The key of the text in a secret that holds a JSON object; null is the whole secret. On Kubernetes the entry."""
    kms_key: Annotated[str, Field(examples=[]), shaped(_KEY_ARN, "the ARN of a key of AWS KMS")] | None = None
    """The key that encrypts a secret on AWS, if it is not AWS's own; replicas may then decrypt with it."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        sources = [source for source in _CLOUD_OF_SECRET if getattr(self, source) is not None]
        if len(sources) != 1:
            raise ValueError(
                "must have exactly one source: aws_secretsmanager or aws_ssm for replicas on AWS, google_secret on "
                "Google Cloud, kubernetes_secret in a cluster, environment on this machine"
            )
        if self.kms_key is not None and self.cloud != "aws":
            raise ValueError("must not have kms_key, which is only for a secret on AWS; remove it")
        if self.key is not None and self.environment is not None:
            raise ValueError("must not have key, because a variable of your environment holds one text; remove it")
        if self.kubernetes_secret is not None and (self.key is None or _CLUSTER_KEY.fullmatch(self.key) is None):
            raise ValueError(f"must have the key of an entry of the Secret; write e.g. {_EXAMPLES['kubernetes']}")
        return self

    @property
    def source(self) -> str:
        """The kind of its reference."""
        return next(source for source in _CLOUD_OF_SECRET if getattr(self, source) is not None)

    @property
    def cloud(self) -> Cloud:
        """The cloud whose replicas can read it; None is this machine."""
        return _CLOUD_OF_SECRET[self.source]

    @property
    def is_fetched(self) -> bool:
        """Return whether the job fetches it by its reference. A cluster sets its own ones in the pods."""
        return self.kubernetes_secret is None

    @property
    def name(self) -> str:
        """Its ARN, its resource name, its name in the cluster, or the name of the variable."""
        return str(getattr(self, self.source))

    @property
    def reference(self) -> str:
        """The reference in one text, as jobs get it (`skerry.runtime.contract.SECRET`)."""
        return f"{self.source}:{self.name}" + ("" if self.key is None else f"#{self.key}")


Env = Annotated[
    dict[str, Annotated[str, Field(max_length=4096)]],
    BeforeValidator(or_default),
    Field(default_factory=dict, examples=[{"HF_HOME": "/tmp/hf"}]),  # noqa: S108  an example
]
Secrets = Annotated[
    dict[str, Secret],
    BeforeValidator(or_default),
    Field(default_factory=dict, examples=[{"HF_TOKEN": {"environment": "HF_TOKEN"}}]),
]
Data = Annotated[
    dict[str, Annotated[str, Field(min_length=1, max_length=LONGEST)]],
    BeforeValidator(or_default),
    Field(default_factory=dict, examples=[{"corpus": "s3://acme-data/corpus"}]),
]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a group's replicas, by name. data: URIs, and paths as written."""

    env: Mapping[str, str] = field(default_factory=dict[str, str])
    secrets: Mapping[str, Secret] = field(default_factory=dict[str, Secret])
    data: Mapping[str, str] = field(default_factory=dict[str, str])

    def folders(self, base: Path) -> dict[str, Path]:
        """The data on this machine, by name: absolute paths. base: the spec's folder."""
        return {name: (base / text).absolute() for name, text in self.data.items() if "://" not in text}


def inputs_of(spec: Spec, group: Replicas) -> Inputs:
    """The run's inputs, and the group's, which replace those of the same name."""
    return Inputs(
        env=spec.env | group.env,
        secrets=spec.secrets | group.secrets,
        data={name: text.rstrip("/") or "/" for name, text in (spec.data | group.data).items()},
    )


def problems(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Everything in the names, values and places of `env`, `secrets` and `data` that a replica could not use."""
    for section in _sections(document):
        for name, value in _entries(document, (*section, ENV)):
            yield from _env_problems(document, kinds, (*section, ENV, name), name, value)
        for name, _ in _entries(document, (*section, SECRETS)):
            where: Where = (*section, SECRETS, name)
            if (text := _name_problem(name, kinds)) is not None:
                yield document.problem(where, text, key=True)
            elif document.value((*section, ENV, name)) is not None:
                yield document.problem(where, f"{name} is also in env; remove one of them", key=True)
        for name, value in _entries(document, (*section, DATA)):
            yield from _data_problems(document, (*section, DATA, name), name, value)
    yield from _place_problems(document, kinds)


def missing_folders(document: Document, folder: Path) -> Iterator[Problem]:
    """Data at paths of this machine that do not exist. folder: the spec's. Looks for files."""
    for section in _sections(document):
        for name, value in _entries(document, (*section, DATA)):
            if isinstance(value, str) and value and "://" not in value and not (folder / value).exists():
                text = f"{folder / value} does not exist; write the path of a folder of this machine"
                yield document.problem((*section, DATA, name), text)


def _sections(document: Document) -> Iterator[Where]:
    yield ()
    for index in range(len(document.entries(("replicas",)))):
        yield ("replicas", index)


def _entries(document: Document, where: Where) -> list[tuple[str, Any]]:
    value = document.value(where)
    return list(value.items()) if isinstance(value, dict) else []


def _name_problem(name: str, kinds: TargetKinds) -> str | None:
    if _VARIABLE.fullmatch(name) is None:
        return f"{name!r} is no name of a variable; write letters, digits and '_', e.g. HF_HOME"
    for pattern, reason in _OWNED:
        if pattern.fullmatch(name) is not None:
            return f"{name} cannot be set here: {reason}"
    # Of every kind, because a group may move to another one.
    if any(fnmatchcase(name, pattern) for options in kinds.options for pattern in options.RESERVED):
        return f"{name} cannot be set here: the cloud sets it for its jobs"
    return None


def _env_problems(document: Document, kinds: TargetKinds, where: Where, name: str, value: object) -> Iterator[Problem]:
    if (text := _name_problem(name, kinds)) is not None:
        yield document.problem(where, text, key=True)
    elif isinstance(value, bool | int | float):
        yield document.problem(where, f'must be text; put it in quotes: {name}: "{_as_written(value)}"')
    elif isinstance(value, str) and _KEYS.search(value) is not None:
        text = "looks like a key, and a plan would show it; put it under secrets: and write only its reference"
        yield document.problem(where, f"{text}, e.g. {name}: {{environment: {name}}}")
    elif isinstance(value, str) and "\0" in value:
        yield document.problem(where, "contains a zero byte, which no variable can hold; remove it")


def _as_written(value: bool | float) -> str:  # noqa: FBT001  a value of the spec
    return str(value).lower() if isinstance(value, bool) else str(value)


def _data_problems(document: Document, where: Where, name: str, value: object) -> Iterator[Problem]:
    if _DATA_NAME.fullmatch(name) is None:
        text = f"{name!r} is no name of data; write up to 32 small letters, digits and '_', e.g. corpus"
        yield document.problem(where, text, key=True)
    if isinstance(value, str) and (text := _uri_problem(value)) is not None:
        yield document.problem(where, text)


def _uri_problem(text: str) -> str | None:
    if "://" not in text:
        return "must not begin with ~, which is not expanded; write the whole path" if text.startswith("~") else None
    parts = urlsplit(text)
    if parts.scheme == "file":
        return "must be a path for a folder of this machine; remove file://"
    if parts.scheme not in CLOUDS:
        return f"must be s3://bucket/prefix, gs://bucket/prefix or a path; there is no data at {parts.scheme}://"
    if _BUCKET.fullmatch(parts.netloc) is None:
        return f"must name a bucket; write e.g. {parts.scheme}://acme-data/corpus"
    if _PREFIX.fullmatch(text.partition("://")[2]) is None:
        return "must have a prefix of letters, digits and . _ / = + , @ - only: rights are limited to it"
    return None


def _place_problems(document: Document, kinds: TargetKinds) -> Iterator[Problem]:
    """Inputs that replicas of a group cannot reach: of another cloud, or of this machine."""
    by_name = dict(zip(kinds.names, kinds.options, strict=True))
    for index, kind in enumerate(kinds_of_groups(document)):
        options = by_name.get(kind) if isinstance(kind, str) else None
        if options is None:
            continue
        group: Where = ("replicas", index)
        count = sum(len(_effective(document, group, part)) for part in (ENV, SECRETS, DATA))
        if count > _MOST:
            text = f"{count} variables, secrets and data are more than {_MOST}, which every cloud passes to a job"
            yield document.problem(group, f"{text}; write them into a file of the code")
        for name, where in _effective(document, group, SECRETS).items():
            yield from _secret_place(document, index, name, where, options.CLOUD)
        for name, where in _effective(document, group, DATA).items():
            yield from _data_place(document, index, name, where, options)


def written_env(document: Document, index: int) -> dict[str, Where]:
    """The place of each variable of a group in the document. index: the group's."""
    return _effective(document, ("replicas", index), ENV)


def _effective(document: Document, group: Where, part: str) -> dict[str, Where]:
    """The place of each input of a group in the document: in the group, else in the run."""
    sections: tuple[Where, ...] = ((), group)
    return {name: (*section, part, name) for section in sections for name, _ in _entries(document, (*section, part))}


def _secret_place(document: Document, index: int, name: str, where: Where, cloud: Cloud) -> Iterator[Problem]:
    value = document.value(where)
    sources = [source for source in _CLOUD_OF_SECRET if isinstance(value, dict) and value.get(source) is not None]
    if len(sources) != 1 or (of := _CLOUD_OF_SECRET[sources[0]]) == cloud:
        return
    if cloud is not None and cloud not in _WORDS and of in _WORDS:  # jobs there have what credentials the user gives
        return
    kind = document.value(("replicas", index, "target", "kind"))
    if of is None:
        why = "is a value that would be stored in the description of a job"
    elif of not in _WORDS:
        why = "is in a cluster of Kubernetes, which gives it to its own pods only"
    elif cloud is None:
        why = f"is read by the role of a job on {_WORDS[of]}, and these replicas have none"
    else:
        why = f"is on {_WORDS[of]}, whose secrets a job on {_WORDS[cloud]} cannot read"
    own = f"replicas[{index}].secrets: {{{name}: {_EXAMPLES.get(cloud, _EXAMPLES['aws'])}}}"
    yield document.problem(where, f"{why}: replicas[{index}] runs on {kind}; write e.g. {own}")


def _data_place(
    document: Document, index: int, name: str, where: Where, options: type[TargetOptions]
) -> Iterator[Problem]:
    text, cloud = document.value(where), options.CLOUD
    # This machine, and a site of the user's own, have what credentials and folders the user gives them.
    if not isinstance(text, str) or _uri_problem(text) is not None:
        return
    of = CLOUDS[urlsplit(text).scheme] if "://" in text else None
    is_reached = of == cloud if cloud in _WORDS else of is not None or options.SEES_FOLDERS
    if is_reached:
        return
    why = "is a folder of this machine" if of is None else f"is on {_WORDS[of]}"
    kind = document.value(("replicas", index, "target", "kind"))
    example = _DATA_EXAMPLES["google" if cloud == "google" else "aws"]
    own = f"replicas[{index}].data: {{{name}: {example}}}"
    text = f"{why}, which a job on {_WORDS.get(cloud or '', kind)} cannot read: replicas[{index}] runs on {kind}"
    yield document.problem(where, f"{text}; copy it there and write e.g. {own}")
