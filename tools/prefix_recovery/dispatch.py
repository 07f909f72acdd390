"""The loop of a job: samples to the engine, ended calls to the output, until all are there or somebody says stop.

Owns: concurrency, the order of samples, which rows there are, what is told to the progress display.
Does not know: how the engine was made, the format of a store, how rows outlast a full disk (row_writer.py), exit codes.

Invariants:
1. A row is appended only when its call's terminal record is durable in the store, so that a lost output can be made
   again, and only after a look at the log: a fenced run appends nothing.
2. A request that the engine or the session refuses costs that sample, by name, never the job.
3. At most `max_concurrent_calls` calls are in the engine. A call that waits for durability does not count, but of those
   there are at most UNDELIVERED_PER_SLOT times as many: a store that takes nothing more holds up the feed, not memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefix_recovery import changes
from prefix_recovery.engine_requests import Requests
from prefix_recovery.progress import Progress
from prefix_recovery.prompts import BadLine, Sample, source_digest
from prefix_recovery.results import Results
from prefix_recovery.row_writer import RowWriter
from prefix_recovery.rows import make_row, text_of
from prefix_recovery.tally import Tally
from recovery.calls import LiveCall
from recovery.config import JobConfig
from recovery.errors import Damaged, InputError, Stop
from recovery.ledger import Entry
from recovery.model import FINISH_REASONS, PolicyVersion, Request
from vllm_hooks import RecoverySession, surface
from vllm_hooks.capture import drain
from vllm_hooks.trouble import Trouble

UNDELIVERED_PER_SLOT = 8
"""Calls begun and not yet in the output, per call that may be in the engine."""


@dataclass(slots=True)
class Outcome:
    """What a run did; `bad` are the samples that have no result and never will, `undelivered` rows that wait still."""

    rows_from_store: int = 0
    undelivered: int = 0
    bad: list[BadLine] = field(default_factory=list)


class Dispatch:
    """One run of a job over a started engine and an opened session."""

    def __init__(
        self,
        config: JobConfig,
        engine: Any,
        session: RecoverySession,
        results: Results,
        samples: Sequence[Sample],
        progress: Progress,
        tally: Tally | None,
    ) -> None:
        self._config = config
        self._session = session
        self._engine = engine
        self._requests = Requests(engine, config.sampling)
        self._results = results
        self._samples = {sample.name: sample for sample in samples}
        self._numbers = {sample.name: number for number, sample in enumerate(samples)}
        self._progress = progress
        self._tally = tally
        if tally is not None:
            session.on_tokens = self._count
        self._slots = asyncio.Semaphore(config.max_concurrent_calls)
        self._undelivered = asyncio.Semaphore(UNDELIVERED_PER_SLOT * config.max_concurrent_calls)
        self._rows = RowWriter(self._append, self._appended)
        self._n_generating, self._fed = 0, False
        self.outcome = Outcome()

    def _count(self, call: LiveCall, n_tokens: int) -> None:
        if self._tally is not None:
            self._tally.decoded(self._numbers[call.request.rollout], n_tokens)

    # ---- before the loop -------------------------------------------------------------------------------------

    async def matched(self) -> list[Sample]:
        """`match`, off the event loop: it reads the store and may write many rows."""
        return await self._rows.in_thread(self.match)

    def match(self) -> list[Sample]:
        """Compare the store's calls with the prompts; write rows that the store has and the output has not.

        Returns the samples still to run, those with a saved prefix first. Raises FingerprintMismatch, naming the
        prompt, if a line changed or an unfinished one disappeared.
        """
        self._session.source_digests = {
            name: source_digest(sample.prompt, self._config.sampling) for name, sample in self._samples.items()
        }
        entries = self._session.stored.entries()
        found = changes.compared(entries, self._session.source_digests)
        changes.refuse_changed(found, self._samples, self._requests, self._asked)
        ended: dict[str, Entry] = {}
        begun: set[str] = set()
        for entry in entries:
            name = entry.identity.rollout
            if name not in self._samples or (entry.ended is None and not entry.n_tokens):
                continue
            if self._tally is not None:
                self._tally.started(self._numbers[name], entry.n_tokens, ended=entry.ended is not None)
            if entry.ended is not None:
                ended[name] = entry
            else:
                begun.add(name)
        lost = self._deliver_ended([e for name, e in ended.items() if self._key(name) not in self._results.done])
        todo = [
            sample
            for name, sample in self._samples.items()
            if (name not in ended or name in lost) and self._key(name) not in self._results.done
        ]
        return [s for s in todo if s.name in begun] + [s for s in todo if s.name not in begun]

    def _asked(self, entry: Entry) -> Request | None:
        try:
            return self._session.stored.read([entry.call_id])[entry.call_id].request
        except Damaged:
            return None

    def _key(self, name: str) -> tuple[str, int]:
        sample = self._samples[name]
        return sample.prompt.id, sample.index

    def _deliver_ended(self, entries: list[Entry]) -> set[str]:
        """Write the rows of ended calls. Returns the names of those whose stored answer is damaged: they start anew."""
        lost: set[str] = set()
        for start in range(0, len(entries), 64):
            part = entries[start : start + 64]
            try:
                self._deliver(part)
            except Damaged:
                for entry in part:
                    try:
                        self._deliver([entry])
                    except Damaged as error:
                        name = entry.identity.rollout
                        self._progress.say(
                            f"the stored answer of {name} is damaged and is generated again: {error.message}"
                        )
                        self._session.stored.drop(entry.call_id)
                        lost.add(name)
        return lost

    def _deliver(self, entries: list[Entry]) -> None:
        transcripts = self._session.stored.read([entry.call_id for entry in entries])
        rows = []
        for entry in entries:
            assert entry.ended is not None
            transcript = transcripts[entry.call_id]
            sample, ids = self._samples[entry.identity.rollout], transcript.token_ids.tolist()
            text = text_of(self._requests.tokenizer_for(sample.prompt), transcript.request, ids, *entry.ended)
            rows.append(
                self._row(
                    sample,
                    transcript.request,
                    ids,
                    transcript.logprobs.tolist(),
                    transcript.version_spans,
                    entry.history,
                    *entry.ended,
                    text,
                )
            )
        self._append(rows)
        self.outcome.rows_from_store += len(rows)
        self._progress.finished(len(rows))

    def _row(
        self,
        sample: Sample,
        request: Request,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version_spans: Sequence[tuple[int, int, PolicyVersion]],
        history: Sequence[Any],
        finish_reason: str,
        stop_reason: int | str | None,
        text: str,
    ) -> dict[str, Any]:
        return make_row(
            id=sample.prompt.id,
            sample_index=sample.index,
            source=self._session.source_digests[sample.name],
            request=request,
            token_ids=token_ids,
            logprobs=logprobs,
            version_spans=version_spans,
            history=history,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            text=text,
        )

    # ---- the loop ----------------------------------------------------------------------------------------------

    async def run(self, todo: Iterable[Sample], stop: asyncio.Event) -> None:
        """Run `todo` to the end, or until `stop` is set or something ends the run (which is raised)."""
        writer = asyncio.create_task(self._rows.run())
        feeder = asyncio.create_task(self._feed(list(todo)))
        stopped = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(self._session.failing())
        try:
            await _first_of(feeder, stopped, writer, failing)
            if feeder.done() and not stop.is_set():
                self._rows.put_last()  # they may have to wait for a disk or a store
                await _first_of(stopped, writer, failing)
        finally:
            stopped.cancel()
            failing.cancel()
            if not feeder.done():
                self._session.read_now()
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
            if not writer.done():
                self._rows.put_last()
                await asyncio.wait({writer}, timeout=self._config.rollout_checkpointing.grace_s)
                self.outcome.undelivered = self._rows.n_waiting
                writer.cancel()
            self._rows.close()

    async def _feed(self, todo: list[Sample]) -> None:
        async with asyncio.TaskGroup() as group:
            for sample in todo:
                await self._undelivered.acquire()
                await self._slots.acquire()
                self._n_generating += 1
                group.create_task(self._one(sample))
            self._fed = True
            self._ask_for_the_last_cut()

    def _ask_for_the_last_cut(self) -> None:
        """Where only a cut makes results durable, those that end last must not wait for the next interval."""
        flushes = self._config.rollout_checkpointing.gym.generation_chunk_flush_tokens
        if self._fed and self._n_generating == 0 and not flushes:
            self._session.want_snapshot()

    async def _one(self, sample: Sample) -> None:
        try:
            await self._to_the_end(sample)
        except BaseException:
            self._undelivered.release()
            raise

    async def _to_the_end(self, sample: Sample) -> None:
        try:
            prompt, params = self._requests.prepare(sample.prompt, sample.index)
            output = await self._generate(sample, prompt, params)
        except InputError as error:
            self._refused(sample, error.message)
            return
        except Exception as error:
            if not surface.is_refusal(error):
                raise
            self._refused(sample, surface.refusal_text(error))
            return
        finally:
            self._slots.release()
            self._n_generating -= 1
            self._ask_for_the_last_cut()
        await self._finish(sample, output)

    @property
    def trouble(self) -> Trouble | None:
        """Why finished rows wait, if they do."""
        return self._rows.trouble

    def _appended(self, n_rows: int) -> None:
        for _ in range(n_rows):
            self._undelivered.release()
        self._progress.finished(n_rows)

    async def _generate(self, sample: Sample, prompt: Any, params: Any) -> Any:
        return await drain(self._engine.generate(prompt, params, sample.name))

    async def _finish(self, sample: Sample, output: Any) -> None:
        completion = output.outputs[0]
        if completion.finish_reason not in FINISH_REASONS:
            self._refused(sample, f"the engine ended the request with {completion.finish_reason!r}")
            return
        if self._session.capturing and self._session.has_result(sample.name):
            call = await self._session.durable(sample.name)
            self._rows.put(self._captured_row(sample, call, completion.text))
            return
        ids = list(completion.token_ids)
        request = Request(rollout=sample.name, prompt_token_ids=output.prompt_token_ids, sampling={})
        logprobs = surface.sampled_logprobs(ids, completion.logprobs) or []
        spans = [(0, len(ids), self._session.version)]
        ended = (completion.finish_reason, completion.stop_reason, completion.text)
        self._rows.put(self._row(sample, request, ids, logprobs, spans, (), *ended))

    def _captured_row(self, sample: Sample, call: LiveCall, text: str) -> dict[str, Any]:
        assert call.ended is not None
        return self._row(
            sample,
            call.request,
            call.transcript_ids,
            call.transcript_logprobs,
            call.version_spans,
            self._session.stored.history(call.call_id),
            call.ended.finish_reason,
            call.ended.stop_reason,
            text,
        )

    def _refused(self, sample: Sample, error: str) -> None:
        self._undelivered.release()
        self.outcome.bad.append(BadLine(sample.prompt.line, sample.prompt.id, error))
        self._progress.refused(sample.name, error)

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        """In the writer's thread: after one look at the log."""
        if self._session.capturing:
            self._session.raise_if_failed()
            self._session.stored.check_not_fenced()
        self._results.append(rows)


async def _first_of(*tasks: asyncio.Task[Any]) -> None:
    """Wait until one of them is done; raise what any of them ended with, the last named first."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in reversed(tasks):
        if task.done():
            task.result()


def first_stop(error: BaseExceptionGroup[Any] | BaseException) -> BaseException:
    """Of a task group's errors the one that explains the others: what stops the process, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [first_stop(item) for item in error.exceptions]
    return next((e for e in leaves if isinstance(e, Stop) or surface.is_engine_dead(e)), leaves[0])
