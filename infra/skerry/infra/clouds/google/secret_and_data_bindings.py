"""The bindings of a principal on the inputs in its spec: exactly these secrets, and these prefixes of buckets. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skerry.infra.clouds.google.bucket_bindings import BucketBinding
from skerry.infra.clouds.google.replica_rules import VIEWER, Rule
from skerry.infra.clouds.google.secret_bindings import SecretBinding
from skerry.infra.clouds.google.services import service
from skerry.infra.provision.graph import short_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.infra.provision.graph import Resource, Text
    from skerry.infra.spec.env_secrets_and_data import Inputs

_GS: Final = "gs://"
# A description of a condition holds the key, and has 256 bytes.
_LONGEST: Final = 60


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A principal that reads inputs. key: of its resources. name: of its bindings. text: for people."""

    key: str
    name: str
    member: Text
    text: str


def input_bindings(inputs: Inputs, reader: Reader, store: tuple[str, str] | None) -> Iterator[Resource]:
    """The bindings of a principal, each after what it needs.

    store: the address and the name of the run's own bucket, if it is in Cloud Storage.
    """
    for bucket, rules in _rules(inputs).items():
        yield BucketBinding(
            key=f"{short_name(bucket, _LONGEST)}-{reader.key}",
            name=f"{reader.name}-data",
            region="",
            why=f"{reader.text} may read data in {bucket}; needs storage.buckets.setIamPolicy on it",
            after=(store[0],) if store is not None and store[1] == bucket else (),
            bucket=bucket,
            member=reader.member,
            rules=rules,
        )
    if not (secrets := _secrets(inputs)):
        return
    manager = service("secretmanager", "holds the secrets of the replicas")
    yield manager
    for secret in secrets:
        _, project, _, name = secret.split("/")
        yield SecretBinding(
            key=f"{short_name(f'{project}-{name}', _LONGEST)}-{reader.key}",
            name=reader.name,
            region="",
            why=f"{reader.text} may read {name}; needs secretmanager.secrets.setIamPolicy on it",
            after=(manager.address,),
            secret=secret,
            member=reader.member,
        )


def buckets_of(inputs: Inputs) -> tuple[str, ...]:
    """The buckets in Cloud Storage that hold data of a group."""
    return tuple(_rules(inputs))


def _rules(inputs: Inputs) -> dict[str, tuple[Rule, ...]]:
    """A rule for each entry of the data in Cloud Storage, by bucket."""
    rules: dict[str, tuple[Rule, ...]] = {}
    for name, uri in inputs.data.items():
        if uri.startswith(_GS):
            bucket, _, prefix = uri.removeprefix(_GS).partition("/")
            rule = Rule(title=f"read {name}", role=VIEWER, keys=(f"{prefix}/" if prefix else "",), listing=True)
            rules[bucket] = (*rules.get(bucket, ()), rule)
    return rules


def _secrets(inputs: Inputs) -> list[str]:
    """The secrets in Secret Manager, each once whatever its versions."""
    names = {secret.name for secret in inputs.secrets.values() if secret.source == "google_secret"}
    return sorted({name.partition("/versions/")[0] for name in names})
