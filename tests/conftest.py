"""Rules for every test: tests that start processes are slow, slow tests run last, none sees a run of the developer.

Except on several processes (xdist), where the longest files come first, so that all processes end at the same time.
"""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ["tests.support.sdk_files"]

# A machine may be slow, and a test that fails is to fail again.
settings.register_profile("skerry", deadline=None, derandomize=True)
settings.load_profile("skerry")

# Where every test starts processes, builds something, or makes much of an account in memory and takes it away.
SLOW_PLACES = (
    "packaging/",
    "infra/clouds/aws/test_run_bucket_and_image_repository.py",
    "infra/clouds/aws/test_iam.py",
    "infra/clouds/aws/test_security_group_in_existing_vpc.py",
    "infra/clouds/aws/test_ecr.py",
    "infra/clouds/aws/test_s3.py",
    "infra/targets/aws_batch/test_handlers.py",
    "infra/deploy/",
    "infra/cli/test_estimate_command.py",
    "testing/",
)

# Files that take ten seconds or more, the longest first.
LONGEST = (
    "cloud/test_rehearsal.py",
    "infra/targets/test_crashes.py",
    "recipes/",
    "infra/targets/test_running_jobs_are_reported.py",
    "infra/targets/slurm/",
    "infra/executors/test_slurm.py",
    "simulation/test_exhaustive.py",
    "infra/local/test_misuse.py",
    "infra/targets/test_deploying.py",
    "packaging/test_quickstart.py",
    "runtime/ranks/test_torchrun.py",
    "runtime/training/test_early_round_end_policy.py",
    "contracts/test_site.py",
    "infra/targets/",
    "infra/local/",
    "infra/observe/",
    "infra/run/",
    "infra/deploy/",
    "runtime/ranks/",
    "simulation/",
    "compat/",
    "testing/",
    "infra/report/",
    "runtime/",
    "packaging/",
)

# Tests and their replicas are more processes than cores: threads of one would spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks DNS for the name of every address that a TCPStore connects to, and a question that is lost costs 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Under nohup or behind `&` they are ignored, and whatever a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    # What is imported stays: without this, full garbage collections are a quarter of the time.
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    # The default of 700 objects is for small heaps: with it, collections are a twentieth of the time.
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    # pytest collects ten times more to hear what finalizers raise; after the first time nothing is left for them.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    paths = {item: item.path.relative_to(root).as_posix() for item in items}
    for item, path in paths.items():
        if path.startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)
    slow = {item for item in items if item.get_closest_marker("slow") is not None}
    if not hasattr(config, "workerinput"):
        items.sort(key=lambda item: item in slow)
        return
    slow_paths = {paths[item] for item in slow}

    def place(item: pytest.Item) -> int:
        long = (number for number, start in enumerate(LONGEST) if paths[item].startswith(start))
        return next(long, len(LONGEST)) if paths[item] in slow_paths else len(LONGEST) + 1

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _no_run_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SKERRY_") and not name.startswith("SKERRY_TEST_")]:
        monkeypatch.delenv(name)
