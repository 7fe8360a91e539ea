"""An AWS account in memory, in this process: jobs end at once, no container runs; else as strict and slow as AWS."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from moto import mock_aws
from moto.batch.models import batch_backends
from moto.ec2.models import ec2_backends
from tests.infra.clouds.aws.account import ACCOUNT, Listener
from tests.infra.targets.aws_batch.kit import ENVIRONMENT
from tests.support.clocks import FakeClock

from skerry.infra.clouds.aws.session import Aws
from skerry.testing.aws.shims import (
    batch_deleting,
    batch_listing,
    batch_settling,
    batch_update_fields,
    managed_policies,
    tags_at_bucket_creation,
    unshare_job_environment,
)
from skerry.testing.aws.shims.patching import Patches

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def listener() -> Listener:
    return Listener()


@pytest.fixture(scope="session")
def shared(listener: Listener) -> Aws:
    """One for all tests: to make clients takes longer than to use them."""
    return Aws(FakeClock(), ENVIRONMENT, client_made=listener.client_made)


@pytest.fixture(scope="module")
def emulation() -> Iterator[None]:
    """Not longer than a module: what is patched in moto would be seen by every test of this process."""
    patches = Patches()
    for shim in (
        managed_policies,
        tags_at_bucket_creation,
        unshare_job_environment,
        batch_listing,
        batch_update_fields,
    ):
        shim.install(patches)
    batch_deleting.install(patches)
    batch_settling.install(patches, lambda: 2)
    with mock_aws(config={"batch": {"use_docker": False}}):
        yield
    patches.undo()


@pytest.fixture
def aws(shared: Aws, emulation: None) -> Aws:
    """Return the account without resources of Batch and launch templates; the rest of earlier tests stays.

    A network and IAM's own policies take moto a second to make.
    """
    del emulation
    for backend in batch_backends[ACCOUNT].values():
        backend._jobs.clear()  # noqa: SLF001  moto has no other way
        backend.reset()
    for place in ec2_backends[ACCOUNT].values():
        place.launch_templates.clear()
        place.launch_template_name_to_ids.clear()
    return shared


@pytest.fixture
def calls(listener: Listener) -> Listener:
    return listener


@pytest.fixture
def cloud(aws: Aws) -> Aws:
    """Return the session that the suite of all handlers uses."""
    return aws
