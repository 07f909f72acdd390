"""From an engine and a configuration to a started session, the way most callers want it.

Owns: the order self-test, fingerprint, restore, start.
Does not know: what is captured, what is restored.

Invariant:
1. What blocks (reading model files, the store) runs off the event loop; what needs the loop runs on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from recovery.config import CheckpointingConfig, effective_mode
from recovery.restore import anything
from recovery.resume import StopRules
from vllm_hooks import parity_cache, surface
from vllm_hooks.fingerprint import engine_fields
from vllm_hooks.parity import NOT_TESTED, Parity, self_test
from vllm_hooks.session import RecoverySession
from vllm_hooks.unresumable import Unresumable
from vllm_hooks.watching import Reading


def rules_of(engine: Any, config: CheckpointingConfig) -> StopRules:
    """What ends a call in this engine, and what may be resumed on it as configured."""
    return Unresumable(config).rules(surface.stop_rules(engine))


async def graded(engine: Any, fields: Mapping[str, Any]) -> Parity:
    """What the self-test sees on this engine, or saw at an earlier start of one like it."""
    where = parity_cache.folder()
    key = parity_cache.key_of(engine, fields)
    known = await asyncio.to_thread(parity_cache.load, key, where)
    if known is not None:
        return known
    parity = await self_test(engine)
    await asyncio.to_thread(parity_cache.store, key, parity, where)
    return parity


async def open_session(
    engine: Any,
    config: CheckpointingConfig,
    *,
    must: Mapping[str, Any] | None = None,
    owner: str = "",
    test: bool = True,
    keeps_results: bool = False,
    reading: Reading | None = None,
    compatible: Callable[[Mapping[str, bytes]], None] = anything,
) -> RecoverySession:
    """Claim and restore the store of `config` for this engine, and begin to capture. Call it on the engine's loop.

    Args:
        engine: a vLLM AsyncLLM.
        config: the block `rollout_checkpointing`; with mode `off` nothing is done and the session captures nothing.
        must: further fields of which a difference refuses a restore, beside those of the engine.
        owner: who this is, for people.
        test: run the parity self-test (seconds; once for engines that are alike: parity_cache.py). Without it
            resumes claim `statistical` and FINAL_ONLY is streamed.
        keeps_results: see RecoverySession.open.
        reading: see RecoverySession.open.
        compatible: see RecoverySession.open.

    Raises RecoveryError and its kin: see recovery.errors for the exit codes.
    """
    if effective_mode(config) == "off":
        return RecoverySession(config, None)
    rules = rules_of(engine, config)
    own, recorded = await asyncio.to_thread(engine_fields, engine, rules)
    parity = await graded(engine, {**own, **recorded}) if test else NOT_TESTED
    session = await asyncio.to_thread(
        lambda: RecoverySession.open(
            config,
            must={**own, **(must or {})},
            recorded=recorded,
            stop=rules,
            owner=owner,
            exactness=parity.grade,
            keeps_results=keeps_results,
            reading=reading,
            compatible=compatible,
        )
    )
    session.parity = parity
    session.pulls = parity.pull_agrees
    session.start()
    return session
