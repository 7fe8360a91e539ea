from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest
from ruamel.yaml import YAML
from tests.infra.kit import plain

from skerry.infra import targets
from skerry.infra.spec import model, yaml_document
from skerry.infra.spec_and_store_errors import Problem, SpecInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from skerry.infra.spec.model import SpecFile

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

MIRRORED = f"{BATCH}replication: [{{to: gs://acme-dr/runs}}]\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "skerry.yaml"
    path.write_text(text)
    return path


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    path = write(folder, text)
    with pytest.raises(SpecInvalid) as caught:
        model.load(path, targets.kinds(), overrides)
    return [str(problem).replace(f"{path}:", "") for problem in caught.value.problems]


def load(folder: Path, text: str, *overrides: str) -> SpecFile:
    return model.load(write(folder, text), targets.kinds(), overrides)


def cases() -> Iterator[tuple[str, str]]:
    """Specs with one problem each, and the problem.

    A line of problems.txt names a spec, "local" or "jobs", a text in it and its replacement; without a text, the
    replacement is added at the end. The next line is the problem.
    """
    lines = Path(__file__).with_name("problems.txt").read_text().splitlines()
    for change, problem in zip(lines[::2], lines[1::2], strict=True):
        name, old, new = change.replace("\\n", "\n").split("|")
        spec = {"local": GOOD, "jobs": BATCH}[name]
        assert old in spec
        yield spec.replace(old, new) if old else f"{spec}{new}\n", problem.strip()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *cases(),
        (f"&a\n{GOOD}zzz: *a\n", "1:1: holds an anchor that contains itself; write the values out"),
        ("- 1\n", "1:1: must be a mapping of fields; `skerry init` writes a sample to start from"),
        ("", "1:1: must be a mapping of fields; `skerry init` writes a sample to start from"),
    ],
)
def test_problem_has_its_line_its_place_and_the_correction(tmp_path: Path, text: str, problem: str) -> None:
    assert complaints(tmp_path, text) == [problem]


SETTING = re.compile(r"(?:write(?: e\.g\.)?|, e\.g\.|, or) ([\w.\[\]]+): (.+?)(?=; |, or |$)")
VALUE = re.compile(r"(?:write(?: e\.g\.)?|, or) (\w+://\S+?|\{.+\}|\[.+\])(?=[;,]? |$)")
NAME = re.compile(r"did you mean (\w+)\?$|, e\.g\. (\w+)$")


SUGGESTS = re.compile(r"write e\.g\.|write \w+: |remove (?:it|this|the line)\b|did you mean|in quotes")


def corrected(folder: Path, text: str, problem: str) -> Iterator[tuple[str, str]]:
    """The spec after each correction that its problem suggests, with the place that was corrected."""
    where = problem.split(": ", 2)[1]
    parent, dot, field = where.rpartition(".")
    if "put it under secrets" in problem:
        yield edited(edited(text, where), f"secrets.{field}", {"environment": field}), where
        return
    for name, value in SETTING.findall(problem):
        place = where if name == field else name if "." in name else f"{parent}{dot}{name}"
        yield edited(text, place, value), place
    for value in VALUE.findall(problem):
        yield edited(text, where, value), where
    for names in NAME.findall(problem):
        value = yaml_document.read(write(folder, text)).value(steps_of(where))
        yield edited(edited(text, where), f"{parent}{dot}{''.join(names)}", value), where
    if "has the tag" in problem:
        yield re.sub(r"!\w+ ", "", text), where
    elif removed := re.search(r"[;,](?: or)? remove (it|this|the line)\b", problem):
        place = parent if removed[1] == "the line" else where
        yield edited(text, place), place
    if "put it in quotes" in problem:
        value = yaml_document.read(write(folder, text)).value(steps_of(where))
        yield edited(text, where, json.dumps(str(value))), where


def steps_of(place: str) -> tuple[str | int, ...]:
    return tuple(int(step) if step.isdigit() else step for step in re.findall(r"[\w-]+", place))


def edited(text: str, place: str, *value: object) -> str:
    """The spec with another value at a place: YAML, or a builtin; without a value, the spec without the place."""
    document = YAML(typ="safe")
    tree = document.load(text)
    *steps, last = steps_of(place)
    node = tree
    for step in steps:
        node = node.setdefault(step, {}) if isinstance(node, dict) else node[step]
    if value:
        node[last] = document.load(value[0]) if isinstance(value[0], str) else value[0]
    else:
        del node[last]
    return json.dumps(tree)


@pytest.mark.parametrize(("text", "problem"), [case for case in cases() if SUGGESTS.search(case[1])])
def test_suggestion_is_itself_valid(tmp_path: Path, text: str, problem: str) -> None:
    specs = list(corrected(tmp_path, text, problem))
    assert specs
    for spec, place in specs:
        try:
            load(tmp_path, spec)
        except SpecInvalid as invalid:  # another kind of target also needs fields of its own
            left = [each for each in invalid.problems if each.path == place or not each.text.startswith("missing")]
            assert not left


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
    overrides = ["outer.rounds=7", "replicas[0].count=3", "faults.grace=90s", "outer.lr=0.5"]
    loaded = load(tmp_path, GOOD, *overrides)
    assert loaded.spec.outer.rounds == 7
    assert [replica.slot for replica in loaded.replica_slots] == ["a-0", "a-1", "a-2"]
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
    assert load(tmp_path, GOOD, "outer.rounds=null").spec.outer.rounds is None


def test_section_without_fields_is_the_default_section(tmp_path: Path) -> None:
    for text in ("faults:\n  # grace: 5s\n", "faults: {restarts: }\n"):
        assert load(tmp_path, GOOD + text).spec.faults == model.Faults()


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        ("/mnt/store", "must be a URI; for a folder write file:///mnt/store"),
        ("runs", "must be a URI; for a folder write file://runs"),
        ("S3://bucket/x", "must begin in lower case; write s3://bucket/x"),
        ("s4://bucket", "must begin with s3://, gs://, az://, hf:// or file://; there is no store for s4://"),
        ("s3://", "must name a bucket; write s3://bucket/prefix"),
        ("file:///", "must name a folder; write file:///folder, or file://folder beside the spec"),
        ("file://~/x", "must not begin with ~, which is not expanded; write file:///home/you/x"),
        ("file://localhost/tmp/x", "must name no host; write file:///tmp/x"),
    ],
)
def test_invalid_store_is_reported_with_a_correction(tmp_path: Path, store: str, complaint: str) -> None:
    [problem] = complaints(tmp_path, GOOD.replace("file://store", store))
    assert problem.startswith(f"2:8: store: {complaint}; got")


def test_interrupted_check_keeps_earlier_problems(tmp_path: Path) -> None:
    def interrupted(_: object) -> list[Problem]:
        raise KeyboardInterrupt

    with pytest.raises(SpecInvalid, match="must be at least 1"):
        model.load(write(tmp_path, GOOD.replace("count: 2", "count: 0")), targets.kinds(), checks=[interrupted])
    with pytest.raises(KeyboardInterrupt):
        model.load(write(tmp_path, GOOD), targets.kinds(), checks=[interrupted])


def test_missing_or_unreadable_file_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "skerry.yaml"
    with pytest.raises(SpecInvalid, match="no such file; `skerry init` writes a sample"):
        model.load(path, targets.kinds())
    for data, problem in ((b"run: \xff\n", "is not UTF-8 text: byte 5 is 0xff"), (b"run: a\x00\n", "is not YAML")):
        path.write_bytes(data)
        with pytest.raises(SpecInvalid, match=problem):
            model.load(path, targets.kinds())


READ_AND_MEASURE = """
import pathlib, sys, time
from skerry.infra.spec import yaml_document
from skerry.infra.spec_and_store_errors import SpecInvalid
try:
    yaml_document.read(pathlib.Path(sys.argv[1]))
except SpecInvalid as error:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(time.process_time(), int(peak.split()[1]), error, sep="\\n")
"""


def test_pipe_and_repeated_aliases_cost_a_second_and_100_mb_at_most(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    bomb = tmp_path / "bomb.yaml"
    bomb.write_text("\n".join(lines))
    for path, complaint in ((pipe, "is not a file"), (bomb, "has more than 50000 values")):
        command = [sys.executable, "-c", READ_AND_MEASURE, str(path)]
        cpu_s, peak_kib, error = subprocess.check_output(command, text=True).split("\n", 2)
        assert complaint in error
        assert float(cpu_s) < 1, "of the CPU, with the start of the process"
        assert int(peak_kib) < 100_000


@pytest.mark.parametrize("text", ["[" * 2500, "a: " + "{a: " * 500, "- " * 2500, "[" * 40 + "]" * 40])
def test_document_with_many_levels_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecInvalid, match="it has more than 32 levels; this is not a spec"):
        yaml_document.read(write(tmp_path, text))


def test_relative_paths_start_at_the_folder_of_the_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    loaded = model.load(Path("skerry.yaml"), targets.kinds())
    assert loaded.run_uri == (tmp_path / "store" / "tiny").as_uri()
    assert loaded.code_path == tmp_path
    assert loaded.work_folder == tmp_path / ".skerry" / "tiny"
    for store, uri in (
        ("file:///data/runs/", "file:///data/runs/tiny"),
        ("s3://bucket/runs/", "s3://bucket/runs/tiny"),
    ):
        assert load(tmp_path, GOOD, f"store={store}").run_uri == uri


def test_replicas_are_numbered_over_all_groups_in_order(tmp_path: Path) -> None:
    text = GOOD + "  - {name: b, count: 1, target: {kind: local, threads: 3}}\n"
    replicas = [(replica.slot, replica.index, replica.threads) for replica in load(tmp_path, text).replica_slots]
    assert replicas == [("a-0", 0, None), ("a-1", 1, None), ("b-0", 2, 3)]


FIXED = (
    "outer.lr=0.6",
    "outer.sync_every=200",
    "replicas[0].count=3",
    "faults.grace=1s",
    "faults.min_replicas=2",
    "run=other",
)
FREE = ("faults.restarts.max=9", "code.command=[python, other.py]", "outer.rounds=40")
FREE_IN_JOBS = (
    "replicas[0].target.region=eu-west-1",
    "replicas[0].target.spot=true",
    "limits.max_hours=3",
    "byo.bucket=true",
    "tags.team=other",
    "state=file://elsewhere",
    "image=acme/skerry:2",
)


@pytest.mark.parametrize(
    ("spec", "overrides", "same"),
    [
        (GOOD, FIXED, False),
        (GOOD, (*FREE, "replicas[0].target.threads=2"), True),
        (BATCH, FIXED, False),
        (BATCH, (*FREE, *FREE_IN_JOBS), True),
        (
            MIRRORED,
            ("replication[0].every=5", "replication[0].log=every round", "replication[0].to=gs://acme-2/x"),
            False,
        ),
        (MIRRORED, ("replication[0].region=europe-west1", "replication[0].byo.bucket=true"), True),
    ],
)
def test_digest_covers_only_what_run_json_fixes(
    tmp_path: Path, spec: str, overrides: Sequence[str], *, same: bool
) -> None:
    digest = load(tmp_path, spec).digest()
    for override in overrides:
        assert (load(tmp_path, spec, override).digest() == digest) is same, override


def test_groups_of_one_kind_may_be_in_several_regions(tmp_path: Path) -> None:
    west = "{kind: aws_batch, region: us-west-2, instance_types: [p5.48xlarge], role: group, shared_memory: 64GiB}"
    loaded = load(tmp_path, f"{BATCH}  - {{name: b, count: 900, target: {west}}}\n")
    assert [replica.slot for replica in loaded.replica_slots[:6]] == ["a-0", "a-1", "a-2", "a-3", "b-0", "b-1"]
    assert loaded.deployed
    assert {replica.threads for replica in loaded.replica_slots} == {None}
    assert loaded.spec.replicas[1].model_dump(mode="json")["target"]["shared_memory"] == "64GiB"


def test_state_is_with_the_run_by_default(tmp_path: Path) -> None:
    assert load(tmp_path, BATCH).state_uri is None
    assert load(tmp_path, BATCH, "state=s3://other/states").state_uri == "s3://other/states/tiny"
    assert load(tmp_path, BATCH, "state=file://here").state_uri == (tmp_path / "here" / "tiny").as_uri()


@pytest.mark.parametrize("kind", targets.samples())
def test_sample_is_valid_for_the_schema_and_the_models(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, targets.samples()[kind])
    loaded = model.load(path, targets.kinds())
    assert {group.target.kind for group in loaded.spec.replicas} == {kind}
    assert loaded.spec.run == "my-run"
    document = json.loads(model.schema(targets.kinds()))
    jsonschema.Draft202012Validator.check_schema(document)
    tree = plain(yaml_document.read(path).tree)
    jsonschema.validate(tree, document)
    with pytest.raises(jsonschema.ValidationError, match="'rouns' was unexpected"):
        jsonschema.validate({**tree, "rouns": 1}, document)


def test_schema_is_frozen() -> None:
    golden = Path(__file__).with_name("schema.golden.json")
    assert model.schema(targets.kinds()) + "\n" == golden.read_text(), (
        "the spec's language changed; if on purpose: skerry schema > tests/infra/spec/schema.golden.json"
    )


def test_every_number_of_a_spec_has_both_ends() -> None:
    def numbers(node: object, path: str) -> Iterator[tuple[str, dict[str, object]]]:
        if isinstance(node, dict) and node.get("type") in ("integer", "number"):
            yield path, node
        for name, value in (
            node.items() if isinstance(node, dict) else enumerate(node if isinstance(node, list) else ())
        ):
            yield from numbers(value, f"{path}/{name}")

    for path, limits in numbers(json.loads(model.schema(targets.kinds())), ""):
        assert limits.keys() & {"minimum", "exclusiveMinimum"}, path
        assert limits.keys() & {"maximum", "exclusiveMaximum"}, path


def test_default_in_consistency_equals_the_default_of_the_model() -> None:
    assert model.Outer(rounds=1).sync_every == 100
