"""Waiting, ownership and contents, which the handlers of both clouds share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from tests.infra.clouds.aws.test_logs import GROUP
from tests.infra.clouds.aws.test_s3 import BUCKET
from tests.infra.kit import wanted
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.logs import LogGroup
from skerry.infra.clouds.handler_helpers import (
    Absent,
    NotYetVisible,
    check_empty,
    count_contents,
    delete_contents,
    of,
    owner_conflict,
    wait_for,
)
from skerry.infra.provision.handler import Contents
from skerry.runtime.errors import Conflict, Invalid, Retryable

ROOT: Final = Path(__file__).parents[3]
PAGE: list[dict[str, Any]] = [{"Size": 5}, {"Size": "6"}]


def test_wait_polls_with_growing_pauses_until_there_is_a_result() -> None:
    clock, answers = FakeClock(), iter([None, None, None, "visible"])
    assert wait_for(clock, "it is visible", clock.now() + 60, lambda: next(answers)) == "visible"
    assert clock.pauses == sorted(clock.pauses)
    assert len(clock.pauses) == 3


def test_wait_that_times_out_names_its_condition() -> None:
    clock = FakeClock()
    with pytest.raises(
        NotYetVisible, match="timed out after 60 s, waiting until it is visible; run the same command again"
    ) as caught:
        wait_for(clock, "it is visible", clock.now() + 60, lambda: None)
    assert isinstance(caught.value, TimeoutError | Retryable)


def test_contents_are_counted_up_to_ten_pages() -> None:
    assert count_contents([PAGE] * 2, "Size") == Contents(objects=4, size_bytes=22)
    assert count_contents([PAGE] * 11, "Size") == Contents(objects=20, size_bytes=110, more=True)


def test_contents_are_deleted_page_by_page_with_progress() -> None:
    pages, deleted, progress = [PAGE, PAGE], list[dict[str, Any]](), list[Contents]()

    def first_page() -> list[dict[str, Any]]:
        if not pages:
            raise Absent("no such bucket")
        return pages.pop()

    total = Contents(objects=4, size_bytes=22)
    assert delete_contents(first_page, deleted.extend, "Size", progress.append) == total
    assert deleted == PAGE * 2
    assert progress == [Contents(objects=2, size_bytes=11), total]


def test_resource_that_holds_data_is_not_deleted() -> None:
    check_empty("bucket", "acme", Contents(objects=0))
    with pytest.raises(Conflict, match=r"the bucket acme holds 3 objects and is not deleted; empty it if no other"):
        check_empty("bucket", "acme", Contents(objects=3))


def test_foreign_resource_is_named_with_its_owner_and_a_remedy() -> None:
    assert "role r exists already and belongs to the run x: it is not changed; delete it" in str(
        owner_conflict("role", "r", "x", "delete it")
    )
    assert "is not tagged as part of a run" in str(owner_conflict("role", "r", None, "delete it"))


def test_resource_of_another_kind_is_refused() -> None:
    assert of(LogGroup, wanted(GROUP, "s3://a/b")) is GROUP
    with pytest.raises(Invalid, match=r"aws_bucket.store is not a aws_log_group"):
        of(LogGroup, wanted(BUCKET, "s3://a/b"))


def test_importing_the_clouds_imports_no_sdk() -> None:
    places = [path.relative_to(ROOT / "infra") for path in (ROOT / "infra/skerry/infra/clouds").rglob("*.py")]
    modules = sorted(".".join(place.with_suffix("").parts) for place in places if place.stem != "__init__")
    assert {"skerry.infra.clouds.aws.session", "skerry.infra.clouds.google.session"} <= set(modules)
    loaded = "sys.exit(any(name in sys.modules for name in ('boto3', 'botocore', 'google.auth', 'requests')))"
    program = f"import sys\nfor name in {modules!r}: __import__(name)\n{loaded}"
    path = f"{ROOT / 'runtime'}:{ROOT / 'infra'}"
    subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": path}, check=True, timeout=300)
