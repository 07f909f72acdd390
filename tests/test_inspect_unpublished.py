"""`latest` says what was flushed and not yet published, and is told so by few bytes of names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.layout import segment_stem
from recovery.ledger import Ledger
from recovery.log import Slot
from recovery.ports import Listed, ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from snapshot_inspect.newest import newest
from snapshot_inspect.places import ledger_codec, segment_codec
from snapshot_inspect.survey import position
from snapshot_inspect.unpublished import flushed_since, unpublished
from storage_backends.memory import MemoryStore
from storage_backends.testing.faults import Wrapped
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import Job, say
from tests.test_inspect_screens import opened_as, run_once


def _flush(job: Job, name: str, *tokens: int) -> None:
    say(job.calls.get(name) or job.open(name), *tokens)
    job.flush()


def test_in_the_first_minute_latest_says_what_was_flushed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    job = Job(store)
    opened_as(monkeypatch, store)
    assert "since then" not in run_once(capsys, "latest", "s").out
    _flush(job, "a", 3, 4)
    _flush(job, "b", 5)
    said = " ".join(run_once(capsys, "latest", "s").out.split())
    assert "0 calls" in said and "since then 2 segments (" in said and "flushed and not yet published" in said
    document = json.loads(run_once(capsys, "latest", "s", "--json").out)
    assert document["unpublished"]["segments"] == 2 and document["unpublished"]["nbytes"] > 100
    job.snapshot()
    assert "since then" not in run_once(capsys, "latest", "s").out
    _flush(job, "a", 6)
    assert "since then 1 segment (" in " ".join(run_once(capsys, "latest", "s", "--check").out.split())
    job.close()


def _slot(flushed: object) -> Slot:
    return Slot(seq=2, epoch=1, kind="snapshot", nonce="n", prev="p", owner="o", utc=0.0, body={"flushed": flushed})


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["w0.00000001", "w0.00000002", "w1.00000001"]), st.integers(0, 6)), st.data())
def test_what_is_told_is_what_lies_behind_the_snapshot(flushed: dict[str, int], data: st.DataObject) -> None:
    store, expected = MemoryStore(), set()
    writers = sorted(flushed) or ["w0.00000001"]
    for writer in [*writers, "x9.0000000f", "compacted.0000000f"]:
        for flush in range(1, data.draw(st.integers(1, 9))):
            key = segment_stem(1, writer, flush, "0" * 8) + "-00000000.arrow"
            store.put_new(key, b"x" * flush)
            if flush > flushed.get(writer, 0) and not writer.startswith("compacted"):
                expected.add(key)
    found = flushed_since(store, _slot(flushed))
    assert found is not None and {item.key for item in found} == expected
    assert set(unpublished(store, Ledger(), 1, flushed)) == expected


@pytest.mark.parametrize("flushed", [None, [], {"w0.1": "1"}, {"w0.1": -1}])
def test_a_snapshot_that_does_not_say_is_not_guessed_about(flushed: object) -> None:
    assert flushed_since(MemoryStore(), _slot(flushed)) is None


def test_a_forged_account_is_seen_when_the_ledger_is_read() -> None:
    store = stores.several(MemoryStore()).store
    at = position(store)
    key = f"log/{at.tail:012d}.json"
    slot = json.loads(store.get(key))
    slot["body"]["flushed"] = {"w0.00000000": 99}
    store.delete(key)
    store.put_new(key, json.dumps(slot).encode())
    (problem,) = newest(store, at, (segment_codec(), ledger_codec())).problems
    assert "accounts for other flushes" in problem


class AsS3(Wrapped):
    """Counts what a bucket would send for each answer: bodies, and about 230 bytes of XML for each name."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.nbytes = 0
        self.read: list[str] = []

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = self.inner.get(key, start, end)
        self.read.append(key)
        self.nbytes += 500 + len(data)
        return data

    def list(self, prefix: str, after: str = "") -> list[Listed]:
        found = self.inner.list(prefix, after)
        self.nbytes += 500 + sum(230 + len(item.key) for item in found)
        return found


def test_latest_of_a_thousand_entries_reads_less_than_a_megabyte_and_no_ledger(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    make_root(store, SeededEntropy("log"))
    for life in range(996):
        SlotLog(store, ManualClock(float(life)), SeededEntropy(f"life {life}"), "somebody").claim()
    job = Job(store)
    call = job.open("a")
    while position(store).tail < 1000:
        say(call, 3)
        job.snapshot()
    say(call, 4)
    job.flush()
    job.close()
    seen = AsS3(store)
    opened_as(monkeypatch, seen)
    document = json.loads(run_once(capsys, "latest", "s", "--json").out)
    assert document["unpublished"]["segments"] == 1 and document["tail"] >= 1000
    assert seen.nbytes < 1_000_000 and len(seen.read) < 12
    assert all(key.startswith(("log/", "format.json", "hint")) for key in seen.read), "what it needs is in the log"
