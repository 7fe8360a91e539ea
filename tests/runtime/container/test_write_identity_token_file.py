from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from skerry.runtime import contract
from skerry.runtime.container.write_identity_token_file import TOKEN_FILE, write_token_file
from skerry.runtime.errors import Invalid


@pytest.fixture(autouse=True)
def _own_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TOKEN_FILE, "before")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_token_is_written_for_this_user_only() -> None:
    environment = {contract.TOKEN_VARIABLE: "PLATFORM_TOKEN", "PLATFORM_TOKEN": "a.b.c"}
    write_token_file(environment)
    path = Path(environment[TOKEN_FILE])
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("a.b.c", 0o600)
    assert os.environ[TOKEN_FILE] == str(path)


def test_nothing_is_written_unless_a_variable_is_named(tmp_path: Path) -> None:
    environment = {"PLATFORM_TOKEN": "a.b.c"}
    write_token_file(environment)
    assert (environment, list(tmp_path.iterdir())) == ({"PLATFORM_TOKEN": "a.b.c"}, [])


def test_missing_token_is_refused() -> None:
    with pytest.raises(Invalid, match="PLATFORM_TOKEN has no identity token"):
        write_token_file({contract.TOKEN_VARIABLE: "PLATFORM_TOKEN"})
