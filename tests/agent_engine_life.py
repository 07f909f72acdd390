"""The workplace agent on a vLLM engine, in one mode after the other; its process kills itself where it is told.

    python -m tests.agent_engine_life MODEL FOLDER [MODE TURN N_TOKENS | MODE STEP]

Owns: one such life, and the job as it is (`both`), for an engine that is there already.
Does not know: what its outcome has to be.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from examples.agents.mailbox import Mailbox
from examples.agents.workplace import Workplace
from recovery.calls import LiveCall
from recovery.config import CheckpointingConfig, GymConfig
from tests.agent_lives import PATIENCE_S, ModeName

MODES: tuple[ModeName, ...] = ("prefix_recovery", "turn")
TASK, TURNS, TOKENS = (0, 262, 278, 198, 185), 3, 24

OnTokens = Callable[[Any, ModeName, LiveCall], None]
OnStep = Callable[[ModeName, str], None]


async def both(llm: Any, folder: Path, on_tokens: OnTokens, on_step: OnStep) -> None:
    """To the end of both jobs, from wherever they are. A job that is done is not begun again."""
    for mode in MODES:
        if not (folder / mode / "outcome.json").exists():
            await one(llm, folder / mode, mode, on_tokens, on_step)


async def one(llm: Any, folder: Path, mode: ModeName, on_tokens: OnTokens, on_step: OnStep) -> None:
    from vllm import SamplingParams

    from vllm_hooks import RecoverableEngine, open_session

    folder.mkdir(parents=True, exist_ok=True)
    gym = GymConfig(mode=mode, generation_chunk_flush_tokens=4)
    config = CheckpointingConfig(enabled=True, store=str(folder / "store"), gym=gym, snapshot_interval_s=3600.0)
    session = await open_session(llm, config, test=False)
    with (folder / "lives.jsonl").open("a") as lives:
        counters = session.counters
        lives.write(json.dumps({"reused": counters.tokens_reused, "thrown_away": counters.tokens_regenerated}) + "\n")
    session.on_tokens = lambda call, n: on_tokens(session, mode, call)
    mailbox = Mailbox(folder / "mailbox.sqlite", step=lambda what: on_step(mode, what))
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def step(what: str) -> None:
        on_step(mode, what)
        if what.startswith("turn"):
            session.want_snapshot()

    engine = RecoverableEngine(llm, session)
    agent = Workplace(engine, session, "r", TASK, mailbox, turns=TURNS, params=params, step=step)
    for participant in (mailbox, agent):
        await asyncio.to_thread(session.participants.join, participant, PATIENCE_S)
    context = await agent.run()
    await session.stop(timeout_s=PATIENCE_S)
    (folder / "outcome.new").write_text(json.dumps({"context": context, **mailbox.contents()}))
    os.replace(folder / "outcome.new", folder / "outcome.json")


def main(model: str, folder: str, die: Sequence[str]) -> None:
    from prefix_recovery.engine import Engine
    from tests.conftest import ENGINE

    def on_tokens(session: Any, mode: ModeName, call: LiveCall) -> None:
        if len(die) == 3 and (mode, str(call.request.turn)) == (die[0], die[1]) and call.n_tokens >= int(die[2]):
            due = time.monotonic() + PATIENCE_S
            while session.stager.busy:  # a flush of this call has begun, and what was flushed is to be found again
                assert time.monotonic() < due, "the flush is not done"
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step(mode: ModeName, what: str) -> None:
        if len(die) == 2 and (mode, what) == (die[0], die[1]):
            os.kill(os.getpid(), signal.SIGKILL)

    engine = Engine(model, ENGINE)
    asyncio.run(both(engine.llm, Path(folder), on_tokens, on_step))
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
