"""A process whose engine core is killed in the middle of decoding; prints what its callers and its session saw.

Owns: the scenario of test_engine_death.py, which needs an engine that may die. Arguments: MODEL STORE.
Does not know: what is right.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from prefix_recovery.engine import Engine
from prefix_recovery.processes import Identity
from recovery.log_reading import find_tail
from storage_backends import open_store
from tests.engine_runs import block, greedy, open_session, prompts, standing, tokens_of, until
from tests.job_processes import engine_core_of
from vllm_hooks import RecoverableEngine

ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20}
KINDS = ("DELTA", "CUMULATIVE", "FINAL_ONLY", "PULLED", "DELTA", "PULLED")


async def call(engine: Any, number: int, yielded: dict[str, list[int]]) -> str:
    """One call; returns the type of the error that ended it."""
    kind, name = KINDS[number], f"r{number}"
    yielded[name] = []
    try:
        async for output in engine.generate(prompts(6)[number], greedy(900, kind), name):
            fresh = list(output.outputs[0].token_ids)
            yielded[name] = yielded[name] + fresh if kind == "DELTA" else fresh
    except Exception as error:
        return type(error).__name__
    return ""


async def scenario(llm: Any, core: Identity, store: Path) -> dict[str, Any]:
    session = open_session(llm, block(store, flush=16))
    session.pulls = True
    session.start()
    wrapped = RecoverableEngine(llm, session)
    yielded: dict[str, list[int]] = {}
    calls = [asyncio.ensure_future(call(wrapped, number, yielded)) for number in range(6)]
    await until(lambda: tokens_of(session) >= 200)
    async with standing(llm):
        session.want_snapshot()
        await until(lambda: session.counters.snapshots == 1)
    await until(lambda: tokens_of(session) >= 500)
    os.kill(core.pid, signal.SIGKILL)
    errors = await asyncio.gather(*calls)
    tail = find_tail(open_store(str(store)))
    captured = {c.request.rollout: (list(c.transcript_ids), list(c.transcript_logprobs)) for c in live(session)}
    late = await call(wrapped, 0, {})
    session.want_snapshot()
    last = await session.stop()
    return {
        "errors": errors,
        "late": late,
        "captured": captured,
        "yielded": yielded,
        "snapshots": session.counters.snapshots,
        "last": None if last is None else last.verdict.value,
        "slots_after": find_tail(open_store(str(store))) - tail,
        "dead": repr(session.dead_engine),
    }


def live(session: Any) -> list[Any]:
    return list(session.table._calls.values())


def main() -> None:
    engine = Engine(sys.argv[1], ENGINE)
    core = engine_core_of(os.getpid())
    found = asyncio.run(scenario(engine.llm, core, Path(sys.argv[2])))
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
