"""One coordinator as a process of its own: it claims, restores and takes snapshots until it is fenced or told to end.

Owns: the program, and what it says on stdout, one JSON object a line:
    {"ready": true}                        it waits for a line before it opens the store
    {"restored": id, "from": id or null}   it claimed, restored and published
    {"ack": id, "deleted": n}              it was told that this snapshot is published
    {"ack": id, "deleted": n, "wrong": null or text}
                                           the same, and what a second reader could not restore of it at once
    {"abandoned": text}                    an attempt came to nothing
    {"fenced": text}                       a newer coordinator took over; it ends with 11
    {"done": {...}}                        told to end, it decoded everything: the answers in the store
Does not know: who stops or races it (racing.py).

Usage: python -m tests.racer URL NUMBER SEED KEEP CODEC [before|after N]
    With the last two arguments, on disk, it stops itself (SIGSTOP) before or after its N-th slot gets its name.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import sys
import threading
from typing import Any, cast

from recovery.errors import Damaged, Fenced, RecoveryError
from recovery.log_reading import read_slot
from recovery.ports import ObjectStore
from recovery.protocol import Verdict
from recovery.reading import missing_segments, read_transcripts
from recovery.snapshots import Snapshot, load
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import CodecName, MixedSegmentCodec
from tests.fake_engine import Life, Prompt

PROMPTS = tuple(Prompt(f"p{n}", (7, n, n * n % 11), 24 + 6 * n, "seed" if n == 3 else "") for n in range(6))
SNAPSHOTS_MAX = 3000
"""So that a process that nobody fences or ends does not run for ever."""


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def stop_at_slot(when: str, at: int) -> None:
    """SIGSTOP this process right before or after the system call that makes its `at`-th slot visible."""
    link, left = os.link, [at]

    def stopping(src: str, dst: str, **options: Any) -> None:
        left[0] -= bool(re.fullmatch(r"\d{12,}\.json", dst))
        hit, left[0] = left[0] == 0, left[0] or -1
        if hit and when == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        link(src, dst, **options)
        if hit and when == "after":
            os.kill(os.getpid(), signal.SIGSTOP)

    os.link = stopping  # type: ignore[assignment]


class Racer:
    def __init__(self, url: str, number: int, chance: random.Random, keep: int, codec: CodecName) -> None:
        self.chance = chance
        self.keep = keep
        self.store: ObjectStore = open_store(url, create=True)
        self.ending = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        segments, ledgers = MixedSegmentCodec(codec), ArrowLedgerCodec(rows_per_batch=2)
        self.life = Life(self.store, number, prompts=PROMPTS, keep_latest_k=keep, segments=segments, ledgers=ledgers)
        say(**{"restored": self.life.restored.published, "from": self.life.restored.snapshot})

    def _listen(self) -> None:
        sys.stdin.readline()
        self.ending.set()

    def race(self) -> None:
        """Snapshots until somebody takes over (raises Fenced) or the work shall be brought to its end."""
        self.life.dispatch()
        for _ in range(SNAPSHOTS_MAX):
            if self.ending.is_set():
                break
            self.life.decode(self.chance.choice([0, 1, 1, 2]))
            if self.chance.random() < 0.3:
                self.life.flush()
            self.snapshot()
        while self.life.live or not self.snapshot():
            self.life.decode(4)
        say(done=self.life.answers())

    def snapshot(self) -> bool:
        attempt = self.life.snapshot()
        if attempt.snapshot is not None:
            content = self.life.published[attempt.snapshot]
            tokens = {self.life.by_id[call].rollout: n for call, (n, _) in content.items()}
            looked = {"wrong": self.wrong(attempt.snapshot, tokens)} if self.chance.random() < 0.25 else {}
            say(ack=attempt.snapshot, deleted=attempt.collected, **looked)
        if attempt.verdict is Verdict.FENCED:
            raise cast(Fenced, attempt.error)
        if attempt.verdict is Verdict.ABANDONED:
            say(abandoned=str(attempt.error))
        return attempt.snapshot is not None

    def wrong(self, seq: int, tokens: dict[str, int]) -> str | None:
        """What a reader, with nothing from this coordinator's memory, cannot restore of a snapshot."""
        store, life = self.store, self.life
        try:
            read = read_slot(store, seq)
            if read is None:
                return f"slot {seq} is not there"
            ledger = load(store, life.ledgers, Snapshot.from_slot(read.slot)).ledger
            if missing := missing_segments(store, {key: ledger.segment(key) for key in ledger.segments_in_use()}):
                return str(missing[0])
            found = read_transcripts(store, life.segments, ledger, list(ledger))
        except Damaged as error:
            return str(error)
        for call, transcript in found.items():
            prompt = life.by_id[call]
            ids = tuple(transcript.token_ids.tolist())
            if ids != prompt.reference()[: len(ids)] or len(ids) != tokens[prompt.rollout]:
                return f"{prompt.rollout} has {len(ids)} tokens, not the {tokens[prompt.rollout]} of the cut, or others"
        return None


def main() -> int:
    url, number, seed, keep, codec, *stop = sys.argv[1:]
    if url.startswith("s3:"):
        importlib.import_module("storage_backends.s3")  # not in the middle of the race
    say(ready=True)
    sys.stdin.readline()
    if stop:
        stop_at_slot(stop[0], int(stop[1]))
    try:
        Racer(url, int(number), random.Random(seed), int(keep), cast(CodecName, codec)).race()
    except Fenced as error:
        say(fenced=str(error))
        return error.exit_code
    except RecoveryError as error:
        say(stopped=f"{type(error).__name__}: {error}")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
