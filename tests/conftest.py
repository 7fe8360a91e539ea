"""Rules for every test: tests that start processes are slow, slow tests run last, none sees a run of the developer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A machine may be slow, and a test that fails is to fail again.
settings.register_profile("skerry", deadline=None, derandomize=True)
settings.load_profile("skerry")

# Where every test starts processes, builds something, or makes much of an account in memory and takes it away.
SLOW_PLACES = (
    "packaging/",
    "infra/clouds/aws/test_home.py",
    "infra/clouds/aws/test_iam.py",
    "infra/clouds/aws/test_vpc.py",
    "infra/clouds/aws/test_ecr.py",
    "infra/clouds/aws/test_s3.py",
    "infra/targets/aws_batch/test_handlers.py",
    "infra/deploy/",
    "infra/cli/test_estimate_command.py",
    "testing/",
)

# torch asks DNS for the name of every address that a TCPStore connects to, and a question that is lost costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Under nohup or behind `&` they are ignored, and whatever a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        if item.path.relative_to(root).as_posix().startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(autouse=True)
def _no_run_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKERRY_") and not name.startswith("SKERRY_TEST_")]:
        monkeypatch.delenv(name)
