"""vllm_hooks.server_stopping: what a server that is told to end does for the messages that it has not ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.test_server_http import ASK, CHAT, LONGEST_S, Client, Served, Tokens, on_loop, served
from vllm_hooks.server_http import RecoveryLayer
from vllm_hooks.server_stopping import SIGNALS, Stopping


async def three_tokens(one: Served, **more: Any) -> Client:
    client = Client(one.app, {**ASK, **more}, x_attempt_id="a")
    one.captured.allow(3)
    await client.until(lambda: len(client.tokens) == 3)
    return client


async def stored_at_the_signal(one: Served) -> Client:
    client = await three_tokens(one)
    one.end.begin()
    while not one.session.counters.snapshots:
        await asyncio.sleep(0.001)
    return client


@on_loop
async def test_an_open_stream_is_ended_and_what_it_has_is_kept(tmp_path: Path) -> None:
    """The last snapshot does not wait for clients: this one has not left."""
    async with served(tmp_path / "s") as one:
        client = await three_tokens(one)
        one.end.begin()
        one.bare.errored = True
        await one.end._end
        assert not client.left.is_set() and one.session.counters.last_snapshot is not None
        await client.answer()
        assert client.code == "recovery_stopping" and client.tokens == [0, 1, 2]
    async with served(tmp_path / "s") as two:
        (call,) = two.attempts.describe("a")["calls"]
        assert call["n_tokens"] == 3
        two.captured.allow(3)
        assert (await Client(two.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))


@on_loop
async def test_an_engine_that_is_ended_on_purpose_has_not_died(tmp_path: Path) -> None:
    """vLLM's streams then end with what they end with when it dies: the last snapshot is taken all the same."""
    async with served(tmp_path / "s") as one:
        client = await stored_at_the_signal(one)
        one.captured.allow(1)
        await client.until(lambda: len(client.tokens) == 4)
        one.session.engine_died(RuntimeError("its process is gone"))
        one.bare.errored = True
        await one.end._end
        assert one.session.counters.snapshots == 2 and one.session.dead_engine is None
        (entry,) = one.session.stored.entries()
        assert entry.n_tokens == 4


@on_loop
async def test_an_end_that_fails_is_told_of(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:

        async def broken() -> None:
            raise ValueError("no such connection")

        end = Stopping(one.bare, one.session, broken, grace_s=60)
        end.begin()
        one.bare.errored = True
        while one.session.failure is None:
            await asyncio.sleep(0.001)
        assert "no such connection" in str(one.session.failure)
        one.session.failure = None  # so that it can be closed


@on_loop
async def test_while_the_engine_goes_on_its_streams_do(tmp_path: Path) -> None:
    """`--shutdown-timeout`: what is captured is stored at the signal, and what comes later at the end."""
    async with served(tmp_path / "s") as one:
        client = await stored_at_the_signal(one)
        late = await Client(one.app, ASK, x_attempt_id="b").answer()
        assert (late.status, late.code, late.headers["x-should-retry"]) == (503, "recovery_stopping", "true")
        one.captured.allow(3)
        assert (await client.answer()).tokens == list(range(6))
        await one.end.finish()
        await one.end.finish()
    async with served(tmp_path / "s") as two:
        assert two.attempts.describe("a")["state"] == "ended" and two.attempts.describe("b") is None


@on_loop
async def test_all_connections_are_told_as_they_can_be(tmp_path: Path) -> None:
    """One that is served, one that waits for its turn, and one that the handler left running."""
    async with served(tmp_path / "s") as one:
        one.lazy = True
        streamed = await three_tokens(one)
        whole = Client(one.app, {**ASK, "stream": False}, x_attempt_id="b")
        while len(one.attempts._connections) < 2:
            await asyncio.sleep(0.001)
        one.bare.errored = True
        one.end.begin()
        assert (await streamed.answer()).code == "recovery_stopping"
        await whole.answer()
        assert (whole.status, whole.code) == (503, "recovery_stopping")
        await one.end.finish()
        assert not one.attempts._connections


@pytest.mark.parametrize("how", ["abort", "error"])
def test_an_engine_that_is_ended_ends_no_message(tmp_path: Path, how: str) -> None:
    """Told "abort" as its reason, a client would take half a message for the whole of it."""

    async def scenario(folder: Path) -> None:
        async with served(folder / "s") as one:

            async def ending(prompt: Any, params: Any, name: str) -> AsyncIterator[Tokens]:
                yield Tokens([0])
                await one.captured.permits.acquire()
                if how == "error":
                    raise RuntimeError("the engine is dead")
                yield Tokens([], "abort")

            one.captured.generate = ending  # type: ignore[method-assign]
            client = Client(one.app, ASK, x_attempt_id="a")
            await client.until(lambda: client.tokens == [0])
            one.end.begin()
            one.captured.allow()
            one.bare.errored = True
            assert (await client.answer()).code == "recovery_stopping"

    on_loop(scenario)(tmp_path)


def test_a_signal_is_heard_beside_the_servers_own_handler() -> None:
    wanted: list[str] = []
    heard: list[int] = []

    async def scenario() -> None:
        loop, both = asyncio.get_running_loop(), asyncio.Event()

        async def stop(*, timeout_s: float) -> None:
            wanted.append(f"stop {timeout_s}")

        async def nobody() -> None:
            wanted.append("end connections")

        session: Any = SimpleNamespace(want_snapshot=wanted.append, stop=stop)
        end = Stopping(SimpleNamespace(errored=False), session, nobody, 7)
        for number in SIGNALS:
            loop.add_signal_handler(number, lambda number=number: (heard.append(number), both.set()))
        end.listen()
        for number in SIGNALS:
            both.clear()
            os.kill(os.getpid(), number)
            await asyncio.wait_for(both.wait(), 120)
        while not end.begun:
            await asyncio.sleep(0.001)
        assert wanted == ["shutdown"]
        await end.finish()
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    with signals_restored():
        asyncio.run(scenario())
    assert heard == list(SIGNALS)
    assert wanted == ["shutdown", "end connections", "stop 7"]


def test_a_signal_without_a_handler_does_what_it_did() -> None:
    async def scenario() -> None:
        session: Any = None
        Stopping(None, session, asyncio.sleep, 7).listen()  # type: ignore[arg-type]

    with signals_restored():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asyncio.run(scenario())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@contextmanager
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class EngineClient:
    """As vLLM's server sees its engine: gone once it was shut down."""

    vllm_config = SimpleNamespace(shutdown_timeout=0)
    errored, is_running = False, True

    def shutdown(self, timeout: float) -> None:
        self.errored = True


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def ends_under_two_streams(one: Served, folder: Path) -> None:
    """What `vllm serve` runs, around a handler of ours: its loop, its signals, its wait for connections."""
    from fastapi import FastAPI
    from starlette.responses import StreamingResponse
    from vllm.entrypoints.launchers.launcher import create_server_unix_socket, serve_http

    app, engine, may_end = FastAPI(), EngineClient(), asyncio.Event()
    app.state.engine_client = one.end._engine = engine

    async def start(layer: RecoveryLayer) -> None:
        one.end.listen()

    one.start = start  # type: ignore[method-assign]

    async def lines() -> AsyncIterator[bytes]:
        yield b"begun\n"
        await may_end.wait()

    def layer(app: Any) -> RecoveryLayer:
        async def route(scope: Any, receive: Any, send: Any) -> None:
            handler = one._handler if scope["type"] == "http" and scope["path"] == CHAT else app
            await handler(scope, receive, send)

        return RecoveryLayer(route, one)

    app.add_api_route("/bare", lambda: StreamingResponse(lines()))
    app.add_middleware(layer)  # type: ignore[arg-type]
    sock = create_server_unix_socket(str(folder / "u"))

    async def serve() -> None:
        await (await serve_http(app, sock, host="", port=0, timeout_keep_alive=5, log_config=None))

    server = asyncio.ensure_future(serve())
    await until(lambda: server.done() or (hasattr(app.state, "server") and app.state.server.started))
    one.captured.allow(3)
    transport = httpx.AsyncHTTPTransport(uds=str(folder / "u"))
    async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=LONGEST_S) as client:
        async with client.stream("GET", "/bare") as bare:
            assert await anext(bare.aiter_lines()) == "begun"
            async with client.stream("POST", CHAT, json=ASK, headers={"X-Attempt-Id": "a"}) as captured:
                events = (json.loads(line[len("data: ") :]) async for line in captured.aiter_lines() if line)
                assert [await anext(events) for _ in range(3)] == [[0], [1], [2]]
                os.kill(os.getpid(), signal.SIGTERM)
                assert (await anext(events))["error"]["code"] == "recovery_stopping"
            assert one.end._end is not None
            await one.end._end
            assert one.session.counters.last_snapshot is not None
            assert not server.done(), "vLLM waits for the client of the other stream"
            may_end.set()
        await server


def test_the_last_snapshot_of_vllms_server_waits_for_no_client(tmp_path: Path) -> None:
    import uvloop

    async def scenario(folder: Path) -> None:
        async with served(tmp_path / "s") as one:
            await ends_under_two_streams(one, folder)
        async with served(tmp_path / "s") as two:
            (call,) = two.attempts.describe("a")["calls"]
            assert call["n_tokens"] == 3

    with signals_restored(), tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        uvloop.run(asyncio.wait_for(scenario(Path(folder)), LONGEST_S))
