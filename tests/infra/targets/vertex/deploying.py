"""A run on Vertex AI as an operator has it: a spec in a folder, and commands that each begin anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.deploy.account import DIGEST, Operator, write_run

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.testing.google.sandbox import GoogleSandbox

GROUP = """\
  - name: v
    count: {count}
    target: {{kind: vertex, project: {project}, region: us-central1, machine: n2-standard-4, role: {role}}}
"""


def operator(
    folder: Path, sandbox: GoogleSandbox, *, count: int = 2, role: str = "group", images: str | None = None
) -> Operator:
    """images: the project whose repository the image is in; None is the run's own."""
    image = f"us-central1-docker.pkg.dev/{images or sandbox.project}/skerry/replica@sha256:{DIGEST}"
    group = GROUP.format(count=count, project=sandbox.project, role=role)
    return Operator(write_run(folder, group, store="gs://acme-skerry/runs", image=image), sandbox.environment)
