"""Builders for the tests of the targets on AWS: the account, and graphs with a store in S3 or Cloud Storage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from skerry.infra.clouds.aws.s3 import Bucket
from skerry.infra.clouds.aws.session import Account, Aws
from skerry.infra.clouds.cross_cloud import GoogleStore
from skerry.infra.clouds.google.gcs import Bucket as GoogleBucket
from skerry.infra.provision.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from skerry.infra.provision.graph import Resource
    from skerry.infra.provision.target_and_store_interfaces import RunContext

ACCOUNT: Final = Account(number="123456789012", partition="aws")
IMAGE: Final = f"123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry@sha256:{'1' * 64}"
REGION: Final = "us-east-1"
S3_STORE: Final = Bucket(key="store", name="acme", region=REGION)
GOOGLE_STORE: Final = GoogleStore(
    number="987654321098", bucket=GoogleBucket(key="store", name="acme", region="us-central1"), prefix="runs/tiny"
)


def in_cloud_storage(context: RunContext) -> RunContext:
    """The run with its store in Cloud Storage."""
    return replace(context, run_uri=context.run_uri.replace("s3://", "gs://"))


def build_graph(build: Callable[..., Sequence[Resource]], context: RunContext, offers: Sequence[object]) -> Graph:
    """The graph of a run and its bucket. build: of the target. offers: for each of its groups."""
    groups = context.spec.replicas
    if context.run_uri.startswith("s3://"):
        return Graph([S3_STORE, *build(context, ACCOUNT, groups, offers)])
    return Graph([GOOGLE_STORE.bucket, *build(context, ACCOUNT, groups, offers, GOOGLE_STORE)])


class Answers(dict[str, Any]):
    """Answers of AWS by operation, instead of those of the emulation; an exception as an answer is raised.

    sent: the parameters of the answered calls, in order.
    """

    def __init__(self, aws: Aws, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        super().__init__(answers)
        self.sent: list[dict[str, Any]] = []
        for name in ("call", "call_once", "pages"):
            monkeypatch.setattr(type(aws), name, self._answering(getattr(type(aws), name)))

    def _answering(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(aws: Aws, service: str, region: str, operation: str, /, *key: str, **parameters: Any) -> Any:
            if operation not in self:
                return real(aws, service, region, operation, *key, **parameters)
            self.sent.append(parameters)
            answer = self[operation]
            if isinstance(answer, Exception):
                raise answer
            return iter(answer) if key else answer

        return ask
