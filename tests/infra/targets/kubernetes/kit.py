"""Builders for the tests of Kubernetes: a run, its resources, and a cluster that they are in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, of_kind, write_spec
from tests.infra.targets.aws import S3_STORE

from skerry.infra.clouds.google.gcs import Bucket
from skerry.infra.provision.graph import Graph
from skerry.infra.targets.kubernetes.jobs import Jobs, ServiceAccounts
from skerry.infra.targets.kubernetes.resource_graph import build_resources
from skerry.infra.targets.kubernetes.resource_types import Job, ServiceAccount

if TYPE_CHECKING:
    from skerry.infra.provision.handler import Desired
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.targets.kubernetes.cluster import Cluster
    from skerry.infra.targets.kubernetes.resource_graph import Trust

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/kubernetes.yaml"
NAMESPACE: Final = "train"
GCS_STORE: Final = Bucket(key="store", name="acme", region="us-central1")
WHOLE: Final = (
    "context: sandbox, cpu: 500m, memory: 8GiB, gpus: 2, shared_memory: 2GiB, attempts: 3, grace: 2m, max_runtime: 6h, "
    "node_selector: {cloud.google.com/gke-accelerator: nvidia-l4}, tolerations: [{key: spot, effect: NoSchedule}, "
    "{key: team, value: a}], priority_class: low, pull_secret: registry, queue: research"
)


def context_of(
    folder: Path, target: str = "", *, count: int = 2, more: str = "", store: str = "s3://acme/runs"
) -> RunContext:
    """A run with one group `cluster` with these options of its target."""
    secret = "" if target.startswith("secret:") else "secret: store-keys"
    options = ", ".join(filter(None, ["kind: kubernetes, namespace: train", secret, target]))
    return ground_from(
        write_spec(
            folder,
            f"  - {{name: cluster, count: {count}, target: {{{options}}}}}\n",
            store=store,
            image=f"ghcr.io/acme/skerry@sha256:{'1' * 64}",
            code="""{path: ., command: [python, train.py, --text, "it's \\"here\\" $(HOME) $$"]}""",
            more=more,
        )
    )


def graph_of(context: RunContext, trust: Trust | None = None) -> Graph:
    """The graph of the run, with its store in S3."""
    return Graph([S3_STORE, *build_resources(context, context.spec.replicas, {"AWS_REGION": "us-east-1"}, trust)])


class Scene:
    """A run of two replicas in a cluster. jobs: as desired, with their outputs once they are made."""

    def __init__(self, cluster: Cluster, context: RunContext) -> None:
        self.context = context
        graph = graph_of(context)
        for account in of_kind(graph, ServiceAccount):
            ServiceAccounts(cluster).create(kit.wanted(account, context.run_uri))
        self.jobs: list[Desired] = [kit.wanted(job, context.run_uri) for job in of_kind(graph, Job)]
        self.names = [job.name for job in self.jobs]
        self.records = [job.to_record(Jobs(cluster).create(job)) for job in self.jobs]
