"""The column `lineage` of ledger objects: there only where it says something, refused by who does not know it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.lineage import CALLS_PER_TURN_MAX, Lineage, lineage_of
from recovery.model import CallId, LedgerRow
from storage_backends import arrow_file, arrow_lineage
from tests.test_arrow_ledger import decode, encode, header_of, sample_rows

PARENT = CallId(bytes(range(16)))


def rows() -> list[LedgerRow]:
    """Three calls, the second with a parent, the third not said again."""
    first, second, third = sample_rows()
    assert second.identity is not None
    own = second.identity._replace(model_call=7, parent=PARENT)
    return [first, replace(second, identity=own), replace(third, identity=None)]


def test_without_a_lineage_an_object_is_what_it_was() -> None:
    data = encode(header_of(4), sample_rows())
    assert b"lineage" in data and b"call-lineage" not in data and b"model_call" not in data


def test_a_lineage_comes_back_and_is_required() -> None:
    data = encode(header_of(4), rows())
    header, found = decode(data)
    assert header["requires"] == ["call-lineage"] and found == rows()


def test_a_reader_that_does_not_know_it_refuses_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a version before this one does: arrow_file knows no requirement of ledger objects."""
    data = encode(header_of(4), rows())
    before = arrow_file.read_schema
    monkeypatch.setattr(
        arrow_file, "read_schema", lambda data, frame, kind, what, known: before(data, frame, kind, what)
    )
    with pytest.raises(FormatNotUnderstood, match="call-lineage"):
        decode(data)


@pytest.mark.parametrize(
    "value",
    [
        [None, None, None],
        [{"model_call": 0, "parent": bytes(16)}] * 3,
        [{"model_call": None, "parent": bytes(16)}, {"model_call": 0, "parent": bytes(16)}, None],
        [{"model_call": 1, "parent": None}, {"model_call": 0, "parent": bytes(16)}, None],
    ],
)
def test_a_column_that_does_not_fit_is_damage(value: list[Any]) -> None:
    with pytest.raises(Damaged, match="lineage"):
        arrow_lineage.read(pa.array(value, arrow_lineage.FIELD.type), [row.identity for row in rows()], "an object")


@pytest.mark.parametrize("given", [Lineage(), Lineage(3), Lineage(0, PARENT), Lineage(CALLS_PER_TURN_MAX - 1, PARENT)])
def test_a_request_carries_it(given: Lineage) -> None:
    assert lineage_of({"adapter": "x", **given.as_extra()}) == given
    assert bool(given.as_extra()) == (given != Lineage())


@pytest.mark.parametrize(
    "extra",
    [{}, {"lineage": 1}, {"lineage": {"call": -1, "parent": None}}, {"lineage": {"call": 1, "parent": "zz" * 16}}],
)
def test_what_is_none_of_ours_says_nothing(extra: dict[str, Any]) -> None:
    assert lineage_of(extra) == Lineage()


@pytest.mark.parametrize(("call", "parent"), [(-1, PARENT), (CALLS_PER_TURN_MAX, PARENT), (0, b"short")])
def test_a_lineage_that_cannot_be_stored_is_refused_where_it_is_made(call: int, parent: bytes) -> None:
    with pytest.raises(ValueError, match="a lineage needs"):
        Lineage(call, CallId(parent))
