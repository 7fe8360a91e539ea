"""A Google Cloud project in memory behind real endpoints on this machine. Nothing of it outlives it.

Several can run at once. It stands beside the AWS sandbox, whose endpoint it is given where runs cross clouds.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import urllib.error
import urllib.request
import uuid
from typing import TYPE_CHECKING, Any, Final

from werkzeug.serving import make_server

from skerry.infra.engine import Engine
from skerry.infra.testing.boxes import HOST, Boxes
from skerry.infra.testing.faults import Fault, Faults, How
from skerry.infra.testing.google.accounts import Account, Accounts
from skerry.infra.testing.google.buckets import Buckets
from skerry.infra.testing.google.calls import GoogleCalls
from skerry.infra.testing.google.customjobs import CustomJobs
from skerry.infra.testing.google.driving import Driven
from skerry.infra.testing.google.exchange import Exchange
from skerry.infra.testing.google.hosting import JobHost, Surroundings
from skerry.infra.testing.google.identity import identity_token
from skerry.infra.testing.google.images import Images
from skerry.infra.testing.google.logs import Logs
from skerry.infra.testing.google.machines import Machines
from skerry.infra.testing.google.objects import Objects
from skerry.infra.testing.google.operations import Operations
from skerry.infra.testing.google.pools import Pools
from skerry.infra.testing.google.principals import Principal
from skerry.infra.testing.google.project import USUAL, Project
from skerry.infra.testing.google.provision import Projects, Services
from skerry.infra.testing.google.repositories import Repositories
from skerry.infra.testing.google.server import Connection, Gate
from skerry.infra.testing.google.xml import XmlFace
from skerry.infra.testing.jobs import Jobs
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

    from skerry.runtime.clock import Clock

PROJECT: Final = "skerry-sandbox"
NUMBER: Final = "415104041262"
WHO: Final = "user:operator@example.com"
"""The operator, as policies and calls name it."""
_NOBODY: Final = f"nobody@{PROJECT}.iam.gserviceaccount.com"
# gcloud's own names for a service's endpoint; Compute Engine is here so that nobody asks the real one.
SERVICES: Final = (
    "AIPLATFORM",
    "ARTIFACTREGISTRY",
    "CLOUDBILLING",
    "CLOUDRESOURCEMANAGER",
    "COMPUTE",
    "IAM",
    "IAMCREDENTIALS",
    "LOGGING",
    "SERVICEUSAGE",
    "STORAGE",
    "STS",
)
_LOOK_S: Final = 0.01
_CALL_S: Final = 30.0


class GoogleSandbox:
    """A project for tests. A context manager; what is made in it is gone afterwards.

    containers: Vertex's jobs run in Docker; otherwise a test drives them through `jobs`. registry: host:port of a
    registry that stands in for Artifact Registry. network: the containers', "bridge" or "host". settling: how many
    looks it takes until what was done is seen: operations, new accounts, policies, log entries. object_rate: one write
    a second of an object's name, as Cloud Storage allows. aws: the endpoint whose STS is asked who somebody is.
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
        """Starts it. Raises Retryable if containers are wanted and no engine answers."""
        self._mark = uuid.uuid4().hex[:8]
        engine = Engine() if containers else None
        self.project: Final = PROJECT
        self.number: Final = NUMBER
        self.registry: Final = registry
        self.settling = settling
        self.calls: Final = GoogleCalls()
        self.variables: Final[dict[str, str]] = {}
        """Given to every container besides its own, such as those that lead to the AWS sandbox."""
        self._faults = Faults()
        self._published: set[str] = set()
        self._is_open = True
        self._state: Final = Project(PROJECT, NUMBER, clock or SystemClock(), lambda: self.settling)
        state = self._state
        signed = functools.partial(_signed_by_iam, state)
        self.principals: Final = state.principals
        self.accounts: Final = Accounts(state, signed)
        self._operations = Operations(state)
        self.pools: Final = Pools(state, self._operations)
        self.objects: Final = Objects(state, limits_rate=object_rate)
        self.buckets: Final = Buckets(state, self.objects)
        self.logs: Final = Logs(state)
        self.repositories: Final = Repositories(state, self._operations)
        self.exchange: Final = Exchange(state, self.pools, aws)
        # Containers reach this machine by an address of their bridge; nobody else needs more than loopback.
        bind = "0.0.0.0" if containers else "127.0.0.1"  # noqa: S104  see above
        self._within = HOST if containers and network == "bridge" else "127.0.0.1"
        self.machines: Final = Machines(state, self.accounts, bind=bind, host=self._within)
        boxes = None if engine is None else Boxes(engine, mark=self._mark, network=network, grace_s=stop_grace_s)
        self._jobs = Jobs(boxes)
        self._custom = CustomJobs(state, self._operations, self._jobs, self._host)
        self.jobs: Final = Driven(state, self._custom, self._jobs)
        gate = self._wired()
        self.violations: Final = gate.violations
        """What was asked that no document of Google's knows, or that this sandbox does not play; in words."""
        self._server = make_server(bind, 0, gate, threaded=True, request_handler=Connection)
        self.endpoint: Final = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._operator = Principal(name=WHO, grants=None)
        self.token: Final = self.principals.token(self._operator, math.inf, lambda: True)
        self.environment: Final[Mapping[str, str]] = {
            **{f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{name}": f"{self.endpoint}/" for name in SERVICES},
            "CLOUDSDK_AUTH_ACCESS_TOKEN": self.token,
            "CLOUDSDK_CORE_PROJECT": PROJECT,
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            # The operator has the token and nothing else: the machine is no account, so that no other way lets in.
            **self.acting_as(_NOBODY),
        }
        """What makes skerry, gcloud and google-auth talk to this project as its operator, and to nobody else."""
        self.abroad: Final[Mapping[str, str]] = {
            "STORAGE_EMULATOR_HOST": self.within(self.endpoint),
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_STS": f"{self.within(self.endpoint)}/",
        }
        """What leads a container of another cloud here; it has no account of this project, and no machine of it."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _LOOK_S}, daemon=True, name="skerry-google"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acting_as(self, email: str) -> dict[str, str]:
        """The variables that a process finds on a machine that runs as this service account."""
        metadata = self.machines.serve(email).replace(self._within, "127.0.0.1")
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint,
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            # No login of whoever runs the tests.
            "CLOUDSDK_CONFIG": os.devnull,
        }

    def within(self, endpoint: str) -> str:
        """How a container calls an address of this machine's loopback."""
        return endpoint.replace("127.0.0.1", self._within)

    def unpay(self) -> None:
        """Take the project's billing account away."""
        self._state.is_paid = False

    def enable(self, *services: str) -> None:
        """Enable APIs, as somebody did long ago: `aiplatform.googleapis.com`."""
        with self._state.lock:
            self._state.enabled |= set(services)

    def restrict(self, permissions: Collection[str] | None) -> None:
        """Let the operator have these permissions and no others; None is all of them, as in the beginning."""
        grants = None if permissions is None else frozenset(permissions)
        self._operator = Principal(name=self._operator.name, grants=grants)
        self.principals.change(self.token, self._operator)

    def call(
        self, http: str, path: str, body: Mapping[str, Any] | None = None, *, token: str | None = None
    ) -> tuple[int, Any]:
        """One request, and its status and JSON. token: the operator's, if no other is given; empty is none at all."""
        token = self.token if token is None else token
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}{path}", data=data, method=http, headers=headers)  # noqa: S310  loopback
        try:
            with urllib.request.urlopen(request, timeout=_CALL_S) as answer:  # noqa: S310  same
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def fail(self, *, how: How, after: int = 0, on: str | None = None, times: int | None = 1) -> Fault:
        """Let a writing call fail: the next, or the one after `after` more. on: count only this method, by its id.

        times: how many in a row; None is for ever, as if the network or the process had died there.
        """
        fault = Fault(how=how, after=after, on=on, times=times)
        self._faults.add(fault)
        return fault

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.heal()

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """Names of all that exists, by kind; empty when the project is.

        Jobs that are over are not listed: Vertex keeps them for as long as nobody deletes them. Nor are enabled APIs.
        """
        with self._state.lock:
            found = {
                "bucket": list(self.objects.buckets),
                "repository": self.repositories.names(),
                "service account": self.accounts.names(),
                "job": self._custom.names(over=False),
                **self.pools.names(),
            }
        return {kind: tuple(sorted(names)) for kind, names in sorted(found.items()) if names}

    def publish(self, image: str, repository: str, location: str = "us-central1") -> str:
        """Push a local image to where this project's Artifact Registry would have it; the reference by digest.

        repository: REPOSITORY/NAME. Raises Invalid without a registry.
        """
        if self.registry is None:
            raise Invalid("this sandbox has no registry: GoogleSandbox(registry=host:port)")
        path = f"{self.project}/{repository}"
        name = f"{self.registry}/{path}:published"
        engine = Engine()
        engine.images.tag(image, name)
        try:
            digest = engine.images.push(name, None, lambda _: None)
        finally:
            engine.images.remove(name)
        self._published.add(f"{self.registry}/{path}@{digest}")
        within, _, last = repository.partition("/")
        with self._state.lock:
            self.repositories.push(location, within, last, digest)
        return f"{location}-docker.pkg.dev/{path}@{digest}"

    def reset(self) -> None:
        """An empty project again, with the same operator and token. Jobs end, faults and calls are forgotten."""
        self._jobs.close()
        self._faults.heal()
        with self._state.lock:
            self._state.enabled = set(USUAL)
            self._state.is_paid = True
            self.buckets.taken.clear()
            self._state.policies.clear()
            for part in (self.accounts, self._operations, self.pools, self.logs, self.repositories, self._custom):
                part.clear()
            self.objects.buckets.clear()
            self.objects.uploads.clear()
            self.violations.clear()
        self.calls.clear()

    def close(self) -> None:
        """End it: no container, thread or server is left. Again is success."""
        if not self._is_open:
            return
        self._is_open = False
        self._jobs.close()
        self.machines.close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for reference in self._published:
            Engine().images.remove(reference)

    def _wired(self) -> Gate:
        state = self._state
        parts = (
            self.accounts,
            self.pools,
            self.buckets,
            self.logs,
            self.repositories,
            self._custom,
            Services(state, self._operations),
            Projects(state),
        )
        self.handlers = {name: handler for part in parts for name, handler in part.handlers().items()}
        images = Images(state, self.registry)
        return Gate(state, self.handlers, XmlFace(self.objects), self.exchange, images, self.calls, self._faults)

    def _host(self, told: Mapping[str, object]) -> JobHost:
        around = Surroundings(
            mark=self._mark,
            endpoint=self.within(self.endpoint),
            registry=self.registry,
            metadata=self.machines.serve,
            variables=self.variables,
        )
        return JobHost(told, around, self._state, self.logs)


def _signed_by_iam(project: Project, account: Account, audience: str, with_email: bool) -> str:  # noqa: FBT001  a callback
    return identity_token(project, account, audience, azp=account.email, with_email=with_email)
