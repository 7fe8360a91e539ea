"""What a script of this checkout says and does, and what a command loads: both as a user has them, in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT: Final = Path(__file__).parents[2]
_LIMIT_S: Final = 180
# Each command in turn, and which of the large libraries are there after it.
_LOADS: Final = """
import json, sys
from skerry.infra import cli
known = {'boto3', 'google.auth', 'google.cloud.aiplatform', 'sagemaker', 'docker', 'torch', 'moto', 'pandas'}
told = [sorted(known & set(sys.modules))]
for words in json.loads(sys.argv[1]):
    try:
        cli.app(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    told.append(sorted(known & set(sys.modules)))
print(json.dumps(told))
"""


def run(environment: Mapping[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )


def dry_run(script: str, spec: Path, environment: Mapping[str, str]) -> tuple[list[str], str]:
    """The steps that a script which deploys would take, and the plan that it shows."""
    ended = run(environment, ROOT / script, spec, "--variant", "cpu", "--dry-run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [line for line in ended.stderr.splitlines() if line.startswith("+ ")], ended.stdout


def loads(environment: Mapping[str, str], *commands: Sequence[str]) -> list[list[str]]:
    """Large libraries that are loaded with the command line alone, and after each of these commands."""
    ended = run(environment, sys.executable, "-c", _LOADS, json.dumps(commands))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: list[list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return found
