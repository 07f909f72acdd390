"""ArrowLedgerCodec: round trips, the columns of docs/format.md, refusals, mangled bytes."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.errors import Damaged, FormatNotUnderstood
from recovery.ledger_columns import LedgerRows, Names
from recovery.model import (
    DROPPED,
    ENDED,
    OPEN,
    CallId,
    ChunkRef,
    Identity,
    LedgerRow,
    PolicyVersion,
    RecordRef,
    Restarted,
    Resumed,
)
from storage_backends import arrow_ledger
from storage_backends.arrow_ledger import SCHEMA, ArrowLedgerCodec
from storage_backends.testing.mutations import try_in_process

CODEC = ArrowLedgerCodec()
KEY = b"prefix-recovery"
SEGMENTS = [f"seg/e000001/w0.1a2b3c4d/{n:08d}-00000000-{n:08x}.arrow" for n in range(6)]
PARENT = {"key": "ledger/e000001/0123456789abcdef.arrow", "nbytes": 10, "crc32c": 5, "sha256": "0" * 64}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
U32 = st.integers(0, 2**32 - 1)
REFS = st.builds(RecordRef, st.sampled_from(SEGMENTS), U32)
DIGESTS = st.binary(min_size=16, max_size=16)
CHUNKS = st.builds(
    ChunkRef,
    REFS,
    U32,
    st.integers(1, 2**32 - 1),
    DIGESTS,
    st.builds(PolicyVersion, TEXT.filter(bool), st.integers(0, 2**64 - 1)),
)
IDENTITIES = st.builds(
    Identity,
    rollout=TEXT,
    turn=st.integers(0, 2**40),
    request_digest=DIGESTS,
    source_digest=TEXT,
    restart_only=TEXT,
    opened=REFS,
    model_call=st.just(0) | U32,
    parent=st.just(bytes(16)) | DIGESTS,
)
NUMBER = st.integers(0, 2**40)
EVENTS = st.one_of(st.builds(Resumed, NUMBER, NUMBER, TEXT), st.builds(Restarted, NUMBER, NUMBER, TEXT))
ENDS = st.tuples(st.sampled_from(["stop", "length", "repetition"]), st.none() | st.integers(-(2**40), 2**40) | TEXT)


@st.composite
def row_lists(draw: st.DrawFn) -> list[LedgerRow]:
    rows = []
    for call_id in draw(st.lists(DIGESTS, unique=True, max_size=6)):
        end = draw(st.none() | ENDS)
        rows.append(
            LedgerRow(
                call_id=CallId(call_id),
                attempt=draw(U32),
                state=draw(st.sampled_from([OPEN, DROPPED])) if end is None else ENDED,
                n_tokens=draw(U32),
                kept=draw(U32),
                chunks=tuple(draw(st.lists(CHUNKS, max_size=4))),
                identity=draw(st.none() | IDENTITIES),
                ended=end,
                history=draw(st.none() | st.lists(EVENTS, max_size=3).map(tuple)),
            )
        )
    return rows


def names() -> Names:
    """Numbers 0 to 5 for SEGMENTS, as the other objects of the ledger give them."""
    made = Names()
    for number, key in enumerate(SEGMENTS):
        made.bind(key, number)
    return made


def encode(header: dict[str, Any], rows: list[LedgerRow]) -> bytes:
    return CODEC.encode(header, LedgerRows.of(rows, names()))


def decode(data: bytes) -> tuple[dict[str, Any], LedgerRows]:
    return CODEC.decode(data, names())


class OneObject:
    """The codec as mutations.py tries it."""

    def decode(self, data: bytes) -> tuple[dict[str, Any], LedgerRows]:
        return decode(data)


def header_of(described: int = 4, *, parent: Any = PARENT, **changes: Any) -> dict[str, Any]:
    segments = [
        {"number": number, "key": key, "nbytes": 100, "crc32c": 7, "batches": [[8, 64, 9, 3]]}
        for number, key in enumerate(SEGMENTS[:described])
    ]
    header = {
        "format": "prefix-recovery/ledger",
        "version": 1,
        "requires": [],
        "depth": 0 if parent is None else 3,
        "parent": parent,
        "segments": segments,
        "numbered": 6,
        "flushed": {"w0.1a2b3c4d": 17},
    }
    return {**header, **changes}


def sample_rows(n_rows: int = 3, n_chunks: int = 2) -> list[LedgerRow]:
    rows = []
    for number in range(n_rows):
        chunks = tuple(
            ChunkRef(
                RecordRef(SEGMENTS[(number + i) % 6], i), 4 * i, 4, bytes([number % 256, i] * 8), PolicyVersion("a", i)
            )
            for i in range(n_chunks)
        )
        identity = Identity(
            rollout=f"p-{number}",
            turn=1,
            request_digest=bytes(range(16)),
            source_digest="ab",
            restart_only="",
            opened=RecordRef(SEGMENTS[5], number),
        )
        ended = ("stop", None) if number % 2 else None
        state = ENDED if ended else OPEN
        call_id = CallId(number.to_bytes(16, "little"))
        history = (Resumed(4, 2, "bitwise"), Restarted(8, 3, "stale"))
        rows.append(LedgerRow(call_id, 2, state, 4 * n_chunks, 0, chunks, identity, ended, history))
    return rows


@pytest.mark.parametrize("rows_per_batch", [7, arrow_ledger.ROWS_PER_BATCH])
def test_rows_that_compress_better_than_a_reader_believes_are_read_again(
    rows_per_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histories of calls that were open at the same restores are the same text: from 100,000 calls and 13 restores
    on, about, an object was written that every reader refused."""
    monkeypatch.setattr(arrow_ledger, "NBYTES_ALWAYS", 1 << 10)
    history = tuple(Resumed(8 * at, 3 * at, "bitwise") for at in range(200))
    rows = [dataclasses.replace(row, history=history) for row in sample_rows(30)]
    codec, header = ArrowLedgerCodec(rows_per_batch), header_of(6)
    data = codec.encode(header, LedgerRows.of(rows, names()))
    raw = 30 * 200 * len('{"at":8,"exactness":"bitwise","kind":"resume","snapshot":3}')
    assert raw / arrow_ledger.RATIO_MAX < len(data) < raw / 8, "made longer, and not by much"
    assert codec.decode(data, names()) == (header, LedgerRows.of(rows, names()))
    assert pa.ipc.open_file(data).read_all().num_rows == 30


@given(rows=row_lists(), described=st.integers(0, 6))
def test_header_and_rows_come_back(rows: list[LedgerRow], described: int) -> None:
    header = header_of(described)
    lineage = any(row.identity and (row.identity.model_call or row.identity.parent != bytes(16)) for row in rows)
    assert decode(encode(header, rows)) == ({**header, "requires": ["call-lineage"] if lineage else []}, rows)


def test_rows_of_a_base_come_back() -> None:
    header = header_of(6, parent=None)
    assert decode(encode(header, sample_rows())) == (header, sample_rows())


def test_no_rows_at_all() -> None:
    header = header_of(0, parent=None, flushed={})
    assert decode(encode(header, [])) == (header, [])


def test_more_rows_than_fit_one_batch() -> None:
    rows = sample_rows(40_000, 1)
    header = header_of()
    data = encode(header, rows)
    assert pa.ipc.open_file(data).num_record_batches == 3
    assert decode(data)[1] == rows


def test_columns_are_those_of_the_format() -> None:
    file = pa.ipc.open_file(encode(header_of(4), sample_rows()))
    assert json.loads(file.schema.metadata[KEY]) == header_of(4)
    assert [field.name for field in file.schema] == [
        "call_id", "attempt", "state", "n_tokens", "kept", "chunks", "identity", "ended", "history",
    ]  # fmt: skip
    row = file.read_all().to_pylist()[1]
    assert (row["call_id"], row["attempt"], row["state"]) == (b"\1" + bytes(15), 2, 1)
    assert (row["n_tokens"], row["kept"]) == (8, 0)
    assert row["chunks"][1] == {
        "segment": 2, "index": 1, "start": 4, "n_tokens": 4, "digest": b"\1" * 16, "lineage": "a", "number": 1,
    }  # fmt: skip
    assert row["identity"] == {
        "rollout": "p-1",
        "turn": 1,
        "request_digest": bytes(range(16)),
        "source_digest": "ab",
        "restart_only": "",
        "segment": SEGMENTS[5],
        "index": 1,
    }
    assert json.loads(row["ended"]) == {"finish_reason": "stop", "stop_reason": None}
    assert json.loads(row["history"]) == [
        {"kind": "resume", "at": 4, "snapshot": 2, "exactness": "bitwise"},
        {"kind": "restart", "at": 8, "snapshot": 3, "reason": "stale"},
    ]


def test_segments_have_the_numbers_of_the_ledger_described_here_or_not() -> None:
    column = pa.ipc.open_file(encode(header_of(2), sample_rows(6, 1))).read_all().column("chunks")
    assert [chunks[0]["segment"] for chunks in column.to_pylist()] == [0, 1, 2, 3, 4, 5]


def test_numbers_need_no_description_to_be_read() -> None:
    """Objects are decoded one by one; what a number stands for may be said by another one."""
    _, rows = CODEC.decode(encode(header_of(0), sample_rows(6, 1)), Names())
    assert rows.chunks["segment"].tolist() == [0, 1, 2, 3, 4, 5] and rows.names.keys == {}


def test_what_cannot_be_stored_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="header"):
        encode({**header_of(), "version": 2}, [])
    row = sample_rows(1)[0]
    for name, value in (("attempt", 1 << 32), ("n_tokens", -1), ("call_id", b"short")):
        with pytest.raises(ValueError, match=r"fit|16 bytes"):
            encode(header_of(), [dataclasses.replace(row, **{name: value})])


def test_fifty_thousand_calls_take_seconds_not_minutes() -> None:
    rows = sample_rows(50_000, 5)
    begin = time.process_time()
    data = encode(header_of(), rows)
    encoded = time.process_time()
    decoded = decode(data)[1]
    assert encoded - begin < 5 and time.process_time() - encoded < 15
    assert len(decoded) == len(rows) and decoded[-1] == rows[-1]


# ---- what is refused when read ----------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, list[Any]]], None] = lambda columns: None, **header: Any) -> bytes:
    """A ledger object whose rows were changed by `change`, written by plain pyarrow."""
    columns = pa.ipc.open_file(encode(header_of(), sample_rows())).read_all().to_pydict()
    change(columns)
    item = [pa.field(f.name, f.type) for f in SCHEMA.field("chunks").type.value_type]
    types = {"chunks": pa.list_(pa.struct(item))}
    metadata = {KEY: json.dumps(header_of(**header)).encode()}
    loose = pa.schema([pa.field(f.name, types.get(f.name, f.type)) for f in SCHEMA], metadata=metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, loose) as writer:
        arrays = [pa.array(columns[field.name], field.type) for field in loose]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=loose))
    return bytes(sink.getvalue())


def test_a_file_that_plain_pyarrow_wrote_is_read() -> None:
    assert decode(rewritten()) == (header_of(), sample_rows())


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"version": 2}, ["version 2", "version 1"]),
        ({"version": "1"}, ["version '1'"]),
        ({"format": "prefix-recovery/segment"}, ["prefix-recovery/segment"]),
        ({"requires": ["tombstones"]}, ["'tombstones'"]),
    ],
)
def test_f4_other_formats_versions_and_needs_are_not_understood(header: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(FormatNotUnderstood) as caught:
        decode(rewritten(**header))
    assert all(word in caught.value.message for word in words)


def test_f4_unknown_fields_are_kept_and_ignored() -> None:
    header, rows = decode(rewritten(comment={"a": 1}))
    assert header["comment"] == {"a": 1} and rows == sample_rows()


SEGMENT = {"number": 0, "key": SEGMENTS[0], "nbytes": 1, "crc32c": 1, "batches": []}


@pytest.mark.parametrize(
    "header",
    [
        {"requires": "x"},
        {"parent": "x"},
        {"segments": {}},
        {"segments": ["x"]},
        {"segments": [SEGMENT, SEGMENT]},
        {"segments": [SEGMENT, {**SEGMENT, "number": 7}]},
        {"segments": [SEGMENT, {**SEGMENT, "key": SEGMENTS[1]}]},
        {"segments": [{**SEGMENT, "number": -1}]},
        {"segments": [{**SEGMENT, "number": "0"}]},
        {"segments": [{**SEGMENT, "number": 1 << 32}]},
        {"segments": [{**SEGMENT, "key": "../../a"}]},
        {"segments": [{**SEGMENT, "key": 1}]},
        {"segments": [{**SEGMENT, "nbytes": -1}]},
        {"segments": [{**SEGMENT, "crc32c": 1 << 32}]},
        {"segments": [{**SEGMENT, "batches": [[1, 2, 3]]}]},
        {"segments": [{**SEGMENT, "batches": [[1, 2, 3, -1]]}]},
        {"segments": [{**SEGMENT, "batches": [[1, 2, 3, True]]}]},
        {"numbered": None},
        {"numbered": -1},
        {"flushed": []},
        {"flushed": {"w0": "1"}},
        {"parent": None},
    ],
)
def test_a_header_that_breaks_a_rule_is_damage(header: dict[str, Any]) -> None:
    def keep_one(columns: dict[str, list[Any]]) -> None:
        columns["kept"][0] = 1

    with pytest.raises(Damaged):
        decode(rewritten(keep_one, **header))


CHUNK = {"segment": 0, "index": 0, "start": 0, "n_tokens": 1, "digest": bytes(16), "lineage": "a", "number": 0}
WHO = {
    "rollout": "r", "turn": 0, "request_digest": bytes(16), "source_digest": "", "restart_only": "",
    "segment": SEGMENTS[0], "index": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("call_id", None),
        ("call_id", (1).to_bytes(16, "little")),
        ("attempt", None),
        ("state", 3),
        ("state", 1),
        ("n_tokens", None),
        ("kept", None),
        ("chunks", None),
        ("chunks", [None]),
        *(("chunks", [{**CHUNK, name: None}]) for name in CHUNK),
        ("chunks", [{**CHUNK, "n_tokens": 0}]),
        ("chunks", [{**CHUNK, "lineage": ""}]),
        *(("identity", {**WHO, name: None}) for name in WHO),
        ("identity", {**WHO, "turn": 1 << 63}),
        ("identity", {**WHO, "segment": "/a/b"}),
        ("identity", {**WHO, "segment": ""}),
        ("ended", '{"finish_reason": "stop", "stop_reason": null}'),
        ("history", "{}"),
        ("history", "[1]"),
        ("history", "[]]"),
        ("history", '[], "list": []'),
        ("history", '[{"kind": "rewind", "at": 0, "snapshot": 1}]'),
        ("history", '[{"kind": "resume", "at": 0, "snapshot": 1}]'),
        ("history", '[{"kind": "restart", "at": -1, "snapshot": 1, "reason": ""}]'),
    ],
)
def test_a_row_that_breaks_a_rule_is_damage(column: str, value: Any) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns[column][0] = value

    with pytest.raises(Damaged):
        decode(rewritten(change))


@pytest.mark.parametrize(
    "text", [None, '{"finish_reason": "abort"}', '{"finish_reason": "stop", "stop_reason": []}', "x"]
)
def test_an_end_that_breaks_a_rule_is_damage(text: str | None) -> None:
    def change(columns: dict[str, list[Any]]) -> None:
        columns["ended"][1] = text

    with pytest.raises(Damaged):
        decode(rewritten(change))


def test_every_truncation_is_damage() -> None:
    data = encode(header_of(), sample_rows())
    for length in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:length])


def test_a_segment_is_no_ledger() -> None:
    from storage_backends.arrow_segments import ArrowSegmentCodec

    with pytest.raises(FormatNotUnderstood, match="prefix-recovery/segment"):
        decode(ArrowSegmentCodec().encode([], "seg/x").data)


def test_mangled_bytes_never_crash_a_reader_that_skips_the_sum(tmp_path: Path) -> None:
    sample = tmp_path / "sample"
    sample.write_bytes(encode(header_of(), sample_rows(20, 5)))
    tally = try_in_process("tests.test_arrow_ledger:OneObject", sample, seed=1, count=3000)
    assert sum(tally.values()) == 3000
    assert tally["Damaged"] > 1000
