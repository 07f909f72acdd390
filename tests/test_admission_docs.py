"""docs/admission.md: every line is there, is cited by a test or says why not; its diagrams are the tables'."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "admission.md").read_text(encoding="utf-8")
LINES = dict(re.findall(r"(?m)^\| ([AVM]\d+) \|(.*)$", PAGE))
TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests").glob("*.py"))
    if path.name not in ("test_admission_docs.py", "mutations.py")
)


def test_every_line_of_the_contract_is_on_the_page_once() -> None:
    found = re.findall(r"(?m)^\| ([AVM]\d+) \|", PAGE)
    assert found == [f"A{n}" for n in range(1, 71)] + [f"V{n}" for n in range(1, 19)] + [f"M{n}" for n in range(1, 35)]


@pytest.mark.parametrize("line", LINES)
def test_a_test_cites_the_line(line: str) -> None:
    if "oes not apply" in LINES[line]:
        return
    assert re.search(rf"\b{line}\b|test_(\w+_)?{line.lower()}_", TESTS), f"no test cites {line}"


def test_the_diagrams_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_diagrams", ROOT / "docs" / "make_diagrams.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.redrawn_admission(PAGE) == PAGE, "run: python docs/make_diagrams.py"
