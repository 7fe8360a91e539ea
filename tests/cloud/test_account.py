"""Checks of an account before anything is created in it: the caller, rights, quotas, machines, the image."""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from tests.cloud.place import KINDS, NAME, Place
from tests.support.command_line import invoke

from skerry.infra.deploy.read_clouds import read_accounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.cloud.settings import Settings


@contextmanager
def spelled(settings: Settings, kind: str, *, jobs: bool) -> Iterator[Place]:
    """A spec of which nothing is created."""
    place = Place.spelled(settings, f"{NAME}account", [kind], 1, jobs=jobs)
    try:
        yield place
    finally:
        shutil.rmtree(place.spec.parent)


@pytest.mark.parametrize(("cloud", "kind"), [("aws", "aws_batch"), ("google", "vertex")], ids=["aws", "google"])
def test_caller_is_known(
    settings: Settings, cloud: str, kind: str, record_property: Callable[[str, object], None]
) -> None:
    with spelled(settings, kind, jobs=False) as place:
        account = read_accounts(place.deployment)[cloud]
        caller = place.deployment.access.principal(cloud)
        record_property(f"{cloud}-{'account' if cloud == 'aws' else 'project'}", account)
        record_property("principal", caller)
        if cloud == "google":
            record_property("google-number", place.deployment.access.google.identity().number)
    assert account
    sys.stdout.write(f"{cloud}: {account}, as {caller}\n")


@pytest.mark.parametrize("kind", KINDS)
def test_doctor_reports_no_problem(
    settings: Settings, kind: str, record_property: Callable[[str, object], None]
) -> None:
    with spelled(settings, kind, jobs=True) as place:
        for cloud, account in read_accounts(place.deployment).items():
            place_name = cloud.partition("/")[0]
            record_property("google-project" if place_name == "google" else f"{place_name}-account", account)
        result = invoke("doctor", place.spec)
    sys.stdout.write(result.output)
    assert result.exit_code == 0, result.output + result.stderr
