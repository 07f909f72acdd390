"""recovery.reading: nothing unchecked is handed out, and an error names segment, call and tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recovery.errors import Damaged, DigestMismatch, ObjectMissing
from recovery.ledger import Ledger
from recovery.model import ChunkRef, PolicyVersion, Record, SegmentInfo
from recovery.reading import missing_segments, read_segment, read_transcripts
from recovery.staging import coordinates_of
from recovery.transcripts import assemble
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import CountingStore
from tests.fakes import chunk, ended, name, opened, request
from tests.plain_codecs import PlainSegments

CODEC = PlainSegments()
A1 = PolicyVersion("a", 1)


def stored(store: MemoryStore, ledger: Ledger, records: list[Record], flush: int = 1) -> SegmentInfo:
    segment = CODEC.encode(records, f"seg/e000001/w0.00000000/{flush:08d}-00000000")
    store.put_new(segment.info.key, segment.data)
    ledger.describe(segment.info)
    for at in coordinates_of(records, segment.info.key):
        assert ledger.apply(at) == ""
    return segment.info


@pytest.fixture
def world() -> tuple[MemoryStore, Ledger, list[SegmentInfo]]:
    store, ledger = MemoryStore(), Ledger()
    records: list[Record] = [opened("a"), opened("b"), chunk("a", 0, [1, 2]), chunk("b", 0, [9])]
    one = stored(store, ledger, records)
    more: list[Record] = [
        chunk("a", 2, [3], version=A1),
        chunk("a", 3, [4, 5], version=A1, logprobs=None),
        ended("a", 5),
    ]
    return store, ledger, [one, stored(store, ledger, more, flush=2)]


def test_transcripts_are_what_was_captured(world: tuple) -> None:
    store, ledger, _ = world
    counting = CountingStore(store)
    found = read_transcripts(counting, CODEC, ledger, list(ledger))
    assert counting.count() == 2, "each segment is read once"
    a, b = found[name("a")], found[name("b")]
    assert a.token_ids.tolist() == [1, 2, 3, 4, 5] and a.token_ids.dtype == np.int32
    assert a.logprobs.tolist()[:3] == [-0.5, -1.0, -1.5] and np.isnan(a.logprobs[3:]).all()
    assert a.version_spans == ((0, 2, PolicyVersion("a", 0)), (2, 5, A1))
    assert a.request.rollout == "a" and a.request.prompt_token_ids.tolist() == [1, 2, 3]
    assert (b.token_ids.tolist(), b.version_spans) == ([9], ((0, 1, PolicyVersion("a", 0)),))


def test_a_call_without_tokens_has_an_empty_transcript() -> None:
    store, ledger = MemoryStore(), Ledger()
    stored(store, ledger, [opened("a")])
    transcript = read_transcripts(store, CODEC, ledger, list(ledger))[name("a")]
    assert (transcript.token_ids.tolist(), transcript.logprobs.tolist(), transcript.version_spans) == ([], [], ())
    assert assemble(request("a"), []).token_ids.dtype == np.int32


def test_wide_columns_are_joined_where_they_go_on_and_never_filled_in() -> None:
    store, ledger = MemoryStore(), Ledger()
    ids = np.arange(12, dtype=np.int32).reshape(6, 2)
    ever = np.array([np.nan, -0.0, -np.inf, 1e-45, 1, 2, 3], np.float32)
    pieces: list[dict[str, np.ndarray]] = [
        {"ever": ever[:2], "ids": ids[:2]},  # [0, 2)
        {"ever": ever[2:4], "ids": ids[2:4], "late": np.array([True, False])},  # [2, 4)
        {"ever": ever[4:5]},  # [4, 5): no ids
        {"ever": ever[5:6], "ids": ids[4:5]},  # [5, 6)
        {"ever": ever[6:], "ids": ids[5:].astype(np.int64)},  # [6, 7): of another type
    ]
    records: list[Record] = [opened("a")]
    at = 0
    for columns in pieces:
        n = len(columns["ever"])
        records.append(chunk("a", at, [7] * n, columns=columns))
        at += n
    for flush, part in enumerate((records[:3], records[3:]), 1):
        stored(store, ledger, part, flush)
    found = read_transcripts(store, CODEC, ledger, list(ledger))[name("a")]
    assert list(found.columns) == ["ever", "ids", "late"]
    (whole,) = found.columns["ever"]
    assert (whole.start, whole.stop) == (0, 7) == (0, len(found.token_ids))
    assert whole.values.tobytes() == ever.tobytes() and whole.values.dtype == np.float32
    assert [(run.start, run.stop, run.values.dtype.name) for run in found.columns["ids"]] == [
        (0, 4, "int32"),
        (5, 6, "int32"),
        (6, 7, "int64"),
    ]
    assert found.columns["ids"][0].values.tolist() == ids[:4].tolist()
    assert [(run.start, run.values.tolist()) for run in found.columns["late"]] == [(2, [True, False])]
    assert read_transcripts(store, CODEC, ledger, list(ledger), columns=False)[name("a")].columns == {}


def test_only_the_wanted_calls_segments_are_read(world: tuple) -> None:
    store, ledger, _ = world
    counting = CountingStore(store)
    entry = ledger.get(name("b"))
    assert set(read_transcripts(counting, CODEC, ledger, [entry])) == {name("b")}
    assert counting.count() == 1


def test_c3_a_missing_segment_is_named(world: tuple) -> None:
    store, ledger, (_, two) = world
    store.delete(two.key)
    with pytest.raises(ObjectMissing, match=two.key):
        read_transcripts(store, CODEC, ledger, list(ledger))
    (error,) = missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()})
    assert isinstance(error, ObjectMissing) and two.key in str(error)


def test_f1_a_truncated_or_longer_segment_is_refused_before_it_is_parsed(world: tuple) -> None:
    store, _, (one, two) = world
    data = store.get(one.key)
    for changed in (data[:-1], data + b" ", b""):
        store.put(one.key, changed)
        with pytest.raises(DigestMismatch, match=one.key):
            read_segment(store, CODEC, one)
        (error,) = missing_segments(store, {info.key: info for info in (one, two)})
        assert isinstance(error, DigestMismatch) and f"{one.key} has {len(changed)} bytes" in str(error)
    assert len(read_segment(store, CODEC, two)) == 3


def test_every_flipped_byte_is_found(world: tuple) -> None:
    store, _, (one, _) = world
    data = store.get(one.key)
    for at in range(0, len(data), 7):
        store.put(one.key, data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(DigestMismatch):
            read_segment(store, CODEC, one)


def test_a_segment_that_holds_something_else_names_call_and_tokens(world: tuple) -> None:
    """The bytes are as written, yet not what the ledger recorded: a mix-up that no sum over bytes can find."""
    store, ledger, _ = world
    entry = ledger.get(name("a"))
    good = list(entry.chunks)

    def listed(refs: list[ChunkRef]) -> None:
        entry.chunks.cut(0)
        for ref in refs:
            entry.chunks.append(ref)

    def changed(ref: ChunkRef, **fields: object) -> None:
        listed([replace(c, **fields) if c is ref else c for c in good])
        with pytest.raises(DigestMismatch, match=rf"is not tokens \d+ to \d+ of call {name('a').hex()} \(a\)"):
            read_transcripts(store, CODEC, ledger, [entry])
        listed(good)

    changed(good[0], digest=b"x" * 16)
    changed(good[0], at=replace(good[0].at, index=3))  # another call's chunk
    changed(good[0], at=replace(good[0].at, index=0))  # not a chunk
    changed(good[1], at=replace(good[1].at, index=1))  # the next chunk of the same call
    changed(good[1], version=PolicyVersion("a", 2))  # relabelled
    changed(good[1], n_tokens=2)
    listed([replace(good[0], at=replace(good[0].at, index=77)), *good[1:]])
    with pytest.raises(DigestMismatch, match="has 4 records; tokens 0 to 2 of call"):
        read_transcripts(store, CODEC, ledger, [entry])
    listed(good)
    assert read_transcripts(store, CODEC, ledger, [entry])


def test_a_request_that_is_not_the_recorded_one_is_named(world: tuple) -> None:
    store, ledger, _ = world
    entry = ledger.get(name("a"))
    good = entry.identity
    for wrong in (
        good._replace(request_digest=b"x" * 16),
        good._replace(opened=replace(good.opened, index=1)),
        good._replace(opened=replace(good.opened, index=2)),
    ):
        entry.identity = wrong
        with pytest.raises(DigestMismatch, match=r"is not the request of call .* \(a\)"):
            read_transcripts(store, CODEC, ledger, [entry])
    entry.identity = good._replace(opened=replace(good.opened, index=9))
    with pytest.raises(Damaged, match="has 4 records; the request of call"):
        read_transcripts(store, CODEC, ledger, [entry])
