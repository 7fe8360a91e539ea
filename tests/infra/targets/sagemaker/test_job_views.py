from __future__ import annotations

from typing import TYPE_CHECKING

from tests.infra.targets.sagemaker.kit import Scene, context_of

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.sagemaker.job_views import lines, views

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.aws.session import Aws
    from skerry.testing.sandbox import Sandbox


def test_views_keep_their_order_and_report_deleted_records(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path))
    scene.make()
    first, second = (scene.record(f"sagemaker_job.sm-{number}") for number in range(2))
    sandbox.training.start(second.name)
    assert [(job.slot, job.state) for job in views(aws, [second, first])] == [("sm-1", "Training"), ("sm-0", "Pending")]
    scene.jobs.delete(first)
    (deleted,) = views(aws, [first])
    assert (deleted.state, deleted.condition) == ("UNKNOWN", Condition.LOST)
    assert deleted.why.startswith("SageMaker has no record of it")
    assert list(lines(aws, first, None)) == []


def test_lines_of_all_starts_are_in_order_and_continue_at_a_cursor(aws: Aws, sandbox: Sandbox, tmp_path: Path) -> None:
    scene = Scene(aws, context_of(tmp_path, "spot: true", count=1))
    scene.make()
    record = scene.record("sagemaker_job.sm-0")
    texts = [f"{start} {number}" for start in range(2) for number in range(3)]
    for start in range(2):
        for text in texts[3 * start : 3 * start + 3]:
            sandbox.training.write(record.name, text)
        sandbox.training.interrupt(record.name)
    log = list(lines(aws, record, None))
    assert [(line.slot, line.text) for line in log] == [("sm-0", text) for text in texts]
    for number, line in enumerate(log):
        assert [after.text for after in lines(aws, record, line.cursor)] == texts[number + 1 :]
