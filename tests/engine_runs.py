"""Calls on a real engine, bare and captured, in a form that can be compared.

Owns: how a stream of outputs becomes one Answer, how a store with a call cut at an exact place is made, and how a store
is read back.
Does not know: pytest, which behaviour is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recovery import codec
from recovery import resume_table as table
from recovery.config import CheckpointingConfig, GymConfig
from recovery.ledger import Entry
from recovery.log_reading import find_tail, walk_back
from recovery.model import Request
from recovery.reading import read_transcripts
from recovery.snapshots import Snapshot, load
from recovery.transcripts import Transcript
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.arrow_segments import ArrowSegmentCodec
from vllm_hooks import RecoverableEngine, RecoverySession, surface, top_logprobs
from vllm_hooks.marks import SCHEME

LogprobEntry = list[tuple[int, float]]


@dataclass(slots=True)
class Logprob:
    """As vLLM's, of which an import here would come before the engine's environment is set."""

    logprob: float
    rank: int | None


KINDS = ("DELTA", "CUMULATIVE", "FINAL_ONLY", "PULLED")
"""What callers ask for; PULLED: FINAL_ONLY, with the session reading the engine's front end instead of streaming."""
PROMPT = [0, 262, 278, 198, 185, 506, 103, 35]


@dataclass(slots=True)
class Answer:
    """What a caller was given in the end.

    `logprobs`: per token the (id, logprob) pairs, the sampled token's first; `named`: rank and text of each of them.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    cumulative_logprob: float | None
    logprobs: list[LogprobEntry] | None
    named: list[list[tuple[int | None, str | None]]] | None
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Any] | None
    finished: bool
    n_outputs: int

    @property
    def sampled(self) -> list[float]:
        """The logprob of each sampled token."""
        assert self.logprobs is not None
        return [dict(entry)[token] for token, entry in zip(self.token_ids, self.logprobs, strict=True)]


def greedy(max_tokens: int, kind: str = "FINAL_ONLY", **fields: Any) -> Any:
    """SamplingParams of a greedy call that runs to its length. PULLED is FINAL_ONLY, read instead of streamed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **fields}
    return SamplingParams(**values, output_kind=RequestOutputKind["FINAL_ONLY" if kind == "PULLED" else kind])


async def answer_of(stream: AsyncIterator[Any], delta: bool, each: Callable[[Any], None] | None = None) -> Answer:
    """Read a stream to its end. Lists are copied as they come: the engine goes on writing into some of them."""
    ids: list[int] = []
    text, logprobs, named, n, prompt_logprobs, output = "", None, None, 0, None, None
    async for output in stream:
        n += 1
        if each is not None:
            each(output)
        completion = output.outputs[0]
        fresh = None if completion.logprobs is None else [_entry(item) for item in completion.logprobs]
        names = None if completion.logprobs is None else [_names(item) for item in completion.logprobs]
        if delta:
            ids += completion.token_ids
            text += completion.text
            logprobs = None if fresh is None else (logprobs or []) + fresh
            named = None if names is None else (named or []) + names
            prompt_logprobs = output.prompt_logprobs or prompt_logprobs
        else:
            ids, text, logprobs = list(completion.token_ids), completion.text, fresh
            named = names
            prompt_logprobs = output.prompt_logprobs
    assert output is not None, "the stream had no output"
    completion = output.outputs[0]
    return Answer(
        token_ids=ids,
        text=text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=logprobs,
        named=named,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids),
        prompt_logprobs=None if prompt_logprobs is None else [p and _entry(p) for p in prompt_logprobs],
        finished=output.finished,
        n_outputs=n,
    )


def _entry(position: Any) -> LogprobEntry:
    return [(int(token), float(value.logprob)) for token, value in position.items()]


def _names(position: Any) -> list[tuple[int | None, str | None]]:
    return [(value.rank, value.decoded_token) for value in position.values()]


async def ask(engine: Any, prompt: Any, params: Any, name: str, **arguments: Any) -> Answer:
    """One whole call."""
    from vllm.sampling_params import RequestOutputKind

    return await answer_of(
        engine.generate(prompt, params, name, **arguments), params.output_kind == RequestOutputKind.DELTA
    )


def assert_same(got: Answer, wanted: Answer, tolerance: float = 1e-6) -> None:
    """Equal in everything a caller can see but the number of outputs; logprobs within `tolerance`."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason", "prompt", "prompt_token_ids", "finished"):
        assert getattr(got, name) == getattr(wanted, name), name
    assert (got.logprobs is None) == (wanted.logprobs is None)
    assert_same_prompt_logprobs(got, wanted, tolerance)
    assert (got.cumulative_logprob is None) == (wanted.cumulative_logprob is None)
    if wanted.logprobs is not None and got.logprobs is not None:
        assert len(got.logprobs) == len(got.token_ids)
        assert [[token for token, _ in entry] for entry in got.logprobs] == [
            [token for token, _ in entry] for entry in wanted.logprobs
        ]
        assert got.named == wanted.named
        values = [[[value for _, value in entry] for entry in one.logprobs] for one in (got, wanted)]
        assert all(np.allclose(a, b, rtol=0, atol=tolerance) for a, b in zip(*values, strict=True))
    if wanted.cumulative_logprob is not None and got.cumulative_logprob is not None:
        assert abs(got.cumulative_logprob - wanted.cumulative_logprob) <= tolerance * max(1, len(wanted.token_ids))


def assert_same_prompt_logprobs(got: Answer, wanted: Answer, tolerance: float) -> None:
    """The same rows, each with the same ids; values within `tolerance`."""
    assert (got.prompt_logprobs is None) == (wanted.prompt_logprobs is None)
    pairs = zip(got.prompt_logprobs or (), wanted.prompt_logprobs or (), strict=True)
    for one, other in pairs:
        assert [token for token, _ in one or ()] == [token for token, _ in other or ()]
        assert np.allclose([v for _, v in one or ()], [v for _, v in other or ()], rtol=0, atol=tolerance)


def block(store: Path, **fields: Any) -> CheckpointingConfig:
    """`rollout_checkpointing` with snapshots only when asked for. `flush`: tokens per flush; `mode`: the mode."""
    gym = GymConfig(mode=fields.pop("mode", "prefix_recovery"), generation_chunk_flush_tokens=fields.pop("flush", 8))
    return CheckpointingConfig(
        **{"enabled": True, "store": str(store), "snapshot_interval_s": 3600.0, "gym": gym, **fields}
    )


def open_session(engine: Any, config: CheckpointingConfig, **fields: Any) -> RecoverySession:
    """A session over a store, with the engine's rules of when a call ends."""
    return RecoverySession.open(config, must={"model": "tiny"}, stop=surface.stop_rules(engine), **fields)


@contextlib.asynccontextmanager
async def capturing(
    engine: Any, store: Path, *, last_snapshot: bool = True, pulls: bool = False, **fields: Any
) -> AsyncIterator[tuple[Any, RecoverySession]]:
    """A started session over `store` and the engine that captures into it; stopped at the end."""
    opening = {name: fields.pop(name) for name in ("keeps_results", "exactness") if name in fields}
    session = open_session(engine, block(store, **fields), **opening)
    session.pulls = pulls
    session.start()
    try:
        yield RecoverableEngine(engine, session), session
    finally:
        await session.stop(last_snapshot=last_snapshot)


def request_of(
    name: str, prompt_ids: Sequence[int], params: Any, draws: str = "position", arguments: Sequence[str] = ()
) -> Request:
    """What RecoverableEngine makes of a request, under this `draws`. `arguments`: names of what else it has set."""
    sampling = surface.sampling_fields(params)
    drawn = (
        {"draws": {"scheme": SCHEME, "seed": params.seed}}
        if draws == "position" and params.temperature and params.seed is not None
        else {}
    )
    return Request(
        rollout=name,
        prompt_token_ids=np.asarray(prompt_ids, dtype=np.int32),
        sampling=sampling,
        extra=drawn,
        restart_only=table.hindrance(sampling, [*drawn, *arguments], frozenset(table.ABILITIES)),
    )


async def put_cut(
    session: RecoverySession,
    engine: Any,
    name: str,
    params: Any,
    whole: Answer,
    start: int,
    cut: int,
    draws: str = "position",
    arguments: Sequence[str] = (),
) -> None:
    """Let a session capture tokens [start, cut) of a call, as if its consumer had been cut off exactly there."""
    request = request_of(name, whole.prompt_token_ids, params, draws, arguments)
    call = await session.admit(request, surface.stop_rules(engine))
    assert call.n_tokens == start
    if cut > start:
        ids, logprobs = whole.token_ids[start:cut], whole.sampled[start:cut]
        session.captured(call, ids, logprobs, columns_of(params, whole, start, cut))
    session.left(call)


def columns_of(params: Any, whole: Answer, start: int, cut: int) -> dict[str, Any] | None:
    """The columns that a capture of these tokens has."""
    n_top = top_logprobs.n_kept(params)
    if n_top is None or whole.logprobs is None or whole.named is None:
        return None
    entries = [
        {token: Logprob(value, rank) for (token, value), (rank, _) in zip(pairs, names, strict=True)}
        for pairs, names in zip(whole.logprobs[start:cut], whole.named[start:cut], strict=True)
    ]
    return top_logprobs.columns_of(top_logprobs.positions_of(entries, 0, len(entries), n_top), n_top)


async def store_with_cut(engine: Any, store: Path, name: str, params: Any, whole: Answer, cut: int) -> None:
    """A store whose snapshot holds exactly the first `cut` tokens of the call `whole`."""
    async with capturing(engine, store) as (_, session):
        await put_cut(session, engine, name, params, whole, 0, cut)


async def cut_everywhere(
    engine: Any, store: Path, prompt: Any, params: Any, cuts: Sequence[int] | None = None, tolerance: float = 2e-5
) -> Answer:
    """Cut a call at every position (or at `cuts`), carry each on, and compare it with the uninterrupted one.

    What is sampled is compared with a captured call that was not interrupted: its seed draws by position there.
    Returns the uninterrupted answer. Each resume must have asked the engine for exactly what was left.
    """
    if params.temperature:
        async with capturing(engine, store.parent / f"{store.name}-whole") as (wrapped, _):
            whole = await ask(wrapped, prompt, params, "whole")
    else:
        whole = await ask(engine, prompt, params, f"bare-{store.name}")
    n = len(whole.token_ids)
    chosen = list(range(1, n + 1)) if cuts is None else sorted({cut for cut in cuts if 0 < cut <= n})
    async with capturing(engine, store) as (_, session):
        for cut in chosen:
            await put_cut(session, engine, f"r{cut}", params, whole, 0, cut)
    async with capturing(engine, store) as (wrapped, session):
        answers = await asyncio.gather(*(ask(wrapped, prompt, params, f"r{cut}") for cut in chosen))
        assert session.counters.tokens_captured == sum(n - cut for cut in chosen)
    for cut, got in zip(chosen, answers, strict=True):
        try:
            assert_same(got, whole, tolerance)
        except AssertionError as error:
            raise AssertionError(f"cut at {cut} of {n}: {error}") from error
    stored = read_back(store)
    assert all(stored.transcripts[f"r{cut}"].token_ids.tolist() == whole.token_ids for cut in chosen)
    assert all(stored.entries[f"r{cut}"].ended == (whole.finish_reason, whole.stop_reason) for cut in chosen)
    return whole


@dataclass(slots=True)
class Stored:
    """The newest snapshot of a store, read with nothing of the session that wrote it."""

    snapshot: int
    entries: dict[str, Entry]
    transcripts: dict[str, Transcript]


def read_back(root: Path) -> Stored:
    """The newest snapshot and the transcripts of all its calls, by request id."""
    store = open_store(str(root))
    for read in walk_back(store, find_tail(store)):
        assert not isinstance(read, Exception), read
        if read.slot.kind == "snapshot":
            loaded = load(store, ArrowLedgerCodec(), Snapshot.from_slot(read.slot))
            found = read_transcripts(store, ArrowSegmentCodec(), loaded.ledger, loaded.ledger)
            return Stored(
                read.slot.seq,
                {entry.identity.rollout: entry for entry in loaded.ledger},
                {loaded_entry.identity.rollout: found[loaded_entry.call_id] for loaded_entry in loaded.ledger},
            )
    raise AssertionError(f"{root} has no snapshot")


def call_id_of(name: str, prompt_ids: Sequence[int], params: Any) -> Any:
    """The id under which a call is kept."""
    return codec.call_id(name, 0, codec.request_digest(request_of(name, prompt_ids, params)))


def prompts(n: int, length: int = 8, seed: int = 0) -> list[list[int]]:
    """Prompts of ids that differ from each other."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(length + number)] for number in range(n)]


async def cancel_after(engine: Any, session: Any, prompt: Any, params: Any, name: str, at_least: int) -> int:
    """Cancel a call that gives its caller nothing before its end, once that much is captured. Returns how much."""
    task = asyncio.ensure_future(ask(engine, prompt, params, name))
    await until(lambda: tokens_of(session) >= at_least)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    captured: int = session.counters.tokens_captured
    return captured


def tokens_of(session: Any) -> int:
    """Tokens captured up to this moment, those of pulled calls included."""
    session._polling.read_all()
    captured: int = session.counters.tokens_captured
    return captured


async def until(holds: Any, timeout_s: float = 200.0) -> None:
    """Let the loop run until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def standing(engine: Any) -> AsyncIterator[None]:
    """The engine decodes nothing in the block, and goes on after it where it was: for what takes a time of its own."""
    await engine.pause_generation(mode="keep", clear_cache=False)
    try:
        yield
    finally:
        await engine.resume_generation()


async def take_snapshot(session: Any, timeout_s: float | None = None) -> Any:
    """One snapshot now, as the coordinator's thread takes it."""
    return await asyncio.to_thread(session.snapshots._take, "test", timeout_s)


async def abort_after(engine: Any, prompt: Any, params: Any, name: str, at_least: int) -> list[int]:
    """Leave a DELTA stream once it gave that many tokens. Returns them.

    The engine goes on while this process has no turn, and then gives all at once: who needs an unfinished call asks for
    some hundred tokens more than `at_least`.
    """
    from vllm.sampling_params import RequestOutputKind

    delta = params.clone()
    delta.output_kind = RequestOutputKind.DELTA
    ids: list[int] = []
    stream = engine.generate(prompt, delta, name)
    try:
        async for output in stream:
            ids += output.outputs[0].token_ids
            if len(ids) >= at_least:
                break
    finally:
        await stream.aclose()
    return ids
