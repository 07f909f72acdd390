"""vllm_hooks.server_stopping: what a server that is told to end does for the messages that it has not ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_server_http import ASK, Client, Served, Tokens, on_loop, served
from vllm_hooks.server_stopping import SIGNALS, Stopping


async def three_tokens(one: Served, **more: Any) -> Client:
    client = Client(one.app, {**ASK, **more}, x_attempt_id="a")
    one.captured.allow(3)
    await client.until(lambda: len(client.tokens) == 3)
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
async def test_while_the_engine_goes_on_its_streams_do(tmp_path: Path) -> None:
    """`--shutdown-timeout`: what is captured is stored at the signal, and what comes later at the end."""
    async with served(tmp_path / "s") as one:
        client = await three_tokens(one)
        one.end.begin()
        while not one.session.counters.snapshots:
            await asyncio.sleep(0.001)
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

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        asyncio.run(scenario())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == list(SIGNALS)
    assert wanted == ["shutdown", "end connections", "stop 7"]


def test_a_signal_without_a_handler_does_what_it_did() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:

        async def scenario() -> None:
            session: Any = None
            Stopping(None, session, asyncio.sleep, 7).listen()  # type: ignore[arg-type]

        asyncio.run(scenario())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
