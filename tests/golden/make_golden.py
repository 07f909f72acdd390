"""Writes the golden store of a format version, and what a correct reader must return of it.

    python -m tests.golden.make_golden FOLDER      makes FOLDER, FOLDER.sha256 and expected.json in FOLDER

A golden store is written once and never again: stores like it exist in the world. A folder that is there is refused.

Owns: jobs of several lives that drive the core, and the same jobs as plain Python values (Told).
Does not know: any reader. What is expected is computed from the values that were fed in and from what the writer
returned, never from what is stored.

Invariants:
1. Clock and randomness are given: the same calls write the same bytes, with the same pyarrow.
2. What the core does at a restore is written a second time here, over plain values.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recovery.codec import call_id, fingerprint, request_digest
from recovery.ledger import Ledger
from recovery.model import CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
from recovery.ports import ObjectStore
from recovery.publication import Publication
from recovery.restore import choose, compatibility_record, restore
from recovery.resume import StopRules
from recovery.resume_table import why
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from recovery.staging import Stager
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from storage_backends.memory import MemoryStore
from tests.fakes import ManualClock, SeededEntropy

MUST = {"model.name": "tiny", "tokenizer.digest": "5eed", "prompts.names": ["räksmörgås", "雪"], "model.rope": 1e-06}
RECORDED = {"engine.vllm": "0.32.0", "engine.threads": 2}
EOS = 2
A0, A1 = ("a", 0), ("a", 1)
NAN, INF = float("nan"), float("inf")

# ---- the same job as plain values ------------------------------------------------------------------------------------


@dataclass
class Told:
    """One call as it was fed in. `tokens`: (id, logprob or None, mask, (lineage, number)) each.

    `columns`: for each token its row in each wide column, as (type, width, bytes).
    """

    rollout: str
    turn: int
    prompt: list[int]
    sampling: dict[Any, Any]
    extra: dict[str, Any]
    restart_only: str
    source_digest: str
    attempt: int = 0
    tokens: list[tuple[int, float | None, bool, tuple[str, int]]] = field(default_factory=list)
    columns: list[dict[str, tuple[str, int, bytes]]] = field(default_factory=list)
    ended: tuple[str, int | str | None] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def restored(self, snapshot: int) -> None:
        """What a restore makes of an open call (docs/format.md, sections 8 and 11)."""
        n = len(self.tokens)
        if n and n >= self.sampling["max_tokens"]:
            self.ended = ("length", None)
            return
        self.attempt += 1
        if n and self.restart_only:
            reason = f"{self.restart_only}: {why(self.restart_only)}"
            self.history.append({"kind": "restart", "at": n, "snapshot": snapshot, "reason": reason})
            self.tokens, self.columns = [], []
        elif n:
            if self.history and self.history[-1]["kind"] == "resume" and self.history[-1]["at"] == n:
                self.history.pop()
            self.history.append({"kind": "resume", "at": n, "snapshot": snapshot, "exactness": "bitwise"})

    def as_json(self) -> dict[str, Any]:
        """The call as expected.json has it: `logprobs` are the bits of float32, null where there are none."""
        versions: list[list[Any]] = []
        for at, (*_, (lineage, number)) in enumerate(self.tokens):
            if not versions or versions[-1][2:] != [lineage, number]:
                versions.append([at, at, lineage, number])
            versions[-1][1] = at + 1
        value = {
            "rollout": self.rollout,
            "turn": self.turn,
            "call_id": self.call_id().hex(),
            "prompt_token_ids": self.prompt,
            "sampling": self.sampling,
            "extra": self.extra,
            "restart_only": self.restart_only,
            "source_digest": self.source_digest,
            "attempt": self.attempt,
            "state": "open" if self.ended is None else "ended",
            "finish_reason": self.ended and self.ended[0],
            "stop_reason": self.ended and self.ended[1],
            "history": self.history,
            "token_ids": [token for token, *_ in self.tokens],
            "logprobs": [None if lp is None else bits(lp) for _, lp, *_ in self.tokens],
            "mask": "".join(str(int(mask)) for *_, mask, _ in self.tokens),
            "versions": versions,
        }
        if columns := self.columns_as_json():
            value["columns"] = columns
        return json.loads(json.dumps(value))

    def columns_as_json(self) -> list[dict[str, Any]]:
        """By name and position, each stretch of tokens that have the column in one type and width."""
        found: list[dict[str, Any]] = []
        for name in sorted({name for row in self.columns for name in row}):
            last: dict[str, Any] = {}
            for at, row in enumerate(self.columns):
                if name not in row:
                    continue
                type_, width, data = row[name]
                if (last.get("stop"), last.get("type"), last.get("width")) != (at, type_, width):
                    last = {"name": name, "type": type_, "width": width, "start": at, "stop": at, "bits": ""}
                    found.append(last)
                last["stop"], last["bits"] = at + 1, last["bits"] + data.hex()
        return found

    def call_id(self) -> bytes:
        """Section 4, over plain values."""
        asked_for = {name: value for name, value in self.extra.items() if name != "draws"}
        texts = [json.loads(json.dumps(value)) for value in (self.sampling, asked_for)]
        plain = [json.dumps(text, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() for text in texts]
        parts = [struct.pack(f"<Q{len(self.prompt)}i", len(self.prompt), *self.prompt)]
        parts += [struct.pack("<Q", len(text)) + text for text in plain]
        asked = hashlib.sha256(b"prefix-recovery request 1\0" + b"".join(parts)).digest()[:16]
        name = self.rollout.encode()
        named = struct.pack("<Q", len(name)) + name + struct.pack("<Q", self.turn)
        return hashlib.sha256(b"prefix-recovery call 1\0" + named + asked).digest()[:16]


def bits(logprob: float) -> int:
    return struct.unpack("<I", struct.pack("<f", logprob))[0]


Name = tuple[str, int]
Calls = dict[Name, Told]
Event = tuple[Any, ...]


def happen(calls: Calls, event: Event) -> None:
    """Apply one stored event to plain values."""
    kind, name, *rest = event
    if kind == "open":
        calls[name] = copy.deepcopy(rest[0])
    elif kind == "again":
        calls[name].attempt, calls[name].tokens, calls[name].columns = rest[0], [], []
    elif kind == "tokens":
        calls[name].tokens += rest[0]
        calls[name].columns += rest[1]
    else:
        calls[name].ended = rest[0]


# ---- the job itself --------------------------------------------------------------------------------------------------


class Life:
    """One process of a job, from its claim on. Another one on the same store is the job after a crash of the last."""

    def __init__(
        self,
        store: ObjectStore,
        before: Life | None = None,
        *,
        keep: int = 6,
        seed: object = 0,
        codec: CodecName = "arrow",
    ) -> None:
        self.store = store
        number = 1 if before is None else before.log.epoch + 1
        entropy = SeededEntropy(f"{seed} life {number}")
        self.clock = ManualClock(1_767_225_600.25 + 3600.0 * number)
        self.states: dict[str, Any] = {"sampler": {"drawn": 0, "note": "ä/雪"}}
        self.kinds: list[tuple[str, int]] = [] if before is None else before.kinds
        self.expected: dict[int, dict[str, Any]] = {} if before is None else before.expected
        self.reaches: dict[int, set[str]] = {} if before is None else before.reaches
        segments, ledgers = MixedSegmentCodec(codec), ArrowLedgerCodec()
        make_root(store, entropy)
        self.log = SlotLog(store, self.clock, entropy, f"höst-{number} pid {number}")
        self.kinds.append(("epoch", self.log.claim()))
        chosen = choose(store, segments, ledgers, self.log.tail, "auto", MUST)
        ledger = chosen.loaded.ledger if chosen.loaded else Ledger()
        self.publication = Publication(store, segments, ledgers, entropy, self.log, ledger, keep_latest_k=keep)
        if chosen.loaded:
            self.publication.writer.adopt(chosen.loaded.objects)
            keys = [item.ref.key for item in chosen.loaded.objects]
            self.publication.start_from(keys, chosen.loaded.snapshot.states)
        self.restored = restore(
            self.publication,
            store,
            segments,
            ledgers,
            chosen,
            choice="auto",
            keep_latest_k=keep,
            stop=StopRules((EOS,), 4096),
            states=lambda found: self._encoded_states(),
            fingerprint_hex=fingerprint(MUST),
            exactness="bitwise",
        )
        self.calls: Calls = {}
        if before is not None:
            self.calls = copy.deepcopy(before.published)
            for event in before.flushed:
                happen(self.calls, event)
            for call in self.calls.values():
                if call.ended is None:
                    call.restored(snapshot=len(self.kinds) + 1)
        self.live = copy.deepcopy(self.calls)
        self._published("adoption", None if before is None else max(before.expected))
        self.stager = Stager(store, segments, entropy, epoch=self.log.epoch, worker="w0")
        self._pending: list[tuple[Record, Event]] = []

    def _encoded_states(self) -> dict[str, bytes]:
        others = {name: json.dumps(value, ensure_ascii=False).encode() for name, value in self.states.items()}
        return {"job": compatibility_record(MUST, RECORDED), **others}

    def _published(self, cause: str, restored_from: int | None) -> None:
        """Note what a snapshot that was just published has to hold, and what the collection after it did."""
        self.kinds.append(("snapshot", self.log.epoch))
        number = len(self.kinds)
        self.published, self.flushed = copy.deepcopy(self.calls), []
        self.expected[number] = {
            "cause": cause,
            "restored_from": restored_from,
            "states": {"job": {"must": MUST, "recorded": RECORDED}, **copy.deepcopy(self.states)},
            "calls": [call.as_json() for _, call in sorted(self.calls.items())],
        }
        self.reaches[number] = set(self.publication.reached())
        if self.log.tail > number:
            self.kinds.append(("gc", self.log.epoch))

    # ---- what calls do -----------------------------------------------------------------------------------------------

    def open(self, rollout: str, turn: int = 0, prompt: Sequence[int] = (1, 5, 6), **fields: Any) -> Name:
        values = {
            "sampling": {"max_tokens": 64, "temperature": 0.0},
            "extra": {},
            "restart_only": "",
            "source_digest": "",
        }
        told = Told(rollout, turn, list(prompt), **{**values, **fields})
        name = (rollout, turn)
        self.live[name] = copy.deepcopy(told)
        self._opened(told, ("open", name, told))
        return name

    def again(self, name: Name) -> None:
        """An open call that cannot go on begins again in the same process, under a higher attempt."""
        call = self.live[name]
        call.attempt, call.tokens, call.columns = call.attempt + 1, [], []
        self._opened(call, ("again", name, call.attempt))

    def _opened(self, call: Told, event: Event) -> None:
        asked = Request(
            rollout=call.rollout,
            turn=call.turn,
            prompt_token_ids=np.array(call.prompt, np.int32),
            sampling=call.sampling,
            extra=call.extra,
            restart_only=call.restart_only,
            source_digest=call.source_digest,
        )
        own = call_id(call.rollout, call.turn, request_digest(asked))
        self._pending.append((Opened(call_id=own, attempt=call.attempt, request=asked), event))

    def say(
        self,
        name: Name,
        tokens: Sequence[int],
        *,
        version: tuple[str, int] = A0,
        logprobs: Sequence[float] | str | None = "some",
        mask: Sequence[bool] | None = None,
        columns: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """One chunk."""
        if logprobs == "some":
            logprobs = [-0.25 * (token % 9) for token in tokens]
        call, n = self.live[name], len(tokens)
        masked = [True] * n if mask is None else [bool(bit) for bit in mask]
        columns = columns or {}
        told = list(zip(tokens, [None] * n if logprobs is None else logprobs, masked, [version] * n, strict=True))
        chunk = Chunk(
            call_id=CallId(call.call_id()),
            attempt=call.attempt,
            start=len(call.tokens),
            token_ids=np.array(tokens, np.int32),
            logprobs=None if logprobs is None else np.array(logprobs, np.float32),
            mask=np.array(masked, np.bool_),
            version=PolicyVersion(*version),
            columns=columns,
        )
        rows = [
            {c: (v.dtype.name, v.shape[1] if v.ndim == 2 else 0, v[i].tobytes()) for c, v in columns.items()}
            for i in range(n)
        ]
        call.tokens += told
        call.columns += rows
        self._pending.append((chunk, ("tokens", name, told, rows)))

    def end(self, name: Name, reason: str, stop: int | str | None = None) -> None:
        call = self.live[name]
        call.ended = (reason, stop)
        record = Ended(
            call_id=CallId(call.call_id()),
            attempt=call.attempt,
            n_tokens=len(call.tokens),
            finish_reason=reason,
            stop_reason=stop,
        )
        self._pending.append((record, ("end", name, call.ended)))

    # ---- what the job does -------------------------------------------------------------------------------------------

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        assert self.stager.flush([record for record, _ in pending]).result(60) is None
        self.flushed += [event for _, event in pending]

    def snapshot(self, cause: str = "interval", drop: Sequence[Name] = ()) -> int:
        """`drop`: calls that an earlier snapshot holds."""
        self.flush()
        self.clock.utc_now += 60
        publication, staged = self.publication, self.stager.take_staged()
        for item in staged:
            publication.ledger.describe(item.info)
            for at in item.coordinates:
                reason = publication.ledger.apply(at)
                assert not reason, reason
            publication.flushed[item.writer] = item.flush
        for event in self.flushed:
            happen(self.calls, event)
        for name in drop:
            publication.ledger.drop(CallId(self.calls.pop(name).call_id()))
            del self.live[name]
        draft = publication.record(self._encoded_states())
        assert not publication.validate(draft, staged)
        slot = publication.publish(draft, cause=cause, fingerprint=fingerprint(MUST), restored_from=None)
        publication.collect()
        self._published(cause, None)
        return slot.seq

    def close(self) -> None:
        self.stager.close(wait=True)


# ---- the golden store ------------------------------------------------------------------------------------------------

ODD = 'räksmörgås/雪 🚀 "quoted" back\\slash\ttab\x7f'
FOREIGN = {
    ".DS_Store": b"\0\0\0\1Bud1",
    "log/.DS_Store": b"\0\0\0\1Bud1",
    "log/000000000009.json.bak": b"{}",
    "log/9.json": b"{}",
    "ledger/e000001/Copy-of-a-ledger.arrow": b"ARROW1",
    "seg/e000001/notes.txt": b"not ours\n",
    "seg/e000002/w0.0000000g/00000001-00000000-00000000.arrow": b"ARROW1",
    "somebody/else.json": b"[]",
}
"""Objects of other people, in places where a reader may trip over them."""


def golden(store: ObjectStore) -> Life:
    first = _first_life(store)
    second = _second_life(store, first)
    # A third process claimed the store and got no further.
    log = SlotLog(store, second.clock, SeededEntropy("life 3"), "höst-3 pid 3")
    second.kinds.append(("epoch", log.claim()))
    return second


def _first_life(store: ObjectStore) -> Life:
    life = Life(store)  # slot 1: the claim; 2: a snapshot of nothing
    greedy = {"max_tokens": 64, "temperature": 0.0, "logit_bias": {9: 1.5, 10: -1e-05}, "top_p": 1.0, "min_p": 1e16}
    plain = life.open("p-1", prompt=(1, 5, 6, 2**31 - 1, 0), sampling=greedy, source_digest="row 7 ä")
    odd = life.open(
        ODD, 3, (), sampling={"max_tokens": 32, "seed": 7}, restart_only="seed", extra={"ключ": [None, "é"]}
    )
    many = life.open("many", prompt=range(200, 280), sampling={"max_tokens": 500, "temperature": 0.0})
    life.say(plain, [7, 8, 9], logprobs=[NAN, -INF, -0.0], mask=[1, 0, 1])
    life.flush()
    gone = life.open("dropped")  # alone in its segment, which is collected some snapshots later
    life.say(gone, [40, 41])
    life.end(gone, "stop", EOS)
    life.snapshot()
    life.say(plain, [0, 2**31 - 1], logprobs=None)
    life.say(odd, [11, 12, 13, 14, 15, 16, 17], mask=[0, 0, 1, 1, 1, 0, 1])
    by_id, by_text = life.open("ended by id"), life.open("ended by text", 1)
    life.say(by_id, [50, EOS])
    life.end(by_id, "stop", EOS)
    life.say(by_text, [51, 52, 53])
    life.end(by_text, "stop", "</s>\n雪")
    life.snapshot(drop=[gone])
    again, silent = life.open("again"), life.open("silent")
    life.say(again, [60, 61])
    life.snapshot("request")
    # 72 records in one flush are two batches of one segment.
    for step in range(70):
        life.say(many, [step, step + 1000], version=A0 if step < 35 else A1, logprobs="some" if step % 3 else None)
    life.again(again)
    life.say(again, [62])
    life.snapshot()
    life.states["sampler"] = {"drawn": 9, "note": "ä/雪"}
    life.say(many, [3000, 3001], version=A1, mask=[0, 1])
    life.flush()
    life.say(many, [3002], version=A1, mask=[0])
    cut, looped = life.open("length", 2**40), life.open("repetition")
    life.say(cut, [70, 71], version=("ä-β", 2**64 - 1))
    life.say(cut, [72], version=("ä-β", 0))
    life.end(cut, "length")
    life.say(looped, [5] * 40)
    life.end(looped, "repetition")
    life.snapshot()
    life.say(plain, [80], version=A1)
    life.say(many, [4000], version=A1)
    life.snapshot()
    life.snapshot("request")  # nothing is new: only what is said again
    life.say(many, [4001], version=A1)
    life.snapshot()
    full = life.open("full", sampling={"max_tokens": 3, "temperature": 0.0})
    life.say(full, [90, 91, 92])  # its budget is used up, and the end never stored: a restore ends it
    life.snapshot()
    # The crash: one flush that no snapshot names, and records that were never flushed.
    life.say(plain, [100, 101], version=A1, mask=[1, 0])
    late = life.open("late")
    life.say(late, [110])
    life.flush()
    life.say(plain, [102])
    assert silent in life.calls
    life.close()
    return life


def _second_life(store: ObjectStore, before: Life) -> Life:
    life = Life(store, before)
    plain, odd = ("p-1", 0), (ODD, 3)
    life.say(plain, [120, 121], version=A1)
    life.say(odd, [18, 19], version=A1, logprobs=None)
    life.snapshot()
    life.say(plain, [EOS])
    life.end(plain, "stop", None)
    life.say(odd, [20])
    life.open("p-1", 1, (1, 5, 6, 7), extra={"lora": "ß"}, restart_only="lora")
    life.states["sampler"] = {"drawn": 12, "note": ""}
    life.snapshot("final", drop=[("repetition", 0)])
    life.say(odd, [21], version=A1)  # adoptable: flushed, and no snapshot names it
    life.flush()
    life.close()
    return life


WHOLE = (11, 17)
"""Snapshots of which expected.json holds every token: one of the first life, and the newest."""


def expectation(life: Life, store: ObjectStore, whole: Collection[int] | None = WHOLE) -> dict[str, Any]:
    """What expected.json holds. `whole`: of which snapshots every token; None: of all."""
    present = {item.key for item in store.list("")}
    readable = sorted(number for number, keys in life.reaches.items() if keys <= present)
    snapshots = {}
    for number in readable:
        wanted = dict(life.expected[number])
        if whole is not None and number not in whole:
            calls = wanted.pop("calls")
            wanted["tokens"] = {f"{call['rollout']} {call['turn']}": len(call["token_ids"]) for call in calls}
        snapshots[str(number)] = wanted
    return {
        "kinds": [kind for kind, _ in life.kinds],
        "epochs": [epoch for _, epoch in life.kinds],
        "readable": readable,
        "collected": sorted(set(life.reaches) - set(readable)),
        "snapshots": snapshots,
    }


def as_text(value: Any, depth: int = 4, indent: str = "") -> str:
    """JSON with a line per field down to single calls."""
    if depth and isinstance(value, dict) and value:
        inner = [
            f"{indent} {json.dumps(k, ensure_ascii=False)}: {as_text(v, depth - 1, indent + ' ')}"
            for k, v in value.items()
        ]
        return "{\n" + ",\n".join(inner) + f"\n{indent}}}"
    if depth and isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"{indent} {as_text(item, 0)}" for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)


def files_of(store: ObjectStore) -> dict[str, bytes]:
    return {item.key: store.get(item.key) for item in store.list("")}


def write_store(folder: Path, files: Mapping[str, bytes]) -> None:
    """FOLDER, which may not be there, and FOLDER.sha256."""
    folder.mkdir()
    for key, data in files.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    lines = [f"{hashlib.sha256(data).hexdigest()}  {folder.name}/{key}\n" for key, data in sorted(files.items())]
    folder.with_suffix(".sha256").write_text("".join(lines))
    print(f"{folder}: {len(files)} files, {sum(map(len, files.values()))} bytes")


def main(folder: Path) -> None:
    store = MemoryStore()
    life = golden(store)
    write_store(folder, files_of(store) | FOREIGN)
    expected = (as_text(expectation(life, store)) + "\n").encode()
    (folder.parent / "expected.json").write_bytes(expected)
    print(f"expected.json: {len(expected)} bytes")
    print(*(f"{seq}:{kind}@{epoch}" for seq, (kind, epoch) in enumerate(life.kinds, 1)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
