"""recovery.notes: whatever has become of a note, reading it gives what it should be or None."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_recovery.processes import Identity
from recovery import notes

GARBAGE = [
    b"", b"\0" * 64, b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000,
    b'{"pid": ' + b"9" * 5000 + b"}", b'{"pid": 1',
]  # fmt: skip
NUMBERS = ["1e400", "-1e400", "NaN", "1.0", "true", '"1"', "null", "[1]", "{}", "-1", "0", "9" * 400]
"""None of them is the number of a process."""

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@pytest.mark.parametrize("note", GARBAGE, ids=range(len(GARBAGE)))
def test_what_is_no_object_is_none(note: bytes) -> None:
    assert notes.object_in(note) is None


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_reading_a_note_never_raises(note: bytes | str) -> None:
    found = notes.object_in(note)
    assert found is None or isinstance(found, dict)


@given(anything, st.integers(), st.integers())
def test_a_number_is_a_whole_one_in_bounds(value: Any, low: int, high: int) -> None:
    found = notes.whole(json.loads(json.dumps(value)), low, high)
    assert (found is not None) == (type(value) is int and value in range(low, high + 1))


@given(st.dictionaries(st.sampled_from(["pid", "started", "boot"]), st.integers() | st.floats() | st.text()))
def test_a_process_is_read_from_anything(value: Any) -> None:
    found = Identity.from_json(value)
    if found is not None:
        assert found.as_json() == {name: value[name] for name in ("pid", "started", "boot")}
        assert not found.alive(), "a start time and a boot that are made up"


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", ["pid", "started"])
def test_a_process_has_whole_numbers(name: str, number: str) -> None:
    good = Identity.own().as_json()
    assert Identity.from_json(good) == Identity.own()
    if (name, number) != ("started", "0"):
        assert Identity.from_json({**good, name: json.loads(number)}) is None
