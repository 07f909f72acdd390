"""docs/cases.md: every case that it says holds is named by a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"(?m)^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \|", (ROOT / "docs/cases.md").read_text(encoding="utf-8"))
CASES = [case for row in ROWS for case in row.split(", ")]
TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "tests").glob("test_*.py"))
    if path.name != "test_cases.py"
)


def test_the_page_lists_the_scope() -> None:
    assert len(CASES) == len(set(CASES)) == 61


@pytest.mark.parametrize("case", CASES)
def test_a_test_names_the_case(case: str) -> None:
    named = rf"(\b{case}\b|test_(\w+_)?{case.lower()}_)"
    if case == "S3":  # the word alone is the object store
        named = r"def test_s3_|\bS3 and F7\b"
    assert re.search(named, TESTS), f"no test names {case}"
