"""Runs a Google Cloud project in memory behind real endpoints on this machine.

Several can run at once. For runs across clouds it gets the endpoint of the AWS sandbox.
"""

from __future__ import annotations

import functools
import json
import math
import os
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.clock import SystemClock
from skerry.testing.cloud_sandbox import CloudSandbox
from skerry.testing.container_environment import JobDefaults
from skerry.testing.docker_containers import HOST, JobContainers
from skerry.testing.google.access_tokens import Principal
from skerry.testing.google.custom_jobs import CustomJobs
from skerry.testing.google.identity_pools import Pools
from skerry.testing.google.image_pull_api import Images
from skerry.testing.google.job_controls import JobControls
from skerry.testing.google.logs import Logs
from skerry.testing.google.metadata_server import Machines, identity_token
from skerry.testing.google.operations import Operations
from skerry.testing.google.project_and_billing import Projects, Services
from skerry.testing.google.repositories import Repositories
from skerry.testing.google.secret_manager import Secrets
from skerry.testing.google.server import GoogleApplication
from skerry.testing.google.service_accounts import Account, Accounts
from skerry.testing.google.shared_state import DEFAULT_SERVICES, Project
from skerry.testing.google.storage_json import Buckets
from skerry.testing.google.storage_objects import Objects
from skerry.testing.google.storage_xml import StorageXml
from skerry.testing.google.token_exchange import Exchange
from skerry.testing.google.vertex_container_setup import VertexJobHost
from skerry.testing.http_server import Server
from skerry.testing.job_runner import Jobs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from skerry.runtime.clock import Clock

PROJECT: Final = "skerry-sandbox"
NUMBER: Final = "415104041262"
OPERATOR: Final = "user:operator@example.com"
"""The operator's name in policies and calls."""
_NO_ACCOUNT: Final = f"nobody@{PROJECT}.iam.gserviceaccount.com"
# gcloud's names for endpoints of services; with Compute Engine, so that no client contacts the real one.
_ENDPOINTS: Final = (
    "AIPLATFORM",
    "ARTIFACTREGISTRY",
    "CLOUDBILLING",
    "CLOUDRESOURCEMANAGER",
    "COMPUTE",
    "IAM",
    "IAMCREDENTIALS",
    "LOGGING",
    "SECRETMANAGER",
    "SERVICEUSAGE",
    "STORAGE",
    "STS",
)
_CALL_TIMEOUT_S: Final = 30.0


class GoogleSandbox(CloudSandbox):
    """A Google project for tests. A context manager; everything created in it is gone afterwards.

    containers: Vertex's jobs run in Docker; otherwise a test drives them through `jobs`. registry: host:port of a
    registry that plays Artifact Registry. network: of the containers, "bridge" or "host". settling: how many
    lookups it takes until a change is visible: operations, new accounts, policies, log entries. object_rate: limit
    writes to one per second and object name, as Cloud Storage does. aws: the endpoint of the STS that verifies AWS
    identities.
    """

    def __init__(
        self,
        *,
        containers: bool = False,
        registry: str | None = None,
        network: str = "bridge",
        settling: int = 0,
        stop_grace_s: float = 30.0,
        object_rate: bool = False,
        aws: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start it. Raises Retryable if containers need an engine and none answers."""
        engine = Engine() if containers else None
        super().__init__(registry=registry, settling=settling, any_image=containers)
        self._mark = uuid.uuid4().hex[:8]
        self.project: Final = PROJECT
        self.number: Final = NUMBER
        state = self._state = Project(PROJECT, NUMBER, clock or SystemClock(), lambda: self.settling)
        self.principals: Final = state.principals
        self.accounts: Final = Accounts(state, functools.partial(_iam_identity_token, state))
        self._operations = Operations(state)
        self.pools: Final = Pools(state, self._operations)
        self.objects: Final = Objects(state, limits_rate=object_rate)
        self.buckets: Final = Buckets(state, self.objects)
        self.logs: Final = Logs(state)
        self.repositories: Final = Repositories(state, self._operations)
        self.secrets: Final = Secrets(state)
        self.exchange: Final = Exchange(state, self.pools, aws)
        self._local_host = HOST if containers and network == "bridge" else "127.0.0.1"
        self.machines: Final = Machines(state, self.accounts, all_addresses=containers, host=self._local_host)
        self.job_runs: Final = Jobs(
            None if engine is None else JobContainers(engine, mark=self._mark, network=network, grace_s=stop_grace_s)
        )
        self.custom_jobs: Final = CustomJobs(state, self._operations, self.job_runs, self._job_host)
        self.jobs: Final = JobControls(state, self.custom_jobs, self.job_runs)
        application = self._build_application()
        self.violations: Final = application.violations
        """Requests that no document of Google's allows, or that this sandbox does not support."""
        self._server = Server(application, all_addresses=containers)
        self.endpoint: Final = f"http://127.0.0.1:{self._server.port}"
        self._operator = Principal(name=OPERATOR, grants=None)
        self.token: Final = self.principals.token(self._operator, math.inf, lambda: True)
        self.environment: Final[Mapping[str, str]] = {
            **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self.endpoint}/" for name in _ENDPOINTS},
            "CLOUDSDK_AUTH_ACCESS_TOKEN": self.token,
            "CLOUDSDK_CORE_PROJECT": PROJECT,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            # The operator has only the token: the machine has no account, so that no other credentials work.
            **self.acting_as(_NO_ACCOUNT),
        }
        """Variables that make skerry, gcloud and google-auth use this project as its operator, and no other project."""
        self.abroad: Final[Mapping[str, str]] = {
            "STORAGE_EMULATOR_HOST": self.within(self.endpoint),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"{self.within(self.endpoint)}/",
        }
        """Variables that lead a container of another cloud here; it has no account and no machine of this project."""
        self._server.start()

    def acting_as(self, email: str) -> dict[str, str]:
        """Return the variables of a process on a machine that runs as this service account."""
        metadata = self.machines.serve(email).replace(self._local_host, "127.0.0.1")
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint,
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            # Hides the gcloud login of the user.
            "CLOUDSDK_CONFIG": os.devnull,
        }

    def within(self, endpoint: str) -> str:
        """Return an endpoint of this machine's loopback as a container reaches it."""
        return endpoint.replace("127.0.0.1", self._local_host)

    def unpay(self) -> None:
        """Remove the project's billing account."""
        self._state.is_paid = False

    def enable(self, *services: str) -> None:
        """Enable APIs, such as `aiplatform.googleapis.com`."""
        with self._state.lock:
            self._state.enabled |= set(services)

    def restrict(self, permissions: Collection[str] | None) -> None:
        """Limit the operator to these permissions; None restores all."""
        grants = None if permissions is None else frozenset(permissions)
        self._operator = Principal(name=self._operator.name, grants=grants)
        self.principals.change(self.token, self._operator)

    def call(
        self, http: str, path: str, body: Mapping[str, Any] | None = None, *, token: str | None = None
    ) -> tuple[int, Any]:
        """Send one request and return status and JSON. token: default is the operator's; empty sends none."""
        token = self.token if token is None else token
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}{path}", data=data, method=http, headers=headers)  # noqa: S310  loopback
        try:
            with urllib.request.urlopen(request, timeout=_CALL_TIMEOUT_S) as response:  # noqa: S310  same
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """Return the names of everything that exists, by kind; empty for an empty project.

        Jobs that are over are not listed, because Vertex keeps them until they are deleted. Neither are enabled APIs.
        """
        with self._state.lock:
            names_by_kind = {
                "bucket": list(self.objects.buckets),
                "repository": self.repositories.names(),
                "service account": self.accounts.names(),
                "job": self.custom_jobs.names(over=False),
                "secret": self.secrets.names(),
                **self.pools.names(),
            }
        return {kind: tuple(sorted(names)) for kind, names in sorted(names_by_kind.items()) if names}

    def publish(self, image: str, repository: str, location: str = "us-central1") -> str:
        """Push a local image into this project's Artifact Registry and return the reference by digest.

        repository: REPOSITORY/NAME. Raises Invalid without a registry.
        """
        path = f"{self.project}/{repository}"
        digest = self._push(image, path)
        repository_id, _, name = repository.partition("/")
        with self._state.lock:
            self.repositories.push(location, repository_id, name, digest)
        return f"{location}-docker.pkg.dev/{path}@{digest}"

    def reset(self) -> None:
        """Empty the project, with the same operator and token. Jobs end; faults and calls are cleared."""
        self.job_runs.close()
        self.heal()
        with self._state.lock:
            self._state.enabled = set(DEFAULT_SERVICES)
            self._state.is_paid = True
            self.buckets.taken.clear()
            self._state.policies.clear()
            parts = (self.accounts, self._operations, self.pools, self.logs, self.repositories, self.custom_jobs)
            for part in (*parts, self.secrets):
                part.clear()
            self.objects.buckets.clear()
            self.objects.uploads.clear()
            self.violations.clear()
        self.calls.clear()

    def _stop(self) -> None:
        self.job_runs.close()
        self.machines.close()
        self._server.close()

    def _build_application(self) -> GoogleApplication:
        services = (
            self.accounts,
            self.pools,
            self.buckets,
            self.logs,
            self.repositories,
            self.custom_jobs,
            self.secrets,
            Services(self._state, self._operations),
            Projects(self._state),
        )
        self.handlers = {name: handler for service in services for name, handler in service.handlers().items()}
        return GoogleApplication(
            self._state,
            self.handlers,
            StorageXml(self.objects),
            self.exchange,
            Images(self._state, self.registry, lambda: self.any_image),
            self.calls,
            self._faults,
        )

    def _job_host(self, resource: Mapping[str, object]) -> VertexJobHost:
        defaults = JobDefaults(
            mark=self._mark, endpoint=self.within(self.endpoint), registry=self.registry, variables=self.variables
        )
        return VertexJobHost(resource, defaults, self.machines.serve, self._state, self.logs)


def _iam_identity_token(project: Project, account: Account, audience: str, with_email: bool) -> str:  # noqa: FBT001  a callback
    return identity_token(project, account, audience, azp=account.email, with_email=with_email)
