"""A real browser for tests: Chromium without a window.

Owns: how it is found, started and spoken to; what a page asked for and said on its console.
Does not know: what a page should show.

Invariants:
1. It is found on this machine and nowhere else; where there is none a test fails and says what to type.
2. The browser gets a profile of its own, no network but a dead proxy, and ends with the call.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_DEADLINE_S = 120.0


def executable() -> str:
    named = os.environ.get("PREFIX_RECOVERY_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(
            "no Chromium on this machine; type: make browser  (as root on Debian: apt-get install "
            "--no-install-recommends chromium), or set PREFIX_RECOVERY_CHROMIUM to one",
            pytrace=False,
        )
    return found


class Tab:
    """One page in a browser of its own, spoken to over a pipe (Chrome's DevTools protocol)."""

    def __init__(self, page: Path, fragment: str, profile: str, *, width: int = 1360, height: int = 1600) -> None:
        self._numbers = itertools.count(1)
        self.console: list[str] = []
        self.requests: list[str] = []
        out_read, self._write = os.pipe()
        self._read, in_write = os.pipe()
        arguments = [
            executable(),
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--proxy-server=127.0.0.1:9",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        # The protocol is spoken on the descriptors 3 and 4, whatever they are called here.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{out_read} 4>&{in_write}', "bash", *arguments],
            pass_fds=(out_read, in_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(out_read)
        os.close(in_write)
        self._received = b""
        self._session: str | None = None
        (target,) = (t for t in self._ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask("Page.navigate", url=page.as_uri() + fragment)
        self.wait_for("document.readyState === 'complete'")

    def __call__(self, expression: str) -> Any:
        """What a JavaScript expression gives, promises awaited. Raises AssertionError for what it throws."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not self(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true"

    def type(self, text: str) -> None:
        """Keys, into what has the focus."""
        self._ask("Input.insertText", text=text)

    def screenshot(self, to: Path) -> None:
        to.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _ask(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._heard(answer.get("method", ""), answer.get("params", {}))
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], _DEADLINE_S)
            data = os.read(self._read, 1 << 20) if ready else b""
            assert data, "the browser has ended, or says nothing more"
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def _heard(self, event: str, about: dict[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(part.get("value", part.get("description"))) for part in about["args"]))
        elif event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Log.entryAdded":
            self.console.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])


@contextmanager
def opened(page: Path, fragment: str = "") -> Iterator[Tab]:
    """A page whose program has run."""
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        tab = Tab(page, fragment, profile)
        try:
            yield tab
        finally:
            tab.close()
