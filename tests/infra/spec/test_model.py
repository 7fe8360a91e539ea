from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest

from skerry.infra import spec, words
from skerry.infra.errors import Problem, SpecInvalid
from skerry.infra.sample import SAMPLES

GOOD = """\
run: tiny
store: file://store
code: {path: ., command: [python, train.py]}
outer: {rounds: 40}
replicas:
  - {name: a, count: 2, target: {kind: local}}
"""

BATCH = """\
run: tiny
store: s3://acme/runs
image: acme/skerry:gpu
code: {path: ., command: [python, train.py]}
outer: {rounds: 40}
replicas:
  - name: a
    count: 4
    target: {kind: aws_batch, region: us-east-1, instance_types: [g6e.xlarge], gpus: 1}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "skerry.yaml"
    path.write_text(text)
    return path


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    path = write(folder, text)
    with pytest.raises(SpecInvalid) as caught:
        spec.load(path, overrides)
    return [str(problem).replace(f"{path}:", "") for problem in caught.value.problems]


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def batch(old: str, new: str) -> str:
    assert old in BATCH
    return BATCH.replace(old, new)


NAME = "1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
CASES = {
    "unknown field": (
        changed("rounds: 40", "rounds: 40, round: 3"),
        "4:21: outer.round: unknown field; did you mean rounds?",
    ),
    "far from any field": (
        GOOD + "zzz: 1\n",
        (
            "7:1: zzz: unknown field; the fields here are run, store, image, code, outer, faults, replicas, "
            "state, limits, byo, tags"
        ),
    ),
    "number without a unit": (
        GOOD + "faults: {grace: 60}\n",
        "7:17: faults.grace: has no unit (60s are seconds, 60m minutes, 60h hours); got 60; write e.g. grace: 60s",
    ),
    "wrong unit": (
        GOOD + "faults: {grace: 60sec}\n",
        (
            "7:17: faults.grace: has an unknown unit 'sec' (the units are ms, s, m, h, d); got '60sec'; "
            "write e.g. grace: 60s"
        ),
    ),
    "not a time": (
        GOOD + "faults: {start_window: soon}\n",
        "7:24: faults.start_window: must be a time with its unit, like 60s; got 'soon'; write e.g. start_window: 10m",
    ),
    "count 0": (
        changed("count: 2", "count: 0"),
        "6:22: replicas[0].count: must be at least 1; got 0; write e.g. count: 4",
    ),
    "count in words": (
        changed("count: 2", "count: two"),
        "6:22: replicas[0].count: must be a whole number; got 'two'; write e.g. count: 4",
    ),
    "missing": (changed("count: 2, ", ""), "6:5: replicas[0].count: missing; write e.g. count: 4"),
    "missing rounds": (changed("rounds: 40", "lr: 0.5"), "4:8: outer.rounds: missing; write e.g. rounds: 40"),
    "duplicate name": (
        GOOD + "  - {name: a, count: 1, target: {kind: local}}\n",
        "7:12: replicas[1].name: 'a' is already the name of replicas[0]; write another, e.g. name: a-1",
    ),
    "too few replicas": (
        GOOD + "faults: {min_replicas: 3}\n",
        (
            "7:24: faults.min_replicas: no round could ever close: 3 needed, 2 replicas in the spec; "
            "write e.g. min_replicas: 2"
        ),
    ),
    "an end that is put off and is none": (
        changed("rounds: 40", "rounds: null") + "faults: {make_up: true}\n",
        (
            "7:19: faults.make_up: a run without rounds has no end to put off; "
            "give it some, e.g. outer.rounds: 200, or leave this out"
        ),
    ),
    "fragments that do not fit": (
        changed("rounds: 40", "rounds: 40, sync_every: 10, fragments: 3"),
        "4:33: outer.sync_every: must be a multiple of fragments; got 10 with fragments: 3; write e.g. sync_every: 12",
    ),
    "fragments that do not fit the default": (
        changed("rounds: 40", "rounds: 40, fragments: 3"),
        "4:8: outer.sync_every: must be a multiple of fragments; got 100 with fragments: 3; write e.g. sync_every: 102",
    ),
    "a later target": (
        changed("kind: local", "kind: kubernetes, region: x"),
        (
            "6:40: replicas[0].target.kind: kubernetes is not available yet in this version; "
            "available: local, docker, aws_batch, sagemaker, vertex"
        ),
    ),
    "an unknown target": (
        changed("kind: local", "kind: locl"),
        (
            "6:40: replicas[0].target.kind: unknown kind of target 'locl'; "
            "available: local, docker, aws_batch, sagemaker, vertex"
        ),
    ),
    "a field of another target": (
        changed("kind: local", "kind: local, network: host"),
        "6:47: replicas[0].target.network: unknown field; the fields here are kind, threads",
    ),
    "a typing error in a target": (
        changed("kind: local", "kind: docker, netwrk: host") + "image: x\n",
        "6:48: replicas[0].target.netwrk: unknown field; did you mean network?",
    ),
    "a wrong value in a target": (
        changed("kind: local", "kind: docker, network: wifi") + "image: x\n",
        "6:57: replicas[0].target.network: must be 'bridge' or 'host'; got 'wifi'; write e.g. network: host",
    ),
    "no kind of target": (
        changed("kind: local", "threads: 2"),
        (
            "6:33: replicas[0].target.kind: must be 'local' or 'docker' or 'aws_batch' or 'sagemaker' or 'vertex'; "
            "write e.g. kind: local"
        ),
    ),
    "containers of no image": (
        changed("kind: local", "kind: docker"),
        "1:1: image: missing, and containers are made of one; write e.g. image: skerry:cpu",
    ),
    "two kinds of targets": (
        GOOD + "  - {name: b, count: 1, target: {kind: docker}}\nimage: x\n",
        (
            "7:40: replicas[1].target.kind: cannot run beside replicas[0], which is local: one run has one kind of "
            "target so far; write kind: local"
        ),
    ),
    "a bad choice": (
        changed("rounds: 40", "rounds: 40, codec: int8"),
        "4:28: outer.codec: must be 'none' or 'bf16'; got 'int8'; write e.g. codec: bf16",
    ),
    "a number in a command": (
        changed("train.py]", "train.py, 5]"),
        "3:45: code.command[2]: must be text (put it in quotes); got 5",
    ),
    "a bad name": (
        changed("run: tiny", "run: tiny gpt"),
        f"1:6: run: must be {NAME}; got 'tiny gpt'; write e.g. run: tiny-gpt",
    ),
    "an empty section": (
        changed("outer: {rounds: 40}", "outer:"),
        (
            "4:1: outer: must be a section with rounds, sync_every, fragments, codec, lr, momentum, weighting, "
            "max_norm; "
            "got nothing; write e.g. outer: {rounds: 40}"
        ),
    ),
    "a missing section": (
        changed("outer: {rounds: 40}\n", ""),
        "1:1: outer: missing; write e.g. outer: {rounds: 40}",
    ),
    "no code": (
        changed("code: {path: ., command: [python, train.py]}\n", ""),
        "1:1: code: missing; write e.g. code: {path: ./train, command: [python, train.py]}",
    ),
    "a time that no clock can hold": (
        GOOD + "faults: {grace: 999999999999d}\n",
        "7:17: faults.grace: must be at most 365d; got '999999999999d'; write e.g. grace: 60s",
    ),
    "an anchor that contains itself": (
        "&a\n" + GOOD + "zzz: *a\n",
        "1:1: holds an anchor that contains itself; write the values out",
    ),
    "a tag": (
        changed("rounds: 40", "rounds: !big 40"),
        "4:17: has the tag !big, which nothing here reads; remove it",
    ),
    "a tag of a section": (
        changed("outer: {", "outer: !mine {"),
        "4:8: has the tag !mine, which nothing here reads; remove it",
    ),
    "a store in memory": (
        changed("file://store", "memory://x"),
        (
            "2:8: store: must be a store that other processes can open; memory:// is gone with the process; "
            "got 'memory://x'; write e.g. store: file://.skerry/store"
        ),
    ),
    "a key twice": (
        GOOD + "run: b\n",
        '7:1: is not YAML: found duplicate key "run" with value "b" (original value: "tiny")',
    ),
    "broken YAML": (GOOD + "x: [1\n", "8:1: is not YAML: expected ',' or ']', but got '<stream end>'"),
    "a size without a unit": (
        batch("gpus: 1", "disk: 100"),
        (
            "9:86: replicas[0].target.disk: has no unit (100MiB are mebibytes, 100GiB gibibytes); got 100; "
            "write e.g. disk: 100GiB"
        ),
    ),
    "an unknown unit of a size": (
        batch("gpus: 1", "memory: 8Gi"),
        (
            "9:88: replicas[0].target.memory: has an unknown unit 'Gi' (the units are MB, MiB, GB, GiB, TB, TiB); "
            "got '8Gi'; write e.g. memory: 28GiB"
        ),
    ),
    "a family of machines": (
        batch("g6e.xlarge", "g6e"),
        (
            "9:67: replicas[0].target.instance_types[0]: must be a type of machine with its size, not a family; "
            "got 'g6e'"
        ),
    ),
    "no region": (
        batch("region: us-east-1, ", ""),
        "9:13: replicas[0].target.region: missing; write e.g. region: us-east-1",
    ),
    "a time that is too short": (
        batch("region: us-east-1", "region: us-east-1, max_runtime: 10s"),
        "9:63: replicas[0].target.max_runtime: must be 1m to 365d; got '10s'; write e.g. max_runtime: 24h",
    ),
    "a region that is none": (
        batch("region: us-east-1", "region: virginia"),
        ("9:39: replicas[0].target.region: must be a region of AWS; got 'virginia'; write e.g. region: us-east-1"),
    ),
    "jobs and a folder": (
        batch("s3://acme/runs", "file://store"),
        ("2:8: store: jobs of aws_batch reach a store in S3 or Cloud Storage; write e.g. store: s3://my-bucket/runs"),
    ),
    "a bucket that S3 refuses": (
        batch("s3://acme/runs", "s3://Acme_Runs/x"),
        (
            "2:8: store: the bucket 'Acme_Runs' may have small letters, digits, '-' and '.', and begins and ends "
            "with a letter or digit; write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "a prefix that no tag can hold": (
        batch("s3://acme/runs", "s3://acme/team a,b"),
        (
            "2:8: store: the run's URI marks all that is made: letters, digits, '.', '_', '-' and '/', 256 at most; "
            "write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "a prefix that is too long for a tag": (
        batch("s3://acme/runs", f"s3://acme/{'x' * 250}"),
        (
            "2:8: store: the run's URI marks all that is made: letters, digits, '.', '_', '-' and '/', 256 at most; "
            "write e.g. store: s3://my-bucket/runs"
        ),
    ),
    "jobs of no image": (
        batch("image: acme/skerry:gpu\n", ""),
        (
            "1:1: image: missing, and containers are made of one; write e.g. image: "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
        ),
    ),
    "jobs beside processes": (
        BATCH + "  - {name: b, count: 1, target: {kind: local}}\n",
        (
            "10:40: replicas[1].target.kind: cannot run beside replicas[0], which is aws_batch: one run has one kind "
            "of target so far; write kind: aws_batch"
        ),
    ),
    "a role for each of many": (
        batch("count: 4", "count: 201"),
        (
            "9:13: replicas[0].target.role: 201 replicas would need a role each, and IAM allows 1,000 in an account; "
            "above 200 write role: group"
        ),
    ),
    "spot's own way on other machines": (
        batch("gpus: 1", "allocation: spot_capacity_optimized"),
        (
            "9:92: replicas[0].target.allocation: spot_capacity_optimized is for spot machines, and these are not; "
            "write allocation: best_fit_progressive"
        ),
    ),
    "a zone elsewhere": (
        batch("gpus: 1", "zones: [us-west-2a]"),
        "9:88: replicas[0].target.zones[0]: us-west-2a is not in us-east-1; write e.g. us-east-1a",
    ),
    "machines beside a queue that has its own": (
        batch("gpus: 1", "byo: {queue: q, subnets: [subnet-0a]}"),
        "9:96: replicas[0].target.byo.subnets: is not used beside queue, which has its own; take one of them out",
    ),
    "too little time for a job": (
        BATCH + "limits: {max_hours: 0.01}\n",
        ("10:21: limits.max_hours: is 36 s, and 60 s are the least that a job may be limited to; write 0.017 or more"),
    ),
    "a limit that nobody would keep": (
        GOOD + "limits: {max_hours: 3}\n",
        (
            "7:10: limits.max_hours: is kept by jobs in a cloud, and replicas of local end only by themselves; "
            "take it out"
        ),
    ),
    "a tag of ours": (
        BATCH + "tags: {'skerry:run': x}\n",
        (
            "10:7: tags: must not begin with skerry:, which is not yours to use ('skerry:run'); got a mapping; "
            "write e.g. tags: {team: research}"
        ),
    ),
    "a tag that AWS refuses": (
        BATCH + "tags: {team: 'r&d'}\n",
        (
            "10:7: tags: must have values of at most 256 letters, digits, spaces and + - = . _ : / @ ('r&d'); "
            "got a mapping; write e.g. tags: {team: research}"
        ),
    ),
    "a state in memory": (
        BATCH + "state: memory://x\n",
        (
            "10:8: state: must be a store that other processes can open; memory:// is gone with the process; "
            "got 'memory://x'; write e.g. state: file://.skerry/state"
        ),
    ),
    "a list": ("- 1\n", "1:1: must be a mapping of fields; `skerry init` writes a sample to start from"),
    "nothing": ("", "1:1: must be a mapping of fields; `skerry init` writes a sample to start from"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_spec_is_told_by_line_place_and_what_to_write(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert complaints(tmp_path, text) == [expected]


def test_every_problem_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("run: tiny", "run: .x").replace("count: 2", "count: 0") + "faults: {grace: 5, min_replica: 1}\n"
    found = complaints(tmp_path, text)
    assert [line.split(":")[:3] for line in found] == [
        ["1", "6", " run"],
        ["6", "22", " replicas[0].count"],
        ["7", "17", " faults.grace"],
        ["7", "20", " faults.min_replica"],
    ]


def test_an_override_replaces_a_value_and_its_errors_name_the_flag(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    loaded = spec.load(path, ["outer.rounds=7", "replicas[0].count=3", "faults.grace=90s", "outer.lr=0.5"])
    assert loaded.spec.outer.rounds == 7
    assert [seat.slot for seat in loaded.seats] == ["a-0", "a-1", "a-2"]
    assert loaded.spec.faults.grace == timedelta(seconds=90)
    assert complaints(tmp_path, GOOD, "outer.rounds=many", "outr.x=1") == [
        "--set outer.rounds=many: outer.rounds: must be a whole number; got 'many'; write e.g. rounds: 40",
        "--set outr.x=1: outr: unknown field; did you mean outer?",
    ]
    assert complaints(tmp_path, GOOD, "rounds", "replicas[4].count=1") == [
        "--set replicas[4].count=1: there is no replicas[4]: replicas has 1, counted from 0",
        "--set rounds: is not field=value; write e.g. --set outer.rounds=40",
    ]


def test_a_bad_override_does_not_hide_what_is_wrong_in_the_file(tmp_path: Path) -> None:
    found = complaints(tmp_path, GOOD.replace("count: 2", "count: 0"), "outer.rounds=", "replicas[9].target.kind=x")
    assert found == [
        "--set outer.rounds=: has no value; write null if none is meant",
        "--set replicas[9].target.kind=x: there is no replicas[9]: replicas has 1, counted from 0",
        "6:22: replicas[0].count: must be at least 1; got 0; write e.g. count: 4",
    ]
    assert spec.load(write(tmp_path, GOOD), ["outer.rounds=null"]).spec.outer.rounds is None


def test_a_section_whose_lines_are_all_comments_is_the_default_one(tmp_path: Path) -> None:
    for text in ("faults:\n  # grace: 5s\n", "faults: {restarts: }\n"):
        assert spec.load(write(tmp_path, GOOD + text)).spec.faults == spec.Faults()


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        ("/mnt/store", "must be a URI; for a folder write file:///mnt/store"),
        ("runs", "must be a URI; for a folder write file://runs"),
        ("S3://bucket/x", "must begin in lower case; write s3://bucket/x"),
        ("s4://bucket", "must begin with s3://, gs://, az:// or file://; there is no store for s4://"),
        ("s3://", "must name a bucket; write s3://bucket/prefix"),
        ("file:///", "must name a folder; write file:///folder, or file://folder beside the spec"),
        ("file://~/x", "must not begin with ~, which nobody expands; write file:///home/you/x"),
        ("file://localhost/tmp/x", "must name no host; write file:///tmp/x"),
    ],
)
def test_a_store_that_cannot_be_is_told_what_to_write(tmp_path: Path, store: str, complaint: str) -> None:
    [found] = complaints(tmp_path, changed("file://store", store))
    assert found.startswith(f"2:8: store: {complaint}; got")


def test_ctrl_c_during_a_slow_check_does_not_lose_what_was_found_before(tmp_path: Path) -> None:
    def interrupted(_: object) -> list[Problem]:
        raise KeyboardInterrupt

    with pytest.raises(SpecInvalid, match="must be at least 1"):
        spec.load(write(tmp_path, GOOD.replace("count: 2", "count: 0")), checks=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        spec.load(write(tmp_path, GOOD), checks=[interrupted])


def test_a_missing_or_unreadable_file_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(SpecInvalid, match="no such file; `skerry init` writes a sample"):
        spec.load(missing)
    missing.write_bytes(b"run: \xff\n")
    with pytest.raises(SpecInvalid, match="is not UTF-8 text: byte 5 is 0xff"):
        spec.load(missing)
    missing.write_bytes(b"run: a\x00\n")
    with pytest.raises(SpecInvalid, match="is not YAML"):
        spec.load(missing)


def test_paths_start_at_the_folder_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    loaded = spec.load(Path("skerry.yaml"))
    assert loaded.run_uri == (tmp_path / "store" / "tiny").as_uri()
    assert loaded.code_path == tmp_path
    assert loaded.work_folder == tmp_path / ".skerry" / "tiny"
    absolute = spec.load(Path("skerry.yaml"), ["store=file:///data/runs/"])
    assert absolute.run_uri == "file:///data/runs/tiny"
    assert spec.load(Path("skerry.yaml"), ["store=s3://bucket/runs/"]).run_uri == "s3://bucket/runs/tiny"


def test_slots_are_numbered_over_all_groups_in_document_order(tmp_path: Path) -> None:
    text = GOOD + "  - {name: b, count: 1, target: {kind: local, threads: 3}}\n"
    seats = spec.load(write(tmp_path, text)).seats
    assert [(seat.slot, seat.index, seat.threads) for seat in seats] == [
        ("a-0", 0, None),
        ("a-1", 1, None),
        ("b-0", 2, 3),
    ]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("outer.lr=0.6", False),
        ("outer.sync_every=200", False),
        ("replicas[0].count=3", False),
        ("faults.grace=1s", False),
        ("faults.min_replicas=2", False),
        ("run=other", False),
        ("faults.restarts.max=9", True),
        ("code.command=[python, other.py]", True),
        ("replicas[0].target.threads=2", True),
        ("outer.rounds=40", True),
    ],
)
def test_the_digest_covers_what_run_json_fixes_and_nothing_else(tmp_path: Path, override: str, *, same: bool) -> None:
    path = write(tmp_path, GOOD)
    assert (spec.load(path, [override]).digest() == spec.load(path).digest()) is same


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("replicas[0].target.region=eu-west-1", True),
        ("replicas[0].target.spot=true", True),
        ("limits.max_hours=3", True),
        ("byo.bucket=true", True),
        ("tags.team=other", True),
        ("state=file://elsewhere", True),
        ("image=acme/skerry:2", True),
        ("replicas[0].count=5", False),
    ],
)
def test_a_run_goes_on_wherever_its_replicas_are(tmp_path: Path, override: str, *, same: bool) -> None:
    path = write(tmp_path, BATCH)
    assert (spec.load(path, [override]).digest() == spec.load(path).digest()) is same


def test_groups_of_one_kind_may_be_in_several_regions_and_many_share_a_role(tmp_path: Path) -> None:
    west = "{kind: aws_batch, region: us-west-2, instance_types: [p5.48xlarge], role: group, shared_memory: 64GiB}"
    loaded = spec.load(write(tmp_path, f"{BATCH}  - {{name: b, count: 900, target: {west}}}\n"))
    assert [seat.slot for seat in loaded.seats[:6]] == ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1"]
    assert loaded.deployed
    assert {seat.threads for seat in loaded.seats} == {None}
    assert loaded.spec.replicas[1].model_dump(mode="json")["target"]["shared_memory"] == "64GiB"


def test_the_state_lies_with_the_run_or_where_the_spec_says(tmp_path: Path) -> None:
    path = write(tmp_path, BATCH)
    assert spec.load(path).state_uri is None
    assert spec.load(path, ["state=s3://other/states"]).state_uri == "s3://other/states/tiny"
    assert spec.load(path, ["state=file://here"]).state_uri == (tmp_path / "here" / "tiny").as_uri()


def test_the_roles_of_all_groups_count_together_and_a_role_of_ones_own_does_not(tmp_path: Path) -> None:
    more = (
        "  - {{name: b, count: 197, target: {{kind: aws_batch, region: us-east-1, instance_types: [g5.xlarge]{0}}}}}\n"
    )
    [found] = complaints(tmp_path, BATCH + more.format(""))
    assert found.startswith("10:35: replicas[1].target.role: 201 replicas")
    assert spec.load(write(tmp_path, BATCH + more.format(", byo: {job_role: mine}")))


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        ("my-bucket", True),
        ("a.b.c", True),
        ("x" * 63, True),
        ("ab", False),
        ("x" * 64, False),
        ("-ab", False),
        ("a..b", False),
        ("10.0.0.1", False),
        ("xn--bucket", False),
        ("mine--x-s3", False),
    ],
)
def test_the_bucket_of_a_deployed_run_has_a_name_that_s3_takes(tmp_path: Path, name: str, *, fine: bool) -> None:
    text = batch("acme/runs", f"{name}/runs")
    if fine:
        assert spec.load(write(tmp_path, text)).run_uri == f"s3://{name}/runs/tiny"
    else:
        assert complaints(tmp_path, text)[0].startswith("2:8: store: the bucket")


@pytest.mark.parametrize("kind", SAMPLES)
def test_the_sample_is_valid_for_the_schema_and_for_us(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, SAMPLES[kind])
    loaded = spec.load(path)
    assert {group.target.kind for group in loaded.spec.replicas} == {kind}
    assert loaded.spec.run == "my-run"
    document = json.loads(spec.schema())
    jsonschema.Draft202012Validator.check_schema(document)
    tree = spec.document.read(path).tree
    jsonschema.validate(json.loads(json.dumps(tree)), document)
    with pytest.raises(jsonschema.ValidationError, match="'rouns' was unexpected"):
        jsonschema.validate({**json.loads(json.dumps(tree)), "rouns": 1}, document)


def test_the_schema_is_frozen() -> None:
    golden = Path(__file__).with_name("schema.golden.json")
    assert spec.schema() + "\n" == golden.read_text(), (
        "the spec's language changed; if on purpose: skerry schema > tests/infra/schema.golden.json"
    )


def test_the_default_that_coherence_repeats_is_the_models() -> None:
    assert spec.Outer(rounds=1).sync_every == 100


@pytest.mark.parametrize(
    ("text", "seconds"), [("250ms", 0.25), ("60s", 60), ("1.5h", 5400), ("10m", 600), ("2d", 172800), ("0s", 0)]
)
def test_a_time_is_read_with_its_unit_and_written_back(text: str, seconds: float) -> None:
    assert words.parse_duration(text) == timedelta(seconds=seconds)
    assert words.parse_duration(words.format_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-5s", "5", "1e9s", "5 weeks", "inf", "99999d", "999999999999d", "9" * 400 + "s", True, None, ()]
)
def test_anything_else_is_not_a_time(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be|has no unit|unknown unit"):
        words.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("60GiB", 60 << 30), ("1.5GiB", 3 << 29), ("512MiB", 512 << 20), ("2TB", 2 * 10**12), ("100 GB", 10**11)],
)
def test_a_size_is_read_with_its_unit_and_written_back(text: str, size_bytes: int) -> None:
    assert words.parse_size(text) == size_bytes
    assert words.parse_size(words.format_size(size_bytes)) == size_bytes
