"""Headless Chromium through its debugging pipe: opens a page and reports its requests, messages and layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

LIMIT_S = 120.0


def chromium() -> str | None:
    """Return the path of this machine's browser; None if it has none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


class Browser:
    """One tab. Every message is JSON that ends with a zero byte."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read, self._rest, self._number = to_browser, from_browser, b"", 0
        self.events: list[dict[str, Any]] = []
        target = self._ask("Target.createTarget", {"url": "about:blank"}, None)["targetId"]
        self._session = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True}, None)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._ask(method, parameters, self._session)

    def look(self, *, width: int, dark: bool) -> None:
        """Emulate a screen of that width, in light or dark mode."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Load a file and wait until all of its resources are loaded."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Load an address and wait until all of its resources are loaded."""
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())

    def value(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def requested(self) -> list[str]:
        """Every address that the page asked for."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What stands in the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def _ask(self, method: str, parameters: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            request["sessionId"] = session
        os.write(self._write, json.dumps(request).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, message
                found: dict[str, Any] = message["result"]
                return found
            self.events.append(message)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser went away"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser that can reach only this machine, and end it after at most `LIMIT_S`."""
    program = chromium()
    assert program is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # Its helper processes may still write there when it is gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads its commands from descriptor 3 and answers on 4.
        script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
        process = subprocess.Popen(
            [
                "bash", "-c", script, program, "--headless=new", "--no-sandbox", "--disable-gpu",
                "--remote-debugging-pipe", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                f"--user-data-dir={profile}",
            ],
            pass_fds=(to_read, from_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        timer = Timer(LIMIT_S, process.kill)
        timer.start()
        try:
            yield Browser(to_write, from_read)
        finally:
            timer.cancel()
            os.close(to_write)
            os.close(from_read)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
