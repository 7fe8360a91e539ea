"""Runs an empty image registry, the program docker-registry, on this machine's loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

from skerry.runtime.clock import Backoff, SystemClock, wait_until
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from typing import Self

PROGRAM: Final = "docker-registry"
_WITHIN_S: Final = 20.0


class Registry:
    """A running registry; a context manager. address: host:port; engines need no TLS for it, because it is loopback."""

    def __init__(self) -> None:
        """Raises Invalid if the program is missing, TimeoutError if it does not answer."""
        program = shutil.which(PROGRAM)
        if program is None:
            raise Invalid(
                f"program not found: {PROGRAM}; as root, run apt-get install --no-install-recommends {PROGRAM}"
            )
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            self.address: Final = f"127.0.0.1:{free_port.getsockname()[1]}"
        self._folder = Path(tempfile.mkdtemp(prefix="skerry-registry-"))
        settings = self._folder / "registry.yml"
        settings.write_text(
            "version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\n"
            f"storage: {{filesystem: {{rootdirectory: {self._folder}/data}}}}\nhttp: {{addr: {self.address}}}\n"
        )
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen([program, "serve", str(settings)], stdout=log, stderr=log)  # noqa: S603  found above
        clock = SystemClock()
        try:
            wait_until(clock, self._answers, clock.now() + _WITHIN_S, Backoff(first=0.05, cap=0.2))
        except TimeoutError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the registry and remove its images."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool | None:
        try:
            with urllib.request.urlopen(f"http://{self.address}/v2/", timeout=2) as answer:
                return answer.status == 200 or None
        except OSError:
            return None
