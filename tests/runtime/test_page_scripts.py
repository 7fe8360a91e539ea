"""The scripts of README.md, runtime/README.md and docs/model.md run: they train, evaluate, save or load as they say."""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from tests.kit.managers import begin_run, commits, wait_for
from tests.support.command_line import invoke
from tests.support.s3server import S3Server
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime import replica as runtime_replica
from skerry.runtime.contract import Contract
from skerry.runtime.log.files_saved_by_script import list_artifacts
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.runtime.store import Store

ROOT: Final = Path(__file__).parents[2]
ROUNDS: Final = 6
LOOP: Final = "        for step in replica.steps(inner):"


def script(page: str, number: int = 0) -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


WHOLE: Final = script("README.md")
"""The training script, which the other pages add to."""


class Run:
    """A run of one replica, whose script is one of the pages'. made: the steps whose batches the script asked for."""

    def __init__(self, uri: str, build: Callable[[], nn.Module], loss_of: Callable[[Any, Any], torch.Tensor]) -> None:
        self.store: Store = open_store(uri)
        begin_run(self.store, ["a-0"], rounds=ROUNDS, sync_every=2)
        self.made: list[tuple[int, int, int]] = []
        variables = Contract(run_uri=uri, slot="a-0", index=0, replicas=1).environment()
        self.names: dict[str, Any] = {
            "connect": functools.partial(runtime_replica.connect, variables),
            "torch": torch,
            "DiLoCo": DiLoCo,
            "build": build,
            "loss_of": loss_of,
            "batch": self.batch,
        }

    def batch(self, step: int, index: int, replicas: int) -> torch.Tensor:
        self.made.append((step, index, replicas))
        return torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(step))

    def train(self, source: str, **names: Any) -> None:
        exec(compile(source, "page.md", "exec"), self.names | names)  # noqa: S102  the pages' own text
        assert len(commits(self.store)) == ROUNDS
        assert self.made == [(step, 0, 1) for step in range(2 * ROUNDS)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def loss_of(model: nn.Module, numbers: torch.Tensor) -> torch.Tensor:
        return (model(numbers.float()) ** 2).mean()

    return Run((tmp_path / "run").as_uri(), lambda: nn.Linear(4, 3), loss_of)


def test_script_of_the_readme_trains_to_the_end(run: Run) -> None:
    run.train(WHOLE)


def test_evaluations_of_the_runtime_page_run_after_rounds_and_in_steps(run: Run) -> None:
    written, losses = list[nn.Module](), list[float]()

    def loss_on(held_out: object) -> float:
        assert held_out == "held out"
        losses.append(0.5)
        return losses[-1]

    evaluating = textwrap.indent(replaced(script("runtime/README.md"), "    ...\n", ""), " " * 8)
    text = replaced(WHOLE, next(line for line in WHOLE.splitlines() if line.startswith(LOOP)), evaluating.rstrip())
    run.train(text, loss_on=loss_on, held_out="held out", write_samples=written.append)
    assert (len(losses), len(written)) == (2, 1)  # after the fifth round and the last; before the first step


def test_local_copies_of_the_runtime_page_are_kept_in_their_folder(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "copies"
    copies = replaced(script("runtime/README.md", 1), "/dev/shm/skerry", str(folder))  # noqa: S108  of the page
    line = next(line for line in WHOLE.splitlines() if line.startswith("    manager = "))

    def batch_after_a_copy(step: int, index: int, replicas: int) -> torch.Tensor:
        if step == 2 * ROUNDS - 1:
            wait_for(lambda: list(folder.rglob("*.json")))  # an end does not wait for a copy that is being written
        return run.batch(step, index, replicas)

    run.train(replaced(WHOLE, line, textwrap.indent(copies, " " * 4)), batch=batch_after_a_copy)


def test_script_saves_files_as_the_page_about_models_shows(run: Run, tmp_path: Path) -> None:
    (tmp_path / "attention.png").write_bytes(b"a picture")
    saving = replaced(script("docs/model.md", 3), "/tmp/attention.png", str(tmp_path / "attention.png"))  # noqa: S108  same
    run.train(WHOLE + textwrap.indent(saving, " " * 4), text="a sample")
    assert {artifact.name: artifact.round for artifact in list_artifacts(run.store)} == {
        "sample.txt": ROUNDS,
        "attention.png": ROUNDS,
    }


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of the run on the page about models; the current folder is empty."""
    monkeypatch.chdir(tmp_path)
    with S3Server() as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }.items():
            monkeypatch.setenv(name, value)
        (uri,) = set(re.findall(r"s3://acme-diloco/runs/tiny-gpt", (ROOT / "docs/model.md").read_text()))
        yield uri


@pytest.mark.slow
def test_trained_model_is_loaded_in_the_ways_of_the_page(bucket: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=4)
    tiny.save_pretrained(tmp_path / "gpt2")  # the page's name, as a folder, so that nothing is fetched

    def build() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(tiny)

    run = Run(bucket, build, lambda model, numbers: model(input_ids=numbers, labels=numbers).loss)
    run.train(WHOLE)
    assert invoke("export", bucket, "-o", "model.safetensors").exit_code == 0
    names: dict[str, Any] = {"build_model": build}
    states: list[dict[str, torch.Tensor]] = []
    for number in range(3):
        text = script("docs/model.md", number).replace("round=120", "round=0")
        exec(compile(text, "model.md", "exec"), names)  # noqa: S102  same
        states.append({name: tensor.clone() for name, tensor in names["model"].state_dict().items()})
        names["model"] = build()
    first, *others = states
    assert all(torch.equal(other[name], tensor) for other in others for name, tensor in first.items())
    assert transformers.AutoModelForCausalLM.from_pretrained("my-model").config.n_embd == 8
    assert names["earlier"].keys() == first.keys()
    assert any(not torch.equal(names["earlier"][name], tensor) for name, tensor in first.items())
