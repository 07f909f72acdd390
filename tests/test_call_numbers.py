"""recovery.call_numbers: one number for one call, for as long as the ledger lives."""

from __future__ import annotations

from recovery.call_numbers import LIMIT, CallNumbers
from tests.fakes import name


def test_numbers_are_new_ones() -> None:
    numbers = CallNumbers()
    assert [numbers.take(name(f"c{n}")) for n in range(3)] == [1, 2, 3] and numbers.numbered == 4
    numbers.reserve(3)
    numbers.reserve(40)
    assert numbers.take(name("c9")) == 40


def test_a_call_that_comes_back_before_anyone_was_told_keeps_its_number() -> None:
    numbers = CallNumbers()
    first = numbers.take(name("c0"))
    numbers.drop(name("c0"), first)
    assert numbers.take(name("c0")) == first and numbers.dropped == {}
    numbers.drop(name("c0"), first)
    numbers.published()
    assert numbers.take(name("c0")) == first + 1, "a row said that the first one is gone"


def test_without_numbers_calls_have_none() -> None:
    numbers = CallNumbers()
    numbers.reserve(LIMIT - 1)
    assert [numbers.take(name(f"c{n}")) for n in range(3)] == [LIMIT - 1, 0, 0] and numbers.numbered == LIMIT
