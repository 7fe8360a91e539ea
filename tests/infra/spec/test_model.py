from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import jsonschema
import pytest

from skerry.infra import targets
from skerry.infra.errors import Problem, SpecInvalid
from skerry.infra.spec import model, yaml_document

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
        model.load(path, targets.kinds(), overrides)
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
    "unknown field with a distant name": (
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
            "7:24: faults.min_replicas: no round could close: 3 contributions needed, 2 replicas in the spec; "
            "write e.g. min_replicas: 2"
        ),
    ),
    "make_up without rounds": (
        changed("rounds: 40", "rounds: null") + "faults: {make_up: true}\n",
        ("7:19: faults.make_up: needs a number of rounds; write e.g. outer.rounds: 200, or remove this"),
    ),
    "uneven fragments": (
        changed("rounds: 40", "rounds: 40, sync_every: 10, fragments: 3"),
        "4:33: outer.sync_every: must be a multiple of fragments; got 10 with fragments: 3; write e.g. sync_every: 12",
    ),
    "uneven fragments with the default": (
        changed("rounds: 40", "rounds: 40, fragments: 3"),
        "4:8: outer.sync_every: must be a multiple of fragments; got 100 with fragments: 3; write e.g. sync_every: 102",
    ),
    "a planned kind of target": (
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
    "a misspelled option": (
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
    "containers without an image": (
        changed("kind: local", "kind: docker"),
        "1:1: image: missing, and containers need one; write e.g. image: skerry:cpu",
    ),
    "two kinds of targets": (
        GOOD + "  - {name: b, count: 1, target: {kind: docker}}\nimage: x\n",
        (
            "7:40: replicas[1].target.kind: cannot run with replicas[0], which is local: only kinds in clouds "
            "can be mixed; write kind: local"
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
    "a time that is too long": (
        GOOD + "faults: {grace: 999999999999d}\n",
        "7:17: faults.grace: must be at most 365d; got '999999999999d'; write e.g. grace: 60s",
    ),
    "a recursive anchor": (
        "&a\n" + GOOD + "zzz: *a\n",
        "1:1: holds an anchor that contains itself; write the values out",
    ),
    "a tag": (
        changed("rounds: 40", "rounds: !big 40"),
        "4:17: has the tag !big, which is not supported; remove it",
    ),
    "a tag of a section": (
        changed("outer: {", "outer: !mine {"),
        "4:8: has the tag !mine, which is not supported; remove it",
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
    "jobs without an image": (
        batch("image: acme/skerry:gpu\n", ""),
        (
            "1:1: image: missing, and containers need one; write e.g. image: "
            "123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu"
        ),
    ),
    "jobs and processes": (
        BATCH + "  - {name: b, count: 1, target: {kind: local}}\n",
        (
            "10:40: replicas[1].target.kind: cannot run with replicas[0], which is aws_batch: only kinds in clouds "
            "can be mixed; write kind: aws_batch"
        ),
    ),
    "a limit of local replicas": (
        GOOD + "limits: {max_hours: 3}\n",
        (
            "7:10: limits.max_hours: is enforced only by jobs in a cloud, and replicas of local run without "
            "one; remove it"
        ),
    ),
    "a reserved tag": (
        BATCH + "tags: {'skerry:run': x}\n",
        (
            "10:7: tags: must not begin with skerry:, which skerry reserves ('skerry:run'); got a mapping; "
            "write e.g. tags: {team: research}"
        ),
    ),
    "a tag with a wrong character": (
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
def test_problem_has_its_line_its_place_and_the_correction(tmp_path: Path, case: str) -> None:
    text, expected = CASES[case]
    assert complaints(tmp_path, text) == [expected]


def test_all_problems_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = GOOD.replace("run: tiny", "run: .x").replace("count: 2", "count: 0") + "faults: {grace: 5, min_replica: 1}\n"
    problems = complaints(tmp_path, text)
    assert [line.split(":")[:3] for line in problems] == [
        ["1", "6", " run"],
        ["6", "22", " replicas[0].count"],
        ["7", "17", " faults.grace"],
        ["7", "20", " faults.min_replica"],
    ]


def test_override_replaces_a_value_and_its_problems_name_the_flag(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    loaded = model.load(
        path, targets.kinds(), ["outer.rounds=7", "replicas[0].count=3", "faults.grace=90s", "outer.lr=0.5"]
    )
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


def test_invalid_override_hides_no_problem_of_the_file(tmp_path: Path) -> None:
    problems = complaints(tmp_path, GOOD.replace("count: 2", "count: 0"), "outer.rounds=", "replicas[9].target.kind=x")
    assert problems == [
        "--set outer.rounds=: has no value; write null to unset it",
        "--set replicas[9].target.kind=x: there is no replicas[9]: replicas has 1, counted from 0",
        "6:22: replicas[0].count: must be at least 1; got 0; write e.g. count: 4",
    ]
    assert model.load(write(tmp_path, GOOD), targets.kinds(), ["outer.rounds=null"]).spec.outer.rounds is None


def test_section_without_fields_is_the_default_section(tmp_path: Path) -> None:
    for text in ("faults:\n  # grace: 5s\n", "faults: {restarts: }\n"):
        assert model.load(write(tmp_path, GOOD + text), targets.kinds()).spec.faults == model.Faults()


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        ("/mnt/store", "must be a URI; for a folder write file:///mnt/store"),
        ("runs", "must be a URI; for a folder write file://runs"),
        ("S3://bucket/x", "must begin in lower case; write s3://bucket/x"),
        ("s4://bucket", "must begin with s3://, gs://, az:// or file://; there is no store for s4://"),
        ("s3://", "must name a bucket; write s3://bucket/prefix"),
        ("file:///", "must name a folder; write file:///folder, or file://folder beside the spec"),
        ("file://~/x", "must not begin with ~, which is not expanded; write file:///home/you/x"),
        ("file://localhost/tmp/x", "must name no host; write file:///tmp/x"),
    ],
)
def test_invalid_store_is_reported_with_a_correction(tmp_path: Path, store: str, complaint: str) -> None:
    [problem] = complaints(tmp_path, changed("file://store", store))
    assert problem.startswith(f"2:8: store: {complaint}; got")


def test_interrupted_check_keeps_earlier_problems(tmp_path: Path) -> None:
    def interrupted(_: object) -> list[Problem]:
        raise KeyboardInterrupt

    with pytest.raises(SpecInvalid, match="must be at least 1"):
        model.load(write(tmp_path, GOOD.replace("count: 2", "count: 0")), targets.kinds(), checks=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        model.load(write(tmp_path, GOOD), targets.kinds(), checks=[interrupted])


def test_missing_or_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(SpecInvalid, match="no such file; `skerry init` writes a sample"):
        model.load(missing, targets.kinds())
    missing.write_bytes(b"run: \xff\n")
    with pytest.raises(SpecInvalid, match="is not UTF-8 text: byte 5 is 0xff"):
        model.load(missing, targets.kinds())
    missing.write_bytes(b"run: a\x00\n")
    with pytest.raises(SpecInvalid, match="is not YAML"):
        model.load(missing, targets.kinds())


def test_relative_paths_start_at_the_folder_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    loaded = model.load(Path("skerry.yaml"), targets.kinds())
    assert loaded.run_uri == (tmp_path / "store" / "tiny").as_uri()
    assert loaded.code_path == tmp_path
    assert loaded.work_folder == tmp_path / ".skerry" / "tiny"
    absolute = model.load(Path("skerry.yaml"), targets.kinds(), ["store=file:///data/runs/"])
    assert absolute.run_uri == "file:///data/runs/tiny"
    assert (
        model.load(Path("skerry.yaml"), targets.kinds(), ["store=s3://bucket/runs/"]).run_uri == "s3://bucket/runs/tiny"
    )


def test_replicas_are_numbered_over_all_groups_in_order(tmp_path: Path) -> None:
    text = GOOD + "  - {name: b, count: 1, target: {kind: local, threads: 3}}\n"
    seats = model.load(write(tmp_path, text), targets.kinds()).seats
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
def test_digest_covers_only_what_run_json_fixes(tmp_path: Path, override: str, *, same: bool) -> None:
    path = write(tmp_path, GOOD)
    assert (
        model.load(path, targets.kinds(), [override]).digest() == model.load(path, targets.kinds()).digest()
    ) is same


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
def test_digest_ignores_where_replicas_run(tmp_path: Path, override: str, *, same: bool) -> None:
    path = write(tmp_path, BATCH)
    assert (
        model.load(path, targets.kinds(), [override]).digest() == model.load(path, targets.kinds()).digest()
    ) is same


def test_groups_of_one_kind_may_be_in_several_regions(tmp_path: Path) -> None:
    west = "{kind: aws_batch, region: us-west-2, instance_types: [p5.48xlarge], role: group, shared_memory: 64GiB}"
    loaded = model.load(write(tmp_path, f"{BATCH}  - {{name: b, count: 900, target: {west}}}\n"), targets.kinds())
    assert [seat.slot for seat in loaded.seats[:6]] == ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1"]
    assert loaded.deployed
    assert {seat.threads for seat in loaded.seats} == {None}
    assert loaded.spec.replicas[1].model_dump(mode="json")["target"]["shared_memory"] == "64GiB"


def test_state_is_with_the_run_by_default(tmp_path: Path) -> None:
    path = write(tmp_path, BATCH)
    assert model.load(path, targets.kinds()).state_uri is None
    assert model.load(path, targets.kinds(), ["state=s3://other/states"]).state_uri == "s3://other/states/tiny"
    assert model.load(path, targets.kinds(), ["state=file://here"]).state_uri == (tmp_path / "here" / "tiny").as_uri()


@pytest.mark.parametrize("kind", targets.samples())
def test_sample_is_valid_for_the_schema_and_the_models(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, targets.samples()[kind])
    loaded = model.load(path, targets.kinds())
    assert {group.target.kind for group in loaded.spec.replicas} == {kind}
    assert loaded.spec.run == "my-run"
    document = json.loads(model.schema(targets.kinds()))
    jsonschema.Draft202012Validator.check_schema(document)
    tree = yaml_document.read(path).tree
    jsonschema.validate(json.loads(json.dumps(tree)), document)
    with pytest.raises(jsonschema.ValidationError, match="'rouns' was unexpected"):
        jsonschema.validate({**json.loads(json.dumps(tree)), "rouns": 1}, document)


def test_schema_is_frozen() -> None:
    golden = Path(__file__).with_name("schema.golden.json")
    assert model.schema(targets.kinds()) + "\n" == golden.read_text(), (
        "the spec's language changed; if on purpose: skerry schema > tests/infra/spec/schema.golden.json"
    )


def test_default_in_consistency_equals_the_default_of_the_model() -> None:
    assert model.Outer(rounds=1).sync_every == 100
