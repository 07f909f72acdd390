"""What the tests of export, import and repair hold against each other: the content of snapshots, whatever holds them.

Owns: a snapshot's content as plain values, a store with every kind of content, and a job carried on from a store.
Does not know: the inspector.

Invariants:
1. Content is read by the core alone (recovery.snapshots, the codecs), and holds no place: no key, no index, no slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recovery.ledger import Entry
from recovery.log_reading import Read, find_tail, walk_back
from recovery.model import Chunk, PolicyVersion
from recovery.ports import ObjectStore
from recovery.snapshots import Loaded, Snapshot, load
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from storage_backends.testing.segments import plain
from tests import inspect_stores as stores

NAN, INF = float("nan"), float("inf")

INTERRUPTED_RECORDING = """
import os, signal, sys
from recovery import publication
record = publication.Publication.record
def interrupted(self, states):
    os.kill(os.getpid(), signal.SIGINT)
    return record(self, states)
publication.Publication.record = interrupted
from snapshot_inspect.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The inspector as a program that is interrupted when it begins to write a ledger."""


def rich(store: ObjectStore, *codecs: CodecName) -> stores.Job:
    """`carried_on`, and then what else a snapshot can hold: wide columns, odd floats, masks of several runs, names."""
    job = stores.carried_on(store, *codecs)
    live = job.calls
    top = np.arange(12, dtype=np.int32).reshape(4, 3)
    odd = np.array([[NAN, -INF, -0.0], [INF, 1e-45, 0.5]] * 2, np.float32)
    live["p-1"].append([30, 31, 32, 33], [NAN, -INF, -0.0, 1e-45], stores.A1, {"top.ids": top, "top.logprobs": odd})
    live["p-1"].append([34], None, PolicyVersion("b", 7), {"flag": np.array([True])})
    other = job.open("e\u0301 🙂/+%2F", (1 << 17, 5), turn=2, source_digest="row 9", extra={"row": 9, "é": [1.5, None]})
    stores.say(other, 9, 9, 9)
    other.end("stop", "END")
    assert job.snapshot() == 9
    return job


def newest(store: ObjectStore, seq: int | None = None) -> Loaded:
    for read in walk_back(store, find_tail(store, trust_hint=False)):
        if isinstance(read, Read) and read.slot.kind == "snapshot" and seq in (None, read.slot.seq):
            return load(store, ArrowLedgerCodec(), Snapshot.from_slot(read.slot))
    raise AssertionError("there is no such snapshot")


def by_name(loaded: Loaded) -> list[Entry]:
    """The calls of a snapshot in the order of `content`."""
    return sorted(loaded.ledger, key=lambda entry: (entry.identity.rollout, entry.identity.turn))


def content(store: ObjectStore, seq: int | None = None) -> dict[str, Any]:
    """A snapshot without its places: calls by name with their chunks' digests and bits, states, fingerprint."""
    loaded, codec = newest(store, seq), MixedSegmentCodec()
    records: dict[str, list[Any]] = {}
    for key in loaded.ledger.segments_in_use():
        info = loaded.ledger.segment(key)
        records[key] = codec.decode(store.get(key), info)
    calls = []
    for entry in by_name(loaded):
        chunks = []
        for ref in entry.chunks:
            record = records[ref.at.segment][ref.at.index]
            assert isinstance(record, Chunk)
            bits = (plain(record.token_ids), plain(record.logprobs), plain(record.mask), _columns(record))
            chunks.append((ref.start, ref.n_tokens, ref.digest.hex(), ref.version, record.attempt, bits))
        opened = records[entry.identity.opened.segment][entry.identity.opened.index]
        identity = (entry.identity.rollout, entry.identity.turn, entry.identity.request_digest.hex())
        more = (entry.identity.source_digest, entry.identity.restart_only, plain(opened))
        state = (entry.call_id.hex(), entry.attempt, entry.state, entry.n_tokens, entry.ended, entry.history)
        calls.append((identity, more, state, chunks))
    return {"calls": calls, "states": dict(loaded.states), "fingerprint": loaded.snapshot.slot.body["fingerprint"]}


def _columns(chunk: Chunk) -> dict[str, Any]:
    return {name: plain(values) for name, values in chunk.columns.items()}


def carried_to_the_end(store: ObjectStore, life: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a restore makes of a store, and the content after each open call was ended with the same tokens."""
    job = stores.Job(store, life, keep=8)
    plans = {
        call.entry.identity.rollout: (
            call.plan,
            plain(call.transcript.token_ids),
            plain(call.transcript.logprobs),
            call.transcript.version_spans,
            call.entry.attempt,
        )
        for call in job.restored.calls
    }
    for call in job.carry_on().values():
        stores.say(call, 41, 2)
        call.end("stop", 2)
    job.snapshot("final")
    job.close()
    return plans, content(store)
