"""Checks the behaviour of an engine's containers that the other tests rely on."""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING

from tests.e2e.conftest import until

from skerry.infra.local.docker_engine import ContainerRequest, ContainerResult

if TYPE_CHECKING:
    from skerry.infra.local.docker_engine import Engine


def test_the_input_ends_as_soon_as_its_leash_is_closed(engine: Engine, base: str) -> None:
    container = engine.containers.create(ContainerRequest(image=base, command=["cat"], leash=True))
    try:
        hold = engine.containers.attach(container)
        engine.containers.start(container)
        hold.close()
        until(lambda: not engine.containers.inspect(container)["State"]["Running"])
        assert engine.containers.wait(container) == ContainerResult(exit_code=0, out_of_memory=False)
    finally:
        engine.containers.remove(container)
    with warnings.catch_warnings(action="error", category=ResourceWarning):
        del hold
        gc.collect()


def test_reading_only_the_first_output_leaves_no_connection_open(engine: Engine, base: str) -> None:
    container = engine.containers.create(ContainerRequest(image=base, command=["sh", "-c", "echo hello; sleep 600"]))
    try:
        engine.containers.start(container)
        with warnings.catch_warnings(action="error", category=ResourceWarning):
            assert next(iter(engine.containers.output(container, follow=True))) == b"hello\n"
            gc.collect()
    finally:
        engine.containers.remove(container)
