"""Which worker runs which test when the suite runs in several processes (`make test`).

Owns: the order of files, and what goes together to one worker.
Does not know: what a test does.

Invariants:
1. All files that start an engine are one worker's, and it begins with them: there is one engine, and no two tests that
   decode share the cores.
2. Every other file goes as a whole to the worker that is free: what its fixtures make is made once.

xdist's own groups cannot say this: they rewrite the ids of tests, which pytest 9.2 no longer lets them do.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

_ROOT = Path(__file__).parent.parent
_ASKED = {"tiny_model", "session_engine", "engine"}
"""What a test or a fixture takes that decodes: an engine, or the model that it starts one with."""


@cache
def starts_engine(file: str) -> bool:
    """Whether a test file, given from the project's root, has something that asks for an engine."""
    tree = ast.parse((_ROOT / file).read_bytes())
    return any(isinstance(f, ast.FunctionDef) and _ASKED & {arg.arg for arg in f.args.args} for f in tree.body)


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return "engine" if starts_engine(file) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False  # it would put files of many tests first
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not starts_engine(item.nodeid.split("::", 1)[0]))
