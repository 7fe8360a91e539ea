"""The table of losses: from where a run goes on, by what is lost and by the mirrors that it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from skerry.infra.cost.work_lost_by_failure import NOTHING, Place, loss_lines, losses
from skerry.infra.spec.model import Faults
from skerry.infra.spec.replication_section import FurtherPlace

if TYPE_CHECKING:
    from collections.abc import Sequence

HOME = Place(uri="s3://acme/runs/tiny", cloud="aws", region="us-east-1")


def mirror(
    uri: str, region: str, *, costs: str = "-", copied: int | None = None, checkpoint: int | None = None, **line: Any
) -> Place:
    return Place(
        uri=f"{uri}/tiny",
        cloud={"s3": "aws", "gs": "google"}[uri[:2]],
        region=region,
        line=FurtherPlace(to=uri, **line),
        costs=costs,
        copied=copied,
        checkpoint=checkpoint,
    )


WEST = mirror("s3://acme-west/runs", "us-west-2", every=5, costs="$1")
GOOGLE = mirror("gs://acme-dr/runs", "europe-west4", every=10, costs="$9")


def table(mirrors: Sequence[Place], rounds: int | None = None) -> dict[str, tuple[str, str, str]]:
    rows = losses(HOME, mirrors, None, Faults(), rounds)
    return {row.lost: (row.goes_on_from, row.work_lost, row.costs) for row in rows}


def test_each_loss_is_answered_by_the_place_that_survives_it() -> None:
    near, far = ("round r - 5, s3://acme-west/runs", "<= 5 rounds"), ("round r - 10, gs://acme-dr/runs", "<= 10 rounds")
    assert table([GOOGLE, WEST]) == {
        "a process": ("the store", "<= 1 round of one replica", "-"),
        "a machine": ("the store", "<= 1 round of one replica", "-"),
        "the bucket acme": (*near, "$1"),
        "the region us-east-1": (*near, "-"),
        "the account at AWS": (*far, "$9"),
        "AWS": (*far, "-"),
        "the store and all mirrors": (NOTHING, "the run", "-"),
    }


def test_without_mirrors_the_loss_of_the_store_is_the_end() -> None:
    assert {row[0] for lost, row in table([]).items() if lost not in ("a process", "a machine")} == {NOTHING}


def test_mirror_of_every_round_is_preferred_and_loses_none() -> None:
    rounds = mirror("gs://acme-all/runs", "europe-west4", every=50, log="every round")
    assert table([WEST, rounds])["the bucket acme"] == ("round r, gs://acme-all/runs", "rounds not copied yet", "-")


def test_bucket_of_the_user_may_be_of_another_account() -> None:
    own = mirror("s3://acme-west/runs", "us-west-2", byo={"bucket": True})
    rows = table([own])
    assert rows["the account at AWS"][0] == "round r - 1, s3://acme-west/runs, if it is of another account"
    assert rows["AWS"][0] == NOTHING


@pytest.mark.parametrize(
    ("line", "copied", "checkpoint", "expected"),
    [
        ({"log": "every round"}, 36, 30, ("round 36, gs://acme-dr/runs", "2 rounds now")),
        ({}, 36, 30, ("round 30, gs://acme-dr/runs", "8 rounds now")),
        ({"log": "every round"}, 36, None, (NOTHING, "the run")),
    ],
)
def test_status_counts_from_the_round_that_can_be_restored_now(
    line: dict[str, Any], copied: int, checkpoint: int | None, expected: tuple[str, str]
) -> None:
    place = mirror("gs://acme-dr/runs", "europe-west4", copied=copied, checkpoint=checkpoint, **line)
    assert table([place], rounds=38)["the bucket acme"][:2] == expected


def test_peers_and_unfinished_rounds_bound_the_loss_of_a_process() -> None:
    peers = FurtherPlace(to="peers", every="20s", copies=3)
    process, machine, *_ = losses(HOME, [], peers, Faults.model_validate({"keep_unfinished": "5m"}))
    assert (process.goes_on_from, process.work_lost) == ("the memory of its machine", "<= 20s of one replica")
    assert process.costs == "3 copies of the state in memory"
    assert (machine.goes_on_from, machine.work_lost) == ("the store", "<= 5m of one replica")


def test_run_in_a_folder_loses_the_folder() -> None:
    home = Place(uri="file:///disk/runs/tiny", cloud=None, region=None)
    assert [row.lost for row in losses(home, [WEST], None, Faults())[2:]] == [
        "the folder /disk/runs",
        "the store and all mirrors",
    ]


def test_columns_of_the_table_are_aligned() -> None:
    lines = list(loss_lines(losses(HOME, [WEST], None, Faults())))
    column = lines[0].index("the run goes on from")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines)
    assert NOTHING in lines[-1]
