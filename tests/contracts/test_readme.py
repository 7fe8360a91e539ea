"""Checks the pages: the spec is valid, the named files exist. test_site.py has links, test_page_scripts.py scripts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skerry.infra import targets
from skerry.infra.spec import model

ROOT = Path(__file__).parents[2]
FOLDERS = ("*.md", "docs/**/*.md", "runtime/*.md", "infra/*.md", "*/decisions/*.md")
PAGES = sorted(path for pattern in FOLDERS for path in ROOT.glob(pattern))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_spec_in_the_readme_is_valid(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "skerry.yaml").write_text(shown)
    assert len(model.load(tmp_path / "skerry.yaml", targets.kinds()).replica_slots) == 4


def test_script_in_the_readme_is_short() -> None:
    (shown,) = blocks(ROOT / "README.md", "python")
    assert len(shown.splitlines()) <= 13


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_named_scripts_and_test_files_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(r"\b(scripts/[a-z_-]+|\.ci/[a-z]+)\b", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`([\w/]*\btest_\w+\.py|store/conformance\.py)`", text):
        assert any((ROOT / "tests").glob(f"**/{name}")) or (ROOT / name).exists(), name
