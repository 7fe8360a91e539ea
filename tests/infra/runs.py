"""A spec for the stand-in script, `skerry` in this process or as a real one, and the live processes of a run."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.forked import ForkedProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


STANDIN = Path(__file__).parent / "standin"
ROOT = Path(__file__).parents[2]

SPEC = """\
run: {run}
store: file://store
code:
  path: {code}
  command: [{command}]
outer: {{rounds: 3}}
faults: {{min_replicas: 1, grace: 1s, start_window: 5s, restarts: {{max: {restarts}, window: 1m}}}}
replicas:
  - {{name: a, count: {count}, target: {{kind: local, threads: 1}}}}
"""


def write_spec(
    folder: Path,
    *behaviours: str,
    run: str = "test-run",
    count: int = 2,
    restarts: int = 2,
    code: Path = STANDIN,
    command: str | None = None,
) -> Path:
    words = command or ", ".join(["python", "train.py", *behaviours])
    path = folder / "skerry.yaml"
    path.write_text(SPEC.format(run=run, code=code, command=words, count=count, restarts=restarts))
    return path


def environment() -> dict[str, str]:
    """The environment of a shell in which skerry is installed; the stand-in also finds the builders of the tests."""
    above = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    source = os.pathsep.join([str(ROOT / "runtime"), str(ROOT / "infra"), str(ROOT), *above])
    return {**os.environ, "PYTHONPATH": source, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}


class Skerry:
    """A real `skerry` process, and as real replicas; its output is read line by line.

    terminal: the standard input. imports: modules that every replica imports, and that are imported once for all.
    """

    def __init__(self, *arguments: str, terminal: Path = Path(os.devnull), imports: Sequence[str] = ()) -> None:
        self._lines_read: list[str] = []
        words = ["-m", "tests.support.forked_skerry", ",".join(imports), *arguments]
        self._folder = tempfile.TemporaryDirectory()
        pipe = Path(self._folder.name, "output")
        os.mkfifo(pipe)
        self.process = ForkedProcess(words, environment(), pipe, source=terminal)
        self._output = pipe.open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(timeout=300)
        self._output.close()
        self._folder.cleanup()

    def until(self, text: str, times: int = 1) -> None:
        """Read until `times` more lines contain `text`."""
        for line in self._read_lines():
            times -= text in line
            if times == 0:
                return
        raise AssertionError(f"ended without {text!r}:\n{self.output}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        """Read the rest of the output; the exit code."""
        for _ in self._read_lines():
            pass
        return self.process.wait(timeout=300)

    def close_output(self) -> None:
        """Read no more, as a terminal that was closed."""
        self._output.close()

    @property
    def output(self) -> str:
        return "".join(self._lines_read)

    def _read_lines(self) -> Iterator[str]:
        for line in self._output:
            self._lines_read.append(line)
            yield line


def processes_in(folder: Path) -> list[int]:
    """The ids of all live processes whose current folder is below `folder`."""
    processes: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink().is_relative_to(folder):
                processes.append(int(process.name))
        except OSError:  # ended, or of another user
            continue
    return processes
