"""The records of the log: canonical bytes, strict parsing, and short errors for damaged records."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.protocol import contribution, policy, run_record
from tests.kit.records import commit
from tests.support.clocks import FakeClock

from skerry.runtime.errors import Corrupt, Invalid
from skerry.runtime.log.installed_versions import read_software
from skerry.runtime.log.record_parsing import MAX_RECORD_BYTES, Record, digest_of
from skerry.runtime.log.records import GENESIS, Commit, Contribution, Decision, Heartbeat, Member, Part, Place, Share
from skerry.runtime.log.run_record import MirrorSettings, PeerCopies, Run
from skerry.runtime.protocol.quorum import ObservedContribution, members

PARTS = tuple(Part(digest=f"{number:032x}", header_bytes=1, total_bytes=2) for number in range(3))
CONTRIBUTION = contribution("a", parts=PARTS)
COMMIT = commit(3)
SHARE = Share(slot="a", contribution="c" * 64, weight=1.0)
DECISION = Decision(
    run="a" * 32,
    round=0,
    exchange=0,
    base=GENESIS,
    index="1" * 32,
    reduction="all_gather",
    members=(SHARE,),
    proposer="a",
    nonce="d" * 32,
)


def changed(record: Record, **fields: object) -> bytes:
    """The bytes of a record with other fields, which need not be valid."""
    return json.dumps(json.loads(record.to_bytes()) | fields).encode()


def test_parsed_record_has_the_same_bytes() -> None:
    again = Commit.parse(COMMIT.to_bytes(), "commits/00000003.json")
    assert again == COMMIT
    assert again.to_bytes() == COMMIT.to_bytes()
    assert digest_of(COMMIT.to_bytes()) == digest_of(again.to_bytes())


def test_member_without_place_has_the_bytes_of_old_logs() -> None:
    text = (
        f'{{"run":"{"a" * 32}","slot":"a","incarnation":0,"nonce":"{"b" * 32}","host":"h","process":7,"created":"now"}}'
    )
    member = Member.parse(text.encode(), "members/a/000000.json")
    assert (member.place, member.to_bytes()) == (None, text.encode())
    placed = member.model_copy(update={"place": Place(cloud="aws", region="us-east-1", spot=True)})
    assert Member.parse(placed.to_bytes(), "members/a/000000.json") == placed


def test_versions_of_a_start_are_short_and_from_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"skerry": "1" * 5000}.__getitem__)
    monkeypatch.setattr(metadata, "PackageNotFoundError", KeyError)
    software = read_software({"SKERRY_CODE": "no digest"})
    assert (software.skerry, software.torch, software.code) == ("1" * 64, None, None)


def test_place_is_read_back_from_the_launchers_variable() -> None:
    place = Place(cloud="google", region="us-central1", machine="g2-standard-8", accelerators=1, spot=False)
    assert Place.of_text(place.to_text()) == place
    assert Place.of_text('{"cloud": "aws", "zone": "of a newer launcher"}') == Place(cloud="aws")
    assert (Place.of_text(None), Place.of_text("")) == (None, None)


@pytest.mark.parametrize("text", ["aws", '{"spot": "yes"}', '{"accelerators": -1}', '{"cloud": "' + "x" * 5000 + '"}'])
def test_wrong_place_is_invalid(text: str) -> None:
    with pytest.raises(Invalid, match=r"SKERRY_PLACE is not the place of a replica: .*; write \{"):
        Place.of_text(text)


WRONG_FIELDS = [
    (COMMIT, {"round": -1}, "round"),
    (COMMIT, {"round": "3"}, "round"),
    (COMMIT, {"round": 3.0}, "round"),
    (COMMIT, {"run": "short"}, "run"),
    (COMMIT, {"exchanges": ["x"]}, "exchanges.0"),
    (COMMIT, {"surprise": 1}, "surprise"),
    (COMMIT, {"previous": None}, "previous"),
    (run_record(FakeClock()), {"protocol": 2}, "protocol"),
    (DECISION, {"members": []}, "members"),
    (DECISION, {"members": [SHARE.model_dump() | {"weight": 0.0}]}, "members"),
    *((CONTRIBUTION, {field: v}, field) for field in ("discount", "share") for v in (0.0, 1e-46, 2.0**-41, 1.5)),
    *((CONTRIBUTION, {"ranks": ranks}, "ranks") for ranks in ([3], [1, 1], [2, 2], [4, -1], [0, 0], [1.5, 1.5])),
]


@pytest.mark.parametrize(("record", "change", "field"), WRONG_FIELDS)
def test_wrong_field_is_named_with_its_key(record: Record, change: dict[str, object], field: str) -> None:
    with pytest.raises(Corrupt, match=field) as raised:
        type(record).parse(changed(record, **change), "folder/key.json")
    assert "key=folder/key.json" in str(raised.value)


def test_oversized_record_is_corrupt_before_it_is_parsed() -> None:
    with pytest.raises(Corrupt, match="too large"):
        Commit.parse(b"[" * (MAX_RECORD_BYTES + 1), "commits/x")


@given(st.binary(max_size=200))
def test_random_bytes_are_corrupt(data: bytes) -> None:
    for kind in (Commit, Run, Heartbeat, Decision):
        with pytest.raises(Corrupt):
            kind.parse(data, "key")


@pytest.mark.parametrize(
    "wrong",
    [
        {f"{number:x}": 1 for number in range(100_000)},
        {"x" * 3_500_000: 1},
        {"exchanges": [1] * 100_000},
        {f"{'y' * 1000}{number}": 1 for number in range(900)},
    ],
    ids=["many fields", "a long name", "many values", "many long names"],
)
def test_error_for_a_damaged_record_is_short(wrong: dict[str, object]) -> None:
    """It is part of an event and a traceback at every poll."""
    with pytest.raises(Corrupt, match="key=commits/x kind=Commit") as raised:
        Commit.parse(json.dumps(wrong).encode(), "commits/x")
    assert len(str(raised.value)) < 1500
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None, "its text would repeat all of the record"


def test_error_names_the_first_wrong_fields_and_counts_the_rest() -> None:
    extra: dict[str, object] = {f"extra{number}": 1 for number in range(7)}
    with pytest.raises(Corrupt, match=r"extra0: .*; extra4: [^;]*; and 2 more$"):
        Commit.parse(changed(COMMIT, **extra), "commits/x")


@pytest.mark.parametrize("weight", [0.0, -1.0, 1e-320, 1e-46, 9e-31, 1.1e30, 1e39, float("inf"), float("nan")])
def test_weight_outside_float32_is_invalid(weight: float) -> None:
    """It would make the average NaN for every replica."""
    with pytest.raises(ValueError, match="weight"):
        Share(slot="a", contribution="c" * 64, weight=weight)


@pytest.mark.parametrize("weighting", ["tokens", "uniform"])
@pytest.mark.parametrize("tokens", [1, 1 << 62])
def test_every_valid_contribution_has_a_valid_weight(weighting: str, tokens: int) -> None:
    """A proposer that refused its own decision would stop every replica in turn."""
    smallest = {"tokens": tokens, "discount": 2.0**-40, "share": 2.0**-40}
    contributions = {
        slot: ObservedContribution(contribution=contribution(slot, **fields), digest="c" * 64)
        for slot, fields in (("a", smallest), ("b", {"tokens": tokens}))
    }
    assert len(members(policy(weighting=weighting), contributions)) == 2


@pytest.mark.parametrize("ranks", [(), (3, 0), (1, 2), (0, 0, 3), (1, 1, 1)])
def test_parts_of_all_ranks_are_the_parts(ranks: tuple[int, ...]) -> None:
    """A rank without tensors has no part."""
    parsed = Contribution.parse(changed(CONTRIBUTION, ranks=ranks), "contributions/x")
    assert tuple(part for rank in range(max(1, len(ranks))) for part in parsed.parts_of_rank(rank)) == PARTS


@pytest.mark.parametrize("uris", [("s3://a/runs/x",), ("s3://a/runs/x/copy",), ("s3://b/x/", "s3://b/x"), ("s3://a",)])
def test_mirror_needs_a_prefix_apart_from_the_run(uris: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="prefixes of their own"):
        run_record(FakeClock(), store="s3://a/runs/x", mirrors=tuple(MirrorSettings(uri=uri) for uri in uris))


def test_run_without_copies_has_the_bytes_of_before() -> None:
    assert not {"peers", "mirrors"} & json.loads(run_record(FakeClock()).to_bytes()).keys()
    kept = run_record(FakeClock(), peers=PeerCopies(), mirrors=(MirrorSettings(uri="s3://b/x", max_usd=5.0),))
    assert Run.parse(kept.to_bytes(), "run.json") == kept
