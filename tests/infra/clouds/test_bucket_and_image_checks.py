"""The checks of buckets and images before an apply, which both clouds share."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Final

import pytest
from tests.infra.kit import failing

from skerry.infra.clouds.bucket_and_image_checks import (
    DOCKER_MANIFEST,
    Manifest,
    RegistryImage,
    bucket_check,
    data_checks,
    guarded_check,
    image_check,
    manifest_of,
)
from skerry.infra.clouds.handler_helpers import Absent, BucketLook, split_run_uri
from skerry.runtime.errors import Invalid, Retryable, Unauthorized

RUN: Final = "s3://acme-runs/teams/tiny-gpt"
OTHER: Final = "s3://acme-runs/teams/other"
OWN: Final = BucketLook(region="here", owner=RUN)
FOREIGN: Final = BucketLook(region="here", owner=OTHER)
DIGEST: Final = f"sha256:{'a' * 64}"
IMAGE: Final = RegistryImage(repository="train", reference=DIGEST)


def context(*, brought: bool) -> Any:
    """The part of a RunContext that the check reads."""
    return SimpleNamespace(run_uri=RUN, spec=SimpleNamespace(byo=SimpleNamespace(bucket=brought)))


@pytest.mark.parametrize(
    ("look", "brought", "ok", "text", "advice"),
    [
        (None, False, True, "the name acme-runs is free: it will be created in here", ""),
        (None, True, False, "bucket acme-runs does not exist", "create it"),
        (OWN, False, True, "acme-runs exists, and is of this run", ""),
        (FOREIGN, False, True, f"is shared with the run {OTHER}", ""),
        (FOREIGN, True, True, "acme-runs exists, and is yours", ""),
        (BucketLook(region="here", owner=None), False, False, "is not tagged as part of a run", "byo: {bucket: true}"),
        (BucketLook(region="far", owner=OTHER), False, True, "is in far, replicas are in here", ""),
        (BucketLook(region="far", owner=RUN), False, False, "is in far, replicas are in here", "or run in far"),
        (BucketLook(region="far", owner=OTHER), True, True, "is in far, replicas are in here", ""),
    ],
)
def test_bucket_check_reports_owner_and_region(
    look: BucketLook | None,
    brought: bool,  # noqa: FBT001
    ok: bool,  # noqa: FBT001
    text: str,
    advice: str,
) -> None:
    check = bucket_check(context(brought=brought), "acme-runs", "here", look)
    assert (check.name, check.ok) == ("bucket", ok)
    assert text in check.text
    assert advice in check.advice
    assert bool(check.advice) is bool(advice)


@pytest.mark.parametrize(
    ("image", "machines", "ok", "part"),
    [
        (IMAGE, {"amd64", "arm64"}, True, f"train has {DIGEST[:19]} for amd64"),
        (IMAGE, {"arm64"}, False, "build it with --platform linux/amd64"),
        (RegistryImage(repository="train", reference="1"), {"amd64"}, False, "name it by its digest"),
        (None, set[str](), None, "is not in ECR: jobs must be able to pull it without a login"),
    ],
)
def test_image_check_needs_a_digest_and_the_architecture(
    image: RegistryImage | None,
    machines: set[str],
    ok: bool | None,  # noqa: FBT001
    part: str,
) -> None:
    check = image_check("image", "acme/train", image, "ECR", lambda _: runs_on(machines))
    assert check.ok is ok
    assert part in f"{check.text} {check.advice}"


@pytest.mark.parametrize(
    ("reference", "advice"),
    [
        (DIGEST, "push it: `skerry image push acme/train`, and write the digest that it prints into the spec"),
        ("1", "push it: `skerry image push acme/train --tag 1`"),
    ],
)
def test_image_check_names_the_command_that_pushes_it(reference: str, advice: str) -> None:
    image = RegistryImage(repository="train", reference=reference)
    check = image_check("image", "acme/train:1", image, "ECR", failing(Absent("no image")))
    assert (check.ok, check.text, check.advice, check.stops_jobs) == (False, "acme/train:1 is not in ECR", advice, True)


def test_image_that_may_not_be_read_is_unknown() -> None:
    check = image_check("image", "acme/train", IMAGE, "ECR", failing(Unauthorized("right")))
    assert (check.ok, check.stops_jobs) == (None, False)


def test_image_for_other_machines_stops_jobs() -> None:
    assert image_check("image", "acme/train", IMAGE, "ECR", lambda _: runs_on({"arm64"})).stops_jobs


def runs_on(machines: set[str]) -> Manifest:
    return Manifest(media_type=DOCKER_MANIFEST, architectures=frozenset(machines))


@pytest.mark.parametrize(
    ("error", "ok"), [(Unauthorized("right"), False), (Retryable("busy"), None), (Invalid("odd"), False)]
)
def test_guarded_check_turns_errors_into_checks(error: Exception, ok: bool | None) -> None:  # noqa: FBT001
    check = guarded_check("bucket", failing(error))
    assert (check.name, check.ok, check.text) == ("bucket", ok, str(error))


@pytest.mark.parametrize(
    ("manifest", "machines"),
    [
        ({"config": {"digest": "sha256:c"}}, {"arm64"}),
        (
            {"manifests": [{"platform": {"architecture": name}} for name in ("amd64", "arm64", "unknown")]},
            {"amd64", "arm64"},
        ),
    ],
)
def test_architectures_are_read_from_index_or_configuration(manifest: dict[str, Any], machines: set[str]) -> None:
    blobs = {"sha256:c": b'{"architecture": "arm64", "os": "linux"}'}
    assert manifest_of(json.dumps(manifest), "1", blobs.__getitem__).architectures == machines


def test_manifest_without_configuration_is_refused() -> None:
    with pytest.raises(Invalid, match="names no configuration: it is not a runnable image"):
        manifest_of("{}", "1", failing(AssertionError()))


def test_run_uri_is_split_into_bucket_and_prefix() -> None:
    assert split_run_uri(RUN, "s3", "AWS", "S3") == ("acme-runs", "teams/tiny-gpt")
    for uri in ("gs://acme/x", "s3://acme", "s3:///x", "file:///x"):
        with pytest.raises(Invalid, match="a run on AWS needs a store in S3"):
            split_run_uri(uri, "s3", "AWS", "S3")


def looked_at(look: BucketLook | Exception | None) -> list[tuple[bool | None, str]]:
    """The checks of two groups with data in one bucket, and of the run's own bucket."""
    groups: Any = [SimpleNamespace(target=SimpleNamespace(region="here"))] * 2
    run: Any = SimpleNamespace(run_uri=RUN, inputs=lambda _: None)

    def answer(_bucket: str, _region: str) -> BucketLook | None:
        if isinstance(look, Exception):
            raise look
        return look

    checks = data_checks(run, groups, lambda _: ("acme-data", "acme-runs"), answer)
    return [(check.ok, check.text) for check in checks]


@pytest.mark.parametrize(
    ("look", "ok", "text"),
    [
        (BucketLook(region="here", owner=None), True, "acme-data exists"),
        (BucketLook(region="far", owner=None), True, "is in far, replicas are in here"),
        (None, False, "bucket acme-data does not exist"),
        (BucketLook(region="here", owner=None, uniform=False), False, "permissions by object"),
        (Unauthorized("no"), None, "your credentials cannot read bucket acme-data"),
        (Retryable("busy"), None, "busy"),
    ],
)
def test_bucket_with_data_is_checked_once(
    look: BucketLook | Exception | None,
    ok: bool | None,  # noqa: FBT001
    text: str,
) -> None:
    ((result, words),) = looked_at(look)
    assert result is ok
    assert text in words
