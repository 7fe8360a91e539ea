"""An AWS account in memory behind a real endpoint on this machine: moto's server, with what it lacks put in.

One at a time in a process: moto's accounts are global. It talks to nobody, and nothing of it outlives it.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's server and boto3 have no types.

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

from moto import settings
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from skerry.infra.engine import Engine
from skerry.infra.testing import shims
from skerry.infra.testing.boxes import HOST, Boxes
from skerry.infra.testing.calls import Calls
from skerry.infra.testing.faults import Fault, Faults, How
from skerry.infra.testing.gate import Gate, Handler
from skerry.infra.testing.hosting import Surroundings
from skerry.infra.testing.inventory import inventory
from skerry.infra.testing.jobs import Jobs
from skerry.infra.testing.publishing import publish
from skerry.infra.testing.shims.patches import Patches
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from typing import Self

    from werkzeug.serving import BaseWSGIServer

OPERATOR: Final = "operator"
_ADMINISTRATOR: Final = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
}
# How often the server looks whether it shall end; werkzeug's half second is what a test would wait for.
_LOOK_S: Final = 0.01
# Batch gives a container 30 s to end, SageMaker 120.
_TRAINING_GRACES: Final = 4
_ONE: Final = threading.Lock()


class Sandbox:
    """A cloud for tests. A context manager; what is made in it is gone afterwards.

    containers: jobs run in Docker; otherwise a test drives them through `batch`, by id, and `training`, by name.
    enforce_iam: rights are checked from the first call on. registry: host:port of a registry that stands in for ECR.
    network: the containers', "bridge" or "host". settling: how many descriptions a queue or a compute environment takes
    to become VALID, or gone, and a training job to have stopped. stop_grace_s: from SIGTERM to SIGKILL; for training
    jobs it is four times that. without: shims to leave out.
    """

    def __init__(
        self,
        *,
        containers: bool = False,
        enforce_iam: bool = False,
        registry: str | None = None,
        region: str = "us-east-1",
        network: str = "bridge",
        settling: int = 0,
        stop_grace_s: float = 30.0,
        without: Collection[str] = (),
    ) -> None:
        """Starts it. Raises Retryable if containers are wanted and no engine answers, Invalid if another one runs."""
        mark = uuid.uuid4().hex[:8]
        engine = Engine() if containers else None
        if not _ONE.acquire(blocking=False):
            raise Invalid("a sandbox runs already in this process; close it first")
        self.account: Final = DEFAULT_ACCOUNT_ID
        self.region: Final = region
        self.registry: Final = registry
        self.calls: Final = Calls()
        self.settling = settling
        self._faults = Faults()
        self._patches = Patches()
        self._published: set[str] = set()
        self._is_open = True
        gate = Gate(DomainDispatcherApplication(create_backend_app), self.calls, self._faults, enforces=enforce_iam)
        # Containers reach this machine by an address of their bridge; nobody else needs more than loopback.
        self._server: BaseWSGIServer = make_server(
            "0.0.0.0" if containers else "127.0.0.1",  # noqa: S104  see above
            0,
            gate,
            threaded=True,
            request_handler=Handler,
        )
        port = self._server.server_address[1]
        self.endpoint: Final = f"http://127.0.0.1:{port}"
        seen_from_within = f"http://{HOST}:{port}" if network == "bridge" else self.endpoint
        self.batch, self.training = (
            Jobs(None if engine is None else Boxes(engine, mark=mark, network=network, grace_s=grace_s))
            for grace_s in (stop_grace_s, _TRAINING_GRACES * stop_grace_s)
        )
        self.variables: Final[dict[str, str]] = {}
        """Given to every container besides its own, such as those that lead to another cloud's sandbox."""
        around = Surroundings(mark=mark, endpoint=seen_from_within, registry=registry, variables=self.variables)
        self._key: tuple[str, str] | None = None
        try:
            shims.install(self._patches, self.batch, self.training, around, lambda: self.settling, without)
            if enforce_iam:
                self._patches.replace(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
            self._begin()
        except BaseException:
            self._give_back()
            raise
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _LOOK_S}, daemon=True, name="skerry-sandbox"
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """What makes AWS's clients, and so skerry, talk to this account as its operator, and to nobody else."""
        name, secret = self._key or ("", "")
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": name,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def client(self, service: str, **keys: str) -> Any:
        """boto3's client of a service, as the operator. keys: aws_access_key_id and so on of somebody else."""
        import boto3  # noqa: PLC0415  those who bring their own clients do not pay for it
        from botocore.config import Config  # noqa: PLC0415

        name, secret = self._key or ("", "")
        keys = keys or {"aws_access_key_id": name, "aws_secret_access_key": secret}
        once = Config(retries={"total_max_attempts": 1})
        return boto3.client(service, endpoint_url=self.endpoint, region_name=self.region, config=once, **keys)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def fail(self, *, how: How, after: int = 0, on: str | None = None, times: int | None = 1) -> Fault:
        """Let a writing call fail: the next, or the one after `after` more. on: count only these, "batch:SubmitJob".

        times: how many in a row; None is for ever, as if the network or the process had died there.
        """
        fault = Fault(how=how, after=after, on=on, times=times)
        self._faults.add(fault)
        return fault

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.heal()

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """Names of all that exists, by kind; empty when the account is."""
        return inventory(OPERATOR)

    def publish(self, image: str, repository: str) -> str:
        """Push a local image to where this account's ECR would have it; the reference by digest that specs pin.

        Raises Invalid without a registry.
        """
        if self.registry is None:
            raise Invalid("this sandbox has no registry: Sandbox(registry=host:port)")
        reference, local = publish(image, repository, self.registry, self.region)
        self._published.add(local)
        return reference

    def reset(self) -> None:
        """An empty account again, with the same operator and the same key. Jobs end, faults and calls are forgotten."""
        self.batch.close()
        self.training.close()
        self._faults.heal()
        self._begin()
        self.calls.clear()

    def close(self) -> None:
        """End it: no container, thread or patch is left. Again is success."""
        if not self._is_open:
            return
        self._is_open = False
        self.batch.close()
        self.training.close()
        self._server.shutdown()
        self._thread.join()
        for reference in self._published:
            Engine().images.remove(reference)
        self._give_back()
        moto_api_backend.reset()

    def _give_back(self) -> None:
        self._server.server_close()
        self._patches.undo()
        _ONE.release()

    def _begin(self) -> None:
        moto_api_backend.reset()  # also of what other users of moto in this process have left
        iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
        iam.create_user(self.region, OPERATOR)
        iam.put_user_policy(OPERATOR, "AdministratorAccess", json.dumps(_ADMINISTRATOR))
        key = iam.create_access_key(OPERATOR)
        if self._key is not None:
            del iam.access_keys[key.access_key_id]
            key.access_key_id, key.secret_access_key = self._key
            iam.access_keys[key.access_key_id] = key
        self._key = str(key.access_key_id), str(key.secret_access_key)
