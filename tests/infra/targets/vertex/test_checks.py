from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.infra.targets.vertex.kit import PROJECT, context_of
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.cost import prices
from skerry.infra.targets.vertex.checks import checks
from skerry.infra.targets.vertex.costs import rates
from skerry.infra.targets.vertex.resource_types import Job
from skerry.infra.targets.vertex.target import Vertex, open_target

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.target_and_store_interfaces import Check, Rate, RunContext
    from skerry.testing.google.sandbox import GoogleSandbox

ACCOUNT = f"trainer@{PROJECT}.iam.gserviceaccount.com"
PRICES = """{"format": 1, "cloud": "google", "regions": {"us-central1": {
  "machines": {"g2-standard-8": 1.0, "n1-standard-16": 0.9, "nvidia-tesla-t4": 0.4},
  "spot": {"g2-standard-8": 0.3}}}}"""


PLAIN = "machine: n2-standard-4"
ATTACHED = "n1-standard-16, accelerator: nvidia-tesla-t4, accelerators: 2"


def checks_by_name(google: Google, context: RunContext) -> dict[str, Check]:
    return {check.name: check for check in checks(google, context.spec.replicas)}


def rate_of(tmp_path: Path, target: str, *, count: int = 2, more: str = "", own: bool = True) -> Rate:
    file = tmp_path / "prices.json"
    file.write_text(PRICES)
    context = context_of(tmp_path, target, count=count, more=more)
    (rate,) = rates(prices.load("google", file if own else None), context.spec.limits, context.spec.replicas)
    return rate


def test_checks_report_unreadable_facts_as_unknown(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    by_name = checks_by_name(google, context_of(tmp_path, "machine: g2-standard-24, scheduling: spot", count=3))
    assert {name: check.ok for name, check in by_name.items()} == {
        "Vertex AI": True,
        "rights on Vertex AI": True,
        "machine of vertex": None,
        "quota aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_l4_gpus in us-central1": None,
        "service accounts": True,
    }
    assert "`skerry apply` enables it" in by_name["Vertex AI"].text
    sandbox.enable("aiplatform.googleapis.com")
    assert (
        checks_by_name(google, context_of(tmp_path))["Vertex AI"].text
        == f"aiplatform.googleapis.com is enabled in {PROJECT}"
    )
    quota = next(check for name, check in by_name.items() if name.startswith("quota"))
    assert quota.text == "6 are needed at once; the limit cannot be checked"
    assert f"iam-admin/quotas?project={PROJECT}" in quota.advice
    assert "g2-standard-24 with 2 nvidia-l4: its availability in us-central1" in by_name["machine of vertex"].text


def test_missing_permissions_are_named(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    sandbox.restrict({"resourcemanager.projects.get", "aiplatform.customJobs.list", "logging.logEntries.list"})
    by_name = checks_by_name(google, context_of(tmp_path))
    check = by_name["rights on Vertex AI"]
    assert check.ok is False
    assert check.text == "lacking: " + ", ".join(
        f"aiplatform.customJobs.{verb}" for verb in ("cancel", "create", "delete", "get")
    )
    assert by_name["service accounts"].ok is False
    assert by_name["Vertex AI"].ok is False
    sandbox.restrict(None)


def test_byo_account_must_exist_and_be_usable(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    context = context_of(tmp_path, f"{PLAIN}, byo: {{service_account: {ACCOUNT}}}")
    name = f"right to act as {ACCOUNT}"
    assert checks_by_name(google, context)[name].text == f"there is no service account {ACCOUNT}"
    google.call("iam", "POST", f"v1/projects/{PROJECT}/serviceAccounts", body={"accountId": "trainer"})
    assert checks_by_name(google, context)[name].ok is True
    assert checks_by_name(google, context)["service accounts"].text.startswith("0 are needed, 1 exist")
    sandbox.restrict({"iam.serviceAccounts.get", "iam.serviceAccounts.list", "serviceusage.services.get"})
    check = checks_by_name(google, context)[name]
    assert (check.ok, check.advice) == (False, f"ask for roles/iam.serviceAccountUser on {ACCOUNT}")
    sandbox.restrict(None)


def test_account_of_another_project_is_unknown(
    google: Google, sandbox: GoogleSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = google.call

    def call(service: str, method: str, path: str, **parameters: Any) -> dict[str, Any]:
        # The sandbox has one project, and no default accounts.
        granted = {"permissions": ["iam.serviceAccounts.actAs"]}
        return granted if path.endswith(":testIamPermissions") else real(service, method, path, **parameters)

    def check(email: str) -> Check:
        context = context_of(tmp_path, f"{PLAIN}, byo: {{service_account: {email}}}")
        return checks_by_name(google, context)[f"right to act as {email}"]

    default = f"{sandbox.number}-compute@developer.gserviceaccount.com"
    assert check(default).text == f"there is no service account {default}"
    monkeypatch.setattr(google, "call", call)
    # The default account of the project is its own.
    assert check(default).ok is True
    other = check("trainer@team-accounts.iam.gserviceaccount.com")
    text = "iam.serviceAccounts.actAs is granted; the account belongs to team-accounts"
    assert (other.ok, other.text) == (None, text)
    agent = f"service-{sandbox.number}@gcp-sa-aiplatform.iam.gserviceaccount.com"
    assert other.advice == f"ask its owner to grant {agent} the role roles/iam.serviceAccountTokenCreator on it"


def test_too_many_accounts_are_reported(google: Google, sandbox: GoogleSandbox, tmp_path: Path) -> None:
    for number in range(60):
        google.call("iam", "POST", f"v1/projects/{PROJECT}/serviceAccounts", body={"accountId": f"other-{number}"})
    check = checks_by_name(google, context_of(tmp_path, "machine: n2-standard-4, role: replica", count=45))[
        "service accounts"
    ]
    assert (check.ok, check.text) == (None, "45 are needed, 60 exist, and a project may have 100")
    assert len(sandbox.inventory()["service account"]) == 60


@pytest.mark.parametrize(
    ("options", "each", "source"),
    [
        ("g2-standard-8", 1.0, "price in prices.json, disk not counted"),
        ("g2-standard-8, scheduling: spot", 0.3, "spot price in prices.json, disk not counted"),
        ("g2-standard-8, scheduling: flex_start", 1.0, "at most; standard, price in prices.json, disk not counted"),
        (f"{ATTACHED}, scheduling: spot", 1.7, "at most; standard, price in prices.json, disk not counted"),
        ("g2-standard-12", None, "no price of g2-standard-12 in us-central1"),
        ("n1-standard-16, accelerator: nvidia-tesla-p4", None, "no price of nvidia-tesla-p4 in us-central1"),
    ],
)
def test_rate_includes_attached_accelerators(tmp_path: Path, options: str, each: float | None, source: str) -> None:
    rate = rate_of(tmp_path, f"machine: {options}")
    assert rate.per_hour == (None if each is None else pytest.approx(2 * each))
    assert (rate.source, rate.count, rate.cap_hours) == (source, 2, 168)


def test_rate_without_a_table_is_unknown(tmp_path: Path) -> None:
    options, more = "machine: g2-standard-96, scheduling: flex_start", "limits: {max_hours: 9}\n"
    rate = rate_of(tmp_path, options, own=False, more=more)
    assert (rate.per_hour, rate.source) == (None, "no price of g2-standard-96 in us-central1")
    assert rate.what == "g2-standard-96 with 8 nvidia-l4, flex start, in us-central1"
    assert rate.cap_hours == 9


def test_image_is_checked_if_the_store_is_in_another_cloud(google: Google, tmp_path: Path) -> None:
    target = Vertex(google, Aws(google.clock, {}))
    for store, expected in (("gs://acme/runs", []), ("s3://acme/runs", ["image"])):
        context = context_of(tmp_path, store=store)
        # The image is in another registry, so that the check makes no call.
        context = replace(context, image="docker.io/acme/train:1")
        names = [check.name for check in target.checks(context, context.spec.replicas)]
        assert [name for name in names if name == "image"] == expected


def test_project_of_the_spec_overrides_the_environment(sandbox: GoogleSandbox, tmp_path: Path) -> None:
    context = context_of(tmp_path)
    environment = {**sandbox.environment, "GOOGLE_CLOUD_PROJECT": "another-one"}
    target = open_target(OperatorAccess(FakeClock(), environment, context.spec))
    assert target.identity() == {"google": PROJECT}
    resources = target.resources(context, context.spec.replicas)
    assert {resource.project for resource in resources if isinstance(resource, Job)} == {PROJECT}
    # Only the repository of the project itself is created.
    assert [resource.KIND for resource in resources].count("google_repository") == 1
