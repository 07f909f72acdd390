"""The column `call` of ledger objects: what numbers stand for comes back, and what does not fit is refused."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger_columns import NO_ID, LedgerRows, Names
from recovery.model import DROPPED, ENDED, CallId, LedgerRow
from storage_backends import arrow_file, arrow_ledger, arrow_numbers
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.testing.mutations import try_in_process
from tests.test_arrow_ledger import CODEC, header_of, names, row_lists, sample_rows

HEADER = {**header_of(4), "calls_numbered": 1 << 32}


def numbered(rows: list[LedgerRow], numbers: list[int], of: Names | None = None) -> LedgerRows:
    made = LedgerRows.of(rows, names() if of is None else of)
    made.numbers = numbers
    return made


def wholes(n: int) -> list[LedgerRow]:
    return [replace(row, call_id=CallId(struct.pack("<QQ", at, 1 << 60))) for at, row in enumerate(sample_rows(n))]


def deltas(n: int) -> list[LedgerRow]:
    """Rows of known calls that got another chunk each, and in which nothing else is new."""
    rows = [replace(row, identity=None, history=None, kept=3, ended=None, state=0) for row in sample_rows(n, 1)]
    return [replace(row, call_id=CallId(struct.pack("<QQ", at + 1, at + 1))) for at, row in enumerate(rows)]


@given(
    rows=row_lists(),
    numbers=st.lists(st.integers(1, 2**32 - 1), unique=True, min_size=6, max_size=6),
    rows_per_batch=st.integers(1, 6),
    data=st.data(),
)
def test_ids_come_back_when_all_objects_are_read(
    rows: list[LedgerRow], numbers: list[int], rows_per_batch: int, data: st.DataObject
) -> None:
    """And whichever is read first, in however many batches the rows are."""
    codec = ArrowLedgerCodec(rows_per_batch)
    given_numbers = [data.draw(st.sampled_from([0, number])) for number in numbers[: len(rows)]]
    rows = [row if row.call_id != NO_ID else replace(row, call_id=CallId(b"x" * 16)) for row in rows]
    written = numbered(rows, given_numbers)
    one = codec.encode(HEADER, written)
    drops = [LedgerRow(row.call_id, 0, DROPPED, 0, 0, (), None, None, None) for row in rows]
    other = codec.encode(HEADER, numbered(drops, given_numbers))
    for order in (one, other), (other, one):
        shared = names()
        header, read = {data: codec.decode(data, shared) for data in order}[one]
        requires = ["call-numbers"] if any(given_numbers) else []
        lineage = any(row.identity and (row.identity.model_call or row.identity.parent != NO_ID) for row in rows)
        assert header["requires"] == requires + ["call-lineage"] * lineage
        known = [is_whole or not number for is_whole, number in zip(written.whole(), given_numbers, strict=True)]
        assert [call_id != NO_ID for call_id in read.call_ids] == known, "an id only where a row has to have one"
        assert read.numbers == given_numbers
        read.resolve()
        assert read == rows


def test_each_batch_counts_from_its_own_first_row() -> None:
    """In whole rows and in those that mean their call by number only, at a size that takes more than one batch."""
    n = 2 * arrow_ledger.ROWS_PER_BATCH + 5
    numbers, shared, whole = list(range(7, 7 + n)), names(), wholes(n)
    first = CODEC.encode(HEADER, numbered(whole, numbers))
    changed = [replace(row, call_id=of.call_id) for row, of in zip(deltas(n), whole, strict=True)]
    then = CODEC.encode(HEADER, numbered(changed, numbers))
    for data in (then, first):
        assert pa.ipc.open_file(data).num_record_batches == 3
    _, later = CODEC.decode(then, shared)
    _, earlier = CODEC.decode(first, shared)
    later.resolve()
    assert earlier.numbers == later.numbers == numbers
    assert later.call_ids == [row.call_id for row in whole]


@pytest.mark.parametrize("group_nbytes", [1, 5000, arrow_file.GROUP_BYTES])
@pytest.mark.parametrize("chunks_per_batch", [1, 6, arrow_ledger.CHUNKS_PER_BATCH])
def test_batches_that_chunks_close_and_groups_that_bytes_close_are_read_as_one(
    chunks_per_batch: int, group_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some rows alone list more chunks than a batch should, and some none."""
    monkeypatch.setattr(arrow_ledger, "CHUNKS_PER_BATCH", chunks_per_batch)
    monkeypatch.setattr(arrow_file, "GROUP_BYTES", group_nbytes)
    counts = [0, 3, 2, 9, 0, 0, 1, 6, 6, 0, 12, 1, 1, 1, 1, 1, 1, 0]
    some = [sample_rows(len(counts), count)[at] for at, count in enumerate(counts)]
    rows = [replace(row, call_id=one.call_id) for row, one in zip(some, wholes(len(some)), strict=True)]
    rows[5] = of_model_call(rows[5], 2)
    numbers = list(range(len(rows) + 1, 1, -1))
    data = ArrowLedgerCodec(rows_per_batch=5).encode(HEADER, numbered(rows, numbers))
    n_batches = {1: 15, 6: 8}.get(chunks_per_batch, 4)
    assert pa.ipc.open_file(data).num_record_batches == n_batches
    _, read = CODEC.decode(data, names())
    assert read == rows and read.numbers == numbers


def of_model_call(row: LedgerRow, model_call: int) -> LedgerRow:
    assert row.identity is not None
    return replace(row, identity=row.identity._replace(model_call=model_call, parent=CallId(b"p" * 16)))


def test_without_a_number_an_object_is_what_it_was() -> None:
    data = CODEC.encode(HEADER, numbered(sample_rows(), [0, 0, 0]))
    assert b"call-numbers" not in data and b"versions" not in data


def test_a_reader_that_does_not_know_it_refuses_the_object(monkeypatch: pytest.MonkeyPatch) -> None:
    data = CODEC.encode(HEADER, numbered(sample_rows(), [1, 0, 2]))
    before = arrow_file.read_schema
    monkeypatch.setattr(
        arrow_file, "read_schema", lambda data, frame, kind, what, known: before(data, frame, kind, what)
    )
    with pytest.raises(FormatNotUnderstood, match="call-numbers"):
        CODEC.decode(data, names())


def test_a_chunk_more_of_a_known_call_costs_its_digest_and_little_else() -> None:
    """Its 16 bytes are what nothing compresses. With the id and the name of the version it is twice as much."""
    n, chance = 8192, random.Random(8)
    rows = [
        replace(
            row,
            call_id=CallId(chance.randbytes(16)),
            chunks=(replace(row.chunks[0], digest=chance.randbytes(16)),),
        )
        for row in deltas(n)
    ]
    lean = len(CODEC.encode(HEADER, numbered(rows, list(range(1, n + 1)))))
    full = len(CODEC.encode(HEADER, numbered(rows, [0] * n)))
    assert lean < 24 * n and full > lean + 17 * n


def test_mangled_bytes_never_crash_a_reader_that_skips_the_sum(tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    sample.write_bytes(CODEC.encode(HEADER, numbered([*wholes(2), *deltas(9)[2:]], [9, 0, *range(30, 37)])))
    tally = try_in_process("tests.test_arrow_ledger:OneObject", sample, seed=1, count=1500)
    assert sum(tally.values()) == 1500 and tally["Damaged"] > 500


def changed(change: Callable[[dict[str, Any], dict[str, list[Any]]], None]) -> bytes:
    """An object of two whole rows and two deltas, some cells of which are others."""
    data = CODEC.encode(HEADER, numbered([*wholes(2), *deltas(4)[2:]], [9, 0, 3, 4]))
    parts = arrow_file.split(data, "it")
    schema, header = arrow_file.read_schema(data, parts.schema, "prefix-recovery/ledger", "it", ["call-numbers"])
    cells = pa.ipc.open_file(pa.BufferReader(data)).read_all().to_pydict()
    change(header, cells)
    columns = [pa.array(cells[field.name], field.type) for field in schema]
    with_header = schema.with_metadata({arrow_file.METADATA_KEY: arrow_file.strict_json.dump(header).encode()})
    return arrow_file.write(with_header, [pa.RecordBatch.from_arrays(columns, schema=with_header)])[0]


def _twice(header: Any, cells: Any) -> None:
    cells["call"] = [9, -9 % 2**32, 9, 0]


def _no_number(header: Any, cells: Any) -> None:
    cells["call"] = [9, -9 % 2**32, 0, 4]


def _whole_without_id(header: Any, cells: Any) -> None:
    cells["call_id"][0] = NO_ID


def _version_out_of_range(header: Any, cells: Any) -> None:
    cells["chunks"][2][0]["number"] = len(header["versions"])


def _lineage_beside(header: Any, cells: Any) -> None:
    cells["chunks"][2][0]["lineage"] = "a"


def _versions_of_another_form(header: Any, cells: Any) -> None:
    header["versions"] = [["a", True]] * len(header["versions"])


def _version_without_lineage(header: Any, cells: Any) -> None:
    header["versions"] = [["", 0]] * len(header["versions"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_twice, "two rows for one call"),
        (_no_number, "does not say of which call"),
        (_whole_without_id, "does not say of which call"),
        (_version_out_of_range, "of version"),
        (_lineage_beside, "beside a number"),
        (_versions_of_another_form, "no list of"),
        (_version_without_lineage, "no list of"),
    ],
)
def test_what_does_not_fit_is_damage(change: Callable[[Any, Any], None], says: str) -> None:
    with pytest.raises(Damaged, match=says):
        CODEC.decode(changed(change), names())


def test_unchanged_it_is_read() -> None:
    _, rows = CODEC.decode(changed(lambda header, cells: None), names())
    assert rows.numbers == [9, 0, 3, 4] and rows.states == [0, ENDED, 0, 0]


def test_one_number_for_two_calls_of_two_objects_is_damage() -> None:
    shared = names()
    first, second = (CODEC.encode(HEADER, numbered([row], [7])) for row in wholes(2))
    CODEC.decode(first, shared)
    CODEC.decode(first, shared)
    with pytest.raises(Damaged, match="number 7 is call"):
        CODEC.decode(second, shared)


def test_a_number_that_nobody_explains_is_refused() -> None:
    _, rows = CODEC.decode(CODEC.encode(HEADER, numbered(deltas(1), [7])), names())
    with pytest.raises(Damaged, match="which call has the number 7"):
        rows.resolve()


def test_numbers_end_at_the_width_of_the_column() -> None:
    largest = 2**32 - 1
    assert arrow_numbers.read(arrow_numbers.array_of([largest, 1, 0, largest]), [4], "it") == [largest, 1, 0, largest]
