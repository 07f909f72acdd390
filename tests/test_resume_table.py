"""recovery.resume_table: a row for every field there is, nothing resumed on hope, and the page that is made of it."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery import resume_table as table
from recovery.resume_table import (
    ABILITIES,
    DRAWS,
    GENERATOR_DRAWS,
    POSITION_DRAWS,
    REDRAW,
    REQUEST,
    SAMPLING,
    UNCAPTURED,
    Kind,
    hindrance,
)

ROOT = Path(__file__).parents[1]
GREEDY: dict[str, Any] = {"temperature": 0.0}
NONE: frozenset[str] = frozenset()
ALL = frozenset(ABILITIES)
FIELDS = sorted(set(SAMPLING) - {"temperature", "seed"})


def test_the_table_knows_every_field_of_the_installed_engine() -> None:
    """A new version of vLLM with a new field fails here; until it has a row it is restart-only by its name."""
    from vllm import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public - set(SAMPLING) == set(), "give these a row in recovery/resume_table.py"
    assert set(SAMPLING) - public == set(), "these rows are of no field"


def test_the_table_knows_every_argument_of_generate() -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    names = set(inspect.signature(AsyncLLM.generate).parameters) - {"self"}
    assert names - set(REQUEST) == set(), "give these a row in recovery/resume_table.py"


def test_the_page_is_made_of_the_table() -> None:
    """docs/resume-table.md is what docs/make_resume_table.py makes of the table now."""
    spec = importlib.util.spec_from_file_location("make_resume_table", ROOT / "docs" / "make_resume_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "resume-table.md").read_text(encoding="utf-8")
    assert module.redrawn(written) == written, "run: python docs/make_resume_table.py"


@pytest.mark.parametrize("name", [*SAMPLING, *REQUEST])
def test_a_row_says_what_is_needed(name: str) -> None:
    row = table.row(name)
    assert bool(row.how) == (row.kind is not Kind.RESTART)
    assert bool(row.needs) == (row.kind in (Kind.PLUGIN, Kind.DRAWN)) and set(row.needs) <= set(ABILITIES)
    assert bool(row.why) == bool(row.do) == (row.kind is not Kind.EXACT or row.limit is not None)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_alone(name: str) -> None:
    row = SAMPLING[name]
    value = ["x"] if row.harmless == () else 3
    assert hindrance({**GREEDY, name: value}, (), NONE) == ("" if row.kind is Kind.EXACT else name)
    assert hindrance({**GREEDY, name: value}, (), ALL) == (name if row.kind is Kind.RESTART else "")
    for harmless in row.harmless:
        assert hindrance({**GREEDY, name: harmless}, (), NONE) == ""


@pytest.mark.parametrize(("asked", "expected"), [(1, ""), (4096, ""), (4097, "logprobs"), (-1, "logprobs")])
def test_what_is_too_much_to_keep_is_restart_only(asked: int, expected: str) -> None:
    assert hindrance({**GREEDY, "logprobs": asked}, (), NONE) == expected


@pytest.mark.parametrize("name", ["a_field_of_next_year", "truncate_prompt_tokens", "best_of"])
def test_an_unknown_field_is_restart_only_by_its_name(name: str) -> None:
    assert hindrance({**GREEDY, name: 1}, (), ALL) == name
    assert hindrance(GREEDY, [name], ALL) == name
    assert table.why(name) == "it is not known to resume exactly"


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, "temperature"),  # vLLM's own default is 1.0
        ({"temperature": 0.0}, ""),
        ({"temperature": 9e-6}, ""),
        ({"temperature": 1e-5}, "temperature"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": 0.7, "seed": 5}, "seed"),
        ({"temperature": 0.0, "seed": 5}, ""),
        ({"temperature": 1.0, "seed": 5, "a_field_of_next_year": 1}, "seed"),
    ],
)
def test_what_is_drawn_is_not_resumed_unless_it_is_drawn_alike_or_asked_for(
    sampling: dict[str, Any], expected: str
) -> None:
    assert hindrance(sampling, (), NONE) == expected
    assert hindrance(sampling, (), frozenset({POSITION_DRAWS})) == expected, "it was not drawn by position"
    other = "a_field_of_next_year" if len(sampling) == 3 else ""
    assert hindrance(sampling, [DRAWS], frozenset({POSITION_DRAWS})) == other
    assert hindrance(sampling, [DRAWS], frozenset({GENERATOR_DRAWS})) == expected
    assert hindrance(sampling, (), frozenset({GENERATOR_DRAWS})) == (other if "seed" in sampling else expected)
    assert hindrance(sampling, (), frozenset({REDRAW})) == ("a_field_of_next_year" if len(sampling) == 3 else "")


@given(st.sets(st.sampled_from(FIELDS)), st.sets(st.sampled_from(sorted(ABILITIES))))
def test_every_field_that_stands_in_the_way_does_so_in_company(names: set[str], abilities: set[str]) -> None:
    found = hindrance({**GREEDY, **dict.fromkeys(names, "x")}, (), frozenset(abilities))
    alone = {name for name in names if hindrance({**GREEDY, name: "x"}, (), frozenset(abilities))}
    assert found == min(alone, default="")


@given(st.sets(st.sampled_from(FIELDS)), st.sets(st.sampled_from(sorted(ABILITIES))))
def test_an_ability_never_takes_one_away(names: set[str], abilities: set[str]) -> None:
    sampling = {"temperature": 1.0, **dict.fromkeys(names, "x")}
    if not hindrance(sampling, (), frozenset(abilities)):
        assert not hindrance(sampling, (), ALL)


def test_what_is_not_captured_has_a_reason() -> None:
    for name, why in UNCAPTURED.items():
        assert table.why(name) == why != ""
