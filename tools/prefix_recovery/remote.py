"""A job's session whose engines are actors of Ray: what dispatch.py asks of a session, answered from elsewhere.

Owns: which answers are on their way to the output, whether their ends are known to be durable, and following the count
of workers that somebody wants.
Does not know: how workers are found and watched (vllm_hooks.ray_workers.cluster), rows, prompts files.

Invariants:
1. A row may be appended only when its call's end is in the store under an epoch that still holds, or in the ledger of
   the coordinator that took over (`check_not_fenced`).
2. Answers come from the worker that generated them, old ones from the store; none goes through the coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from prefix_recovery.wanted_workers import WantedWorkers
from recovery.calls import LiveCall
from recovery.config import JobConfig
from recovery.coordinator import Attempt
from recovery.errors import Fenced, RecoveryError, SnapshotAbandoned, StoreUnavailable
from recovery.gathering import Transcripts
from recovery.ledger import Entry, Ledger
from recovery.model import CallId, Ended, PolicyVersion, Request, Restore
from recovery.reading import read_transcripts
from storage_backends import open_store
from storage_backends.codecs import MixedSegmentCodec
from vllm_hooks.ray_workers.actors import Answer
from vllm_hooks.ray_workers.answers import answer_now
from vllm_hooks.ray_workers.cluster import Workers
from vllm_hooks.ray_workers.link import LOOK_S, CoordinatorLink
from vllm_hooks.ray_workers.messages import Gone
from vllm_hooks.trouble import Trouble


@dataclass(frozen=True, slots=True)
class Delivered:
    """An ended call, as dispatch.py makes a row of it."""

    call_id: CallId
    request: Request
    transcript_ids: list[int]
    transcript_logprobs: list[float]
    version_spans: list[tuple[int, int, PolicyVersion]]
    ended: Ended


class RemoteStored:
    """The store's calls, as the coordinator's ledger has them at the start; their answers are read here."""

    def __init__(self, config: JobConfig, link: CoordinatorLink, ledger: Ledger) -> None:
        block = config.rollout_checkpointing
        assert block.store is not None
        self._store = open_store(block.store, create=True, **block.store_options.given())
        self._segments = MixedSegmentCodec(block.codec)
        self._link = link
        self._ledger = ledger
        self._histories: dict[CallId, tuple[Restore, ...]] = {}
        self._unsure: dict[CallId, int] = {}

    def entries(self) -> list[Entry]:
        return list(self._ledger)

    def read(self, call_ids: Iterable[CallId]) -> Transcripts:
        part = self._ledger.excerpt(call_ids)
        return read_transcripts(self._store, self._segments, part, part)

    def drop(self, call_id: CallId) -> None:
        self._ledger.drop(call_id)
        self._ask_now("drop", call_id)

    def history(self, call_id: CallId) -> tuple[Restore, ...]:
        return self._histories.pop(call_id, ())

    def note(self, call_id: CallId, epoch: int, history: tuple[Restore, ...]) -> None:
        """A call ended, and a row of it comes."""
        self._histories[call_id] = history
        self._unsure[call_id] = epoch

    def check_not_fenced(self) -> None:
        """Raise Fenced if another run took over, StoreUnavailable while an end is not known to be durable."""
        asked = dict(self._unsure)
        unsure = self._ask_now("unsure", asked)
        for call_id in asked.keys() - set(unsure):
            self._unsure.pop(call_id, None)
        if unsure:
            raise StoreUnavailable(
                f"{len(unsure)} ends were stored while the coordinator was replaced, and are stored once more",
                hint="nothing to do: their rows come as soon as that is done",
            )

    def _ask_now(self, method: str, *arguments: Any) -> Any:
        handle = self._link.handle
        try:
            return answer_now(getattr(handle, method).remote(*arguments), self._link.silent_s)
        except (Gone, TimeoutError, Fenced) as error:
            if isinstance(error, Fenced) and handle is self._link.handle:
                raise
            raise StoreUnavailable(
                "the coordinator does not answer", hint="nothing to do: it is started again, and asked again"
            ) from None


class RemoteEngine:
    """What dispatch.py sends requests to. `like`: an engine's configuration and tokenizer (engine.Unstarted)."""

    def __init__(self, like: Any, session: RemoteSession) -> None:
        self.vllm_config = like.vllm_config
        self.get_tokenizer = like.get_tokenizer
        self._session = session

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        """One output, when the call has ended and its end is stored."""
        ended = await self._session.run(name, prompt, params)
        completion = SimpleNamespace(
            text=ended.text,
            token_ids=ended.token_ids,
            logprobs=None,
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
        )
        yield SimpleNamespace(outputs=[completion], prompt_token_ids=ended.request.prompt_token_ids)


class RemoteSession:
    """Stands where a RecoverySession stands for a job in one process."""

    capturing = True

    def __init__(self, link: CoordinatorLink, workers: Workers, stored: RemoteStored, wanted: WantedWorkers) -> None:
        self._wanted = wanted
        self._link = link
        self._workers = workers
        self.stored = stored
        self.source_digests: Mapping[str, str] = {}
        self.version = PolicyVersion()
        self.failure: RecoveryError | None = None
        self.on_tokens: Callable[[LiveCall, int], None] | None = None
        self._answers: dict[str, Answer] = {}
        self._begun = False

    def counted(self, name: str, n_tokens: int) -> None:
        """A worker captured so many tokens of the request of that name."""
        if self.on_tokens is not None:
            call: Any = SimpleNamespace(request=SimpleNamespace(rollout=name))
            self.on_tokens(call, n_tokens)

    async def run(self, name: str, prompt: Any, params: Any) -> Answer:
        if not self._begun:
            self._begun = True
            await self._link.ask("start")  # nothing is dropped from the ledger any more
        ended = await self._workers.run(name, prompt, params, self.source_digests.get(name, ""))
        if ended.call_id is not None:
            self._answers[name] = ended
        return ended

    def has_result(self, name: str) -> bool:
        return name in self._answers

    async def durable(self, name: str) -> Delivered:
        ended = self._answers.pop(name)
        assert ended.call_id is not None and ended.epoch is not None
        part: Ledger = await self._link.ask("excerpt", [ended.call_id])
        entry = part.get(ended.call_id)
        self.stored.note(ended.call_id, ended.epoch, entry.history if entry is not None else ())
        end = Ended(
            call_id=ended.call_id,
            attempt=0,
            n_tokens=len(ended.token_ids),
            finish_reason=ended.finish_reason,
            stop_reason=ended.stop_reason,
        )
        return Delivered(ended.call_id, ended.request, ended.token_ids, ended.logprobs, ended.version_spans, end)

    async def failing(self) -> None:
        """Wait until the job must stop, and raise why. Meanwhile the coordinator is watched, and the count followed."""
        watch = asyncio.ensure_future(self._link.watch())
        follow = asyncio.ensure_future(self._follow())
        try:
            all_of_them = (watch, follow, self._workers.failed)
            await asyncio.wait(all_of_them, return_when=asyncio.FIRST_COMPLETED)
            for done in all_of_them:
                if done.done():
                    done.result()
        except RecoveryError as error:
            self.failure = error
            raise
        finally:
            watch.cancel()
            follow.cancel()

    async def _follow(self) -> None:
        """For ever: as many workers as are wanted."""
        while True:
            n = self._wanted.changed()
            if n is not None:
                await self._workers.scale(n)
            await asyncio.sleep(LOOK_S)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def read_now(self) -> None:
        """Workers read their engines with the cut."""

    def want_snapshot(self, cause: str = "request") -> None:
        self._link.handle.request.remote(cause)

    @property
    def rejected(self) -> Mapping[str, int]:
        """Records that did not fit the ledger, by reason."""
        return self._link.figures.rejected

    @property
    def troubles(self) -> list[Trouble]:
        error = self._link.figures.last_error
        if not error:
            return []
        figures = self._link.figures
        why = SnapshotAbandoned(error, hint="decoding goes on; the next one is tried as planned")
        return [Trouble("snapshots", 1, why, stands=figures.last_snapshot)]

    async def stop(self, *, last_snapshot: bool = True, timeout_s: float | None = None) -> Attempt | None:
        """A last snapshot if wanted, then the engines end."""
        last: Attempt | None = None
        if self.failure is None:
            last = await self._link.finish(last_snapshot, timeout_s)
        await self._workers.close()
        return last
