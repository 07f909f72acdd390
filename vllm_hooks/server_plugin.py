"""The plug-in with which vLLM's OpenAI server carries on requests that have an attempt id.

Owns: the entry point of the group `vllm.endpoint_plugins`, where its configuration comes from, and what is joined when.
Does not know: what a request is, how it is captured.

Invariants:
1. Without a configuration, and with one that is not enabled, the server is as it was.
2. A configuration that cannot be used, and a store that cannot be restored, end the server at its start. vLLM goes on
   without a plug-in that cannot be made: so nothing is looked at before `attach_router`.
3. Only the two serving objects whose routes are captured get the capturing engine.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shlex
from collections.abc import Mapping
from os import environ
from pathlib import Path
from typing import Any

from recovery.config import CheckpointingConfig, effective_mode, load_loop_config, parse_loop_config
from vllm_hooks import surface
from vllm_hooks.capture import RecoverableEngine
from vllm_hooks.server_asgi import App, Receive, Scope, Send
from vllm_hooks.server_attempts import Attempts
from vllm_hooks.server_engine import AttemptEngine
from vllm_hooks.server_http import RecoveryLayer
from vllm_hooks.server_relay import RelayLayer, RelayServer, socket_path
from vllm_hooks.server_stopping import Stopping
from vllm_hooks.session import RecoverySession
from vllm_hooks.start import open_session

CONFIG = "PREFIX_RECOVERY_CONFIG"
"""Path of a YAML file with the block `rollout_checkpointing`."""
SET = "PREFIX_RECOVERY_SET"
"""Overrides, `a.b=c`, quoted and separated as a shell does."""

_ENDING_S = 10
"""What ends before the last snapshot: the engine, and the connections."""

_log = logging.getLogger("vllm.prefix_recovery")
"""Below vLLM's own: it goes where the server's lines go."""

_CAPTURING = ("openai_serving_chat", "openai_serving_completion")


def config_of(environment: Mapping[str, str]) -> CheckpointingConfig:
    """The block as the environment gives it. Raises ConfigError."""
    path, overrides = environment.get(CONFIG, ""), shlex.split(environment.get(SET, ""))
    loop = load_loop_config(path, overrides) if path else parse_loop_config({}, overrides)
    return loop.rollout_checkpointing


class RecoveryEndpoints:
    """One server process's; vllm.plugins.endpoint_plugins.interface.EndpointPlugin."""

    name = "prefix_recovery"
    required_tasks = ("generate",)
    session: RecoverySession
    attempts: Attempts

    def __init__(self) -> None:
        self._config: CheckpointingConfig | None = None
        self._captures, self._n_processes = True, 1
        self._relay: RelayServer | None = None
        self._end: Stopping | None = None

    def attach_router(self, app: Any) -> None:
        """Put the layer in: what is added later, authentication among it, is around it."""
        config = config_of(environ)
        if effective_mode(config) != "off":
            self._config, self._app = config, app
            app.add_middleware(self._layer)

    def _layer(self, app: App) -> App:
        """Whose it is is known after init_state, and vLLM may make its layers before: chosen with the first message."""
        made: list[App] = []

        async def layer(scope: Scope, receive: Receive, send: Send) -> None:
            if not made:
                made.append(RecoveryLayer(app, self) if self._captures else RelayLayer(app, socket_path()))
            await made[0](scope, receive, send)

        return layer

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Claim and restore the store. Raises RecoveryError and its kin."""
        if self._config is None:
            return
        rank, self._n_processes = surface.api_process(engine_client)
        self._captures = rank == 0
        if self._n_processes > 1:
            socket_path()  # raises here, and not when the first request comes
        if not self._captures:
            return
        if self._n_processes > 1 and (too_short := _too_short(engine_client, self._config)):
            _log.warning("%s", too_short)
        _log.info("%s: self-test of the engine, restore", self._config.store)
        self.session = await open_session(engine_client, self._config, must=fields_of(args))
        _log.info("%s", _opened(self.session))
        self.attempts = Attempts(self.session)
        self._end = Stopping(engine_client, self.session, self.attempts.end_all, self._config.grace_s)
        captured = RecoverableEngine(engine_client, self.session, replays=True)
        engine = AttemptEngine(engine_client, captured, self, self.attempts.records)
        for name in _CAPTURING:
            serving = getattr(state, name, None)
            if serving is not None:
                serving.engine_client = engine

    @property
    def stopping(self) -> bool:
        """The server is going to end."""
        return self._end is not None and self._end.begun

    async def start(self, layer: RecoveryLayer) -> None:
        """Hear of the server's end, and take what the other API server processes hand on."""
        if self._end is not None:
            self._end.listen()
        if self._n_processes > 1:
            self._relay = RelayServer(layer, {"app": self._app})
            await self._relay.start(socket_path())

    async def stop(self) -> None:
        """Take a last snapshot, unless the signal had it taken already."""
        if self._relay is not None:
            self._relay.close()
        if self._end is not None:
            await self._end.finish()


def _too_short(engine_client: Any, config: CheckpointingConfig) -> str:
    """What a signal will cost where vLLM kills its own processes before the last snapshot is taken; else empty."""
    given, wanted = engine_client.vllm_config.shutdown_timeout, math.ceil(config.grace_s) + _ENDING_S
    if given >= wanted:
        return ""
    return (
        f"SIGTERM will be a kill, and cost the newest tokens of each message: with several API server processes vLLM "
        f"ends them after --shutdown-timeout ({given} s); give it {wanted} or more"
    )


def _opened(session: RecoverySession) -> str:
    """What the start found, in a line for who reads the server's log."""
    restored, grade = session.opened.restored if session.opened is not None else None, session.parity.grade
    if restored is None or (restored.snapshot is None and not restored.adopted_segments):
        return f"a store with nothing to continue from; resumes will be graded `{grade}`"
    n_calls, n_tokens = session.counters.calls_restored, session.counters.tokens_reused
    return (
        f"continuing from snapshot {restored.snapshot or 'none'} and {restored.adopted_segments} later segments, as "
        f"snapshot {restored.published}: {n_calls} unfinished calls, {n_tokens} tokens of them kept; resumes are "
        f"graded `{grade}`"
    )


def fields_of(args: Any) -> dict[str, Any]:
    """What of the server's own arguments changes the prompts that requests become."""
    template = str(getattr(args, "chat_template", None) or "")
    text = template if "{" in template or not template else Path(template).read_text(encoding="utf-8")
    return {"server.chat_template": hashlib.sha256(text.encode()).hexdigest() if text else ""}
