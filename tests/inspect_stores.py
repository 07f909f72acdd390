"""Small stores for the tests of the inspector, written by the real core.

Owns: one process-life of a job whose tokens, clock and randomness are given, and a few ready stores.
Does not know: the inspector.

Invariants:
1. The same calls give the same bytes, whatever the store; a snapshot is taken a minute after the one before.
2. Everything is written by recovery's own Coordinator, Stager and restore; nothing is put into a store by hand.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from recovery.calls import CallTable, LiveCall
from recovery.codec import call_id, fingerprint, request_digest
from recovery.coordinator import Coordinator
from recovery.errors import RecoveryError
from recovery.model import PolicyVersion, Request
from recovery.ports import ObjectStore
from recovery.publication import Publication
from recovery.restore import choose, compatibility_record, restore
from recovery.resume import StopRules
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from recovery.staging import Staged, Stager
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from storage_backends.local import LocalStore
from storage_backends.memory import MemoryStore
from tests.fakes import ManualClock, SeededEntropy

BEGIN_UTC = 1_767_225_600.0
"""2026-01-01 00:00:00 UTC."""

MUST = {"model.name": "tiny", "tokenizer.digest": "5eed"}
RECORDED = {"engine.vllm": "0.32.0"}
A0, A1 = PolicyVersion("a", 0), PolicyVersion("a", 1)


class Job:
    """One process of a job, from its claim on; a second one on the same store is the first one after a crash."""

    def __init__(
        self,
        store: ObjectStore,
        life: int = 1,
        *,
        keep: int = 2,
        must: Mapping[str, Any] = MUST,
        codec: CodecName = "arrow",
    ) -> None:
        self.store = store
        self.clock = ManualClock(BEGIN_UTC + 3600.0 * (life - 1))
        self._table = CallTable()
        self.calls: dict[str, LiveCall] = {}
        self._flush: Future[RecoveryError | None] | None = None
        self._states = {"job": compatibility_record(must, RECORDED)}
        entropy = SeededEntropy(f"life {life}")
        segments, ledgers = MixedSegmentCodec(codec), ArrowLedgerCodec()
        make_root(store, entropy)
        log = SlotLog(store, self.clock, entropy, f"host-a pid {life}")
        log.claim()
        chosen = choose(store, segments, ledgers, log.tail, "auto", must)
        self.publication = Publication.on_top_of(
            store, segments, ledgers, entropy, log, chosen.loaded, keep_latest_k=keep
        )
        self.restored = restore(
            self.publication,
            store,
            segments,
            ledgers,
            chosen,
            choice="auto",
            keep_latest_k=keep,
            stop=StopRules((2,), 4096),
            states=lambda found: self._states,
            fingerprint_hex=fingerprint(must),
            exactness="bitwise",
        )
        self._stager = Stager(store, segments, entropy, epoch=log.epoch, worker="w0")
        self._coordinator = Coordinator(self.publication, self, self.clock, timeout_s=60, fingerprint=fingerprint(must))

    # ---- calls -----------------------------------------------------------------------------------------------------

    def open(self, rollout: str, prompt: Sequence[int] = (1, 5, 6), **fields: Any) -> LiveCall:
        fields = {"sampling": {"max_tokens": 64, "temperature": 0.0}, **fields}
        asked = Request(rollout=rollout, prompt_token_ids=np.asarray(prompt, np.int32), **fields)
        call = self._table.open(asked, call_id(rollout, asked.turn, request_digest(asked)), 0)
        self.calls[rollout] = call
        return call

    def carry_on(self) -> dict[str, LiveCall]:
        """The calls that the restore brought back, by rollout."""
        for call in self.restored.calls:
            transcript, entry = call.transcript, call.entry
            n = entry.n_tokens
            spans = transcript.version_spans if n else ()
            ids, logprobs = transcript.token_ids.tolist()[:n], transcript.logprobs.tolist()[:n]
            self.calls[entry.identity.rollout] = self._table.carry_on(
                transcript.request, entry.call_id, entry.attempt, ids, logprobs, spans
            )
        return self.calls

    def flush(self) -> None:
        """What a periodic flush stores."""
        error = self._stager.flush(self._table.freeze()).result(30)
        assert error is None, error

    def snapshot(self, cause: str = "interval") -> int:
        self.clock.utc_now += 60
        attempt = self._coordinator.take(cause)
        assert attempt.snapshot is not None and attempt.error is None, attempt
        return attempt.snapshot

    def close(self) -> None:
        self._stager.close(wait=True)

    # ---- recovery.coordinator.Fleet --------------------------------------------------------------------------------

    def acquire_hold(self, reason: str, timeout_s: float) -> None: ...

    def release_hold(self) -> None: ...

    def raise_fence(self, timeout_s: float) -> None: ...

    def lower_fence(self) -> None: ...

    def resume(self, published: bool) -> None: ...

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        return self._states

    def cut(self, timeout_s: float) -> None:
        self.flush()

    def stage(self, timeout_s: float) -> list[Staged]:
        return self._stager.take_staged()


def say(call: LiveCall, *tokens: int, version: PolicyVersion = A0, logprobs: Sequence[float] | None = None) -> None:
    """Tokens of a call as the engine gives them."""
    call.append(list(tokens), list(logprobs) if logprobs is not None else [-0.25 * t for t in tokens], version)


# ---- ready stores --------------------------------------------------------------------------------------------------


def empty(store: ObjectStore) -> None:
    """Only the format mark."""
    make_root(store, SeededEntropy("life 1"))


def empty_snapshot(store: ObjectStore) -> Job:
    """A restore's first snapshot of nothing."""
    return Job(store)


def one_snapshot(store: ObjectStore, codec: CodecName = "arrow") -> Job:
    """A restore's first snapshot of nothing is snapshot 2; snapshot 3 has one open call."""
    job = Job(store, codec=codec)
    say(job.open("p-1"), 7, 8, 9)
    assert job.snapshot() == 3
    return job


def several(store: ObjectStore, codec: CodecName = "arrow") -> Job:
    """Snapshots 2, 3, 4 and 5: calls that go on, one that ends, two policy versions."""
    job = Job(store, keep=8, codec=codec)
    first, second = job.open("p-1"), job.open("p-2", (1, 9), sampling={"max_tokens": 4}, extra={"row": 2})
    say(first, 7, 8, 9)
    say(second, 4, 4)
    job.snapshot()
    say(first, 10, 11)
    say(first, 12, version=A1)
    say(second, 5, 2)
    second.end("stop", None)
    job.snapshot()
    say(first, 13, version=A1)
    job.open("p-10", (3,), restart_only="seed", sampling={"seed": 1})
    assert job.snapshot("request") == 5
    return job


def crashed(store: ObjectStore, codec: CodecName = "arrow") -> None:
    """`several`, then two flushes that no snapshot names: three tokens of p-1 and the call p-3 are adoptable."""
    job = several(store, codec)
    first = job.calls["p-1"]
    say(first, 14, 15, version=A1)
    job.flush()
    say(first, 16, version=A1)
    job.open("p-3")
    job.flush()
    job.close()


def carried_on(store: ObjectStore, *codecs: CodecName) -> Job:
    """`crashed`, then a second life that carries on: adoption 7, snapshot 8 with a resume and a restart in it.

    `codecs`: those of the two lives.
    """
    first, second = codecs or ("arrow", "arrow")
    crashed(store, first)
    job = Job(store, 2, keep=8, codec=second)
    live = job.carry_on()
    say(live["p-1"], 17, version=A1)
    say(live["p-10"], 4, 4)
    assert job.snapshot("final") == 8
    return job


def collected(store: ObjectStore) -> Job:
    """Many snapshots, of which two are kept: replaced ledgers and the segments of dropped calls were collected."""
    job = Job(store, keep=2)
    calls = [job.open(f"p-{i}") for i in range(6)]
    for turn in range(25):
        say(calls[turn % len(calls)], 20 + turn)
        job.snapshot()
        if turn in (4, 9, 14, 19, 22):
            job.publication.ledger.drop(calls.pop(0).call_id)
    return job


def chained(store: ObjectStore) -> Job:
    """More calls than are said with every snapshot: the ledgers of 3 to 14 lie in several objects each."""
    job = Job(store, keep=20)
    calls = [job.open(f"p-{i}") for i in range(200)]
    for turn in range(12):
        say(calls[turn], 20 + turn)
        job.snapshot()
    return job


def made(make: Callable[[ObjectStore], Any]) -> MemoryStore:
    store = MemoryStore()
    job = make(store)
    if job is not None:
        job.close()
    return store


# ---- stores under a test's hands -----------------------------------------------------------------------------------


def keys(store: ObjectStore, prefix: str) -> list[str]:
    return [item.key for item in store.list(prefix)]


def objects_of(store: ObjectStore) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list("")}


def copy_of(store: ObjectStore) -> MemoryStore:
    other = MemoryStore()
    for key, data in objects_of(store).items():
        other.put_new(key, data)
    return other


def replace(store: ObjectStore, key: str, data: bytes) -> None:
    """Put other bytes in an object's place, as only a fault can."""
    store.delete(key)
    store.put_new(key, data)


def flip(data: bytes, at: int) -> bytes:
    """One bit of byte `at` turned over; which one depends on `at`."""
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


def on_disk(folder: Path, objects: Mapping[str, bytes]) -> LocalStore:
    """The same objects in a folder (without the syncs of a store, which tests do not need)."""
    shutil.rmtree(folder, ignore_errors=True)
    for key, data in objects.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)
    return LocalStore(folder)


def with_newer(store: ObjectStore) -> None:
    """A store of a newer format, as far as anybody can see."""
    several(store).close()
    replace(store, "format.json", store.get("format.json").replace(b'"version":1', b'"version":2'))


def with_newer_ledger(store: ObjectStore) -> MemoryStore:
    """The newest snapshot's ledger says version 2, and all sums are right."""
    store = copy_of(store)
    tail = "log/000000000005.json"
    entry = json.loads(store.get(tail))
    key = entry["body"]["ledger"]["key"]
    data = store.get(key).replace(b'"version":1', b'"version":2')
    entry["body"]["ledger"] = {"key": key, "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    replace(store, key, data)
    replace(store, tail, json.dumps(entry).encode())
    return store
