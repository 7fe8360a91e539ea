"""Variables, secrets and data of replicas on this machine: read once, passed in the environment, written nowhere."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from tests.infra.runs import Skerry, write_spec

from skerry.infra import targets
from skerry.infra.local.container_starts import ContainerOptions, ContainerStarts
from skerry.infra.local.docker_engine import Bind, ContainerRequest
from skerry.infra.local.replica_env_secrets_and_data import read_inputs
from skerry.infra.local.workspace import Workspace
from skerry.infra.run import check_machine_and_store
from skerry.infra.spec import model
from skerry.runtime.errors import Invalid, Retryable

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.infra.local.docker_engine import Engine
    from skerry.infra.spec.model import SpecFile

VALUE: Final = "kaffee-und-kuchen-4711"
GROUPS: Final = """\
env: {COLOUR: green, SIZE: big}
secrets: {TOKEN: {environment: HF_TOKEN}}
data: {corpus: corpus/, far: s3://acme-data/far/}
replicas:
  - {name: a, count: 2, target: {kind: local}}
  - name: b
    count: 1
    target: {kind: local}
    env: {COLOUR: blue}
    secrets: {TOKEN: {environment: OTHER}}
    data: {corpus: more}
"""
# Prints what it was given, and whether a command line of this machine shows the value.
SCRIPT: Final = """\
import hashlib, os, pathlib
value = os.environ["TOKEN"]
def line(path):
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""
shown = any(value.encode() in line(path) for path in pathlib.Path("/proc").glob("[0-9]*"))
corpus = pathlib.Path(os.environ["SKERRY_DATA_CORPUS"])
print("GOT", os.environ["COLOUR"], hashlib.sha256(value.encode()).hexdigest(), shown, (corpus / "a.txt").read_text())
"""


def spec_of(folder: Path, kind: str = "local") -> SpecFile:
    path = write_spec(folder)
    text = path.read_text().partition("\nreplicas:")[0] + "\n" + GROUPS.replace("kind: local", f"kind: {kind}")
    path.write_text(text.replace("run:", "image: skerry:cpu\nrun:", 1))
    for name in ("corpus", "more"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "a.txt").write_text("words")
    return model.load(path, targets.kinds())


def test_group_replaces_the_inputs_of_the_run_by_name(tmp_path: Path) -> None:
    inputs = read_inputs(spec_of(tmp_path), {"HF_TOKEN": VALUE, "OTHER": "second"})
    assert inputs["a-0"] == inputs["a-1"]
    assert inputs["a-0"].variables == {
        "COLOUR": "green",
        "SIZE": "big",
        "TOKEN": VALUE,
        "SKERRY_DATA_CORPUS": str(tmp_path / "corpus"),
        "SKERRY_DATA_FAR": "s3://acme-data/far",
    }
    own = inputs["b-0"].variables
    assert (own["COLOUR"], own["SIZE"], own["TOKEN"]) == ("blue", "big", "second")
    assert inputs["b-0"].folders == (tmp_path / "more",)
    assert VALUE not in repr(inputs)


def test_missing_variables_are_named_and_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="secrets need variables that are not set: HF_TOKEN; export them"):
        read_inputs(spec_of(tmp_path), {"OTHER": "second", "HF_TOKEN": ""})


def test_missing_folder_is_a_problem_of_the_spec(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    (tmp_path / "more" / "a.txt").unlink()
    (tmp_path / "more").rmdir()
    with pytest.raises(Invalid, match=r"no data corpus: .*/more does not exist"):
        read_inputs(spec, {"HF_TOKEN": VALUE, "OTHER": "second"})
    (problem,) = [str(problem) for problem in local_problems(spec)]
    assert problem.endswith(
        f"replicas[1].data.corpus: {tmp_path / 'more'} does not exist; write the path of a folder of this machine"
    )


def local_problems(spec: SpecFile) -> list[Any]:
    try:
        check_machine_and_store.load_offline(spec.path, targets.kinds(), ())
    except model.SpecInvalid as error:
        return [problem for problem in error.problems if "data" in problem.path]
    return []


def test_container_gets_values_by_the_engine_and_data_read_only(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "docker")
    requests: list[ContainerRequest] = []

    def refuse(request: ContainerRequest) -> str:
        requests.append(request)
        raise Retryable("this machine has no engine")

    containers = SimpleNamespace(create=refuse, labelled=lambda _: [])
    options = ContainerOptions(
        run_uri=spec.run_uri,
        run=spec.spec.run,
        replicas=spec.replica_slots,
        image="skerry:cpu",
        code=None,
        environment={},
        inputs=read_inputs(spec, {"HF_TOKEN": VALUE, "OTHER": "second"}),
    )
    engine = cast("Engine", SimpleNamespace(containers=containers))
    starts = ContainerStarts(options, Workspace(tmp_path / "work"), lambda _handle, _ending: None, engine)
    with starts, pytest.raises(Retryable):
        starts.launch(1, ["python", "train.py"])
    (request,) = requests
    assert request.environment["TOKEN"] == VALUE
    assert request.environment["COLOUR"] == "green"
    assert VALUE not in repr([request.name, request.labels, request.binds])
    folder = str(tmp_path / "corpus")
    assert Bind(source=folder, target=folder, writable=False) in request.binds


@pytest.mark.slow
def test_process_gets_inputs_and_no_value_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("words")
    spec = write_spec(tmp_path, code=code, count=1)
    inputs = "env: {COLOUR: green}\nsecrets: {TOKEN: {environment: HF_TOKEN}}\ndata: {corpus: corpus}\n"
    spec.write_text(spec.read_text() + inputs)
    monkeypatch.setenv("HF_TOKEN", VALUE)
    with Skerry("up", str(spec), "--json") as up:
        up.end()
    digest = hashlib.sha256(VALUE.encode()).hexdigest()
    assert f"GOT green {digest} False words" in up.output
    assert VALUE not in up.output
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("run.json" in path.name for path in files)
    assert not [path for path in files if VALUE.encode() in path.read_bytes()]


@pytest.mark.slow
def test_up_without_the_secrets_variable_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(tmp_path, count=1)
    spec.write_text(spec.read_text() + "secrets: {TOKEN: {environment: HF_TOKEN}}\n")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Skerry("up", str(spec)) as up:
        assert up.end() == 2
    assert "secrets need variables that are not set: HF_TOKEN; export them, then run it again" in up.output
    assert not (tmp_path / "store").exists()
