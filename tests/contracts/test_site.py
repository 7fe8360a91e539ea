"""The documentation builds as a site without a broken link, and its recorded session is what the commands do."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.session import PAGE, essence

from skerry.infra import targets
from skerry.infra.cli.fast_help_entry_point import COMMANDS
from skerry.infra.spec import model

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"scripts/{script}.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    built = run("site", str(folder))
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def test_every_link_of_the_site_has_a_target_in_the_site(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    exists = functools.cache(os.path.exists)  # most pages have the same links
    for page in pages:
        for link in set(re.findall(r'(?:href|src)="([^"#?]+)', page.read_text())):
            target = os.path.normpath(page.parent / link)
            assert link.startswith(("http", "data:")) or exists(target), f"{page}: {link}"


def test_nothing_of_the_site_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="http[^"]*', page.read_text())


def test_reference_has_every_command_and_every_section_of_a_spec(site: Path) -> None:
    commands = (site / "docs/reference/commands.html").read_text()
    for name in (name for group in COMMANDS.values() for name in group):
        assert f'id="skerry-{name}"' in commands
    spec = (site / "docs/reference/spec.html").read_text()
    for section in re.findall(r'"#/\$defs/(\w+)"', model.schema(targets.kinds())):
        assert f'id="{section.lower()}"' in spec


def test_recorded_session_is_what_the_commands_do_today() -> None:
    checked = run("session", "--check")
    assert checked.returncode == 0, checked.stderr + checked.stdout


def test_session_of_a_slow_machine_has_the_same_words() -> None:
    page = PAGE.read_text()
    slow = re.sub(r"\nround  [\d.]+ s", "\nround  12 s", page)
    assert slow != page
    assert essence(slow) == essence(page)


@pytest.mark.parametrize("answer", ["converge? not yet", "cost? no cloud bill"])
def test_session_with_another_answer_of_the_report_differs(answer: str) -> None:
    page = PAGE.read_text()
    other = page.replace(answer, answer.partition("?")[0] + "? other words")
    assert other != page
    assert essence(other) != essence(page)
