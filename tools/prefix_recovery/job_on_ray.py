"""A job whose engines are actors of Ray: the same run as job.py's, on another session.

Owns: what is started in which order, and what of it is written down for the next run.
Does not know: how rows are made, how actors are watched, exit codes.

Invariant:
1. The coordinator claims the store when the job is known to fit it, and workers join it; engines start meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefix_recovery import saving
from prefix_recovery.dispatch import Outcome
from prefix_recovery.engine import Engine, Unstarted
from prefix_recovery.job import Run
from prefix_recovery.job_here import JobHere, job_fields, job_of
from prefix_recovery.output_lock import FOLDER_PREFIX
from prefix_recovery.processes import descendants
from prefix_recovery.progress import Progress
from prefix_recovery.remote import RemoteEngine, RemoteSession, RemoteStored
from prefix_recovery.wanted_workers import WantedWorkers
from recovery.restored import Restored
from storage_backends.transfer_queue import CPUS, package, start_queue
from storage_backends.writer_name import writer_name
from vllm_hooks.ray_workers.cluster import Workers
from vllm_hooks.ray_workers.link import CoordinatorLink
from vllm_hooks.ray_workers.ray_here import connected


class RunOnRay(Run):
    """See job.Run. Where it is given an engine's configuration, no worker is needed, and it runs as one process."""

    def _with_engine(self, progress: Progress) -> Outcome:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir="/tmp"))
        try:
            queued = self._config.rollout_checkpointing.staging == "transfer_queue"
            if queued:
                package()
            progress.say(f"starting {self._config.workers} workers on Ray")
            with connected(self._config.ray, self._config.workers, folder, CPUS if queued else 0):
                if queued:
                    progress.say(f"the TransferQueue {'is started' if start_queue() else 'that is there is used'}")
                self._folder = folder
                self._lock.note(descendants(os.getpid()), folder)
                self._wanted = WantedWorkers(Path(self._config.output), self._config.workers, progress.say)
                return asyncio.run(self._loop(None, progress))
        finally:
            WantedWorkers.none(Path(self._config.output))
            shutil.rmtree(folder, ignore_errors=True)

    def _capturing(self, llm: Any, session: Any) -> Any:
        return RemoteEngine(self._like, session) if llm is None else super()._capturing(llm, session)

    def _closing_lines(self, session: Any) -> Iterator[str]:
        if not isinstance(session, RemoteSession):
            return super()._closing_lines(session)
        return iter(saving.rejected_lines("that were stored", session.rejected))

    async def _open_session(self, llm: Any, progress: Progress) -> Any:
        if llm is not None:
            return await super()._open_session(llm, progress)
        config, block, began = self._config, self._config.rollout_checkpointing, time.monotonic()
        beside = config.workers if config.ray.address is None else 1
        start = functools.partial(Engine, config.model, config.engine, beside)
        arguments = (start, block, job_fields(config), self._options.self_test)
        counted: list[Any] = []
        workers = Workers(
            config.workers,
            config.ray,
            arguments,
            progress.say,
            lambda name, n: counted[0](name, n) if counted else None,
        )
        here: JobHere = await asyncio.to_thread(job_of, config, self._file)
        self._like = Unstarted(config.model, config.engine)
        owner = writer_name(f"run {secrets.token_hex(4)}")
        link = CoordinatorLink(block, here.must, here.recorded, here.stop, owner, progress.say)
        restored, changed = await link.ask("opened")
        ledger = await link.ask("everything")
        workers.start(link)
        stored = RemoteStored(config, link, ledger)
        session = RemoteSession(link, workers, stored, self._wanted)
        tokens = 0

        def count(name: str, n_tokens: int) -> None:
            nonlocal tokens
            tokens += n_tokens
            session.counted(name, n_tokens)

        counted.append(count)
        self._captured = lambda: tokens
        failing = asyncio.ensure_future(session.failing())
        first = asyncio.ensure_future(workers.first())
        await asyncio.wait({failing, first}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        failing.cancel()
        self._lock.note(descendants(os.getpid()), self._folder)
        progress.say(f"{len(workers.ready)} of {config.workers} workers ready after {time.monotonic() - began:.0f} s")
        self._say_restored(progress, restored, ledger)
        for difference in changed:
            progress.say(f"changed since the last run, so that resumes claim no more than statistical: {difference}")
        return session

    def _say_restored(self, progress: Progress, restored: Restored, ledger: Any) -> None:
        begun = [entry for entry in ledger if entry.ended is None and entry.n_tokens]
        for line in saving.restored_lines(restored, len(begun), sum(entry.n_tokens for entry in begun)):
            progress.say(line)
