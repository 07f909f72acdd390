"""vllm_hooks/server_relay.py: a process that was asked, and the one that captures, joined by a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recovery.errors import ConfigError
from tests.test_server_http import ASK, CHAT, LONGEST_S, Client, Served, on_loop, served
from vllm_hooks import server_claims as claims
from vllm_hooks import server_plugin
from vllm_hooks.server_engine import AttemptEngine
from vllm_hooks.server_plugin import RecoveryEndpoints
from vllm_hooks.server_relay import RelayLayer, RelayServer, socket_path


class Asked:
    """The other process: `app` is what its clients reach."""

    def __init__(self, path: Path) -> None:
        self.app = RelayLayer(self._handler, path)
        self.own: list[Any] = []

    async def _handler(self, scope: Any, receive: Any, send: Any) -> None:
        self.own.append(scope)
        body = b""
        if scope["type"] == "http":
            body = (await receive())["body"]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"data: " + json.dumps([-2]).encode() + b"\n\n"})
        self.own.append(body)


@asynccontextmanager
async def relayed(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Served, Asked]]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        path = Path(folder) / "s"
        async with served(tmp_path / "store", **more) as one:
            relay = RelayServer(one.app, {"app": "of the process that captures"})
            await relay.start(path)
            yield one, Asked(path)
            relay.close()


@on_loop
async def test_what_has_no_attempt_stays_where_it_came(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (one, asked):
        raw = b'{"prompt": [1], "stream": true, "note": "attempt_id"}'
        assert (await Client(asked.app, raw).answer()).tokens == [-2]
        assert (await Client(asked.app, raw, path="/v1/models").answer()).tokens == [-2]
        assert asked.own[1] == raw
        assert not one.given


@on_loop
async def test_a_captured_request_is_handed_on_and_answered_as_it_comes(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (one, asked):
        client = Client(asked.app, ASK, x_attempt_id="a", authorization="Bearer ada")
        for n in range(1, 7):
            one.captured.allow()
            await client.until(lambda n=n: len(client.tokens) == n)
        await client.answer()
        assert client.headers[claims.HEADER] == "a"
        scope, raw = one.given[0]
        assert json.loads(raw) == ASK
        assert scope["app"] == "of the process that captures"
        assert (b"authorization", b"Bearer ada") in scope["headers"]
        assert not asked.own
        about = Client(asked.app, b"", path="/v1/recovery/attempts/a", method="GET", authorization="Bearer ada")
        assert json.loads((await about.answer()).body)["state"] == "ended"
        assert json.loads((await Client(asked.app, b"", path="/v1/recovery", method="GET").answer()).body)["epoch"] == 1
        refused = await Client(asked.app, ASK, x_attempt_id="a", authorization="Bearer bob").answer()
        assert (refused.status, refused.code) == (403, "attempt_of_another_key")


@on_loop
async def test_a_client_that_leaves_is_seen_by_the_process_that_captures(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (one, asked):
        client = Client(asked.app, ASK, x_attempt_id="a")
        one.captured.allow(2)
        await client.until(lambda: len(client.tokens) == 2)
        client.left.set()
        await client.answer()
        while one.attempts.describe("a")["state"] != "interrupted":
            await asyncio.sleep(0.01)
        one.captured.allow(4)
        assert (await Client(one.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))


@on_loop
async def test_of_two_connections_in_two_processes_the_newer_is_served(tmp_path: Path) -> None:
    async with relayed(tmp_path) as (one, asked):
        first = Client(asked.app, ASK, x_attempt_id="a")
        one.captured.allow(2)
        await first.until(lambda: len(first.tokens) == 2)
        second = Client(one.app, ASK, x_attempt_id="a")
        await first.answer()
        assert first.code == "attempt_taken_over"
        third = Client(asked.app, {**ASK, "stream": False}, x_attempt_id="a")
        await second.answer()
        assert second.code == "attempt_taken_over"
        one.captured.allow(4)
        assert json.loads((await third.answer()).body) == list(range(6))


@on_loop
async def test_a_process_that_captures_no_more_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Not up yet: to be asked again. Gone in mid-answer: broken off, as if it had been the process that was asked."""
    asked = Asked(tmp_path / "nobody")
    early = await Client(asked.app, ASK, x_attempt_id="a").answer()
    assert (early.status, early.code, early.headers["x-should-retry"]) == (503, "recovery_starting", "true")
    assert (await Client(asked.app, ASK).answer()).tokens == [-2]
    async with relayed(tmp_path) as (one, asked):

        async def broken(scope: Any, receive: Any, send: Any) -> None:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"data: [0]\n\n", "more_body": True})
            raise ConnectionResetError

        one.app._app = broken
        client = Client(asked.app, ASK, x_attempt_id="a")
        with pytest.raises(ConnectionError, match="broke off"):
            await client.answer()
        assert client.tokens == [0] and not client.over


@pytest.mark.parametrize(("shutdown_timeout", "warned"), [(0, True), (29, True), (30, False)])
def test_of_the_processes_of_one_launcher_the_first_captures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shutdown_timeout: int, warned: bool
) -> None:
    """The plug-in in two processes, as vLLM puts it in: the second has no session, and hands on.

    If the launcher would kill them before the last snapshot, the first says so at its start.
    """
    store = f"rollout_checkpointing.store={tmp_path / 'store'}"
    monkeypatch.setenv(server_plugin.SET, f"rollout_checkpointing.enabled=true {store}")
    args = SimpleNamespace(chat_template=None)

    async def plugged_in(rank: int, shutdown_timeout: int) -> tuple[RecoveryEndpoints, Any]:
        layers: list[Any] = []
        plugin = RecoveryEndpoints()
        plugin.attach_router(SimpleNamespace(add_middleware=layers.append))
        processes = SimpleNamespace(_api_process_rank=rank, _api_process_count=2)
        client = SimpleNamespace(
            vllm_config=SimpleNamespace(parallel_config=processes, shutdown_timeout=shutdown_timeout)
        )
        state = SimpleNamespace(openai_serving_chat=SimpleNamespace(engine_client=client))
        await plugin.init_state(client, state, args)
        assert (state.openai_serving_chat.engine_client is client) == (rank > 0)
        return plugin, layers[0]

    async def scenario() -> None:
        async with served(tmp_path / "store") as one:

            async def opened(*_: Any, **__: Any) -> Any:
                return one.session

            said: list[str] = []
            monkeypatch.setattr(server_plugin._log, "info", lambda form, *values: said.append(form % values))
            warnings: list[str] = []
            monkeypatch.setattr(server_plugin._log, "warning", lambda form, *values: warnings.append(form % values))
            monkeypatch.setattr(server_plugin, "open_session", opened)
            monkeypatch.setattr(server_plugin, "RecoverableEngine", lambda *_, **__: one.captured)
            second, make_second = await plugged_in(1, 0)
            first, make_first = await plugged_in(0, shutdown_timeout)
            first_layer, second_layer = make_first(one._handler), make_second(one._handler)
            one.engine = AttemptEngine(None, one.captured, one, first.attempts.records)
            early = await Client(second_layer, ASK, x_attempt_id="a").answer()
            assert early.code == "recovery_starting"
            await first.start(first_layer)
            one.captured.allow(6)
            assert (await Client(second_layer, ASK, x_attempt_id="a").answer()).tokens == list(range(6))
            assert first.attempts.describe("a")["state"] == "ended"
            assert not hasattr(second, "session")
            assert len(said) == 2 and said[0].startswith(str(tmp_path / "store")) and "nothing to continue" in said[1]
            assert [f"--shutdown-timeout ({shutdown_timeout} s); give it 30" in one for one in warnings] == [
                True
            ] * warned
            await first.stop()

    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        asyncio.run(asyncio.wait_for(scenario(), LONGEST_S))


def test_the_socket_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if len(os.fsencode(tmp_path)) < 50:
        path = socket_path()
        assert path == socket_path() and path.parent.stat().st_mode & 0o077 == 0
        path.parent.chmod(0o755)
        with pytest.raises(ConfigError, match="not a folder of this user alone"):
            socket_path()
        path.parent.rmdir()
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="too long"):
        socket_path()


def test_the_route_is_the_same_under_a_root_path() -> None:
    scope = {"method": "POST", "path": f"/proxy{CHAT}", "root_path": "/proxy", "headers": []}
    assert claims.is_generating(scope)
