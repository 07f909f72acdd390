"""A token source that is a function of all tokens so far, and a job driven on it one step at a time.

Owns: the reference answer of every prompt, one process-life of a job on the real core (claim, restore, decode, flush,
snapshot), and what may be demanded of a store after that life was cut short.
Does not know: vLLM, threads of its own, wall time, where the store is.

A resumed run on this source equals the uninterrupted one exactly if every token before the cut was carried on
unchanged: the next token is a hash of the prompt and of all tokens before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recovery import codec, resume
from recovery.calls import CallTable, LiveCall, Stored, StoredUpTo
from recovery.compaction import Limits
from recovery.compactor import Compactor
from recovery.coordinator import Attempt, Coordinator
from recovery.ledger import EndedAt, Entry, Ledger
from recovery.model import OPEN, CallId, PolicyVersion, Request
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.publication import Publication
from recovery.reading import read_transcripts
from recovery.restore import Choice, anything, choose, compatibility_record, restore
from recovery.restored import Restored
from recovery.resume import StopRules
from recovery.slots import SlotLog
from recovery.snapshots import make_root
from recovery.staging import Staged, Stager
from tests.fakes import ManualClock, SeededEntropy
from tests.plain_codecs import PlainLedgers, PlainSegments

EOS = 2
STOP = StopRules((EOS,), 4096)
MUST = {"model": "fake"}
V = PolicyVersion("a", 0)


def next_token(prompt: Sequence[int], tokens: Sequence[int]) -> int:
    """A function of the whole context; EOS about once in fifty."""
    text = ",".join(map(str, (*prompt, -1, *tokens)))
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return EOS if value % 50 == 0 else 3 + value % 997


def logprob(token: int, position: int) -> float:
    return -((token * 31 + position) % 64) / 16.0


@dataclass(frozen=True)
class Prompt:
    """One row of the job."""

    rollout: str
    ids: tuple[int, ...]
    max_tokens: int
    restart_only: str = ""

    @property
    def request(self) -> Request:
        return Request(
            rollout=self.rollout,
            prompt_token_ids=np.asarray(self.ids, dtype=np.int32),
            sampling={"temperature": 0.0, "max_tokens": self.max_tokens},
            restart_only=self.restart_only,
        )

    @property
    def call_id(self) -> CallId:
        return codec.call_id(self.rollout, 0, codec.request_digest(self.request))

    def reference(self) -> tuple[int, ...]:
        """The uninterrupted answer."""
        tokens: list[int] = []
        while len(tokens) < self.max_tokens and (not tokens or tokens[-1] != EOS):
            tokens.append(next_token(self.ids, tokens))
        return tuple(tokens)


PROMPTS = (
    Prompt("p0", (5, 6, 8), 9),
    Prompt("p1", (8,), 14),
    Prompt("p2", (9, 9), 3),
    Prompt("p3", (4, 1, 3, 3), 21),
)


@dataclass
class Flushed:
    """What a life was told to be stored: tokens per rollout that no crash may lose, and who has ended."""

    tokens: dict[str, int] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)


Content = Mapping[CallId, tuple[int, bool]]
"""Of each call in a ledger: how many tokens, and whether it has ended."""


def content_of(ledger: Ledger) -> dict[CallId, tuple[int, bool]]:
    return {entry.call_id: (entry.n_tokens, entry.state != OPEN) for entry in ledger}


class InlinePool:
    """The stager's pool without its thread: what is submitted is done on the spot."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        pass


class DirectFleet:
    """recovery.coordinator.Fleet without a loop: everything happens in the caller's thread."""

    def __init__(self, table: CallTable, stager: Stager, states: Mapping[str, bytes]) -> None:
        self._table = table
        self._stager = stager
        self._states = states
        self.held = self.fenced = False
        self.calls: list[str] = []
        self.rewound: dict[CallId, StoredUpTo | None] = {}

    def acquire_hold(self, reason: str, timeout_s: float) -> None:
        self.calls.append("acquire hold")
        self.held = True

    def release_hold(self) -> None:
        self.calls.append("release hold")
        self.held = False

    def raise_fence(self, timeout_s: float) -> None:
        self.calls.append("raise fence")
        self.fenced = True

    def lower_fence(self) -> None:
        self.calls.append("lower fence")
        self.fenced = False

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        self.calls.append("prepare")
        return self._states

    def resume(self, published: bool) -> None:
        self.calls.append(f"resume {published}")
        if published:
            self._stager.published()

    def cut(self, timeout_s: float) -> None:
        self.calls.append("cut")
        self._flush = self._stager.flush(self._table.freeze())

    def stage(self, timeout_s: float) -> list[Staged]:
        self.calls.append("stage")
        error = self._flush.result(30)
        if error is not None:
            raise error
        return self._stager.take_staged()

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        return self._stager.store_again(staged).result(timeout_s)

    def rewind(self, stored: Stored) -> None:
        self.rewound.update(stored)
        self._table.rewind(stored)


class Life:
    """One process of the job, from its claim on.

    `at_cut` is what the ledger of the snapshot in the making must contain; `published` what each acknowledged one
    contains; `flushed` what was acknowledged as stored.
    """

    def __init__(
        self,
        store: ObjectStore,
        number: int,
        *,
        prompts: Sequence[Prompt] = PROMPTS,
        keep_latest_k: int = 2,
        choice: Choice = "auto",
        segments: SegmentCodec | None = None,
        ledgers: LedgerCodec | None = None,
        must: Mapping[str, object] = MUST,
        compatible: Callable[[Mapping[str, bytes]], None] = anything,
        fleet: type[DirectFleet] = DirectFleet,
        limits: Limits | None = None,
        submit: Callable[[Callable[[], None]], None] = lambda work: work(),
    ) -> None:
        self.store = store
        self.prompts = prompts
        self.by_id = {prompt.call_id: prompt for prompt in prompts}
        self.segments, self.ledgers = segments or PlainSegments(), ledgers or PlainLedgers()
        self.stager: Stager | None = None
        self.flushed = Flushed()
        self.published: dict[int, Content] = {}
        self.live: list[LiveCall] = []
        self.seen: list[LiveCall] = []
        self.table = CallTable()
        self.attempts: list[Attempt] = []
        self.at_cut: Content | None = None
        entropy = SeededEntropy(("life", number))
        make_root(store, entropy)
        self.log = SlotLog(store, ManualClock(), entropy, f"life {number}")
        self.log.claim()
        self.chosen = choose(store, self.segments, self.ledgers, self.log.tail, choice, must, compatible)
        loaded = self.chosen.loaded
        self.chosen_content = content_of(loaded.ledger) if loaded else None
        ledger = loaded.ledger if loaded else Ledger()
        publication = Publication(
            store, self.segments, self.ledgers, entropy, self.log, ledger, keep_latest_k=keep_latest_k
        )
        if loaded:
            publication.writer.adopt(loaded.objects)
            publication.start_from([item.ref.key for item in loaded.objects], loaded.snapshot.states)
        self.publication = publication
        states = {**(loaded.states if loaded else {}), "job": compatibility_record(must, {})}
        self.carried: Mapping[str, bytes] = states
        self.restored: Restored = restore(
            publication,
            store,
            self.segments,
            self.ledgers,
            self.chosen,
            choice=choice,
            keep_latest_k=keep_latest_k,
            stop=STOP,
            states=lambda found: states,
            fingerprint_hex=codec.fingerprint(must),
            exactness="bitwise",
        )
        assert self.restored.published is not None
        self.published[self.restored.published] = content_of(ledger)
        self.stager = Stager(
            store, self.segments, entropy, epoch=self.log.epoch, worker="w0", on_staged=self._note_staged
        )
        self.stager._pool = InlinePool()  # type: ignore[assignment]
        self.fleet = fleet(self.table, self.stager, states)
        self.compactor = Compactor(store, self.segments, entropy, epoch=self.log.epoch, submit=submit, limits=limits)
        self.coordinator = Coordinator(
            publication,
            self.fleet,
            ManualClock(),
            timeout_s=60,
            fingerprint=codec.fingerprint(must),
            compactor=self.compactor,
        )

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close(wait=True)

    # ---- the job -----------------------------------------------------------------------------------------------

    def dispatch(self, n: int | None = None) -> None:
        """Open or carry on the first `n` prompts that have no answer yet and are not live."""
        restored = {call.entry.call_id: call for call in self.restored.calls}
        for prompt in self.prompts[:n]:
            call_id = prompt.call_id
            entry = self.publication.ledger.get(call_id)
            if self.table.get(call_id) is not None or (entry is not None and entry.ended is not None):
                continue
            if entry is None:
                self._start(self.table.open(prompt.request, call_id, 0))
                continue
            back = restored[call_id]
            assert back.entry is entry and not isinstance(back.plan, resume.Finish)
            keep = isinstance(back.plan, resume.Resume)
            ids = back.transcript.token_ids.tolist() if keep else []
            lps = back.transcript.logprobs.tolist() if keep else []
            spans = back.transcript.version_spans if keep else ()
            assert tuple(ids) == prompt.reference()[: len(ids)]
            assert lps == [logprob(token, at) for at, token in enumerate(ids)]
            if keep and isinstance(back.plan, resume.Resume):
                assert back.plan.max_tokens == prompt.max_tokens - len(ids)
            self._start(self.table.carry_on(back.transcript.request, call_id, entry.attempt, ids, lps, spans))

    def _start(self, call: LiveCall) -> None:
        self.live.append(call)
        self.seen.append(call)

    def decode(self, steps: int) -> None:
        """One token for every live call, `steps` times."""
        for _ in range(steps):
            for call in list(self.live):
                tokens = list(call.transcript_ids)
                token = next_token(call.request.prompt_token_ids.tolist(), tokens)
                call.append([token], [logprob(token, len(tokens))], V)
                if token == EOS:
                    call.end("stop", None)
                elif len(tokens) + 1 == call.request.sampling["max_tokens"]:
                    call.end("length", None)
                if call.ended is not None:
                    self.live.remove(call)
                    call.in_use = False

    def flush(self) -> None:
        assert self.stager is not None
        self.stager.flush(self.table.freeze()).result(30)

    def snapshot(self, cause: str = "interval") -> Attempt:
        known = dict(content_of(self.publication.ledger))
        known |= {call.call_id: (call.n_tokens, call.ended is not None) for call in self.seen}
        self.at_cut = known
        attempt = self.coordinator.take(cause)
        assert not self.fleet.held and not self.fleet.fenced
        self.attempts.append(attempt)
        if attempt.snapshot is not None:
            self.published[attempt.snapshot] = known
            self.table.published(attempt.ended)
        return attempt

    def work_to_end(self, flush_every: int = 4) -> None:
        """Decode everything and take a last snapshot."""
        self.dispatch()
        while self.live:
            self.decode(flush_every)
            self.flush()
        for _ in range(3):
            if self.snapshot("final").snapshot is not None:
                return
        raise AssertionError(f"no last snapshot: {self.attempts[-1]}")

    def run_to_end(self, flush_every: int = 4) -> dict[str, tuple[int, ...]]:
        """Do all the work, and read the answers back from the store."""
        self.work_to_end(flush_every)
        return self.answers()

    def answers(self) -> dict[str, tuple[int, ...]]:
        """Tokens of every ended call, from the store."""
        entries = [entry for entry in self.publication.ledger if entry.ended is not None]
        transcripts = read_transcripts(self.store, self.segments, self.publication.ledger, entries)
        return {
            transcripts[e.call_id].request.rollout: tuple(transcripts[e.call_id].token_ids.tolist()) for e in entries
        }

    # ---- what was promised -------------------------------------------------------------------------------------

    def _note_staged(self, staged: Staged) -> None:
        for at in staged.coordinates:
            rollout = self.by_id[at.call_id].rollout
            if isinstance(at, EndedAt):
                self.flushed.ended.add(rollout)
            elif hasattr(at, "chunk"):
                self.flushed.tokens[rollout] = max(self.flushed.tokens.get(rollout, 0), at.chunk.stop)

    def keeps(self, promised: Flushed) -> None:
        """Assert that this life's restore lost nothing that an earlier life was told to be stored."""
        entries: dict[str, Entry] = {entry.identity.rollout: entry for entry in self.publication.ledger}
        assert len(entries) == len(self.publication.ledger), "a rollout is in the ledger twice"
        resumed = {call.entry.identity.rollout: call for call in self.restored.calls}
        for rollout, n in promised.tokens.items():
            entry = entries[rollout]
            if entry.identity.restart_only:
                continue
            kept = len(resumed[rollout].transcript.token_ids) if rollout in resumed else entry.n_tokens
            assert kept >= n, f"{rollout}: {n} tokens were stored, {kept} came back"
        for rollout in promised.ended:
            assert entries[rollout].ended is not None, f"{rollout} had ended and is open again"


def reference_answers(prompts: Sequence[Prompt] = PROMPTS) -> dict[str, tuple[int, ...]]:
    return {prompt.rollout: prompt.reference() for prompt in prompts}
