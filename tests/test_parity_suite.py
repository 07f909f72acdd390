"""Every kind of request of the resume table, cut and carried on once; many more of them by `python -m tests.soak`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from recovery import resume_table as table
from tests.conftest import OnLoop
from tests.parity import every_kind, figures, suite
from tests.parity_kinds import ELSEWHERE, KINDS


def test_every_row_that_is_exact_has_a_kind() -> None:
    covered = set(ELSEWHERE).union(*(kind.rows for kind in KINDS))
    rows = {**table.SAMPLING, **table.REQUEST}
    exact = {name for name, row in rows.items() if row.kind is not table.Kind.RESTART}
    assert exact - covered == set(), "no call of the parity suite has these"
    assert covered - exact == set(), "these are not rows that are exact"
    here = Path(__file__).parent
    assert all((here / where).is_file() for where in ELSEWHERE.values() if where.endswith(".py"))


def test_every_kind_comes_in_each_way() -> None:
    ways = {(kind.name, sampled, n) for kind, sampled, n in every_kind(4 * len(KINDS), random.Random(0))}
    assert len(ways) == 4 * len(KINDS)


def test_each_kind_cut_and_carried_on(
    session_engine: Any, on_loop: OnLoop[Any], quick_path: Path, rng: random.Random
) -> None:
    """B16: greedy and seeded, cut once and three times in turn: all exact, logprobs within 1e-5."""
    found = figures(on_loop(suite(session_engine, quick_path, len(KINDS), rng.randrange(1 << 30))))
    assert found["different"] == [] and found["pairs"] == found["exact"] == found["kinds"] == len(KINDS)
