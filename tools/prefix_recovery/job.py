"""`prefix-recovery run`: from a config to an exit code.

Owns: the order of a run (lock, read, engine, restore, loop, last snapshot, release), signals, exit codes.
Does not know: how samples are dispatched (dispatch.py), how tokens are captured.

Invariants:
1. Whatever happens, the output's lock and the engine are released, in that the kernel or the next run ends them.
2. SIGTERM, SIGINT and SIGHUP end in a snapshot within `grace_s`; a second signal ends at once.
3. Nothing is said to be done that is not: exit 0 means that every prompt has its result exactly once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefix_recovery import changes, saving
from prefix_recovery.dispatch import Dispatch, Outcome, first_stop
from prefix_recovery.engine import Engine, Unstarted, set_environment
from prefix_recovery.engine_requests import check_sampling
from prefix_recovery.job_here import JobHere, job_fields, job_of
from prefix_recovery.metrics_server import MetricsServer
from prefix_recovery.model_place import check_model
from prefix_recovery.output_lock import OutputLock
from prefix_recovery.processes import descendants
from prefix_recovery.progress import Progress
from prefix_recovery.prompts import BadLine, PromptFile, Sample, read_prompts
from prefix_recovery.results import Results, write_errors
from prefix_recovery.stored_job import Held, begins_anew, check_stored
from prefix_recovery.tally import Tally
from prefix_recovery.waiting import Notices
from recovery.config import JobConfig, effective_mode
from recovery.coordinator import Attempt
from recovery.errors import ConfigError, EngineDead
from recovery.protocol import Verdict
from recovery.restored import PassedOverWarning
from storage_backends import open_store
from vllm_hooks import RecoverableEngine, RecoverySession, surface
from vllm_hooks.start import open_session

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line adds to a config."""

    strict_input: bool = False
    quiet: bool = False
    self_test: bool = True
    tally: Path | None = None
    folder: Path = Path()
    """The config's."""


def run_job(config: JobConfig, options: RunOptions) -> int:
    """Run or continue a job. Returns the exit code; raises RecoveryError for what stops it."""
    output = Path(config.output)
    file = read_prompts(config.prompts, strict=options.strict_input)
    lock = OutputLock(output)
    for leftover in lock.acquire():
        print(f"ended process {leftover.pid}, left over from a run that died", file=sys.stderr)
    results = Results(output)
    try:
        results.open()
        return _kind_of(config)(config, options, file, lock, results).go()
    finally:
        results.close()
        lock.release()


def _kind_of(config: JobConfig) -> type[Run]:
    if not config.on_ray:
        return Run
    try:
        from prefix_recovery.job_on_ray import RunOnRay  # it extends what is here, and Ray need not be installed
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"workers: {config.workers} needs Ray: {error}",
            hint="pip install 'prefix-recovery[ray]'; or set workers: 1",
        ) from error
    return RunOnRay


class _Undecoded(Exception):
    """There is something to decode, and no engine was started."""


class Run:
    """One run of a job, with an engine in this process."""

    def __init__(
        self, config: JobConfig, options: RunOptions, file: PromptFile, lock: OutputLock, results: Results
    ) -> None:
        self._config = config
        self._options = options
        self._file = file
        self._lock = lock
        self._results = results
        self._samples = list(file.samples(config.samples_per_prompt))
        self._signal: signal.Signals | None = None
        self._last: Attempt | None = None
        self._captures = False
        self._metrics: MetricsServer | None = None

    def go(self) -> int:
        errors = Path(self._config.output + ".errors.jsonl")
        missing = [s for s in self._samples if (s.prompt.id, s.index) not in self._results.done]
        progress = self._progress()
        for line in self._file.bad:
            progress.say(f"{self._file.path} line {line.line}: {line.error}")
        try:
            outcome = self._run(missing, progress) if missing else self._nothing_to_do(progress)
        finally:
            progress.close()
            if self._metrics is not None:
                self._metrics.close()
        bad = self._file.bad + outcome.bad
        if bad or errors.exists():
            write_errors(
                errors, ({"file": str(self._file.path), "line": b.line, "id": b.id, "error": b.error} for b in bad)
            )
        return self._exit_code(bad, progress)

    def _nothing_to_do(self, progress: Progress) -> Outcome:
        """Every sample has its row. A model that was changed meanwhile is not noticed, and that is said."""
        self._look_at_rows(progress)
        progress.say(
            "nothing to do: every prompt that can be read has its row; the model was not compared with the rows' own"
        )
        return Outcome()

    def _look_at_rows(self, progress: Progress) -> None:
        for line in changes.refuse_rows(self._results, self._samples, self._config.sampling).sentences(
            self._results.path
        ):
            progress.say(line)

    def _progress(self) -> Progress:
        wanted = {(s.prompt.id, s.index) for s in self._samples}
        done = len(self._results.done.keys() & wanted)
        self._captured: Any = lambda: 0
        return Progress(len(self._samples), done, lambda: self._captured(), quiet=self._options.quiet)

    def _n_results(self) -> tuple[int, int]:
        """How many of the wanted results there are, and how many are wanted. From any thread."""
        n_done = sum((s.prompt.id, s.index) in self._results.done for s in self._samples)
        return n_done, len(self._samples)

    def _exit_code(self, bad: list[BadLine], progress: Progress) -> int:
        missing = [s for s in self._samples if (s.prompt.id, s.index) not in self._results.done]
        if self._signal is not None:
            return self._stopped(len(missing), progress)
        progress.say(
            f"{len(self._samples) - len(missing)} of {len(self._samples) + len(self._file.bad)} results in "
            f"{self._results.path}" + (f"; what has none is in {self._results.path}.errors.jsonl" if bad else "")
        )
        if bad:
            return 3
        return 0 if not missing else 1

    def _stopped(self, n_missing: int, progress: Progress) -> int:
        assert self._signal is not None
        last = self._last if self._captures else None
        taken = last.snapshot if last is not None and last.verdict is Verdict.PUBLISHED else None
        progress.say(saving.stopped_line(self._signal.name, n_missing, taken))
        if self._captures and taken is None:
            why = f"{last.step}: {last.error}" if last is not None else "an earlier one still hangs"
            progress.say(f"the last snapshot was not published ({why}); flushed tokens are kept all the same")
            return 1
        return 128 + int(self._signal)

    def _run(self, missing: list[Sample], progress: Progress) -> Outcome:
        held = self._check_early(progress)
        # What waits in a queue reaches the store through Ray, which is joined with the workers.
        settled = self._config.rollout_checkpointing.staging == "store"
        if settled and held is not None and held.answers([sample.name for sample in missing]):
            try:
                return self._without_engine(progress)
            except _Undecoded:
                if self._signal is not None:
                    return Outcome()
        return self._with_engine(progress)

    def _without_engine(self, progress: Progress) -> Outcome:
        """Write rows of answers that the store has. Raises _Undecoded if one of them turns out to be damaged."""
        progress.say("the store has the answer of every prompt that has no row: they are written without an engine")
        engine = Unstarted(self._config.model, self._config.engine)
        self._serve_metrics(progress)
        return asyncio.run(self._loop(engine, progress))

    def _serve_metrics(self, progress: Progress) -> None:
        if self._config.metrics is not None and self._metrics is None:
            self._metrics = MetricsServer(str(self._config.metrics), self._n_results)
            progress.say(f"metrics at {self._metrics.url}")

    def _with_engine(self, progress: Progress) -> Outcome:
        began = time.monotonic()
        progress.say("starting the engine")
        engine = Engine(self._config.model, self._config.engine)
        try:
            self._serve_metrics(progress)  # its thread comes after the fork of the engine
            self._lock.note(descendants(os.getpid()), engine.folder)
            progress.say(f"engine ready after {time.monotonic() - began:.0f} s")
            return asyncio.run(self._loop(engine.llm, progress))
        finally:
            engine.close()

    def _check_early(self, progress: Progress) -> Held | None:
        """What would end the run after the engine's start, told before it. Returns what the store has of the job."""
        held = None
        set_environment()
        check_sampling(self._config.sampling)
        block = self._config.rollout_checkpointing
        if effective_mode(block) != "off" and block.store is not None:
            store = open_store(block.store, create=True, **block.store_options.given())
            if block.restore != "never" and (none := begins_anew(store, block.store)):
                progress.say(none)
            held = check_stored(store, block.restore, self._job)
        self._look_at_rows(progress)  # the store can say more about what was changed, and is asked first
        if held is None:
            check_model(self._config.model, self._options.folder)
        return held

    def _job(self) -> JobHere:
        check_model(self._config.model, self._options.folder)
        return job_of(self._config, self._file)

    def _capturing(self, llm: Any, session: RecoverySession) -> Any:
        return RecoverableEngine(llm, session)

    def _closing_lines(self, session: RecoverySession) -> Iterator[str]:
        if session.capturing:
            yield from saving.closing_lines(session.stager.counters, session.snapshots.rejected)

    async def _open_session(self, llm: Any, progress: Progress) -> RecoverySession:
        with progress.restoring() as reading:
            session = await open_session(
                llm,
                self._config.rollout_checkpointing,
                must=job_fields(self._config),
                test=self._options.self_test and not isinstance(llm, Unstarted),
                keeps_results=True,
                reading=reading,
            )
        session.keeps_ranks = False  # rows have none
        self._captured = lambda: session.counters.tokens_captured
        if self._metrics is not None:
            self._metrics.watch(session)
        for line in saving.parity_lines(session.parity):
            progress.say(line)
        restored = session.restored
        counters = session.counters
        if restored is not None:
            for line in saving.restored_lines(restored, counters.calls_restored, counters.tokens_reused):
                progress.say(line)
        for difference in session.opened.changed if session.opened is not None else ():
            progress.say(f"changed since the last run, so that resumes claim no more than statistical: {difference}")
        return session

    async def _loop(self, llm: Any, progress: Progress) -> Outcome:
        stop = asyncio.Event()
        warnings.showwarning = lambda message, *rest, **more: progress.say(f"note: {message}")
        warnings.filterwarnings("ignore", category=PassedOverWarning)  # saving.restored_lines says it
        self._catch_signals(stop, progress)
        session = await self._open_session(llm, progress)
        tally = Tally(self._options.tally, len(self._samples)) if self._options.tally else None
        dispatch = Dispatch(
            self._config, self._capturing(llm, session), session, self._results, self._samples, progress, tally
        )
        self._results.reread()
        todo: list[Sample] = await dispatch.matched()
        if todo and isinstance(llm, Unstarted):
            await session.stop(last_snapshot=False)
            raise _Undecoded
        progress.decoding()
        try:
            async with asyncio.TaskGroup() as group:
                run = group.create_task(dispatch.run(todo, stop))
                ticker = group.create_task(_tick(progress, session, dispatch))
                run.add_done_callback(lambda task: ticker.cancel())
        except BaseExceptionGroup as group_error:
            error = first_stop(group_error)
            await session.stop(last_snapshot=False)
            if surface.is_engine_dead(error):
                raise EngineDead(
                    f"the engine died: {error or 'its process is gone'}",
                    hint="run the same command again: it continues from what was saved",
                ) from error
            raise error from group_error
        self._last = await session.stop(
            timeout_s=None if self._signal is None else self._config.rollout_checkpointing.grace_s
        )
        for line in self._closing_lines(session):
            progress.say(line)
        if n_rows := dispatch.outcome.undelivered:
            progress.say(saving.undelivered_line(n_rows, self._config.output, stored=session.capturing))
        if session.failure is not None:
            raise session.failure
        self._captures = session.capturing
        return dispatch.outcome

    def _catch_signals(self, stop: asyncio.Event, progress: Progress) -> None:
        loop = asyncio.get_running_loop()

        def caught(number: signal.Signals) -> None:
            if self._signal is not None:
                os._exit(128 + int(number))
            self._signal = number
            progress.say(f"{number.name}: taking a last snapshot; once more ends at once")
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, caught, number)


async def _tick(progress: Progress, session: RecoverySession, dispatch: Dispatch) -> None:
    """Once in TICK_S: the figures, and what cannot be saved."""
    notices = Notices()
    while True:
        await asyncio.sleep(TICK_S)
        progress.tick()
        rows = dispatch.trouble
        for line in notices.lines(time.monotonic(), [*session.troubles, *([rows] if rows is not None else [])]):
            progress.say(line)
