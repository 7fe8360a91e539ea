"""One short run in each service, in two clouds, and in all of them: deployed, trained, the same everywhere, gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from tests.cloud.place import placed
from tests.cloud.settings import Settings, until
from tests.e2e.deployed import check_nothing_was_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.runtime.clock import Clock


OTHERS: Final = ("kubernetes", "slurm", "hf_jobs", "modal")


@pytest.mark.parametrize(
    ("kinds", "count"),
    [
        pytest.param(["aws_batch"], 2, id="aws_batch"),
        pytest.param(["sagemaker"], 2, id="sagemaker"),
        pytest.param(["vertex"], 2, id="vertex"),
        pytest.param(["kubernetes"], 2, id="kubernetes"),
        pytest.param(["slurm"], 2, id="slurm"),
        pytest.param(["hf_jobs"], 2, id="hf_jobs"),
        pytest.param(["modal"], 2, id="modal"),
        pytest.param(["aws_batch", "sagemaker", "vertex"], 1, id="mixed"),
        pytest.param(["aws_batch", "sagemaker", "vertex", *OTHERS], 1, id="everywhere"),
    ],
)
def test_a_run_trains_to_its_end_and_is_the_same_everywhere(
    settings: Settings, clock: Clock, kinds: Sequence[str], count: int
) -> None:
    # It fails if anything is left when it is over.
    with placed(settings, kinds, count) as run:
        assert run.watch()["ok"]
        # Every round is closed; machines need a moment to say that they are done.
        until(clock, lambda: {job["condition"] for job in run.jobs().values()} == {"done"})
        check_nothing_was_lost(run.deployment.open_store(), run, killed=())
        assert run.speakers().keys() == set(run.slots)
