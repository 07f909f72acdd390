"""The wheel of `nemo-gym`, fetched and unpacked outside the project: what its staging core makes of rows of ours.

Owns: where it lies, that it is the one that was meant, and that nothing of it is installed.
Does not know: rows.

Its metadata asks for a newer Python than ours; the staging core runs on ours with pydantic (which vLLM brings) and
orjson, which is fetched in the same way. The folder is `$PREFIX_RECOVERY_TEST_WHEELS`, else one of the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

GYM, GYM_PYTHON = "nemo-gym==0.7.0", "3.13.14"
GYM_SHA256 = "cce78fc3fd048f36b4c465fe8e9fe3cc5e7afb6f6e287bfe831f156988508a70"
ORJSON = "orjson>=3.9"


def folder() -> Path:
    """Unpacked; fetched from the package registry if it is not there yet."""
    given = os.environ.get("PREFIX_RECOVERY_TEST_WHEELS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    base = Path(given) if given else cache / "prefix-recovery-tests"
    base.mkdir(parents=True, exist_ok=True)
    place, done = base / GYM.replace("==", "-"), base / f"{GYM}.done"
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two workers of one run
        if not done.exists():
            wheel = _fetch(base, GYM, "--python-version", GYM_PYTHON)
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            assert found == GYM_SHA256, f"{wheel} has the sha256 {found}"
            for one in (wheel, _fetch(base, ORJSON)):
                with zipfile.ZipFile(one) as archive:
                    archive.extractall(place)
                one.unlink()
            done.touch()
    return place


def _fetch(base: Path, what: str, *arguments: str) -> Path:
    """The wheel of one package, without what it requires."""
    before = set(base.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(base)]
    done = subprocess.run([*command, *arguments, what], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{what} could not be fetched: {done.stderr}"
    (wheel,) = set(base.glob("*.whl")) - before
    return wheel


def staging() -> ModuleType:
    """That library's staging core."""
    place = str(folder())
    if place not in sys.path:
        sys.path.append(place)
    return importlib.import_module("nemo_gym.token_id_capture.staging")
