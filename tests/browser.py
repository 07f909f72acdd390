"""A real browser for tests: Chromium without a window.

Owns: how it is found and started, what a page came to and what it said on its console.
Does not know: what a page should show.

Invariants:
1. It is found on this machine and nowhere else; where there is none a test fails and says what to type.
2. The browser gets a profile of its own, no network but a dead proxy, and ends with the call.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_CONSOLE = re.compile(r"CONSOLE[^\]]*\] (.*)")


@dataclass(frozen=True)
class Shown:
    """A page after its program ran: its document as markup, and the lines of its console."""

    dom: str
    console: list[str]


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


def show(page: Path, fragment: str = "", *, screenshot: Path | None = None) -> Shown:
    """Load a page and let its program run to rest."""
    with tempfile.TemporaryDirectory(prefix="browser-") as profile:
        command = [
            executable(),
            "--headless=new",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--proxy-server=127.0.0.1:9",
            f"--user-data-dir={profile}",
            "--window-size=1360,1600",
            "--virtual-time-budget=10000",
            "--enable-logging=stderr",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            *([f"--screenshot={screenshot}"] if screenshot else ["--dump-dom"]),
            page.as_uri() + fragment,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "HOME": profile})
    assert done.returncode == 0, done.stderr[-4000:]
    return Shown(done.stdout, _CONSOLE.findall(done.stderr))
