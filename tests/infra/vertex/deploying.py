"""A run on Vertex AI as an operator has it: a spec in a folder, and commands that each begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.deploy.account import DIGEST, Operator

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.testing.google.sandbox import GoogleSandbox

SPEC = """
run: tiny
store: gs://acme-skerry/runs
image: us-central1-docker.pkg.dev/{images}/skerry/replica@sha256:{digest}
code: {{path: train, command: [python, train.py]}}
outer: {{rounds: 4, sync_every: 2}}
limits: {{max_hours: 24}}
replicas:
  - name: v
    count: {count}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4, role: {role}}}
"""


def operator(
    folder: Path, sandbox: GoogleSandbox, *, count: int = 2, role: str = "group", images: str | None = None
) -> Operator:
    """images: the project whose repository the image is in; None is the run's own."""
    (folder / "train").mkdir(exist_ok=True)
    (folder / "train" / "train.py").write_text("print('training')\n")
    path = folder / "skerry.yaml"
    told = {"project": sandbox.project, "images": images or sandbox.project, "digest": DIGEST}
    path.write_text(SPEC.format(**told, count=count, role=role))
    return Operator(path, sandbox.environment)
