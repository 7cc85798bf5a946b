"""Headless Chromium, driven over a pipe, for the tests of pages."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DEADLINE_S = 60.0
SCREENSHOT_PX = 4000
"""A screenshot shows so much of the page's height."""


class Browser:
    """Chromium without a window; speaks the DevTools protocol on its descriptors 3 and 4."""

    def __init__(self, directory: Path) -> None:
        assert CHROMIUM is not None
        theirs, self._to = os.pipe()
        self._from, theirs_too = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += ["--remote-debugging-pipe", f"--user-data-dir={directory}", "--hide-scrollbars"]
        words = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_too}'
        self._process = subprocess.Popen(
            ["bash", "-c", words, CHROMIUM, *options, "about:blank"],
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(theirs_too)
        self._number, self._read, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def _message(self) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "the browser has ended, or does not answer"
            self._read += data
        text, _, self._read = self._read.partition(b"\0")
        return json.loads(text)

    def open(self, page: Path | str, width: int, height: int, dark: bool = False) -> None:
        """Load a file or an address in a window of this many CSS pixels; returns when it is whole."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def screenshot(self, path: Path) -> Path:
        """The page from its top, as a PNG."""
        size = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], SCREENSHOT_PX), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[dict[str, Any]]:
        """What the console shows, and what was thrown."""
        names = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event for event in self.events if event.get("method") in names]

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def keep(screenshot: Path) -> None:
    """As an artifact of the test run, where one is wanted."""
    if directory := os.environ.get("FLAGPOST_ARTIFACTS"):
        shutil.copy(screenshot, directory)
