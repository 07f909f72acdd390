"""Workers without engines: what a fleet of many processes hands to the coordinator, made by arithmetic.

Owns: the calls of each simulated worker, their tokens, and the segments that a cut makes of them.
Does not know: the coordinator, the ledger, the log, retention: those are the real ones (jobs.Life).

Invariants:
1. A call's tokens are a function of its id and the position, its logprobs of the position: what comes back after any
   crash can be compared.
2. Segments are the product's own, encoded and stored as a worker stores them, one for each worker and cut.
3. What a worker handed over is kept until it is published: a segment that does not read back is stored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.jobs import SAMPLING, VERSION, Seat, job_state
from recovery import codec
from recovery.calls import Stored
from recovery.layout import segment_stem
from recovery.ledger import Ledger
from recovery.model import Array, CallId, Ended, Opened, Record, Request
from recovery.records import CHUNK, SIXTEEN, Records, digests, no_columns
from recovery.restored import RestoredCall
from recovery.staging import Staged, checked_sum, coordinates_of

PROMPT = np.arange(3, 19, dtype=np.int32)
_VOCABULARY, _STEP = 50_021, 7


def tokens_of(bases: Array, positions: Array) -> Array:
    """Invariant 1."""
    tokens: Array = ((bases + _STEP * positions) % _VOCABULARY).astype(np.int32)
    return tokens


def logprobs_of(positions: Array) -> Array:
    """Of the tokens at these positions."""
    logprobs: Array = (-(positions % 64) / 64).astype(np.float32)
    return logprobs


def base_of(call_id: CallId) -> int:
    return int.from_bytes(call_id[:4], "little") % _VOCABULARY


class Worker:
    """The live calls of one worker, as arrays."""

    def __init__(self, name: str, seat: Seat) -> None:
        self._seat = seat
        self.writer = f"{name}.{seat.entropy.hex(4)}"
        self._n_flushes = 0
        self._ids: list[CallId] = []
        self._requests: list[Request] = []
        self._attempts = np.empty(0, np.int64)
        self._at = np.empty(0, np.int64)
        self._frozen = np.empty(0, np.int64)
        self._bases = np.empty(0, np.int64)
        self._left = np.empty(0, np.int64)
        self._over = np.empty(0, np.bool_)
        """Whose end was handed over, and is not known to be published."""
        self._unsaid: list[Opened] = []
        self._kept: dict[str, Records] = {}

    def __len__(self) -> int:
        """Calls that decode."""
        return int(np.count_nonzero(~self._over))

    def open(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """New calls; each ends after so many tokens."""
        ids = [codec.call_id(one.rollout, 0, codec.request_digest(one)) for one in requests]
        self._unsaid += [Opened(call_id=i, attempt=0, request=r) for i, r in zip(ids, requests, strict=True)]
        self._add(ids, requests, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64), lengths)

    def carry_on(self, calls: Sequence[RestoredCall], lengths: Sequence[int]) -> None:
        """Calls that a restore brought back."""
        attempts = np.array([call.entry.attempt for call in calls], np.int64)
        at = np.array([call.entry.n_tokens for call in calls], np.int64)
        ids = [call.entry.call_id for call in calls]
        self._add(ids, [call.transcript.request for call in calls], attempts, at, lengths)

    def _add(
        self, ids: Sequence[CallId], requests: Sequence[Request], attempts: Array, at: Array, lengths: Sequence[int]
    ) -> None:
        self._ids += ids
        self._requests += requests
        self._attempts = np.concatenate([self._attempts, attempts])
        self._at = np.concatenate([self._at, at])
        self._frozen = np.concatenate([self._frozen, at])
        self._bases = np.concatenate([self._bases, np.array([base_of(one) for one in ids], np.int64)])
        self._left = np.concatenate([self._left, np.asarray(lengths, np.int64) - at])
        self._over = np.concatenate([self._over, np.zeros(len(ids), np.bool_)])

    def begin_again(self) -> Worker:
        """Its process was lost with what it had not handed over: another one, which begins its calls again."""
        other = Worker(self.writer.partition(".")[0], self._seat)
        ends, begin = (self._left + self._at).tolist(), np.zeros(len(self._ids), np.int64)
        other._add(self._ids, self._requests, self._attempts + 1, begin, ends)
        other._unsaid = list(map(other._opened, range(len(self._ids))))
        return other

    def _opened(self, row: int) -> Opened:
        return Opened(call_id=self._ids[row], attempt=int(self._attempts[row]), request=self._requests[row])

    def rewind(self, stored: Stored) -> None:
        """Hand over again what the store turned out not to have kept."""
        for row, call_id in enumerate(self._ids):
            if call_id not in stored:
                continue
            what = stored[call_id]
            same = what is not None and what.attempt == self._attempts[row]
            self._frozen[row] = what.n_tokens if what is not None and same else 0
            self._over[row] = False
            if not same:
                self._unsaid.append(self._opened(row))

    def decode(self, n_tokens: int) -> None:
        """Each call gets so many tokens, or as many as it has left."""
        more = np.minimum(self._left, n_tokens)
        self._at += more
        self._left -= more

    def freeze(self) -> Records:
        """What came since the last cut: opened calls, a chunk for each that has new tokens, and the ends."""
        opened: list[Record] = list(self._unsaid)
        self._unsaid = []
        rows = np.flatnonzero(self._at > self._frozen)
        over = np.flatnonzero((self._left <= 0) & ~self._over).tolist()
        ended: list[Record] = [
            Ended(
                call_id=self._ids[row],
                attempt=int(self._attempts[row]),
                n_tokens=int(self._at[row]),
                finish_reason="stop",
                stop_reason=None,
            )
            for row in over
        ]
        records = Records.joined([Records.of(opened), self._chunks(rows), Records.of(ended)])
        self._frozen = self._at.copy()
        self._over[over] = True
        return records

    def _chunks(self, rows: Array) -> Records:
        starts, counts = self._frozen[rows], (self._at - self._frozen)[rows]
        at = np.concatenate([[0], np.cumsum(counts)])
        positions = np.arange(at[-1]) - np.repeat(at[:-1] - starts, counts)
        keys = b"".join([self._ids[row] for row in rows.tolist()])
        columns: dict[str, Any] = {
            "call_ids": np.frombuffer(keys, SIXTEEN),
            "starts": starts,
            "token_ids": tokens_of(np.repeat(self._bases[rows], counts), positions),
            "token_at": at,
            "logprobs": logprobs_of(positions),
            "logprob_at": at,
            "mask": np.ones(at[-1], np.bool_),
            "mask_at": at,
            "versions": [VERSION],
            "version_at": np.zeros(len(rows), np.int64),
        }
        return Records(
            kinds=np.full(len(rows), CHUNK, np.uint8),
            attempts=self._attempts[rows],
            requests={},
            ends={},
            digests=digests({}, **columns, columns=no_columns),
            **columns,
        )

    def _keep(self, rows: Array) -> None:
        self._ids = [self._ids[row] for row in rows.tolist()]
        self._requests = [self._requests[row] for row in rows.tolist()]
        for name in ("_attempts", "_at", "_frozen", "_bases", "_left", "_over"):
            setattr(self, name, getattr(self, name)[rows])

    def store(self, records: Records) -> Staged:
        self._n_flushes += 1
        stem = segment_stem(self._seat.epoch, self.writer, self._n_flushes, self._seat.entropy.hex(4))
        segment = self._seat.segments.encode(records, stem)
        coordinates = coordinates_of(records, segment.info.key)
        checked = checked_sum(self._seat.segments, segment, coordinates)
        self._seat.store.put_new(segment.info.key, segment.data)
        self._kept[segment.info.key] = records
        return Staged(segment.info, coordinates, self.writer, self._n_flushes, checked)

    def store_again(self, key: str) -> Staged | None:
        records = self._kept.get(key)
        return None if records is None else self.store(records)

    def behind(self, ledger: Ledger) -> int:
        """Of how many calls the ledger lacks what was frozen."""
        found = zip(map(ledger.get, self._ids), self._frozen.tolist(), strict=True)
        return sum(frozen > (0 if entry is None else entry.n_tokens) for entry, frozen in found)

    def published(self) -> None:
        self._kept.clear()
        if self._over.any():
            self._keep(np.flatnonzero(~self._over))


class Fleet:
    """The fleet of a coordinator: all workers, one after the other."""

    def __init__(self, seat: Seat, n_workers: int, mishap: Callable[[str], None] = lambda step: None) -> None:
        """`mishap` is told each step before it is done, and may raise what goes wrong with it."""
        self.workers = [Worker(f"w{number}", seat) for number in range(n_workers)]
        self._mishap = mishap
        self._frozen: list[tuple[Worker, Records]] = []
        self._staged: list[Staged] = []

    def open(self, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        """New calls of these numbers, spread over the workers in blocks."""
        requests = [
            Request(rollout=f"rollout-{number:08d}", prompt_token_ids=PROMPT, sampling=SAMPLING) for number in numbers
        ]
        for worker, own in self._blocks(len(requests)):
            worker.open(requests[own], lengths[own])

    def carry_on(self, calls: Sequence[RestoredCall], lengths: Sequence[int]) -> None:
        for worker, own in self._blocks(len(calls)):
            worker.carry_on(calls[own], lengths[own])

    def _blocks(self, n: int) -> Iterator[tuple[Worker, slice]]:
        size = -(-n // len(self.workers))
        for number, worker in enumerate(self.workers):
            yield worker, slice(number * size, (number + 1) * size)

    def lose(self, number: int) -> None:
        """A worker's process is gone, and with it what it had not stored."""
        self._frozen = [(worker, records) for worker, records in self._frozen if worker is not self.workers[number]]
        self.workers[number] = self.workers[number].begin_again()

    def decode(self, n_tokens: int) -> None:
        for worker in self.workers:
            worker.decode(n_tokens)

    def acquire_hold(self, reason: str, timeout_s: float) -> None: ...

    def release_hold(self) -> None: ...

    def raise_fence(self, timeout_s: float) -> None: ...

    def lower_fence(self) -> None: ...

    def prepare(self, timeout_s: float) -> Mapping[str, bytes]:
        self._mishap("prepare")
        return job_state()

    def resume(self, published: bool) -> None:
        for worker in self.workers if published else ():
            worker.published()

    def cut(self, timeout_s: float) -> None:
        self._mishap("cut")
        self._frozen += [(worker, worker.freeze()) for worker in self.workers]

    def stage(self, timeout_s: float) -> list[Staged]:
        while self._frozen:  # what is stored when a later one fails goes with the next snapshot
            worker, records = self._frozen[0]
            if len(records):
                self._staged.append(worker.store(records))
            del self._frozen[0]
        staged, self._staged = self._staged, []
        return staged

    def store_again(self, staged: Staged, timeout_s: float) -> Staged | None:
        found = (worker.store_again(staged.info.key) for worker in self.workers if worker.writer == staged.writer)
        return next(found, None)

    def rewind(self, stored: Stored) -> None:
        for worker in self.workers:
            worker.rewind(stored)

    def behind(self, ledger: Ledger) -> int:
        """Calls of which a ledger that was just published lacks what was handed over."""
        return sum(worker.behind(ledger) for worker in self.workers)


def number_of(rollout: str) -> int:
    return int(rollout.rpartition("-")[2])


def is_as_decoded(call: RestoredCall) -> bool:
    """Invariant 1."""
    found, positions = call.transcript, np.arange(call.n_tokens)
    expected = tokens_of(np.array(base_of(call.entry.call_id)), positions)
    return np.array_equal(found.token_ids, expected) and np.array_equal(found.logprobs, logprobs_of(positions))
