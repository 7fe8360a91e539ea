"""ObjectStoreAllReduce: averages over a fixed set of ranks, one tensor per call."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from tests.kit.managers import begin_run, contributions, together
from tests.support.s3server import Request, Response, S3Server

from skerry.runtime import contract
from skerry.runtime.allreduce import ObjectStoreAllReduce
from skerry.runtime.errors import Invalid
from skerry.runtime.protocol.quorum import Undecided
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def average(uri: str, values: list[list[torch.Tensor]], **more: object) -> list[list[torch.Tensor]]:
    def work(rank: int) -> list[torch.Tensor]:
        with ObjectStoreAllReduce(uri, rank, len(values), poll_interval_s=0.05, **more) as group:  # type: ignore[arg-type]
            return [group.allreduce(tensor, name=f"t{i}") for i, tensor in enumerate(values[rank])]

    return together([lambda rank=rank: work(rank) for rank in range(len(values))])


def test_each_call_averages_over_all_ranks_in_place_to_the_same_bits(tmp_path: Path) -> None:
    values = [[torch.randn(1000, generator=torch.Generator().manual_seed(i)), torch.tensor(10.0 * i)] for i in range(3)]
    reference = torch.stack([row[0].double() for row in values]).mean(dim=0)
    results = average(tmp_path.as_uri(), values)
    for row, (first, second) in zip(values, results, strict=True):
        assert first is row[0]
        assert torch.equal(first, results[0][0])
        assert second.item() == 10.0
    torch.testing.assert_close(results[0][0].double(), reference, rtol=1e-6, atol=1e-6)


def test_restarted_rank_continues_at_its_saved_round_id(tmp_path: Path) -> None:
    def work(rank: int, round_id: int, values: list[float]) -> list[float]:
        with ObjectStoreAllReduce(str(tmp_path), rank, 2, round_id=round_id, poll_interval_s=0.05) as group:
            results = [group.allreduce(torch.tensor(value + rank)).item() for value in values]
            assert group.round_id == round_id + len(values)
            return results

    first = together([lambda rank=rank: work(rank, 7, [1.0, 3.0]) for rank in range(2)])
    again = together([lambda rank=rank: work(rank, 8, [40.0, 50.0]) for rank in range(2)])
    # Exchange 8 has its result from the first time; 9 is new.
    assert (first, again) == ([[1.5, 3.5]] * 2, [[3.5, 50.5]] * 2)


@pytest.mark.parametrize(("layout", "parts"), [(2, 5), (None, 1)])
def test_payloads_have_the_layout_of_the_run(tmp_path: Path, layout: int | None, parts: int) -> None:
    store = open_store(tmp_path.as_uri())
    begin_run(store, (), minimum=2, layout=layout)
    values = [[torch.full((300_000,), 1.0 + rank)] for rank in range(2)]
    assert [row[0].unique().tolist() for row in average(tmp_path.as_uri(), values)] == [[1.5]] * 2
    assert [len(record.parts) for record in contributions(store)] == [parts] * 2


def test_rank_and_slot_are_those_of_the_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my runs"
    group = ObjectStoreAllReduce(f"file://{folder}/", poll_interval_s=0.05)
    with pytest.raises(Invalid, match=r"rank and world_size of file://.* pass them: .*SKERRY_INDEX"):
        group.allreduce(torch.ones(1))
    replica = contract.Contract(run_uri=folder.as_uri(), slot="replica-0", index=0, replicas=1)
    for name, text in replica.environment().items():
        monkeypatch.setenv(name, text)
    assert (group.rank, group.world_size, group.uri) == (0, 1, f"file://{folder}/")
    assert group.allreduce(torch.tensor(2.0)).item() == 2.0
    group.close()
    assert (folder / "contributions/00000000-0000/replica-0.json").exists()


def test_plain_path_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ObjectStoreAllReduce("runs/42").uri == (tmp_path / "runs/42").as_uri()


class HfGateway(S3Server):
    """Buckets below a namespace, as in Hugging Face's S3 gateway."""

    def answer(self, request: Request) -> Response:
        bucket, _, key = request.key.partition("/")
        return super().answer(replace(request, bucket=f"{request.bucket}/{bucket}", key=key))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[HfGateway]:
    with HfGateway(honours_conditions=getattr(request, "param", True)) as server:
        monkeypatch.setenv("HF_S3_ENDPOINT", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "HFAK")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield server


def test_ranks_average_through_the_gateway_of_hugging_face(gateway: HfGateway) -> None:
    results = average("hf://acme/models/runs/42", [[torch.tensor(1.0)], [torch.tensor(3.0)]])
    assert [result[0].item() for result in results] == [2.0, 2.0]
    assert gateway.peek("acme/models", "runs/42/commits/00000000.json") is not None


@pytest.mark.parametrize("gateway", [False], indirect=True)
def test_gateway_that_ignores_conditions_is_refused(gateway: HfGateway) -> None:
    with pytest.raises(Invalid, match="it ignores If-None-Match"):
        ObjectStoreAllReduce("hf://acme/models/runs/42", 0, 2).allreduce(torch.ones(1))
    assert gateway.peek("acme/models", "runs/42/run.json") is None


def test_timeout_names_the_ranks_that_contributed(tmp_path: Path) -> None:
    with (
        ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, timeout_s=0.2, poll_interval_s=0.05) as group,
        pytest.raises(TimeoutError, match="contributed=rank-0"),
    ):
        group.allreduce(torch.ones(1))


def test_values_that_are_not_finite_fail_at_once(tmp_path: Path) -> None:
    with (
        ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, timeout_s=300, poll_interval_s=0.05) as group,
        pytest.raises(Undecided, match="abstained"),
    ):
        group.allreduce(torch.tensor([float("inf")]))


def test_failed_rank_may_restart_and_the_others_wait(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="power"), ObjectStoreAllReduce(tmp_path.as_uri(), 0, 2, poll_interval_s=0.05):
        raise OSError("power cut")
    results = average(tmp_path.as_uri(), [[torch.tensor(1.0)], [torch.tensor(3.0)]])
    assert [result[0].item() for result in results] == [2.0, 2.0]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_world_is_invalid(tmp_path: Path, rank: int) -> None:
    with pytest.raises(Invalid, match="world_size=2"):
        ObjectStoreAllReduce(tmp_path.as_uri(), rank, 2)


@pytest.mark.slow
def test_launcher_names_the_place_without_torch() -> None:
    code = """
import sys
from skerry.runtime.allreduce import ObjectStoreAllReduce
ObjectStoreAllReduce("s3://bucket/run")
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
