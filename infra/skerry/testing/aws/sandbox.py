"""Runs an AWS account in memory behind a real endpoint on this machine: moto's server with its gaps closed by `shims/`.

One at a time in a process, because moto's accounts are global. It connects to no other host and leaves nothing behind.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# moto's server and boto3 have no types.

from __future__ import annotations

import json
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

from moto import settings
from moto.core.base_backend import BaseBackend
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.iam.models import iam_backends
from moto.moto_api._internal.models import moto_api_backend

from skerry.infra.local.docker_engine import Engine
from skerry.runtime.errors import Invalid
from skerry.testing.aws import shims
from skerry.testing.aws.inventory import inventory
from skerry.testing.aws.record_push_in_ecr import record_image
from skerry.testing.aws.recording_server import AwsApplication, MotoApplication, QuietMotoHandler
from skerry.testing.aws.shims.patching import Patches
from skerry.testing.cloud_sandbox import CloudSandbox
from skerry.testing.container_environment import JobDefaults
from skerry.testing.docker_containers import HOST, JobContainers
from skerry.testing.http_server import Server
from skerry.testing.job_runner import Jobs

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

OPERATOR: Final = "operator"
_ADMINISTRATOR: Final = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}],
}
# Batch gives a container 30 s to end, SageMaker 120.
_TRAINING_GRACES: Final = 4
_ONLY_SANDBOX: Final = threading.Lock()


class Sandbox(CloudSandbox):
    """An AWS account for tests. A context manager; everything created in it is gone afterwards.

    containers: jobs run in Docker; otherwise a test drives them through `batch`, by id, and `training`, by name.
    enforce_iam: rights are checked from the first call on. registry: host:port of a registry that plays ECR.
    network: of the containers, "bridge" or "host". settling: how many descriptions a queue or a compute environment
    takes to become VALID or to disappear, and a training job to have stopped. stop_grace_s: from SIGTERM to SIGKILL;
    four times that for training jobs. without: shims to leave out.
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
        """Start it. Raises Retryable if containers need an engine and none answers, Invalid if a sandbox is running."""
        mark = uuid.uuid4().hex[:8]
        engine = Engine() if containers else None
        if not _ONLY_SANDBOX.acquire(blocking=False):
            raise Invalid("a sandbox is already running in this process; close it first")
        super().__init__(registry=registry, settling=settling, any_image=containers)
        self.account: Final = DEFAULT_ACCOUNT_ID
        self.region: Final = region
        self.issuers: Final[dict[str, Mapping[str, Any]]] = {}
        """The keys with which STS verifies identity tokens, by the URL of their issuer."""
        self._patches = Patches()
        application = AwsApplication(MotoApplication(), self.calls, self._faults, needs_signature=enforce_iam)
        self._server = Server(application, all_addresses=containers, handler=QuietMotoHandler)
        self.endpoint: Final = f"http://127.0.0.1:{self._server.port}"
        self.batch, self.training = (
            Jobs(None if engine is None else JobContainers(engine, mark=mark, network=network, grace_s=grace_s))
            for grace_s in (stop_grace_s, _TRAINING_GRACES * stop_grace_s)
        )
        from_containers = f"http://{HOST}:{self._server.port}" if network == "bridge" else self.endpoint
        defaults = JobDefaults(mark=mark, endpoint=from_containers, registry=registry, variables=self.variables)
        self._key: tuple[str, str] | None = None
        try:
            settings_now = shims.Settings(
                looks=lambda: self.settling, any_image=lambda: self.any_image, issuers=self.issuers
            )
            shims.install(self._patches, self.batch, self.training, defaults, settings_now, without)
            if enforce_iam:
                self._patches.replace(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
            self._create_operator()
        except BaseException:
            self._release()
            raise
        self._server.start()

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that make AWS clients, and so skerry, use this account as its operator, and no other account."""
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
        """Return boto3's client of a service, as the operator. keys: aws_access_key_id and so on of another user."""
        import boto3  # noqa: PLC0415  loaded only for callers without clients of their own
        from botocore.config import Config  # noqa: PLC0415

        name, secret = self._key or ("", "")
        keys = keys or {"aws_access_key_id": name, "aws_secret_access_key": secret}
        once = Config(retries={"total_max_attempts": 1})
        return boto3.client(service, endpoint_url=self.endpoint, region_name=self.region, config=once, **keys)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def inventory(self) -> dict[str, tuple[str, ...]]:
        """Return the names of everything that exists, by kind; empty for an empty account."""
        return inventory(OPERATOR)

    def publish(self, image: str, repository: str) -> str:
        """Push a local image into this account's ECR and return the reference by digest that specs pin.

        Raises Invalid without a registry.
        """
        return record_image(repository, self._push(image, repository), self.region)

    def reset(self) -> None:
        """Empty the account, with the same operator and key. Jobs end; faults and calls are cleared."""
        self.batch.close()
        self.training.close()
        self.heal()
        self._create_operator()
        self.calls.clear()

    def _stop(self) -> None:
        self.batch.close()
        self.training.close()
        self._release()
        _empty_account()

    def _release(self) -> None:
        self._server.close()
        self._patches.undo()
        _ONLY_SANDBOX.release()

    def _create_operator(self) -> None:
        _empty_account()  # also removes what other users of moto in this process created
        iam = iam_backends[DEFAULT_ACCOUNT_ID]["aws"]
        iam.create_user(self.region, OPERATOR)
        iam.put_user_policy(OPERATOR, "AdministratorAccess", json.dumps(_ADMINISTRATOR))
        key = iam.create_access_key(OPERATOR)
        if self._key is not None:
            del iam.access_keys[key.access_key_id]
            key.access_key_id, key.secret_access_key = self._key
            iam.access_keys[key.access_key_id] = key
        self._key = str(key.access_key_id), str(key.secret_access_key)


def _empty_account() -> None:
    """Reset moto without filling the backends that it drops next: AMIs and AWS's own policies take most of a reset."""
    patches = Patches()
    patches.replace(BaseBackend, "reset", _keep)
    try:
        moto_api_backend.reset()
    finally:
        patches.undo()


def _keep(_: BaseBackend) -> None:
    """Do nothing: the backend is dropped next."""
