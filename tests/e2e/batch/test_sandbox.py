"""The sandbox with real containers, driven by plain calls of boto3: what Batch promises a job, and does to it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.e2e.conftest import lacking
from tests.support.batchplace import ECS_TASKS, allow, make_place, make_role, refused, trust

from skerry.runtime.clock import SystemClock
from skerry.testing.batch_retry_rules import TIMED_OUT
from skerry.testing.docker_containers import LABEL
from skerry.testing.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.batchplace import Place

    from skerry.infra.local.docker_engine import Engine

# The base has no SDK: a put is signed here, in forty words of the standard library.
SIGNED_PUT: Final = """
import datetime, hashlib, hmac, http.client, os, sys
from urllib.parse import urlsplit
def put(bucket, key, body, **headers):
    host = urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc
    now = datetime.datetime.utcnow(); stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    sent = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp,
            "x-amz-security-token": os.environ["AWS_SESSION_TOKEN"], **headers}
    names = ";".join(sorted(sent)); lines = "".join(f"{name}:{sent[name]}\\n" for name in sorted(sent))
    asked = f"PUT\\n/{bucket}/{key}\\n\\n{lines}\\n{names}\\n{digest}"
    scope = f"{day}/{os.environ['AWS_REGION']}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\\n{stamp}\\n{scope}\\n{hashlib.sha256(asked.encode()).hexdigest()}"
    secret = ("AWS4" + os.environ["AWS_SECRET_ACCESS_KEY"]).encode()
    for part in (day, os.environ["AWS_REGION"], "s3", "aws4_request"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    sign = hmac.digest(secret, text.encode(), "sha256").hex()
    sent["authorization"] = (f"AWS4-HMAC-SHA256 Credential={os.environ['AWS_ACCESS_KEY_ID']}/{scope}, "
                             f"SignedHeaders={names}, Signature={sign}")
    link = http.client.HTTPConnection(host); link.request("PUT", f"/{bucket}/{key}", body, sent)
    return link.getresponse().status
"""
WAITING: Final = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waiting", flush=True)
signal.sigwait([signal.SIGTERM])
print("stopping", flush=True)
"""
CLOCK: Final = SystemClock()
DEAF: Final = "import signal; signal.signal(15, signal.SIG_IGN); print('waiting', flush=True); signal.pause()"
OURS: Final = {
    "attempts": 3,
    "evaluateOnExit": [
        {"onStatusReason": "Host EC2*", "action": "RETRY"},
        {"onExitCode": "10", "action": "RETRY"},
        {"onExitCode": "137", "action": "RETRY"},
        {"onReason": "*", "action": "EXIT"},
    ],
}


@pytest.fixture
def enforcing(base: str, skerry_registry: str | None) -> Iterator[Sandbox]:
    """Rights are checked, stops take a second."""
    assert base
    with Sandbox(containers=True, enforce_iam=True, registry=skerry_registry, stop_grace_s=1.0) as sandbox:
        yield sandbox


@pytest.fixture
def place(base: str, skerry_containers: Sandbox) -> Place:
    assert base
    return make_place(skerry_containers)


def python(program: str, **rest: Any) -> dict[str, Any]:
    return {"command": ["python3", "-u", "-c", program], **rest}


def logged(place: Place, stream: str, group: str = "/aws/batch/job") -> list[str]:
    logs = place.sandbox.client("logs")
    return [
        get_log_event["message"]
        for get_log_event in logs.get_log_events(logGroupName=group, logStreamName=stream)["events"]
    ]


def stream_of(place: Place, job: str) -> str:
    return str(place.job(job)["container"]["logStreamName"])


def test_jobs_write_only_what_their_role_allows(enforcing: Sandbox, base: str) -> None:
    enforcing.client("s3").create_bucket(Bucket="run")
    place = make_place(enforcing)
    program = SIGNED_PUT + (
        "me = sys.argv[1]\n"
        "codes = [put('run', f'tiny/{me}/a', b'x'), put('run', 'tiny/other/a', b'x'), put('run', f'{me}/a', b'x')]\n"
        "print(codes)\n"
        "sys.exit(0 if codes == [200, 403, 403] else 20)"
    )
    jobs: list[str] = []
    for name in ("a-0", "a-1"):
        own = {"Action": "s3:PutObject", "Resource": f"arn:aws:s3:::run/tiny/{name}/*"}
        role = make_role(enforcing, name, policy=allow(own))
        container = {"image": base, "command": ["python3", "-c", program, name], "jobRoleArn": role}
        jobs.append(place.submit(place.define(name, container=container), name))
    assert [enforcing.batch.wait(job) for job in jobs] == ["SUCCEEDED", "SUCCEEDED"]
    result = enforcing.client("s3").list_objects_v2(Bucket="run")["Contents"]
    assert [item["Key"] for item in result] == ["tiny/a-0/a", "tiny/a-1/a"]
    assert {"role/a-0", "role/a-1"} <= {call.caller for call in enforcing.calls}
    response = place.job(jobs[0])
    assert response["container"]["exitCode"] == 0
    assert response["startedAt"] <= response["stoppedAt"]


def test_a_container_that_is_killed_is_tried_again_in_a_log_of_its_own(place: Place, engine: Engine) -> None:
    sandbox = place.sandbox
    job = place.submit(place.define(container=python(WAITING), retryStrategy=OURS))
    sandbox.batch.wait(job, "RUNNING")
    first = stream_of(place, job)
    engine.containers.signal(sandbox.batch.container(job), "SIGKILL")
    sandbox.batch.wait(job, "RUNNING", attempt=2)
    until_logged(place, stream_of(place, job), "waiting")
    engine.containers.signal(sandbox.batch.container(job), "SIGTERM")
    assert sandbox.batch.wait(job) == "SUCCEEDED"
    response = place.job(job)
    assert [item["container"]["exitCode"] for item in response["attempts"]] == [137, 0]
    streams = [item["container"]["logStreamName"] for item in response["attempts"]]
    assert streams[0] == first != streams[1] == response["container"]["logStreamName"]
    assert logged(place, streams[1]) == ["waiting", "stopping"]


@pytest.mark.parametrize(("code", "attempts"), [(20, 1), (10, 3)])
def test_the_exit_code_decides_whether_it_is_tried_again(place: Place, code: int, attempts: int) -> None:
    program = f"import os, sys; print(os.environ['AWS_BATCH_JOB_ATTEMPT']); sys.exit({code})"
    job = place.submit(place.define(container=python(program)), retryStrategy=OURS)
    assert place.sandbox.batch.wait(job) == "FAILED"
    response = place.job(job)
    assert response["statusReason"] == "Essential container in task exited"
    assert [item["container"]["exitCode"] for item in response["attempts"]] == [code] * attempts
    written = [logged(place, item["container"]["logStreamName"]) for item in response["attempts"]]
    assert written == [[str(number + 1)] for number in range(attempts)]


def test_lost_machine_is_reported_and_retried(place: Place) -> None:
    job = place.submit(place.define(container=python(WAITING), retryStrategy=OURS))
    place.sandbox.batch.wait(job, "RUNNING")
    until_logged(place, stream_of(place, job), "waiting")
    place.sandbox.batch.interrupt(job)
    place.sandbox.batch.wait(job, "RUNNING", attempt=2)
    lost = place.job(job)["attempts"][0]
    assert lost["statusReason"].startswith("Host EC2")
    assert "exitCode" not in lost["container"]


def test_its_output_is_there_while_it_runs_and_a_stop_is_a_sigterm(place: Place) -> None:
    place.sandbox.client("logs").create_log_group(logGroupName="/skerry/tiny")
    options = {"awslogs-group": "/skerry/tiny", "awslogs-stream-prefix": "a-0"}
    container = python(WAITING, logConfiguration={"logDriver": "awslogs", "options": options})
    job = place.submit(place.define(container=container))
    place.sandbox.batch.wait(job, "RUNNING")
    stream = stream_of(place, job)
    assert stream.startswith("a-0/default/")
    until_logged(place, stream, "waiting", "/skerry/tiny")
    place.batch.terminate_job(jobId=job, reason="the run was destroyed")
    assert place.sandbox.batch.wait(job) == "FAILED"
    response = place.job(job)
    assert (response["statusReason"], response["container"]["exitCode"]) == ("the run was destroyed", 0)
    assert logged(place, stream, "/skerry/tiny") == ["waiting", "stopping"]
    place.batch.terminate_job(jobId=job, reason="too late")
    assert place.job(job)["statusReason"] == "the run was destroyed"


def until_logged(place: Place, stream: str, line: str, group: str = "/aws/batch/job") -> None:
    """A signal that comes before is lost: process 1 of a container has no default for it."""
    for _ in range(600):
        if line in logged(place, stream, group):
            return
        CLOCK.pause(0.05)
    raise AssertionError(stream)


def test_container_that_ignores_sigterm_is_killed_after_the_grace(enforcing: Sandbox) -> None:
    place = make_place(enforcing)
    job = place.submit(place.define(container=python(DEAF), retryStrategy=OURS))
    enforcing.batch.wait(job, "RUNNING")
    until_logged(place, stream_of(place, job), "waiting")
    place.batch.terminate_job(jobId=job, reason="over")
    assert enforcing.batch.wait(job) == "FAILED"
    assert [item["container"]["exitCode"] for item in place.job(job)["attempts"]] == [137]


def test_an_attempt_that_takes_too_long_is_ended_and_not_tried_again(enforcing: Sandbox) -> None:
    place = make_place(enforcing)
    settings = {"retryStrategy": OURS, "timeout": {"attemptDurationSeconds": 1}}
    job = place.submit(place.define(container=python(WAITING), **settings))
    assert enforcing.batch.wait(job) == "FAILED"
    response = place.job(job)
    assert (response["statusReason"], len(response["attempts"])) == (TIMED_OUT, 1)


def test_memory_and_shared_memory_are_what_was_asked_for(place: Place) -> None:
    program = (
        "import os; of = os.statvfs('/dev/shm'); print(of.f_blocks * of.f_frsize >> 20)\n"
        "big = bytearray(200 << 20)\nprint('still here')"
    )
    container = python(program, linuxParameters={"sharedMemorySize": 96})
    small = {"resourceRequirements": [{"type": "MEMORY", "value": "64"}]}
    definition = place.define(container=container)
    job, dead = place.submit(definition), place.submit(definition, containerOverrides=small)
    assert place.sandbox.batch.wait(job) == "SUCCEEDED"
    assert logged(place, stream_of(place, job)) == ["96", "still here"]
    assert place.sandbox.batch.wait(dead) == "FAILED"
    response = place.job(dead)["container"]
    assert response["exitCode"] == 137
    assert response["reason"].startswith("OutOfMemoryError")


def test_an_image_in_ecr_comes_from_the_registry_by_its_digest(place: Place, base: str, engine: Engine) -> None:
    if place.sandbox.registry is None:
        lacking("no docker-registry; as root: apt-get install --no-install-recommends docker-registry")
    place.sandbox.client("ecr").create_repository(repositoryName="team/tiny")
    reference = place.sandbox.publish(base, "team/tiny")
    assert ".dkr.ecr.us-east-1.amazonaws.com/team/tiny@sha256:" in reference
    digest = reference.partition("@")[2]
    image = place.sandbox.client("ecr").describe_images(repositoryName="team/tiny")["imageDetails"][0]
    assert image["imageDigest"] == digest
    gone = place.submit(place.define("gone", container={"image": reference.replace("team/tiny@", "team/gone@")}))
    job = place.submit(place.define(container={"image": reference}))
    assert place.sandbox.batch.wait(job) == "SUCCEEDED", place.job(job)
    assert place.sandbox.batch.wait(gone) == "FAILED"
    assert place.job(gone)["attempts"][0]["container"]["reason"].startswith("CannotPullContainerError")
    place.sandbox.close()
    assert not engine.images.has(f"{place.sandbox.registry}/team/tiny@{digest}")


def test_a_job_without_its_log_group_or_its_role_never_starts(place: Place) -> None:
    options = {"awslogs-group": "/not/there"}
    logs = {"logDriver": "awslogs", "options": options}
    without_logs = place.submit(place.define("logs", container=python("1", logConfiguration=logs)))
    role = make_role(place.sandbox, "machine-only", "ec2.amazonaws.com")
    without_role = place.submit(place.define("role", container=python("1", jobRoleArn=role)))
    unknown = json.loads(trust(ECS_TASKS))
    unknown["Statement"][0]["Condition"] = {"StringEquals": {"aws:ResourceTag/x": "1"}}
    place.sandbox.client("iam").create_role(RoleName="tagged", AssumeRolePolicyDocument=json.dumps(unknown))
    tagged = role.replace("machine-only", "tagged")
    not_known = place.submit(place.define("tagged", container=python("1", jobRoleArn=tagged)))
    expected = ((without_logs, "log group"), (without_role, "unable to assume"), (not_known, "SandboxFailed"))
    for job, word in expected:
        assert place.sandbox.batch.wait(job) == "FAILED"
        response = place.job(job)
        assert response["statusReason"] == "Task failed to start"
        assert word in response["container"]["reason"]


def test_no_container_outlives_its_sandbox(base: str, engine: Engine) -> None:
    assert base
    with Sandbox(containers=True, stop_grace_s=1.0) as sandbox:
        place = make_place(sandbox)
        job = place.submit(place.define(container=python(DEAF)))
        sandbox.batch.wait(job, "RUNNING")
        container = sandbox.batch.container(job)
        mark = engine.containers.inspect(container)["Config"]["Labels"][LABEL]
        assert engine.containers.labelled({LABEL: mark}) == [container]
        sandbox.reset()
        assert engine.containers.labelled({LABEL: mark}) == []
        assert sandbox.inventory() == {}
        place = make_place(sandbox)
        job = place.submit(place.define(container=python(WAITING)))
        assert refused(place.batch.terminate_job, jobId=job, reason="at once") == ""
        assert sandbox.batch.wait(job) == "FAILED"
    assert engine.containers.labelled({LABEL: mark}) == []
