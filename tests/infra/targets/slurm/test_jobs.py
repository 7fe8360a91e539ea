"""The handler of jobs, with answers as Slurm 22.05.8 gives them."""

from __future__ import annotations

import base64
import os
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.infra.targets.slurm.kit import Recorded, jobs_of, queue_line
from tests.support.clocks import FakeClock

from skerry.infra.provision.handler import Condition
from skerry.infra.targets.slurm import job_views, requests
from skerry.infra.targets.slurm.cluster import Answer, Cluster
from skerry.infra.targets.slurm.jobs import Jobs
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Invalid, Retryable, SkerryError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from skerry.infra.provision.handler import Desired

NO_ANSWER = Answer(code=1, out="", err="sbatch: error: Batch job submission failed: Unable to contact slurm controller")


@pytest.fixture
def desired(tmp_path: Path) -> Desired:
    return jobs_of(tmp_path)[0]


def known(desired: Desired, job: str = "7") -> Desired:
    return replace(desired, outputs={"id": job, "job": f"{desired.name}/{job}"})


def handler(recorded: Recorded) -> Jobs:
    return Jobs(lambda _: recorded.cluster)


def test_job_is_submitted_with_its_script_and_without_the_environment(desired: Desired) -> None:
    recorded = Recorded(squeue="", sbatch="7;skerry\n")
    assert handler(recorded).create(desired) == {"id": "7", "job": f"{desired.name}/7"}
    words, script = recorded.calls[-1]
    assert (list(words[5:]), script) == (requests.sbatch(desired), requests.script(desired))
    assert "exec env -i " in words[2]


def test_existing_job_of_the_same_settings_is_returned(desired: Desired) -> None:
    recorded = Recorded(squeue=queue_line(desired, 7, "RUNNING"))
    assert handler(recorded).create(desired)["id"] == "7"
    assert recorded.names() == ["squeue"]


def test_ended_job_from_before_a_destroy_is_not_adopted(desired: Desired) -> None:
    recorded = Recorded(squeue=queue_line(desired, 6, "COMPLETED"), sbatch="7\n")
    assert handler(recorded).read([desired]) == [None]
    assert handler(recorded).create(desired)["id"] == "7"
    assert recorded.names() == ["squeue", "squeue", "sbatch"]


def test_other_job_of_the_slot_is_ended_first(desired: Desired) -> None:
    older = queue_line(replace(desired, generation=3), 6, "RUNNING")
    recorded = Recorded(squeue=[older, older, ""], scancel="", sbatch="7\n")
    assert handler(recorded).create(desired)["id"] == "7"
    assert recorded.names() == ["squeue", "scancel", "squeue", "squeue", "sbatch"]


def test_submission_without_an_answer_finds_its_job(desired: Desired) -> None:
    recorded = Recorded(squeue=["", queue_line(desired, 9, "PENDING", "Priority")], sbatch=NO_ANSWER)
    assert handler(recorded).create(desired)["id"] == "9"
    with pytest.raises(Retryable, match="Unable to contact"):
        handler(Recorded(squeue="", sbatch=NO_ANSWER)).create(desired)


def test_jobs_are_read_by_their_ids_or_their_comments(desired: Desired) -> None:
    lines = queue_line(desired, 7, "FAILED", "NonZeroExitCode", 30 << 8) + queue_line(desired, 8, "RUNNING")
    recorded = Recorded(squeue=lines)
    failed, unknown = handler(recorded).read([known(desired), desired])
    assert failed is not None
    assert (failed.condition, failed.detail, failed.owner) == (Condition.LOST, "exit code 30", desired.run)
    assert unknown is not None
    assert (unknown.condition, unknown.outputs["id"]) == (Condition.READY, "8")
    assert recorded.names() == ["squeue"]


@pytest.mark.parametrize(
    ("ending", "accounting", "condition", "detail"),
    [
        ('{"job": "7", "start": 1, "code": 0, "stopped": 0}\n', "", Condition.DONE, "exit code 0"),
        ('{"job": "7", "start": 0, "code": 10, "stopped": 1}\n', "", Condition.LOST, "cancelled"),
        ("\n", "7|skerry|COMPLETED|0:0|1795794317|1795794320\n", Condition.DONE, "exit code 0"),
        ("\n", "7|skerry|FAILED|0:9|1795794317|1795794320\n", Condition.LOST, "exit code 137"),
        ("\n", "7|skerry|CANCELLED by 0|0:0|1795794317|1795794320\n", Condition.LOST, "cancelled"),
        ('{"job": "6", "start": 0, "code": 0, "stopped": 0}\n', "", None, ""),
    ],
)
def test_forgotten_job_is_known_by_its_ending_or_the_accounting(
    desired: Desired, ending: str, accounting: str, condition: Condition | None, detail: str
) -> None:
    recorded = Recorded(squeue="", cat=ending, sacct=accounting)
    (seen,) = handler(recorded).read([known(desired)])
    assert (None if seen is None else (seen.condition, seen.detail, seen.owner, seen.outputs)) == (
        None if condition is None else (condition, detail, desired.run, known(desired).outputs)
    )
    (view,) = job_views.views(lambda _: recorded.cluster, [known(desired).to_record(known(desired).outputs)])
    assert view.condition is (condition or Condition.LOST)


def test_job_without_its_comment_is_listed_by_its_name(desired: Desired) -> None:
    stranger = queue_line(replace(desired, run="file:///shared/runs/other"), 5, "RUNNING")
    bare = queue_line(desired, 6, "PENDING", "Resources").replace('{"run"', "{'run'")
    ended = queue_line(desired, 7, "COMPLETED")
    recorded = Recorded(squeue=stranger + bare + ended)
    owned = list(handler(recorded).list_owned(desired.run, ["localhost"]))
    assert [(record.address, record.outputs["id"]) for record in owned] == [(desired.resource.address, "6")]


def test_delete_cancels_a_live_job_and_waits_for_its_end(desired: Desired) -> None:
    running, stopping = queue_line(desired, 7, "RUNNING"), queue_line(desired, 7, "COMPLETING")
    recorded = Recorded(squeue=[running, stopping, queue_line(desired, 7, "CANCELLED")], scancel="")
    handler(recorded).delete(known(desired).to_record(known(desired).outputs))
    assert recorded.names() == ["squeue", "scancel", "squeue", "squeue"]
    gone = Recorded(squeue="")
    handler(gone).delete(desired.to_record({}))
    assert gone.names() == ["squeue"]


def test_job_of_another_user_is_neither_lost_nor_deleted(desired: Desired) -> None:
    def execute(words: Sequence[str], _text: str) -> Answer:
        line = " ".join(words)
        if "scancel" in line:
            return Answer(code=1, out="", err="scancel: error: Kill job error on job id 7: Access/permission denied")
        return Answer(code=0, out="" if "--user" in line else queue_line(desired, 7, "RUNNING"), err="")

    jobs = Jobs(lambda _: Cluster(FakeClock(), {}, None, execute))
    (seen,) = jobs.read([known(desired)])
    assert seen is not None
    assert seen.condition is Condition.READY
    with pytest.raises(Unauthorized, match="denied"):
        jobs.delete(known(desired).to_record(known(desired).outputs))


def test_job_with_the_id_of_a_recorded_one_on_another_cluster_is_kept(desired: Desired) -> None:
    recorded = Recorded(squeue=queue_line(replace(desired, generation=3), 7, "RUNNING"))
    handler(recorded).delete(known(desired).to_record(known(desired).outputs))
    assert recorded.names() == ["squeue"]
    gone = Recorded(squeue=Answer(code=1, out="", err="slurm_load_jobs error: Invalid job id specified"))
    handler(gone).delete(known(desired).to_record(known(desired).outputs))
    assert gone.names() == ["squeue"]


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (1, "sbatch: error: Batch job submission failed: Invalid partition name specified", Invalid),
        (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", Retryable),
        (1, "scancel: error: Kill job error on job id 3: Access/permission denied", Unauthorized),
        (127, "sh: 1: exec: squeue: not found", Invalid),
        (255, "ssh: connect to host login port 22: Connection refused", Retryable),
        (255, "ada@login: Permission denied (publickey,password).", Unauthorized),
    ],
)
def test_errors_of_commands_are_translated(code: int, text: str, kind: type[SkerryError]) -> None:
    cluster = Cluster(SystemClock(), {}, "ada@login", lambda _words, _text: Answer(code=code, out="", err=text))
    with pytest.raises(kind, match="ada@login: "):
        cluster.call("squeue")


def test_login_runs_the_quoted_line_through_ssh() -> None:
    calls: list[list[str]] = []

    def execute(words: object, _text: str) -> Answer:
        calls.append(list(words))  # type: ignore[call-overload]
        return Answer(code=0, out="", err="")

    Cluster(SystemClock(), {}, "ada@login", execute).call('echo "$1"', ["it's $(date)"])
    assert calls[0][:-1] == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--", "ada@login"]
    assert calls[0][-1] == """sh -c 'cd && export LC_ALL=C && echo skerry-begin && echo "$1"' sh 'it'"'"'s $(date)'"""


@pytest.mark.parametrize(
    "text", [b"10%\r20%\r\n", b"10%\f20%\n", b"10% \xe2\x80\xa8 20%\n", b"\xff\xfe\n", b"\r\n\r\n"]
)
def test_log_continues_at_the_byte_where_it_ended(desired: Desired, tmp_path: Path, text: bytes) -> None:
    target = {**known(desired).settings, "folder": str(tmp_path)}
    record = replace(known(desired), settings=target).to_record(known(desired).outputs)
    log = tmp_path / f"{record.name}.log"
    log.write_bytes(text)
    cluster = Cluster(SystemClock(), dict(os.environ))
    before = list(job_views.lines(cluster, record, None))
    assert before[-1].cursor == str(len(text))
    log.write_bytes(text + b"last\n")
    (last,) = job_views.lines(cluster, record, before[-1].cursor)
    assert last.text == "last"


def test_words_of_a_login_are_not_part_of_the_output(desired: Desired, tmp_path: Path) -> None:
    """A file such as .bashrc may print some; without them the first line is a number."""

    def execute(words: Sequence[str], _text: str) -> Answer:
        done = subprocess.run(["sh", "-c", f"echo Welcome; {words[-1]}"], capture_output=True, text=True, check=True)
        return Answer(code=0, out=done.stdout, err=done.stderr)

    settings = {**known(desired).settings, "folder": str(tmp_path)}
    record = replace(known(desired), settings=settings).to_record(known(desired).outputs)
    (tmp_path / f"{record.name}.log").write_text("step 1\n")
    cluster = Cluster(SystemClock(), dict(os.environ), "ada@login", execute)
    assert [line.text for line in job_views.lines(cluster, record, None)] == ["step 1"]


def test_log_continues_after_its_cursor_with_whole_lines_only(desired: Desired) -> None:
    record = known(desired).to_record(known(desired).outputs)
    written = base64.b64encode("step 1\nstep ü\nste".encode()).decode()
    recorded = Recorded(tail=f"1795794317\n{written}\n")
    first, second = job_views.lines(recorded.cluster, record, None)
    assert [(line.text, line.cursor, line.at_s) for line in (first, second)] == [
        ("step 1", "7", 1795794317.0),
        ("step ü", "15", 1795794317.0),
    ]
    list(job_views.lines(recorded.cluster, record, second.cursor))
    assert recorded.calls[-1][0][-1] == "16"
    missing = Recorded(tail=Answer(code=1, out="", err="stat: cannot statx 'x.log': No such file or directory"))
    assert list(job_views.lines(missing.cluster, record, None)) == []
    with pytest.raises(Invalid, match="not a place in a job's log"):
        list(job_views.lines(recorded.cluster, record, "x"))
