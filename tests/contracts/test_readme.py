"""Checks the READMEs: links have targets, the spec is valid, the script is Python, the scripts exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from skerry.infra import targets
from skerry.infra.spec import model

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "runtime/README.md", "docs/model.md")),
    ROOT / "docs/your-data.md",
    ROOT / "docs/recipes.md",
    *(ROOT / "infra" / name for name in ("README.md", "aws-batch.md", "sagemaker.md", "vertex.md", "across-clouds.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_spec_in_the_readme_is_valid(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "skerry.yaml").write_text(shown)
    assert len(model.load(tmp_path / "skerry.yaml", targets.kinds()).replica_slots) == 4


def test_script_in_the_readme_is_short_python() -> None:
    (shown,) = blocks(ROOT / "README.md", "python")
    ast.parse(shown)
    assert len(shown.splitlines()) <= 13


def test_scripts_to_copy_have_the_same_lines_in_the_same_order() -> None:
    """Recipes with another loop have not all of them, or other names."""
    folder, others = ROOT / "runtime/skerry/runtime/recipes", {"hf_trainer", "lightning_trainer", "mixed_precision"}
    paths = [path for path in folder.glob("*.py") if path.stem not in others and not path.stem.startswith("from_")]
    scripts = {path.name: path.read_text() for path in [*paths, ROOT / "runtime/examples/tiny_gpt/train.py"]}
    (scripts["README.md"],) = blocks(ROOT / "README.md", "python")
    assert len(scripts) > 5
    lines = (
        "with connect() as replica:",
        "inner = torch.optim.AdamW(model.parameters(), lr=",
        "manager = replica.manager(state_dict=model.state_dict, load_state_dict=model.load_state_dict)",
        "replica.keep(inner=inner",
        "with DiLoCo(manager, ",
        ", inner, outer, sync_every=run.sync_every):",
        "in replica.steps(inner",
        "inner.zero_grad()",
        "loss.backward()",
        "replica.log(loss=loss.item()",
        "inner.step()",
    )
    for name, text in scripts.items():
        at = text.index(lines[0])
        for line in lines:
            assert line in text[at:], f"{name}: missing, or in another order: {line}"
            at = text.index(line, at)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_scripts_and_test_files_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\b(scripts/[a-z_-]+|\.ci/[a-z]+)\b", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w/]*\btest_\w+\.py|store/conformance\.py)`", text):
        assert any((ROOT / "tests").glob(f"**/{name}")) or (ROOT / name).exists(), name
