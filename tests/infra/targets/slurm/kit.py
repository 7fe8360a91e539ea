"""Builders for the tests of Slurm: a run's jobs, and a cluster that gives recorded answers (Slurm 22.05.8)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.infra import kit
from tests.infra.kit import ground_from, write_spec
from tests.support.clocks import FakeClock

from skerry.infra.provision.graph import Graph
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.slurm import requests, responses
from skerry.infra.targets.slurm.cluster import Answer, Cluster
from skerry.infra.targets.slurm.resource_graph import build_resources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.infra.provision.target_and_store_interfaces import RunContext

check_golden = partial(kit.check_golden, Path(__file__).parent / "golden")
EXAMPLE: Final = Path(__file__).parents[4] / "infra/examples/slurm.yaml"


def jobs_of(
    folder: Path,
    target: str = "partition: gpu, time: 12h",
    *,
    count: int = 1,
    more: str = "",
    store: str = "file:///shared/runs",
    variables: Mapping[str, str] | None = None,
) -> list[Desired]:
    """Return the desired jobs of a run with one group. variables: to open the store with."""
    groups = f"  - {{name: hpc, count: {count}, target: {{kind: slurm, {target}}}}}\n"
    code = """{path: ., command: [python, train.py, --text, "it's \\"here\\" $(HOME)"]}"""
    spec = write_spec(folder, groups, store=store, image="acme/skerry:1", code=code, more=more)
    context = ground_from(spec)
    return [
        Desired(resource=job, generation=0, run=context.run_uri, settings=job.settings())
        for job in build_resources(context, context.spec.replicas, variables or {})
    ]


def graph_of(context: RunContext) -> Graph:
    """Return the graph of a run whose store is a folder."""
    return Graph(build_resources(context, context.spec.replicas, {}))


def queue_line(desired: Desired, job: int, state: str, reason: str = "None", status: int = 0, restarts: int = 0) -> str:
    """Return a line of squeue as Slurm 22.05.8 prints it."""
    started = "N/A" if state == "PENDING" else "1795794317"
    comment = requests.comment(desired)
    fields = [job, desired.resource.name, state, reason, status, restarts, started, "1795794320", comment]
    widths = [int(column.partition(":")[2]) for column in responses.FORMAT.split(",")]
    return "".join(str(field).ljust(width) for field, width in zip(fields, widths, strict=True)) + "\n"


class Recorded:
    """Answers commands by the first word of Slurm's that they contain; records the commands with their input."""

    def __init__(self, **answers: str | Answer | list[str | Answer]) -> None:
        self.answers = answers
        self.calls: list[tuple[Sequence[str], str]] = []
        self.cluster = Cluster(FakeClock(), {}, None, self._execute)

    def names(self) -> list[str]:
        """The commands so far."""
        return [self._name(words) for words, _ in self.calls]

    def _execute(self, words: Sequence[str], text: str) -> Answer:
        self.calls.append((words, text))
        answer = self.answers[self._name(words)]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return Answer(code=0, out=answer, err="") if isinstance(answer, str) else answer

    @staticmethod
    def _name(words: Sequence[str]) -> str:
        text = " ".join(words)
        return next(name for name in ("sbatch", "scancel", "sacct", "squeue", "sinfo", "cat", "tail") if name in text)
