from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.infra.kit import of_kind
from tests.infra.targets.vertex.kit import PROJECT, REGION, check_golden, context_of, graph_of

from skerry.infra.provision.graph import Ref, as_json, resolved
from skerry.infra.provision.handler import Desired
from skerry.infra.targets.shared.resolve_refs import ready
from skerry.infra.targets.vertex import built_in_accelerators, requests
from skerry.infra.targets.vertex.resource_types import Job
from skerry.infra.targets.vertex.sdk_create import Creator
from skerry.runtime.errors import Invalid
from skerry.testing.google import protobuf_enums
from skerry.testing.google.calls import GoogleCall
from skerry.testing.google.discovery import document

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.clouds.google.session import Google
    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.testing.google.sandbox import GoogleSandbox

CREATE = "aiplatform.projects.locations.customJobs.create"
TARGETS = st.fixed_dictionaries(
    {"machine": st.sampled_from(["g2-standard-8", "a2-ultragpu-2g", "n1-standard-16", "n2-standard-8"])},
    optional={
        "accelerator": st.sampled_from(["nvidia-l4", "nvidia-tesla-t4", "nvidia-tesla-v100"]),
        "accelerators": st.integers(1, 4),
        "scheduling": st.sampled_from(["standard", "spot", "flex_start"]),
        "max_runtime": st.sampled_from(["60s", "1.5h", "30d"]),
        "disk": st.sampled_from(["100GiB", "1TiB", "100.5GiB"]),
        "disk_type": st.sampled_from(["pd-ssd", "pd-standard"]),
        "role": st.sampled_from(["replica", "group"]),
        "byo": st.sampled_from(
            [
                "{service_account: a@b.iam.gserviceaccount.com}",
                "{network: projects/1/global/networks/n}",
                f"{{key: projects/p/locations/{REGION}/keyRings/r/cryptoKeys/k}}",
            ]
        ),
    },
)
WHOLE = (
    "machine: n1-standard-16, accelerator: nvidia-tesla-t4, accelerators: 2, scheduling: spot, disk: 200GiB, "
    "disk_type: pd-standard, max_runtime: 6h, byo: {network: projects/1/global/networks/n, "
    "key: projects/p/locations/us-central1/keyRings/r/cryptoKeys/k}"
)
QUEUED = "machine: a2-highgpu-1g, scheduling: flex_start, max_wait: 48h"


def wanted_of(context: RunContext, *, known: bool = True, generation: int = 0) -> list[Desired]:
    return [
        Desired(
            resource=job,
            generation=generation,
            run=context.run_uri,
            settings={name: resolved(value, output if known else unknown) for name, value in job.settings().items()},
            extra=context.spec.tags,
        )
        for job in of_kind(graph_of(context), Job)
    ]


def output(ref: Ref) -> str:
    return f"{ref.address.partition('.')[2]}@{PROJECT}.iam.gserviceaccount.com"


def unknown(_: Ref) -> None:
    return None


def test_requests_are_frozen(tmp_path: Path) -> None:
    bodies: dict[str, Any] = {}
    for name, options in {"whole": WHOLE, "queued": QUEUED, "plain": "machine: n2-standard-8"}.items():
        (desired,) = wanted_of(context_of(tmp_path, options, count=1, more="tags: {team: research}\n"))
        bodies[name] = as_json(requests.job(desired))
    check_golden("requests", bodies)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=TARGETS, hours=st.none() | st.floats(0.02, 8000), count=st.integers(1, 3))
def test_requests_of_any_spec_match_the_discovery_document(
    tmp_path: Path, options: dict[str, Any], hours: float | None, count: int
) -> None:
    built_in = built_in_accelerators.built_in(options["machine"])
    named = options.get("accelerator"), options.get("accelerators")
    if built_in is None:
        assume(named[0] or named[1] is None)
    else:
        assume(all(value in {None, fixed} for value, fixed in zip(named, built_in, strict=True)))
    text = ", ".join(f"{name}: {value}" for name, value in options.items())
    context = context_of(tmp_path, text, count=count, more="" if hours is None else f"limits: {{max_hours: {hours}}}\n")
    path = f"/v1/projects/{PROJECT}/locations/{REGION}/customJobs"
    matched = document("aiplatform", "v1").match("POST", path)
    assert matched is not None
    method, names = matched
    for desired in wanted_of(context):
        assert list(method.problems(names, {}, ready(requests.job(desired)))) == []


@pytest.mark.parametrize("options", [WHOLE, QUEUED, "machine: n2-standard-8"])
def test_sdk_sends_exactly_the_request(google: Google, sandbox: GoogleSandbox, tmp_path: Path, options: str) -> None:
    sandbox.enable("aiplatform.googleapis.com")
    account = google.call(
        "iam", "POST", f"v1/projects/{PROJECT}/serviceAccounts", body={"accountId": "vertex-replicas"}
    )
    (desired,) = wanted_of(context_of(tmp_path, options, count=1, more="tags: {team: research}\n"))
    body = ready(requests.job(desired))
    assert body["jobSpec"]["serviceAccount"] == account["email"]  # type: ignore[index]
    sandbox.calls.clear()
    name = Creator(google).create(PROJECT, REGION, body)
    (call,) = sandbox.calls
    assert isinstance(call, GoogleCall)
    assert call.name == CREATE
    # The SDK's clients write numbers for the words of an enumeration.
    assert protobuf_enums.named(CREATE, call.body) == body
    received = google.call("aiplatform", "GET", f"v1/{name}")
    assert {key: received[key] for key in body} == body


def test_unresolved_reference_is_not_sent(tmp_path: Path) -> None:
    (desired,) = wanted_of(context_of(tmp_path, count=1), known=False)
    with pytest.raises(Invalid, match=r"known: \(email of google_service_account.vertex-replicas\)"):
        ready(requests.job(desired))
    assert requests.known_digest(desired) is None


def test_digest_differs_for_other_settings(tmp_path: Path) -> None:
    digests: set[str | None] = set()
    for options in ("machine: n2-standard-8", "machine: n2-standard-8, disk: 101GiB", QUEUED, WHOLE):
        (desired,) = wanted_of(context_of(tmp_path, options, count=1))
        digests.add(requests.known_digest(desired))
        assert requests.labels(desired)[requests.SPEC_LABEL] == requests.known_digest(desired)
    assert len(digests) == 4
    (again,) = wanted_of(context_of(tmp_path, "machine: n2-standard-8", count=1), generation=3)
    assert requests.known_digest(again) in digests
