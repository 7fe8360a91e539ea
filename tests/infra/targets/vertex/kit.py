"""Builders for the tests of Vertex AI: a run, and its resources in the sandbox."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, write_spec
from tests.infra.targets.aws import S3_STORE

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.google.gcs import Bucket
from skerry.infra.clouds.google.run_bucket_and_image_repository import GoogleHome
from skerry.infra.provision.graph import Graph
from skerry.infra.targets.vertex.resource_graph import StoreInS3, build_resources
from skerry.infra.targets.vertex.target import Vertex

if TYPE_CHECKING:
    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.testing.google.sandbox import GoogleSandbox

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/vertex.yaml"
GCS_STORE: Final = Bucket(key="store", name="acme", region="us-central1")
PROJECT: Final = "skerry-sandbox"
REGION: Final = "us-central1"
TARGET: Final = "machine: g2-standard-8, accelerator: nvidia-l4"


def spec_of(folder: Path, target: str, *, count: int = 2, more: str = "", store: str = "gs://acme/runs") -> Path:
    """Write a spec with one group `vertex` with these options of its target."""
    kind = f"kind: vertex, project: {PROJECT}, region: us-central1"
    return write_spec(
        folder,
        f"  - {{name: vertex, count: {count}, target: {{{kind}, {target}}}}}\n",
        store=store,
        image=f"us-central1-docker.pkg.dev/{PROJECT}/skerry/replica@sha256:{'1' * 64}",
        code="""{path: ., command: [python, train.py, --text, "it's \\"here\\" $(HOME)"]}""",
        more=more,
    )


def context_of(
    folder: Path, target: str = TARGET, *, count: int = 2, more: str = "", store: str = "gs://acme/runs"
) -> RunContext:
    return ground_from(spec_of(folder, target, count=count, more=more, store=store))


def graph_of(context: RunContext) -> Graph:
    """Return the graph of the run, with its store in Cloud Storage or S3."""
    bucket, store = GCS_STORE, None
    if context.run_uri.startswith("s3://"):
        bucket, store = S3_STORE, StoreInS3(account="123456789012", region="us-east-1")
    return Graph([bucket, *build_resources(context, context.spec.replicas, store)])


class Scene(kit.Scene):
    def __init__(self, google: Google, run: RunContext) -> None:
        super().__init__(run, GoogleHome(google), Vertex(google, Aws(google.clock, {})))


def bind(sandbox: GoogleSandbox, path: str, role: str, member: str) -> None:
    """Add a binding to the policy of a project or of an account, as an administrator does."""
    status, policy = sandbox.call("POST", f"{path}:getIamPolicy", {})
    assert status == 200, policy
    policy.setdefault("bindings", []).append({"role": role, "members": [member]})
    status, answer = sandbox.call("POST", f"{path}:setIamPolicy", {"policy": policy})
    assert status == 200, answer


def trainer(sandbox: GoogleSandbox, *, may_start: bool = True) -> str:
    """Create an account that may start jobs as itself, as the manual says. may_start: False leaves that out."""
    path = f"/v1/projects/{sandbox.project}"
    status, account = sandbox.call("POST", f"{path}/serviceAccounts", {"accountId": "trainer-account"})
    assert status == 200, account
    email = str(account["email"])
    bind(sandbox, path, "roles/aiplatform.user", f"serviceAccount:{email}")
    if may_start:
        own = f"{path}/serviceAccounts/{email}"
        bind(sandbox, own, "roles/iam.serviceAccountUser", f"serviceAccount:{email}")
    return email
