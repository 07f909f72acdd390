"""docs/cases.md: every case that it says holds is named by a test, in the test's name or in its docstring."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"(?m)^\| ([A-Z]\d+(?:, [A-Z]\d+)*) \|", (ROOT / "docs/cases.md").read_text(encoding="utf-8"))
CASES = [case for row in ROWS for case in row.split(", ")]

STORE = {
    "N1", "N4", "N6", "C1", "C3", "C4", "C6", "C7", "C8", "C10", "C11", "C13", "C14", "S1", "S2", "S3", "S4", "S6",
    "S7", "S8", "S10", "S11", "F1", "F3", "F4", "F5", "F7", "W10",
}  # fmt: skip
"""What a store has to hold; no row of these may be missing from the page."""


def named() -> Iterator[str]:
    """Name and docstring of every test, and docstrings of classes of tests; of the shipped conformance classes too."""
    files = [*sorted((ROOT / "tests").glob("test_*.py")), *sorted((ROOT / "storage_backends/testing").glob("*.py"))]
    for path in files:
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield f"{node.name.upper()} {ast.get_docstring(node) or ''}"
            elif isinstance(node, ast.ClassDef):
                yield ast.get_docstring(node) or ""


TESTS = list(named())


def test_the_page_lists_the_scope() -> None:
    assert len(CASES) == len(set(CASES))
    assert set(CASES) >= STORE, f"the page lacks {sorted(STORE - set(CASES))}"


@pytest.mark.parametrize("case", CASES)
def test_a_test_names_the_case(case: str) -> None:
    # The word S3 alone is the object store; there the test's name has to say it.
    pattern = re.compile(r"TEST_(\w+_)?S3_" if case == "S3" else rf"(?<![A-Z0-9]){case}(?![0-9])")
    assert any(pattern.search(text) for text in TESTS), f"no test names {case}"
