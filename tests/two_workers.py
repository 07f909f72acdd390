"""Which worker runs which test when the suite runs in several processes (`make test`).

Owns: the order of files, and what goes together to one worker.
Does not know: what a test does.

Invariants:
1. All files that decode on the session's engine alone are one worker's, and it begins with them.
2. All files that start engines, jobs or servers of their own are the other's, and it begins with those: most of their
   time is waiting for processes. Where they compare with the session's engine, it has one too.
3. Every other file goes as a whole to the worker that is free: what its fixtures make is made once.

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
_ENGINE, _MODEL = {"session_engine", "engine"}, {"tiny_model"}
"""What a test or a fixture takes that decodes: the session's engine, or the model that it starts one with."""
ORDER = ("engine", "processes")
"""The scopes that come first: one for each worker."""


@cache
def scope_of(file: str) -> str:
    """Of a test file, given from the project's root: what goes to one worker together with it."""
    tree = ast.parse((_ROOT / file).read_bytes())
    asked = {arg.arg for f in tree.body if isinstance(f, ast.FunctionDef) for arg in f.args.args}
    return "processes" if asked & _MODEL else "engine" if asked & _ENGINE else file


class _ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _ByFile:
    config.option.loadscopereorder = False  # it would put files of many tests first
    return _ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        scope = scope_of(item.nodeid.split("::", 1)[0])
        return ORDER.index(scope) if scope in ORDER else len(ORDER)

    items.sort(key=place)
