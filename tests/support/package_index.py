"""A package index on this machine's loopback: pypiserver, which redirects to PyPI for packages that it lacks."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Final

from skerry.runtime.clock import Backoff, SystemClock, wait_until

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

WITHIN_S: Final = 300.0


class PackageIndex:
    """A running index of the files in a folder; a context manager. Uploads need no login. url: for pip."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free_port:
            free_port.bind(("127.0.0.1", 0))
            self.address: Final = f"127.0.0.1:{free_port.getsockname()[1]}"
        self.url: Final = f"http://{self.address}/simple/"
        host, port = self.address.split(":")
        options = ("-i", host, "-p", port, "-P", ".", "-a", ".", "--backend", "simple-dir")
        command = (sys.executable, "-m", "pypiserver", "run", *options, str(folder))
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        clock = SystemClock()
        wait_until(clock, self._answers, clock.now() + WITHIN_S, Backoff(first=0.05, cap=0.2))
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool | None:
        try:
            with urllib.request.urlopen(self.url, timeout=2) as response:  # noqa: S310  our own loopback server
                return response.status == 200 or None
        except OSError:
            return None
