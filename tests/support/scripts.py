"""Runs scripts and commands of this checkout in a process: dry runs, and the libraries that a command imports."""

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
_LIMIT_S: Final = 600
# Runs each command and lists the large libraries that are imported after it.
_LOADS: Final = """
import json, sys
from skerry.infra.cli.app import app
known = {'boto3', 'google.auth', 'google.cloud.aiplatform_v1', 'sagemaker', 'docker', 'torch', 'moto', 'pandas'}
known |= {'lightkube', 'httpx2', 'huggingface_hub', 'modal'}
loaded = [sorted(known & set(sys.modules))]
for words in json.loads(sys.argv[1]):
    try:
        app(words)
    except SystemExit as end:
        assert end.code == 0, (words, end.code)
    loaded.append(sorted(known & set(sys.modules)))
print(json.dumps(loaded))
"""


def run(environment: Mapping[str, str], *words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=_LIMIT_S
    )


def dry_run(script: str, spec: Path, environment: Mapping[str, str]) -> tuple[list[str], str]:
    """The steps that a deployment script would take, and the plan that it prints."""
    result = run(environment, ROOT / script, spec, "--variant", "cpu", "--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    return [line for line in result.stderr.splitlines() if line.startswith("+ ")], result.stdout


def loads(environment: Mapping[str, str], *commands: Sequence[str]) -> list[list[str]]:
    """The large libraries that are imported with the command line alone, and after each of these commands."""
    result = run(environment, sys.executable, "-c", _LOADS, json.dumps(commands))
    assert result.returncode == 0, result.stdout + result.stderr
    loaded: list[list[str]] = json.loads(result.stdout.splitlines()[-1])
    return loaded
