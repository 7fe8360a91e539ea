"""Each shim twice: without it moto still has the gap (or the shim may go), with it the sandbox does as AWS does."""

from __future__ import annotations

import base64
import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import boto3
import pytest
from botocore import UNSIGNED
from botocore.config import Config
from google.auth.aws import AwsSecurityCredentials, RequestSigner
from moto.batch.models import Job
from moto.s3.models import s3_backends
from tests.support.batchplace import allow, make_environment, make_place, make_queue, make_role, refused
from tests.testing.registry import registry

from skerry.testing.aws import shims
from skerry.testing.aws.container_role_keys import role_keys
from skerry.testing.sandbox import Sandbox
from skerry.testing.token_issuer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Callable

TLS_ONLY: Final = {
    "Sid": "tls",
    "Effect": "Deny",
    "Principal": "*",
    "Action": "s3:*",
    "Resource": ["arn:aws:s3:::run", "arn:aws:s3:::run/*"],
    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
}
CREATE_ONLY: Final = {
    "Sid": "create",
    "Effect": "Deny",
    "Principal": "*",
    "Action": "s3:PutObject",
    "Resource": "arn:aws:s3:::run/tiny/commits/*",
    "Condition": {"Null": {"s3:if-none-match": "true"}, "Bool": {"s3:ObjectCreationOperation": "true"}},
}


NO_READING: Final = {
    "Effect": "Deny",
    "Principal": "*",
    "Action": "s3:GetObject",
    "Resource": "arn:aws:s3:::run/secret",
}


def protect(sandbox: Sandbox, *statements: dict[str, Any]) -> Any:
    """The client of a bucket with this policy."""
    s3 = sandbox.client("s3")
    s3.create_bucket(Bucket="run")
    s3.put_bucket_policy(Bucket="run", Policy=json.dumps({"Version": "2012-10-17", "Statement": list(statements)}))
    return s3


def unguarded(name: str) -> Sandbox:
    return Sandbox(without={name})


def test_every_shim_is_tried_here() -> None:
    modules = {path.stem for path in Path(shims.__file__).parent.glob("*.py")} - {"__init__", "patching"}
    tried = {name.removeprefix("test_shim_") for name in globals() if name.startswith("test_shim_")}
    assert tried | set(PROBES) == modules


def test_shim_policy_conditions() -> None:
    with unguarded("policy_conditions") as sandbox:
        s3 = protect(sandbox, TLS_ONLY)
        assert refused(s3.put_object, Bucket="run", Key="a"), "moto evaluates Bool now"
    with Sandbox() as sandbox:
        s3 = protect(sandbox, TLS_ONLY, CREATE_ONLY)
        s3.put_object(Bucket="run", Key="a")
        key = "tiny/commits/1.json"
        assert refused(s3.put_object, Bucket="run", Key=key) == "AccessDenied"
        s3.put_object(Bucket="run", Key=key, IfNoneMatch="*")
        assert refused(s3.put_object, Bucket="run", Key=key, IfNoneMatch="*") == "PreconditionFailed"
        assert refused(s3.put_object, Bucket="run", Key=key) == "AccessDenied"
        assert refused(s3.put_object, Bucket="run", Key=key, IfMatch='"x"') == "AccessDenied"
        assert s3.get_object(Bucket="run", Key=key)["ContentLength"] == 0


def test_multipart_upload_works_under_a_create_only_prefix(skerry_sandbox: Sandbox) -> None:
    s3 = protect(skerry_sandbox, CREATE_ONLY)
    where = {"Bucket": "run", "Key": "tiny/commits/2.json"}
    for condition, expected in (({}, "AccessDenied"), ({"IfNoneMatch": "*"}, "")):
        upload = s3.create_multipart_upload(**where)["UploadId"]
        part = s3.upload_part(**where, UploadId=upload, PartNumber=1, Body=b"x" * 100)
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        finish = s3.complete_multipart_upload
        assert refused(finish, **where, UploadId=upload, MultipartUpload=parts, **condition) == expected


def test_a_bucket_s_policy_may_single_out_a_role() -> None:
    with Sandbox(enforce_iam=True) as sandbox:
        role = make_role(sandbox, "replica", policy=allow({"Action": "s3:*", "Resource": "*"}))
        deny = {
            "Effect": "Deny",
            "Principal": {"AWS": role},
            "Action": "s3:PutObject",
            "Resource": "arn:aws:s3:::run/*",
        }
        s3 = protect(sandbox, deny)
        s3.put_object(Bucket="run", Key="a")
        keys = {name.lower(): value for name, value in role_keys(role, "x", "us-east-1").items()}
        foreign = sandbox.client("s3", **keys)
        assert refused(foreign.put_object, Bucket="run", Key="b") == "AccessDenied"
        foreign.get_object(Bucket="run", Key="a")


def test_shim_secret_resources() -> None:
    refusals: list[tuple[str, str]] = []
    for without in ({"secret_resources"}, ()):
        with Sandbox(enforce_iam=True, without=without) as sandbox:
            manager, ssm = sandbox.client("secretsmanager"), sandbox.client("ssm")
            arns = [manager.create_secret(Name=name, SecretString=name)["ARN"] for name in ("ours", "theirs")]
            for name in ("ours", "theirs"):
                ssm.put_parameter(Name=f"/{name}", Value=name, Type="SecureString")
            parameter = f"arn:aws:ssm:us-east-1:{sandbox.account}:parameter"
            read = {"Action": ["secretsmanager:GetSecretValue", "ssm:GetParameter"]}
            policy = allow({**read, "Resource": [arns[0], f"{parameter}/ours"]})
            role = make_role(sandbox, "replica", policy=policy)
            keys = {name.lower(): value for name, value in role_keys(role, "x", "us-east-1").items()}
            foreign, other = sandbox.client("secretsmanager", **keys), sandbox.client("ssm", **keys)
            assert foreign.get_secret_value(SecretId=arns[0])["SecretString"] == "ours"
            assert other.get_parameter(Name=f"{parameter}/ours", WithDecryption=True)["Parameter"]["Value"] == "ours"
            refusal = refused(foreign.get_secret_value, SecretId=arns[1])
            refusals.append((refusal, refused(other.get_parameter, Name="/theirs", WithDecryption=True)))
    assert refusals[0] == ("", ""), "moto checks the names of secrets now"
    # moto's denial has the status 403 and no error of the service.
    assert refusals[1] == ("403", "403")


def test_shim_policy_actions_and_denials() -> None:
    codes: list[tuple[str, str]] = []
    for without in ({"policy_actions_and_denials"}, ()):
        with Sandbox(without=without) as sandbox:
            s3 = protect(sandbox, NO_READING)
            s3.put_object(Bucket="run", Key="secret")
            codes.append(tuple(refused(read, Bucket="run", Key="secret") for read in (s3.get_object, s3.head_object)))
    assert codes == [("403", ""), ("AccessDenied", "403")], "moto says why now, or knows what a HEAD needs"


def test_shim_registry_behind_ecr() -> None:
    digest, manifest = f"sha256:{'ab' * 32}", b'{"config": {"digest": "sha256:cd"}}'
    contents = {f"/v2/skerry/manifests/{digest}": manifest, "/v2/skerry/blobs/sha256:cd": b"{}"}
    layer: Any = {"repositoryName": "skerry", "layerDigest": "sha256:cd"}

    def images(ecr: Any, named: str = digest) -> Any:
        return ecr.batch_get_image(repositoryName="skerry", imageIds=[{"imageDigest": named}])

    with registry(contents) as server:
        with Sandbox(registry=server.host, without={"registry_behind_ecr"}) as sandbox:
            ecr = sandbox.client("ecr")
            ecr.create_repository(repositoryName="skerry")
            assert images(ecr)["images"] == [], "moto asks a registry now"
            assert refused(ecr.get_download_url_for_layer, **layer), "moto has addresses of layers now"
        with Sandbox(registry=server.host) as sandbox:
            ecr = sandbox.client("ecr")
            ecr.create_repository(repositoryName="skerry")
            (image,) = images(ecr)["images"]
            assert image["imageManifest"].encode() == manifest
            assert images(ecr, f"sha256:{'cd' * 32}")["failures"][0]["failureCode"] == "ImageNotFound"
            with urlopen(ecr.get_download_url_for_layer(**layer)["downloadUrl"]) as blob:  # noqa: S310  loopback
                assert blob.read() == b"{}"
    with Sandbox() as sandbox:
        ecr = sandbox.client("ecr")
        assert refused(ecr.get_download_url_for_layer, **layer) == "RepositoryNotFoundException"
        ecr.create_repository(repositoryName="skerry")
        assert refused(ecr.get_download_url_for_layer, **layer) == "LayersNotFoundException"


def managed(sandbox: Sandbox) -> str:
    """The code of attaching a policy of AWS."""
    arn = "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
    make_role(sandbox, "machine", "ec2.amazonaws.com")
    return refused(sandbox.client("iam").attach_role_policy, RoleName="machine", PolicyArn=arn)


def test_shim_batch_service_linked_role() -> None:
    with unguarded("batch_service_linked_role") as sandbox, pytest.raises(Exception, match="ServiceRole is required"):
        make_place(sandbox)
    with Sandbox() as sandbox:
        place = make_place(sandbox)
        result = place.batch.describe_compute_environments(computeEnvironments=["spot"])["computeEnvironments"][0]
        assert result["serviceRole"].endswith("/AWSServiceRoleForBatch")
        assert sandbox.client("iam").get_role(RoleName="AWSServiceRoleForBatch")


def variables(sandbox: Sandbox) -> list[int]:
    """The number of variables of a job with two, at each of three reads."""
    place = make_place(sandbox)
    both = [{"name": "A", "value": "1"}, {"name": "B", "value": "definition"}]
    definition = place.define(container={"environment": both})
    override = {"environment": [{"name": "B", "value": "job"}]}
    job = place.submit(definition, containerOverrides=override)
    looks = [place.job(job)["container"]["environment"] for _ in range(3)]
    assert {"name": "B", "value": "job"} in looks[-1]
    return [len(look) for look in looks]


def submissions(sandbox: Sandbox) -> list[str]:
    """The codes of a submission to a queue that is disabled, and of one of a definition that is gone."""
    place = make_place(sandbox)
    definition = place.define()
    place.batch.update_job_queue(jobQueue="queue", state="DISABLED")
    ask = {"jobName": "job", "jobQueue": "queue", "jobDefinition": definition}
    codes = [refused(place.batch.submit_job, **ask)]
    place.batch.update_job_queue(jobQueue="queue", state="ENABLED")
    place.batch.deregister_job_definition(jobDefinition=definition)
    codes.append(refused(place.batch.submit_job, **ask))
    return codes


def test_submission_with_dependencies_is_refused(skerry_sandbox: Sandbox) -> None:
    place = make_place(skerry_sandbox)
    ask = {"jobName": "job", "jobQueue": "queue", "jobDefinition": place.define(), "dependsOn": [{"jobId": "x"}]}
    assert refused(place.batch.submit_job, **ask) == "NotImplemented"


def listings(sandbox: Sandbox) -> tuple[int, int, int, str]:
    place = make_place(sandbox)
    place.submit(place.define())
    listed = place.batch.list_jobs(jobQueue="queue")["jobSummaryList"]
    described = place.batch.describe_jobs(jobs=[])["jobs"]
    definitions = place.batch.describe_job_definitions(jobDefinitions=["work:1"])["jobDefinitions"]
    many = refused(place.batch.describe_jobs, jobs=[str(number) for number in range(101)])
    return len(listed), len(described), len(definitions), many


def updates(sandbox: Sandbox) -> tuple[int, list[int]]:
    """The size and the time limits after both were updated."""
    place = make_place(sandbox)
    place.batch.update_compute_environment(computeEnvironment="spot", computeResources={"maxvCpus": 64})
    limit = {"reason": "CAPACITY", "state": "RUNNABLE", "maxTimeSeconds": 600, "action": "CANCEL"}
    place.batch.update_job_queue(jobQueue="queue", jobStateTimeLimitActions=[limit])
    environment = place.batch.describe_compute_environments()["computeEnvironments"][0]
    limits = place.batch.describe_job_queues()["jobQueues"][0].get("jobStateTimeLimitActions", [])
    return environment["computeResources"]["maxvCpus"], [item["maxTimeSeconds"] for item in limits]


def deletions(sandbox: Sandbox) -> list[str]:
    """The codes of deleting in the wrong order, then of doing it right."""
    place = make_place(sandbox)
    codes = [
        refused(place.batch.delete_compute_environment, computeEnvironment="spot"),
        refused(place.batch.delete_job_queue, jobQueue="queue"),
    ]
    if not any(codes):
        return codes
    job = place.submit(place.define())
    place.batch.update_compute_environment(computeEnvironment="spot", state="DISABLED")
    codes.append(refused(place.batch.delete_compute_environment, computeEnvironment="spot"))
    place.batch.update_job_queue(jobQueue="queue", state="DISABLED")
    codes.append(refused(place.batch.delete_job_queue, jobQueue="queue"))
    codes.append(place.job(job)["status"])
    codes.append(refused(place.batch.delete_compute_environment, computeEnvironment="spot"))
    return codes


def bucket_tags(sandbox: Sandbox) -> int:
    s3 = sandbox.client("s3")
    s3.create_bucket(Bucket="tagged", CreateBucketConfiguration={"Tags": [{"Key": "team", "Value": "a"}]})
    try:
        return len(s3.get_bucket_tagging(Bucket="tagged")["TagSet"])
    except s3.exceptions.ClientError:
        return 0


def list_during_deletion(sandbox: Sandbox) -> list[str] | str:
    """The keys that a listing finds although one of them is deleted after the listing began."""
    s3 = sandbox.client("s3")
    s3.create_bucket(Bucket="listed")
    for key in ("a", "b", "c"):
        s3.put_object(Bucket="listed", Key=key, Body=b"x")
    listing = s3_backends[sandbox.account]["aws"].buckets["listed"].keys.items()
    first, _ = next(listing)
    s3.delete_object(Bucket="listed", Key="b")
    try:
        return [first, *(key for key, _ in listing)]
    except KeyError as error:
        return str(error)


NO: Final = "ClientException"


# By shim: what is tried, its result by moto alone, and with the shim.
def has_images(sandbox: Sandbox) -> bool:
    return bool(sandbox.client("ec2").describe_images()["Images"])


PROBES: Final[dict[str, tuple[Callable[[Sandbox], Any], Any, Any]]] = {
    "tags_at_bucket_creation": (bucket_tags, 0, 1),
    "listing_during_deletes": (list_during_deletion, "'b'", ["a", "b", "c"]),
    "managed_policies": (managed, "NoSuchEntity", ""),
    "quick_accounts": (has_images, True, False),
    "unshare_job_environment": (variables, [3, 4, 5], [2, 2, 2]),
    "batch_submitting": (submissions, ["", ""], [NO, NO]),
    "batch_listing": (listings, (1, 1, 0, ""), (0, 0, 1, NO)),
    "batch_update_fields": (updates, (8, []), (64, [600])),
    "batch_deleting": (deletions, ["", ""], [NO, NO, NO, "", "FAILED", ""]),
}


@pytest.mark.parametrize("shim", PROBES)
def test_gap_of_moto_is_closed_by_its_shim(shim: str) -> None:
    probe, alone, shimmed = PROBES[shim]
    with unguarded(shim) as sandbox:
        assert probe(sandbox) == alone, "moto has no such gap now"
    with Sandbox() as sandbox:
        assert probe(sandbox) == shimmed


def statuses(sandbox: Sandbox, looks: int) -> list[str]:
    batch = sandbox.client("batch")
    result = (batch.describe_compute_environments()["computeEnvironments"] for _ in range(looks))
    return [item[0]["status"] if item else "gone" for item in result]


def test_shim_batch_settling() -> None:
    with Sandbox(without={"batch_settling"}, settling=2) as sandbox:
        make_place(sandbox)
        assert statuses(sandbox, 1) == ["VALID"]
    with Sandbox() as sandbox:
        place = make_place(sandbox)
        sandbox.settling = 2
        order = [{"order": 1, "computeEnvironment": make_environment(sandbox, "other")}]
        queue = {"jobQueueName": "other", "state": "ENABLED", "priority": 1, "computeEnvironmentOrder": order}
        assert refused(place.batch.create_job_queue, **queue) == NO
    with Sandbox() as sandbox:
        place = make_place(sandbox)
        place.batch.update_job_queue(jobQueue="queue", state="DISABLED")
        place.batch.delete_job_queue(jobQueue="queue")
        sandbox.settling = 2
        place.batch.update_compute_environment(computeEnvironment="spot", state="DISABLED")
        delete = place.batch.delete_compute_environment
        assert refused(delete, computeEnvironment="spot") == NO
        assert statuses(sandbox, 3) == ["UPDATING", "UPDATING", "VALID"]
        delete(computeEnvironment="spot")
        assert statuses(sandbox, 4) == ["DELETING", "DELETING", "gone", "gone"]


def test_queue_is_created_for_a_settled_environment(skerry_sandbox: Sandbox) -> None:
    place = make_place(skerry_sandbox)
    skerry_sandbox.settling = 1
    other = make_environment(skerry_sandbox, "other")
    describe = place.batch.describe_compute_environments
    looks = [[item["status"] for item in describe()["computeEnvironments"]] for _ in range(2)]
    assert looks == [["VALID", "CREATING"], ["VALID", "VALID"]]
    make_queue(skerry_sandbox, other, "slow")
    place.submit(place.define())


def test_shim_batch_jobs() -> None:
    # moto's own way needs Docker; what it lacks is seen in its words.
    own = inspect.getsource(Job)
    for lacking in ("evaluateOnExit", "SIGTERM", "shm_size", "mem_limit", "assume_role", "awslogs-group"):
        assert lacking not in own, f"moto knows {lacking} now"
    with Sandbox() as sandbox:
        place = make_place(sandbox)
        job = place.submit(place.define(retryStrategy={"attempts": 2}))
        assert sandbox.batch.finish(job, 1) == "RUNNABLE"
        assert sandbox.batch.finish(job, 1) == "FAILED"
        assert [item["container"]["exitCode"] for item in place.job(job)["attempts"]] == [1, 1]


TRAINING: Final[dict[str, Any]] = {
    "TrainingJobName": "one",
    "AlgorithmSpecification": {"TrainingImage": "image", "TrainingInputMode": "File"},
    "OutputDataConfig": {"S3OutputPath": "s3://bucket/output"},
    "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1},
    "StoppingCondition": {"MaxRuntimeInSeconds": 60},
    "Environment": {"A": "1"},
}
UNFIT: Final[dict[str, dict[str, Any]]] = {
    "a name with a dot": {"TrainingJobName": "o.ne"},
    "no such machine": {"ResourceConfig": {**TRAINING["ResourceConfig"], "InstanceType": "ml.g99.xlarge"}},
    "a variable that is too long": {"Environment": {"A": "x" * 513}},
    "too many retries": {"RetryStrategy": {"MaximumRetryAttempts": 31}},
    "a wait without spot": {"StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60}},
    "spot without a wait": {"EnableManagedSpotTraining": True},
    "a job of a month": {"StoppingCondition": {"MaxRuntimeInSeconds": 29 * 24 * 3600}},
}


def trained(sandbox: Sandbox, **settings: Any) -> tuple[str, ...]:
    """The codes with which a job is refused: for want of a role, as it is, a second time."""
    sagemaker, arn = sandbox.client("sagemaker"), f"arn:aws:iam::{sandbox.account}:role/trainer"
    request = {**TRAINING, **settings, "RoleArn": arn}
    first = refused(sagemaker.create_training_job, **request)
    make_role(sandbox, "trainer", "sagemaker.amazonaws.com")
    return first, *(refused(sagemaker.create_training_job, **request) for _ in range(2))


def test_shim_sagemaker_requests() -> None:
    with unguarded("sagemaker_requests") as sandbox:
        assert trained(sandbox) == ("", "", ""), "moto looks at roles or names of jobs now"
    for what, settings in UNFIT.items():
        with Sandbox(without={"sagemaker_jobs"}) as sandbox:
            assert trained(sandbox, **settings) == ("ValidationException",) * 3, what
    with Sandbox() as sandbox:
        assert trained(sandbox) == ("ValidationException", "", "ResourceInUse")
        sandbox.reset()
        make_role(sandbox, "trainer")  # for containers, and not for SageMaker
        request = {**TRAINING, "RoleArn": f"arn:aws:iam::{sandbox.account}:role/trainer"}
        assert refused(sandbox.client("sagemaker").create_training_job, **request) == "ValidationException"


def test_shim_sagemaker_jobs() -> None:
    with unguarded("sagemaker_jobs") as sandbox:
        trained(sandbox)
        sagemaker = sandbox.client("sagemaker")
        response = sagemaker.describe_training_job(TrainingJobName="one")
        assert response["TrainingJobStatus"] == "Completed", "moto's jobs take their time now"
        assert "Environment" not in response, "moto keeps variables now"
        for verb in (sagemaker.stop_training_job, sagemaker.delete_training_job):
            assert refused(verb, TrainingJobName="one") == "NotImplemented", "moto knows this now"
    with Sandbox() as sandbox:
        trained(sandbox)
        sagemaker = sandbox.client("sagemaker")
        response = sagemaker.describe_training_job(TrainingJobName="one")
        assert (response["TrainingJobStatus"], response["Environment"]) == ("InProgress", {"A": "1"})
        assert sandbox.inventory()["training job"] == ("one",)
        assert refused(sagemaker.delete_training_job, TrainingJobName="one") == "ResourceInUse"
        sagemaker.stop_training_job(TrainingJobName="one")
        assert refused(sagemaker.stop_training_job, TrainingJobName="one") == "ValidationException"
        assert "training job" not in sandbox.inventory()
        sagemaker.delete_training_job(TrainingJobName="one")
        assert refused(sagemaker.describe_training_job, TrainingJobName="one") == "ValidationException"


CLAIMS: Final = {"sub": "1122", "oaud": "run", "aud": ["1122", "replica@acme.iam.gserviceaccount.com"]}
# `aud` of a trust is a token's azp where it has one, else its audience.
WRONG: Final[list[tuple[dict[str, Any], str]]] = [
    ({"azp": "replica@acme.iam.gserviceaccount.com"}, ""),
    ({"sub": "3344"}, "AccessDenied"),
    ({"azp": "3344"}, "AccessDenied"),
    ({"azp": None}, "AccessDenied"),
    ({"aud": "another"}, "AccessDenied"),
    ({"exp": 1_700_000_000}, "ExpiredTokenException"),
    ({"iss": "https://token.actions.githubusercontent.com"}, "InvalidIdentityToken"),
    ({"iss": None}, "InvalidIdentityToken"),
    ({"exp": "soon"}, "InvalidIdentityToken"),
]


def identity_token(**claims: Any) -> str:
    """As Google's metadata server makes one out, but for what is said."""
    response = {"iss": "https://accounts.google.com", "sub": "1122", "azp": "1122", "aud": "run", "exp": 4_000_000_000}
    parts = ({"alg": "RS256"}, response | claims, "nobody's")
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


@pytest.mark.parametrize("enforces", [False, True])
def test_shim_web_identity(enforces: bool) -> None:  # noqa: FBT001
    taken = {"RoleArn": "arn:aws:iam::123456789012:role/visitor", "RoleSessionName": "replica-0"}
    with Sandbox(without={"web_identity"}, enforce_iam=enforces) as sandbox:
        take = unsigned_sts(sandbox).assume_role_with_web_identity
        code = refused(take, **taken, WebIdentityToken="no token at all")
        assert code == ("SandboxFailed" if enforces else ""), "moto looks at the token, or needs no signature, now"
    conditions = {"StringEquals": {f"accounts.google.com:{name}": text for name, text in CLAIMS.items()}}
    statement = {
        "Effect": "Allow",
        "Principal": {"Federated": "accounts.google.com"},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": conditions,
    }
    with Sandbox(enforce_iam=enforces) as sandbox:
        trust = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        sandbox.client("iam").create_role(RoleName="visitor", AssumeRolePolicyDocument=trust)
        take = unsigned_sts(sandbox).assume_role_with_web_identity
        created = take(**taken, WebIdentityToken=identity_token())
        assert created["AssumedRoleUser"]["Arn"].endswith("assumed-role/visitor/replica-0")
        for claims, expected in WRONG:
            assert refused(take, **taken, WebIdentityToken=identity_token(**claims)) == expected, claims
        assert refused(take, **taken, WebIdentityToken="no token at all") == "InvalidIdentityToken"
        for change, expected in (
            ({"RoleArn": "arn:aws:iam::123456789012:role/nobody"}, "AccessDenied"),
            ({"RoleSessionName": "replica 0"}, "ValidationError"),
            ({"DurationSeconds": 3601}, "ValidationError"),
        ):
            assert refused(take, **taken | change, WebIdentityToken=identity_token()) == expected


def test_token_of_a_cluster_needs_a_provider_and_its_signature(skerry_sandbox: Sandbox) -> None:
    url, account = "https://oidc.example.com/id/0123", "system:serviceaccount:train:skerry-a-0"
    cluster, thief = TokenIssuer(url), TokenIssuer(url)
    iam, audience = skerry_sandbox.client("iam"), "sts.amazonaws.com"
    arn = f"arn:aws:iam::{skerry_sandbox.account}:oidc-provider/oidc.example.com/id/0123"
    statement = {
        "Effect": "Allow",
        "Principal": {"Federated": arn},
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {"StringEquals": {f"{url[8:]}:sub": account, f"{url[8:]}:aud": audience}},
    }
    trust = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    role = iam.create_role(RoleName="pod", AssumeRolePolicyDocument=trust)["Role"]["Arn"]

    def take(issuer: TokenIssuer, **claims: Any) -> str:
        token = issuer.token({"sub": account, "aud": [audience], "exp": 4_000_000_000} | claims)
        verb = unsigned_sts(skerry_sandbox).assume_role_with_web_identity
        return refused(verb, RoleArn=role, RoleSessionName="replica-0", WebIdentityToken=token)

    assert take(cluster) == "InvalidIdentityToken", "no provider"
    iam.create_open_id_connect_provider(Url=url, ClientIDList=[audience], ThumbprintList=["0" * 40])
    assert take(cluster) == "InvalidIdentityToken", "no keys"
    skerry_sandbox.issuers[url] = cluster.keys
    assert take(cluster) == ""
    assert take(thief) == "InvalidIdentityToken"
    assert take(cluster, aud=["another"]) == "InvalidIdentityToken"
    assert take(cluster, sub=f"{account}0") == "AccessDenied"
    assert take(cluster, exp=1_700_000_000) == "ExpiredTokenException"


def unsigned_sts(sandbox: Sandbox) -> Any:
    """STS's client without a key."""
    config = Config(signature_version=UNSIGNED, retries={"total_max_attempts": 1})
    return boto3.client("sts", endpoint_url=sandbox.endpoint, region_name="us-east-1", config=config)


def test_deny_in_a_trust_policy_overrides_allow(skerry_sandbox: Sandbox) -> None:
    allow_all = {
        "Effect": "Allow",
        "Principal": {"Federated": "accounts.google.com"},
        "Action": "sts:AssumeRoleWithWebIdentity",
    }
    deny_one = allow_all | {"Effect": "Deny", "Condition": {"StringEquals": {"accounts.google.com:sub": "1122"}}}
    trust = json.dumps({"Version": "2012-10-17", "Statement": [allow_all, deny_one]})
    arn = skerry_sandbox.client("iam").create_role(RoleName="visitor", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    take = unsigned_sts(skerry_sandbox).assume_role_with_web_identity
    who = {"RoleArn": arn, "RoleSessionName": "replica-0"}
    assert refused(take, **who, WebIdentityToken=identity_token()) == "AccessDenied"
    assert not refused(take, **who, WebIdentityToken=identity_token(sub="3344"))


def test_shim_signed_url_posts() -> None:
    """The question as google-auth signs it: in the address, for AWS's own host."""

    def identity_response(sandbox: Sandbox, secret: str) -> tuple[int, str]:
        keys = AwsSecurityCredentials(sandbox.environment["AWS_ACCESS_KEY_ID"], secret)
        query = "Action=GetCallerIdentity&Version=2011-06-15"
        url = f"https://sts.us-east-1.amazonaws.com?{query}"
        signed = RequestSigner("us-east-1").get_request_options(keys, url, "POST")
        request = Request(f"{sandbox.endpoint}/?{query}", data=b"", headers=signed["headers"], method="POST")  # noqa: S310  loopback
        try:
            with urlopen(request) as answer:  # noqa: S310  same
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, ""

    with Sandbox(without={"signed_url_posts"}, enforce_iam=True) as sandbox:
        secret = sandbox.environment["AWS_SECRET_ACCESS_KEY"]
        assert identity_response(sandbox, secret)[0] == 403, "moto hashes an empty body as one now"
    with Sandbox(enforce_iam=True) as sandbox:
        status, body = identity_response(sandbox, sandbox.environment["AWS_SECRET_ACCESS_KEY"])
        assert (status, ":user/operator<" in body) == (200, True)
        assert identity_response(sandbox, "another's")[0] == 403
