"""Chromium without a window, driven through its DevTools protocol over two pipes. Needs no other package.

Source: https://chromedevtools.github.io/devtools-protocol, and `--remote-debugging-pipe` in Chromium's switches.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pytest
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def require() -> None:
    """Skip a test without an installed Chromium; fail it if SKERRY_TEST_CHROMIUM is `required`."""
    if program() is None:
        if os.environ.get("SKERRY_TEST_CHROMIUM") == "required":
            pytest.fail("Chromium is required, and none is installed")
        pytest.skip("no Chromium is installed; `scripts/test` as root installs it")


@dataclass
class Shown:
    """A page as it was drawn: its picture, what it printed to the console, and what it requested."""

    picture: Image.Image
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def colour(self, x: float, y: float) -> str:
        """The colour of a pixel of the page."""
        red, green, blue = self.picture.getpixel((int(x), int(y)))[:3]  # type: ignore[index]
        return f"#{red:02x}{green:02x}{blue:02x}"


class Browser:
    """One browser process. Not thread-safe."""

    def __init__(self) -> None:
        path = program()
        assert path is not None
        self._profile = tempfile.TemporaryDirectory(prefix="skerry-chromium-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        command = [path, *flags, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        # The browser reads from descriptor 3 and writes to 4; the shell puts them there.
        shell = ["bash", "-c", f'exec 3<&{to_browser} 4>&{from_browser} "$@"', "bash", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._reader = os.fdopen(self._in, "rb")
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._reader.close()
        os.close(self._out)
        self._profile.cleanup()

    def show(self, path: Path, width: int, *, dark: bool = False) -> Shown:
        """Load a file, and take a picture of the whole page."""
        self._events.clear()
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        while not self._events_of("Page.loadEventFired"):
            self._receive()
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        picture = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
        messages = [
            json.dumps(event["params"])
            for name in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
            for event in self._events_of(name)
        ]
        requests = [event["params"]["request"]["url"] for event in self._events_of("Network.requestWillBeSent")]
        return Shown(picture, messages, [url for url in requests if not url.startswith("data:")])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = self._reader.read1(1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "id" not in message:
            self._events.append(message)
        return message

    def _events_of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self._events if event["method"] == name]
