"""The resources of a Kubernetes cluster, typed: a service account and a Job for each replica.

The region of each is its namespace. Source: Kubernetes API, batch/v1 Job, v1 ServiceAccount.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from skerry.infra.provision.graph import Life, Resource, Text

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True)
class ServiceAccount(Resource):
    """The identity of one replica, which has no rights in the cluster. Outputs: uid."""

    KIND: ClassVar[str] = "kubernetes_service_account"
    SINGLE: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Job(Resource):
    """One replica. Outputs: uid.

    cpu: a quantity. memory, shared_memory: bytes. tolerations: as the API has them. secret: its entries become
    variables. secrets: by variable, the name of a Secret and the key of its entry. attempts: starts in total.
    deadline_s: of all attempts together; None is unlimited. grace_s: between SIGTERM and SIGKILL. token_audience:
    of a token of the account that the pod gets; None is no token. credentials: the configuration by which clients of
    Google exchange it, a file in the pod; None is no file. claim: name, path and user of a volume; None is no volume.
    """

    KIND: ClassVar[str] = "kubernetes_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    # The server refuses a change of a pod's template; it takes one of these two at any time.
    FIXED: ClassVar[frozenset[str]] = frozenset(
        {
            "region",
            "image",
            "args",
            "environment",
            "cpu",
            "memory",
            "gpus",
            "shared_memory",
            "node_selector",
            "tolerations",
            "priority_class",
            "pull_secret",
            "queue",
            "secret",
            "secrets",
            "grace_s",
            "service_account",
            "token_audience",
            "credentials",
            "claim",
        }
    )

    image: str
    args: tuple[str, ...]
    environment: Mapping[str, Text]
    cpu: str
    memory: int
    gpus: int
    shared_memory: int
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, str], ...]
    priority_class: str | None
    pull_secret: str | None
    queue: str | None
    secret: str | None
    grace_s: int
    service_account: str
    attempts: int
    deadline_s: int | None
    token_audience: Text | None = None
    credentials: Text | None = None
    claim: Mapping[str, str | int] | None = None
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, "Mapping[str, str]"])
