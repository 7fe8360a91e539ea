"""The login that a spec names: all calls of its commands, and their store, use it; jobs get nothing of it."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.sts.models import sts_backends
from tests.infra.deploy.account import DIGEST, skerry, write_run, write_spec
from tests.infra.deploy.test_company_rules import VERTEX
from tests.support.slurmsite import until
from tests.testing.google.kit import make_account

from skerry.infra import clouds, targets
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.spec import model
from skerry.runtime.clock import SystemClock
from skerry.runtime.errors import Unauthorized
from skerry.testing.plugin import skerry_google

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.testing.google import GoogleSandbox
    from skerry.testing.sandbox import Sandbox

__all__ = ["skerry_google"]

ROLE: Final = "arn:aws:iam::123456789012:role/deployer"
ELSEWHERE: Final = ROLE.replace("123456789012", "210987654321")
DEPLOYER: Final = "deployer@skerry-sandbox.iam.gserviceaccount.com"
SESSION: Final = re.compile(r"\b(?:Aws|Google)\(")
RUN: Final = "s3://acme-skerry/runs/tiny"
COMMANDS: Final = (
    "validate {}",
    "plan {} --out {}.plan",
    "apply {}.plan",
    "status {}",
    "logs {}",
    "estimate {}",
    "doctor {}",
    "state list {}",
    "runs {}",
    "import aws_bucket.store {} --auto-approve",
    "unlock {}",
    "graph {}",
    "report {} --output {}.html",
    "artifacts {}",
    "pin {} --list",
    "extend {} --rounds 9",
    "replicate {}",
    "doctor {} --repair",
    "cancel {} --auto-approve",
    "destroy {} --yes --data",
)


class AheadClock(SystemClock):
    """The time, and some hours more."""

    hours = 0.0

    def utc_text(self) -> str:
        """See Clock."""
        return (dt.datetime.fromisoformat(super().utc_text()) + dt.timedelta(hours=self.hours)).isoformat()


def callers(sandbox: Sandbox, *, of: Callable[[str], bool] = lambda _: True) -> set[str]:
    """The principals that signed the calls, without those that assumed the role."""
    return {call.caller for call in sandbox.calls if call.name != "sts:AssumeRole" and of(call.name)}


def is_of_objects(name: str) -> bool:
    return name in {"s3:GetObject", "s3:PutObject", "s3:DeleteObject"}


def sessions() -> list[Any]:
    return sts_backends[DEFAULT_ACCOUNT_ID]["aws"].assumed_roles


def with_login(tmp_path: Path, section: str) -> Path:
    path = write_spec(tmp_path, count=1)
    path.write_text(path.read_text() + section)
    return path


@pytest.fixture
def profile(tmp_path: Path, skerry_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> str:
    """The profile `prod` with the key of a user of this name; the environment has the key of the operator, too."""
    iam = skerry_sandbox.client("iam")
    iam.create_user(UserName="prod")
    key = iam.create_access_key(UserName="prod")["AccessKey"]
    file = tmp_path / "config"
    keys = f"aws_access_key_id = {key['AccessKeyId']}\naws_secret_access_key = {key['SecretAccessKey']}\n"
    file.write_text(f"[profile prod]\n{keys}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    skerry_sandbox.calls.clear()
    return "prod"


@pytest.fixture
def no_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """google-auth asks Google itself, beside each token of an account, for the regions that it is valid in."""
    manager = "google.auth._regional_access_boundary_utils._RegionalAccessBoundaryManager"
    monkeypatch.setattr(f"{manager}.maybe_start_refresh", lambda *_: None)


def test_all_commands_and_their_store_use_the_assumed_role(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    mirror = "{to: 's3://acme-mirror/runs', region: us-west-2, log: every round}"
    path = with_login(tmp_path, f"aws: {{assume_role: '{ROLE}'}}\nreplication: [{mirror}]\nfailover: automatic\n")
    output = ""
    for command in COMMANDS:
        skerry_sandbox.calls.clear()
        result = skerry(*command.replace("{}", str(path)).split())
        output += result.output + result.stderr
        if command.startswith("validate"):
            assert not skerry_sandbox.calls
            continue
        assert callers(skerry_sandbox) == {"role/deployer"}, command
        assumed = [call for call in skerry_sandbox.calls if call.name == "sts:AssumeRole"]
        assert [(call.caller, call.params["RoleArn"]) for call in assumed] == [("user/operator", ROLE)], command
        assert assumed[0].params["RoleSessionName"].startswith("skerry-")
        if command.startswith("apply"):
            assert callers(skerry_sandbox, of=is_of_objects) == {"role/deployer"}
            assert {"iam:CreateRole", "batch:SubmitJob", "s3:PutObject"} <= set(skerry_sandbox.calls.names)
            # Jobs are submitted by the role and know nothing of it; nor does the state, or the plan.
            stored = [json.dumps(call.params, default=str) for call in skerry_sandbox.calls if "batch" in call.name]
            s3 = skerry_sandbox.client("s3")
            keys = [entry["Key"] for entry in s3.list_objects_v2(Bucket="acme-skerry")["Contents"]]
            stored += [repr(s3.get_object(Bucket="acme-skerry", Key=key)["Body"].read()) for key in keys]
            assert len(stored) > 5
            assert not any("deployer" in text or "AWS_PROFILE" in text for text in stored)
    assert "as arn:aws:sts::123456789012:assumed-role/deployer/skerry-" in output
    texts = [output, (tmp_path / f"{path.name}.plan").read_text()]
    secrets = [text for session in sessions() for text in (session.secret_access_key, session.session_token)]
    assert len(secrets) > 10
    assert not any(secret in text for secret in secrets for text in texts)


def test_sessions_of_a_spec_are_opened_in_one_place() -> None:
    core = Path(targets.__file__).parents[1]
    opening = {path.relative_to(core).as_posix() for path in core.rglob("*.py") if SESSION.search(path.read_text())}
    # An assumed role has a session of its own for the credentials that assume it.
    assert opening == {
        "clouds/open_cloud_sessions.py",
        "clouds/aws/session.py",
    }


def test_profile_has_precedence_over_the_environment(
    tmp_path: Path, skerry_sandbox: Sandbox, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://127.0.0.1:9/")
    path = str(with_login(tmp_path, f"aws: {{profile: {profile}}}\n"))
    assert "as arn:aws:iam::123456789012:user/prod" in skerry("apply", path, "--auto-approve").output
    assert callers(skerry_sandbox) == callers(skerry_sandbox, of=is_of_objects) == {"user/prod"}
    skerry_sandbox.calls.clear()
    skerry("plan", path, "--set", f"aws.assume_role='{ROLE}'")
    assert skerry_sandbox.calls.names.count("sts:AssumeRole") == 1
    assert {call.caller for call in skerry_sandbox.calls if call.name == "sts:AssumeRole"} == {"user/prod"}
    assert callers(skerry_sandbox) == {"role/deployer"}


def test_account_is_checked_after_the_role_is_assumed(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = str(with_login(tmp_path, f"aws: {{assume_role: '{ELSEWHERE}', allowed_accounts: ['123456789012']}}\n"))
    assert "aws account 210987654321 is not among" in skerry("plan", path, code=1).stderr
    assert set(skerry_sandbox.calls.names) == {"sts:AssumeRole", "sts:GetCallerIdentity"}
    allowed = skerry("plan", path, "--set", "aws.allowed_accounts=['210987654321']").output
    assert "in aws account 210987654321 as arn:aws:sts::210987654321:assumed-role/deployer/skerry-" in allowed


def test_keys_of_the_role_are_fetched_anew_before_they_expire(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    file = model.load(with_login(tmp_path, f"aws: {{assume_role: '{ROLE}'}}\n"), targets.kinds(), ())
    clock = AheadClock()
    access = OperatorAccess.of(file, clock, os.environ)
    store = clouds.open_store(RUN, access, {}, 5.0)

    def write() -> set[str]:
        skerry_sandbox.calls.clear()
        store.replace("key", b"value")
        return callers(skerry_sandbox)

    access.aws.call("iam", "", "list_roles")
    assert write() == {"role/deployer"}
    assert len(sessions()) == 1
    # The first keys end in five minutes. From now on, they are those of an unknown caller.
    sessions().clear()
    assert write() == {"anonymous"}
    clock.hours = 55 / 60
    # obstore asks for keys ten times a second at most.
    until(lambda: write() == {"role/deployer"})
    assert sessions()
    skerry_sandbox.calls.clear()
    access.aws.call("iam", "", "list_roles")
    assert callers(skerry_sandbox) == {"role/deployer"}


@pytest.mark.parametrize("command", ["plan", "apply", "status", "doctor", "runs"])
def test_role_that_may_not_be_assumed_is_one_line(tmp_path: Path, skerry_sandbox: Sandbox, command: str) -> None:
    path = str(with_login(tmp_path, f"aws:\n  assume_role: '{ROLE}'\n"))
    skerry_sandbox.fail(how="deny", on="sts:AssumeRole", times=None)
    result = skerry(command, path, code=1)
    text = " ".join((result.stdout + result.stderr).split())
    assert f"aws.assume_role ({path}:19:16): these credentials lack the permission sts:AssumeRole" in text
    assert "allow them sts:AssumeRole on the role, and name them in its trust policy" in text
    assert set(skerry_sandbox.calls.names) == {"sts:AssumeRole"}


def test_unknown_profile_is_one_line(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = str(with_login(tmp_path, "aws:\n  profile: prod\n"))
    text = " ".join(skerry("apply", path, "--auto-approve", code=2).stderr.split())
    assert "aws.profile (" in text
    assert "no profile prod in ~/.aws/config; write one that exists, or run `aws configure sso --profile prod`" in text
    assert not skerry_sandbox.calls


def test_role_that_is_lost_later_is_the_store_s_error(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry_sandbox.client("s3").create_bucket(Bucket="acme-skerry")
    file = model.load(with_login(tmp_path, f"aws: {{assume_role: '{ROLE}'}}\n"), targets.kinds(), ())
    skerry_sandbox.fail(how="deny", on="sts:AssumeRole", times=None)
    store = clouds.open_store(RUN, OperatorAccess.of(file, SystemClock(), os.environ), {}, 5.0)
    with pytest.raises(Unauthorized, match=r"no credentials for this store: .* aws\.assume_role"):
        store.read("key")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("aws: {profile: prod}", "aws.profile"),
        (f"aws: {{assume_role: '{ROLE}'}}", "aws.assume_role"),
        (f"google: {{impersonate: {DEPLOYER}}}", "google.impersonate"),
    ],
)
def test_replicas_on_this_machine_have_no_login_of_the_spec(tmp_path: Path, section: str, text: str) -> None:
    path = write_run(tmp_path, "  - {name: a, count: 1, target: {kind: local}}\n", more=f"{section}\n")
    stderr = skerry("validate", str(path), code=2).stderr
    assert f"{text} " in stderr.replace(":", " ")
    assert "replicas of local use your environment's credentials: remove it, and" in stderr


@pytest.mark.parametrize(
    "section",
    [
        "aws: {assume_role: deployer}",
        f"aws: {{assume_role: '{ROLE.replace('role', 'user')}'}}",
        "google: {impersonate: ada@acme.org}",
    ],
)
def test_login_of_another_form_is_refused(tmp_path: Path, section: str) -> None:
    assert "such as" in skerry("validate", str(with_login(tmp_path, f"{section}\n")), code=2).stderr


@pytest.mark.usefixtures("no_boundaries")
def test_google_calls_and_store_act_as_the_account(
    tmp_path: Path, skerry_google: GoogleSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    skerry_google.any_image = True
    assert make_account(skerry_google, "deployer") == DEPLOYER
    skerry_google.accounts.make_owner(DEPLOYER)
    skerry_google.enable("iamcredentials.googleapis.com")
    groups = VERTEX.format(project=skerry_google.project, digest=DIGEST)
    more = f"limits: {{max_hours: 24}}\ngoogle: {{impersonate: {DEPLOYER}}}\n"
    path = str(write_run(tmp_path, groups, store="gs://acme-skerry/runs", more=more))
    skerry_google.calls.clear()
    assert f"as {DEPLOYER}" in skerry("apply", path, "--auto-approve").output
    generate = "iamcredentials.projects.serviceAccounts.generateAccessToken"
    tokens = [call.caller for call in skerry_google.calls if call.name == generate]
    assert tokens == ["user:operator@example.com"]
    others = [call for call in skerry_google.calls if call.name != generate]
    assert {call.caller for call in others} == {f"serviceAccount:{DEPLOYER}"}
    written = {"storage.objects.insert", "aiplatform.projects.locations.customJobs.create"}
    assert written <= {call.name for call in others}


@pytest.mark.usefixtures("no_boundaries")
def test_account_that_may_not_be_impersonated_is_one_line(tmp_path: Path, skerry_google: GoogleSandbox) -> None:
    make_account(skerry_google, "deployer")
    skerry_google.enable("iamcredentials.googleapis.com")
    skerry_google.restrict(())
    groups = VERTEX.format(project=skerry_google.project, digest=DIGEST)
    more = f"limits: {{max_hours: 24}}\ngoogle: {{impersonate: {DEPLOYER}}}\n"
    path = str(write_run(tmp_path, groups, store="gs://acme-skerry/runs", more=more))
    text = " ".join(skerry("plan", path, code=1).stderr.split())
    assert "google.impersonate (" in text
    assert f"these credentials may not act as {DEPLOYER}" in text
    assert "give them roles/iam.serviceAccountTokenCreator on it" in text
