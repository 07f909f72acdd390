"""vllm_hooks/server_*.py without a server: the layer around a handler of its own kind, on a real session and store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recovery.config import CheckpointingConfig
from recovery.errors import ConfigError, Damaged, Fenced
from recovery.model import Request
from recovery.reconnection import Forget
from recovery.resume import StopRules
from vllm_hooks import server_claims as claims
from vllm_hooks.server_attempts import Attempts
from vllm_hooks.server_engine import AttemptEngine, attempt_of_name
from vllm_hooks.server_http import RecoveryLayer
from vllm_hooks.server_plugin import CONFIG, SET, RecoveryEndpoints, config_of
from vllm_hooks.server_stopping import Stopping
from vllm_hooks.session import RecoverySession

STOP = StopRules((), 4096)
CHAT = "/v1/chat/completions"
LONGEST_S = 300.0


class Tokens(list[int]):
    """One output of the engine: new tokens. `outputs` is what else is looked at."""

    def __init__(self, tokens: list[int], finish_reason: str | None = None) -> None:
        super().__init__(tokens)
        self.outputs = [SimpleNamespace(finish_reason=finish_reason)]


class Engine:
    """A captured engine: `n_tokens` tokens counting up, one for each permission it is given."""

    def __init__(self, session: RecoverySession, n_tokens: int) -> None:
        self.session, self.n_tokens = session, n_tokens
        self.permits = asyncio.Semaphore(0)
        self.aborted: list[str] = []
        self._running: dict[str, bool] = {}

    def allow(self, n: int = 1) -> None:
        for _ in range(n):
            self.permits.release()

    async def abort(self, name: str) -> None:
        self.aborted.append(name)
        self._running[name] = False
        self.allow()

    async def generate(self, prompt: list[int], params: Any, name: str) -> AsyncIterator[Tokens]:
        request = Request(
            rollout=name,
            prompt_token_ids=np.asarray(prompt, np.int32),
            sampling={"temperature": 0.0},
            source_digest=self.session.source_digests.get(name, ""),
        )
        call = await self.session.admit(request, STOP)
        self._running[name] = True
        try:
            if len(call.transcript_ids):
                yield Tokens(list(call.transcript_ids))
            while call.n_tokens < self.n_tokens:
                await self.permits.acquire()
                if not self._running[name]:
                    return
                self.session.captured(call, [call.n_tokens], None)
                yield Tokens([call.n_tokens - 1])
            await self.session.terminal(call, "length", None)
        finally:
            self.session.left(call)


class Client:
    """One HTTP exchange with an ASGI application."""

    def __init__(
        self, app: Any, body: Any, *, path: str = CHAT, method: str = "POST", **headers: str | list[str]
    ) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.half = len(raw) // 2
        self._parts = [
            {"type": "http.request", "body": raw[: self.half], "more_body": True},
            {"type": "http.request", "body": raw[self.half :], "more_body": False},
        ]
        self.left, self.grown = asyncio.Event(), asyncio.Event()
        self.status, self.headers, self.body, self.over = 0, {}, b"", False  # type: int, dict[str, str], bytes, bool
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "headers": pairs, "root_path": ""}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._parts:
            return self._parts.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        assert not self.over, "something was sent after the end"
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.over = not message.get("more_body", False)
        self.grown.set()

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, list) for token in event]

    @property
    def events(self) -> list[Any]:
        return [json.loads(line[len("data: ") :]) for line in self.body.decode().split("\n\n") if line]

    @property
    def code(self) -> str:
        """Of the error that it got, as its last event or as its whole answer."""
        last = self.events[-1] if self.body.startswith(b"data") else json.loads(self.body)
        return str(last["error"]["code"])

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.grown.clear()
            await asyncio.wait_for(self.grown.wait(), LONGEST_S)

    async def answer(self) -> Client:
        await asyncio.wait_for(self.task, LONGEST_S)
        return self


class Served:
    """A layer around a handler, on one session. `handler` is told what it was given."""

    def __init__(self, store: Path, keep: int, n_tokens: int, **block: Any) -> None:
        config = CheckpointingConfig(enabled=True, store=str(store), **block)
        self.session = RecoverySession.open(config, must={}, stop=STOP)
        self.keep, self.n_tokens = keep, n_tokens
        self.given: list[tuple[dict[str, Any], bytes]] = []
        self.lazy = False

    async def __aenter__(self) -> Served:
        self.session.start()
        self.attempts = Attempts(self.session, self.keep)
        self.captured = Engine(self.session, self.n_tokens)
        self.bare = SimpleNamespace(generate=self._bare, errored=False)
        self.end = Stopping(self.bare, self.session, self.attempts.end_all, grace_s=60)
        self.engine = AttemptEngine(self.bare, self.captured, self, self.attempts.records)
        self.app = RecoveryLayer(self._handler, self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, layer: RecoveryLayer) -> None:
        """It is alone."""

    @property
    def stopping(self) -> bool:
        return self.end.begun

    async def stop(self) -> None:
        await self.end.finish()

    async def _bare(self, prompt: Any, params: Any, name: str) -> AsyncIterator[list[int]]:
        yield [-1]

    async def _handler(self, scope: Any, receive: Any, send: Any) -> None:
        """As vLLM's: the body is read, the engine is asked, a stream is sent as it comes, and a leaving client seen."""
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message["more_body"]
        self.given.append((scope, raw))
        body = json.loads(raw)
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"), clone=lambda: SimpleNamespace())
        stream = self.engine.generate(body["prompt"], params, "chatcmpl-1")
        if body.get("mistake"):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
            return
        serving = asyncio.ensure_future(self._send(stream, body.get("stream"), send))
        leaving = [asyncio.ensure_future(receive()) for _ in range(2)]  # vLLM's handler listens, and its response too
        try:
            await asyncio.wait((serving, *leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in leaving:
                one.cancel()
            if not self.lazy:
                serving.cancel()  # a lazy one leaves its task behind, as merged streams of several prompts do
        if serving.done() and not serving.cancelled():
            serving.result()

    async def _send(self, stream: Any, streamed: bool, send: Any) -> None:
        kind = b"text/event-stream; charset=utf-8" if streamed else b"application/json"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        tokens: list[int] = []
        if streamed:
            await send(start)
        async for fresh in stream:
            tokens += fresh
            if streamed:
                event = f"data: {json.dumps(fresh)}\n\n".encode()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        if not streamed:
            await send(start)
        await send({"type": "http.response.body", "body": b"" if streamed else json.dumps(tokens).encode()})


@asynccontextmanager
async def served(store: Path, keep: int = 100, n_tokens: int = 6, **block: Any) -> AsyncIterator[Served]:
    async with Served(store, keep, n_tokens, **block) as one:
        yield one


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(asyncio.wait_for(test(tmp_path), LONGEST_S))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


ASK = {"prompt": [1, 2], "stream": True}


@on_loop
async def test_a_request_without_an_attempt_is_handed_on_as_it_came(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        raw = b'{"prompt": [1],  "stream": true, "note": "attempt_id"}'
        client = await Client(one.app, raw, content_type="application/json").answer()
        assert client.tokens == [-1]
        assert claims.HEADER not in client.headers
        scope, given = one.given[0]
        assert given == raw
        assert scope["headers"] == [(b"content-type", b"application/json")]
        assert one.attempts.status()["tokens_captured"] == 0
        broken = Client(one.app, b"{", x_attempt_id="a")
        with pytest.raises(json.JSONDecodeError):  # the handler's own
            await broken.answer()


@on_loop
async def test_header_and_argument_name_one_attempt(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        one.captured.allow(6)
        first = await Client(one.app, ASK, x_attempt_id="a").answer()
        again = await Client(one.app, {**ASK, "stream": False, "vllm_xargs": {"attempt_id": "a"}}).answer()
        assert first.tokens == list(range(6))
        assert first.headers[claims.HEADER] == "a"
        assert json.loads(again.body) == first.tokens
        assert (b"x-request-id", b"a") in one.given[0][0]["headers"]
        assert one.attempts.describe("a") == {
            "attempt": "a",
            "state": "ended",
            "calls": [{"name": "attempt-a-0", "n_tokens": 6, "finish_reason": "length", "resumed_at": []}],
        }


@on_loop
async def test_the_newer_of_two_streams_is_served(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        first = Client(one.app, ASK, x_attempt_id="a")
        one.captured.allow(2)
        await first.until(lambda: len(first.tokens) == 2)
        assert one.attempts.describe("a")["state"] == "connected"
        second = Client(one.app, ASK, x_attempt_id="a")
        await first.answer()
        assert first.code == "attempt_taken_over"
        one.captured.allow(4)
        assert (await second.answer()).tokens == list(range(6))
        assert one.attempts.status()["tokens_captured"] == 6


@on_loop
async def test_the_newest_of_many_is_served_and_all_others_are_told(tmp_path: Path) -> None:
    """Not streamed, so that nothing was said before: each is told in its status, and told not to try again."""
    async with served(tmp_path / "s") as one:
        clients = [Client(one.app, {**ASK, "stream": False}, x_attempt_id="a") for _ in range(5)]
        for client in clients[:-1]:
            await client.answer()
            assert (client.status, client.code) == (409, "attempt_taken_over")
            assert client.headers["x-should-retry"] == "false"
        one.captured.allow(6)
        assert json.loads((await clients[-1].answer()).body) == list(range(6))


@on_loop
async def test_a_successor_waits_for_what_a_handler_left_running(tmp_path: Path) -> None:
    """A task of the first handler still waits for the engine: its request is aborted, and no token is doubled."""
    async with served(tmp_path / "s") as one:
        one.lazy = True
        first = Client(one.app, ASK, x_attempt_id="a")
        one.captured.allow(2)
        await first.until(lambda: len(first.tokens) == 2)
        second = Client(one.app, ASK, x_attempt_id="a")
        await first.answer()
        assert one.captured.aborted == ["attempt-a-0"]
        one.captured.allow(6)
        assert (await second.answer()).tokens == list(range(6))


async def leaves_after_three(one: Any) -> None:
    """A client of attempt `a` that has three tokens when it leaves."""
    client = Client(one.app, ASK, x_attempt_id="a")
    one.captured.allow(3)
    await client.until(lambda: len(client.tokens) == 3)
    client.left.set()
    await client.answer()


@on_loop
async def test_a_client_that_leaves_loses_nothing(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        await leaves_after_three(one)
        assert one.attempts.describe("a")["state"] == "interrupted"
        one.captured.allow(3)
        assert (await Client(one.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))
        assert one.attempts.status()["tokens_captured"] == 6


@on_loop
async def test_where_a_call_was_carried_on_is_told_in_the_next_life(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        await leaves_after_three(one)
    async with served(tmp_path / "s") as two:
        assert two.attempts.describe("a")["state"] == "interrupted"
        two.captured.allow(3)
        assert (await Client(two.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))
        (call,) = two.attempts.describe("a")["calls"]
        assert (call["n_tokens"], call["resumed_at"]) == (6, [3])
        assert two.attempts.status()["tokens_captured"] == 3


@on_loop
async def test_a_client_that_leaves_in_its_body_is_nobody(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        client = Client(one.app, ASK, x_attempt_id="a")
        client._parts.pop()
        client.left.set()
        await client.answer()
        assert not one.given and client.status == 0


@on_loop
async def test_an_attempt_is_one_request_of_one_key_in_every_life(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        one.captured.allow(6)
        await Client(one.app, ASK, x_attempt_id="a", authorization="Bearer the-key-of-ada").answer()
    async with served(tmp_path / "s") as two:
        for key, body, code in (
            ("Bearer bob", ASK, "attempt_of_another_key"),
            ("", ASK, "attempt_of_another_key"),
            ("Bearer the-key-of-ada", {**ASK, "prompt": [1, 3]}, "attempt_of_another_request"),
            ("Bearer the-key-of-ada", {**ASK, "temperature": 0.5}, "attempt_of_another_request"),
        ):
            refused = await Client(two.app, body, x_attempt_id="a", authorization=key).answer()
            assert refused.code == code
            assert refused.headers["x-should-retry"] == "false"
        answer = await Client(two.app, ASK, x_attempt_id="a", authorization="Bearer the-key-of-ada").answer()
        assert answer.tokens == list(range(6)), "from the store: the engine had no permission"
        assert two.attempts.status()["tokens_captured"] == 0
        stored = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
        assert b"the-key-of-ada" not in stored  # not three letters: digests are written in hexadecimal


@on_loop
async def test_what_was_never_served_does_not_keep_its_id(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        mistaken = await Client(one.app, {**ASK, "mistake": True}, x_attempt_id="a").answer()
        assert mistaken.status == 400
        one.captured.allow(6)
        assert (await Client(one.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))


async def each_asks(one: Served, names: str) -> None:
    """One attempt after the other, each with a prompt of its own, to its end."""
    one.captured.allow(100)
    for name in names:
        await Client(one.app, {**ASK, "prompt": [ord(name)]}, x_attempt_id=name).answer()


@on_loop
async def test_only_so_many_idle_attempts_are_kept_and_the_store_forgets_the_others(tmp_path: Path) -> None:
    async with served(tmp_path / "s", keep=2) as one:
        await each_asks(one, "abcd")
        assert [name for name in "abcd" if one.attempts.describe(name)] == ["c", "d"]
    async with served(tmp_path / "s", keep=2) as two:
        assert [name for name in "abcd" if two.attempts.describe(name)] == ["c", "d"]
        two.captured.allow(6)
        await Client(two.app, {**ASK, "prompt": [5]}, x_attempt_id="e").answer()
    async with served(tmp_path / "s", keep=2) as three:
        assert {attempt_of_name(e.identity.rollout) for e in three.session.stored.entries()} == {"d", "e"}


@on_loop
async def test_an_owner_asks_and_forgets(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        path = "/v1/recovery/attempts/a%2F1"
        unknown = await Client(one.app, b"", path=path, method="GET").answer()
        assert (unknown.status, unknown.code) == (404, "attempt_unknown")
        first = Client(one.app, ASK, x_attempt_id="a/1", authorization="Bearer ada")
        one.captured.allow(1)
        await first.until(lambda: len(first.tokens) == 1)
        busy = await Client(one.app, b"", path=path, method="DELETE", authorization="Bearer ada").answer()
        assert (busy.status, busy.code) == (409, "attempt_connected")
        one.captured.allow(5)
        await first.answer()
        other = await Client(one.app, b"", path=path, method="DELETE").answer()
        assert (other.status, other.code) == (403, "attempt_of_another_key")
        done = await Client(one.app, b"", path=path, method="DELETE", authorization="Bearer ada").answer()
        assert done.status == 200 and one.attempts.describe("a/1") is None


@on_loop
async def test_an_attempt_of_which_nothing_was_kept_is_free_at_once(tmp_path: Path) -> None:
    """A request that was refused, say: nobody had it forgotten, and the client asks again under its id."""
    async with served(tmp_path / "s") as one:
        one.attempts._do([Forget("a")])
        one.captured.allow(100)
        assert (await Client(one.app, ASK, x_attempt_id="a").answer()).status == 200


@on_loop
async def test_a_forgotten_attempt_is_nobodys_while_the_store_has_it(tmp_path: Path) -> None:
    """Another key would be told its answer, and a new message under its id be dropped with the next snapshot."""
    async with served(tmp_path / "s") as one:
        first = Client(one.app, ASK, x_attempt_id="a", authorization="Bearer ada")
        one.captured.allow(100)
        await first.answer()
        path, wanted = "/v1/recovery/attempts/a", list[str]()
        one.session.want_snapshot = wanted.append  # type: ignore[method-assign]
        done = await Client(one.app, b"", path=path, method="DELETE", authorization="Bearer ada").answer()
        assert done.status == 200 and wanted == ["forget"]
        for key in ("ada", "bob"):
            for _ in range(2):
                refused = await Client(one.app, ASK, x_attempt_id="a", authorization=f"Bearer {key}").answer()
                assert (refused.status, refused.code) == (409, "attempt_just_forgotten")
                assert refused.headers["x-should-retry"] == "true"
        RecoverySession.want_snapshot(one.session, wanted[0])
        while not one.session.counters.snapshots:
            await asyncio.sleep(0.001)
        assert one.session.stored.entries() == [], "it was younger than any snapshot, and is in none"
        again = await Client(one.app, ASK, x_attempt_id="a", authorization="Bearer bob").answer()
        assert again.status == 200 and len(again.tokens) == len(first.tokens)
        assert one.attempts.is_owned("a", "bob")


@on_loop
async def test_one_that_was_idle_for_long_and_is_asked_for_again_gets_one_answer_and_keeps_it(tmp_path: Path) -> None:
    """It ended, was forgotten before any snapshot had it, and its client asks at once: the answer is the call's own."""
    async with served(tmp_path / "s", keep=1) as one:
        await each_asks(one, "ab")
        again = {**ASK, "prompt": [ord("a")]}
        refused = await Client(one.app, again, x_attempt_id="a").answer()
        assert (refused.status, refused.code) == (409, "attempt_just_forgotten")
        while (answer := await Client(one.app, again, x_attempt_id="a").answer()).status == 409:
            await asyncio.sleep(0.001)  # a snapshot is taken without anybody's asking for one
        assert answer.tokens == list(range(6)) and not one.attempts._forgotten.get("a")
    async with served(tmp_path / "s", keep=1) as two:
        assert two.attempts.describe("a")["state"] == "ended"
        assert (await Client(two.app, again, x_attempt_id="a").answer()).tokens == list(range(6))
        assert two.session.counters.tokens_captured == 0


@on_loop
async def test_of_an_attempt_that_no_snapshot_had_the_store_keeps_nothing(tmp_path: Path) -> None:
    """What was captured of it is stored with the snapshot that forgets it: those segments are garbage like others."""
    async with served(tmp_path / "s", keep_latest_k=1) as one:

        async def published(cause: str) -> None:
            n = one.session.counters.snapshots
            one.session.want_snapshot(cause)
            while one.session.counters.snapshots == n:
                await asyncio.sleep(0.001)

        def segments() -> set[str]:
            assert one.session.opened is not None
            return {item.key for item in one.session.opened.store.list("seg/")}

        one.captured.allow(100)
        await Client(one.app, ASK, x_attempt_id="young").answer()
        assert one.attempts.forget("young")
        await published("test")
        young = segments()
        assert young and one.session.stored.entries() == []
        for n in range(8):
            await Client(one.app, ASK, x_attempt_id=f"old-{n}").answer()
            await published("test")
            if not young & segments():
                break
        assert not young & segments()
        assert len(one.session.stored.entries()) == n + 1


@on_loop
async def test_a_server_that_may_not_store_says_so_and_serves_the_others(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        one.session.fail(Fenced("another server has taken the store over"))
        refused = await Client(one.app, ASK, x_attempt_id="a").answer()
        assert (refused.status, refused.code) == (503, "recovery_stopped")
        assert "taken the store over" in json.loads(refused.body)["error"]["message"]
        assert (await Client(one.app, ASK).answer()).tokens == [-1]
        one.session.failure = None  # so that it can be closed


@on_loop
async def test_c8_an_idle_server_learns_that_another_took_its_store(tmp_path: Path) -> None:
    """C8: an attempt that had ended is captured no more, so that no snapshot of it would find out."""
    async with served(tmp_path / "s", snapshot_interval_s=0.01) as one:
        one.captured.allow(6)
        await Client(one.app, ASK, x_attempt_id="a").answer()
        while one.session._has_news():
            await asyncio.sleep(0.001)
        assert (await Client(one.app, ASK, x_attempt_id="a").answer()).tokens == list(range(6))
        async with served(tmp_path / "s") as two:
            assert two.attempts.describe("a")["state"] == "ended"
            while one.session.failure is None:
                await asyncio.sleep(0.001)
            refused = await Client(one.app, ASK, x_attempt_id="a").answer()
            assert (refused.status, refused.code) == (503, "recovery_stopped")
        assert isinstance(one.session.failure, Fenced)


BEAM = {**ASK, "use_beam_search": True}
IN_BODY = {"vllm_xargs": {"attempt_id": "a"}}


@on_loop
async def test_what_is_not_captured_is_served_and_the_answer_says_so(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        for body, path in ((BEAM, CHAT), *((ASK, path) for path in claims.GENERATING)):
            kind = "use_beam_search" if body is BEAM else path.lstrip("/")
            with pytest.warns(UserWarning, match=kind):
                by_header = await Client(one.app, body, path=path, x_attempt_id="a").answer()
            by_argument = await Client(one.app, {**body, **IN_BODY}, path=path).answer()
            for client in (by_header, by_argument):
                assert client.tokens == [-1] and claims.HEADER not in client.headers
                assert client.headers[claims.NOT_CAPTURED] == kind
            assert one.session.unresumable.uncaptured[kind] == 2
            assert claims.NOT_CAPTURED not in (await Client(one.app, body, path=path).answer()).headers
        assert one.attempts.status()["tokens_captured"] == 0


@on_loop
async def test_what_is_not_captured_is_refused_if_so_configured(tmp_path: Path) -> None:
    async with served(tmp_path / "t", unresumable="refuse") as two:
        for body, path in ((BEAM, CHAT), *((ASK, path) for path in claims.GENERATING)):
            by_header = await Client(two.app, body, path=path, x_attempt_id="a").answer()
            by_argument = await Client(two.app, {**body, **IN_BODY}, path=path).answer()
            for refused in (by_header, by_argument):
                assert (refused.status, refused.code) == (400, "attempt_not_captured")
            assert (await Client(two.app, body, path=path).answer()).tokens == [-1]


@on_loop
async def test_what_the_engine_is_not_to_be_asked_is_a_mistake_of_the_client(tmp_path: Path) -> None:
    """A ValueError, which vLLM's handlers answer with 400: a 500 would be asked again and again."""
    async with served(tmp_path / "s", unresumable="refuse") as one:

        async def refusing(prompt: Any, params: Any, name: str) -> AsyncIterator[list[int]]:
            one.session.unresumable.pass_through(name, "multi_modal_data")
            yield [0]

        one.captured.generate = refusing  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="multi_modal_data: processed features are not stored"):
            await Client(one.app, ASK, x_attempt_id="a").answer()


@on_loop
async def test_a_form_names_its_attempt_in_a_header(tmp_path: Path) -> None:
    """Audio, say: no JSON."""
    async with served(tmp_path / "s", unresumable="refuse") as one:
        raw = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n\xff\r\n--x--'
        refused = await Client(one.app, raw, path="/v1/audio/transcriptions", x_attempt_id="a").answer()
        assert refused.code == "attempt_not_captured"


@on_loop
async def test_the_last_snapshot_is_taken_before_the_server_says_that_it_is_down(tmp_path: Path) -> None:
    async with served(tmp_path / "s") as one:
        one.captured.allow(6)
        await Client(one.app, ASK, x_attempt_id="a").answer()
        sent = []

        async def lifespan(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "lifespan.startup.complete"})
            assert one.session.counters.snapshots == 0
            await send({"type": "lifespan.shutdown.complete"})

        async def send(message: Any) -> None:
            sent.append((message["type"], one.session.counters.snapshots))

        with suppress(AttributeError):
            await RecoveryLayer(lifespan, one)({"type": "lifespan"}, None, send)
        assert sent == [("lifespan.startup.complete", 0), ("lifespan.shutdown.complete", 1)]


@on_loop
async def test_a_store_of_something_else_is_refused(tmp_path: Path) -> None:
    other = Served(tmp_path / "s", 1, 6)
    other.session.start()
    engine = Engine(other.session, 6)
    engine.allow(6)
    async for _ in engine.generate([1], None, "attempt-x-0"):
        pass
    await other.session.stop()
    with pytest.raises(Damaged, match="attempt 'x' has no claim"):
        async with served(tmp_path / "s"):
            pass


@pytest.mark.parametrize("name", ["attempt-a-0", "0_attempt-a-0", "12_attempt-0_attempt-a-0-3", "attempt--0"])
def test_names_of_calls_lead_back_to_their_attempt(name: str) -> None:
    found = attempt_of_name(name)
    inner = name.partition("attempt-")[2].rpartition("-")[0]
    assert found == (inner or None)
    assert attempt_of_name("rollout-17") is None


BAD_IDS = ["a b", "", " ", "\xe4", "a" * 201, "a\nb", "a\x1f", "\x1fa", "a\xa0", "a\x85", "a\0", "a\x7f", "a,a"]


@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
@pytest.mark.parametrize("attempt", [*BAD_IDS, "\u0430", 7, True, 1.5, ["a"], {}])
@pytest.mark.parametrize("place", ["header", "body"])
def test_an_attempt_id_that_could_not_be_kept_is_refused(place: str, attempt: Any, route: str) -> None:
    if place == "body":
        found = claims.wanted_of(scope_of(route), json.dumps({"vllm_xargs": {"attempt_id": attempt}}).encode())
    elif attempt not in BAD_IDS:
        return  # no header is like this
    else:
        found = claims.wanted_of(scope_of(route, attempt), b"{}")
    assert isinstance(found, claims.Refused) and (found.status, found.code) == (400, "attempt_id_malformed")


@pytest.mark.parametrize("route", [CHAT, "/v1/responses"])
def test_an_attempt_has_one_name(route: str) -> None:
    """Two headers, also of one name, as no proxy may choose; a header and an argument that differ."""

    def code(*headers: str, body: bytes = b"{}") -> str:
        found = claims.wanted_of(scope_of(route, *headers), body)
        return found.code if isinstance(found, claims.Refused) else getattr(found, "attempt", "")

    in_body = json.dumps(IN_BODY).encode()
    assert code("a", "b") == code("a", "a") == code("b", body=in_body) == "attempt_id_twice"
    assert code("a", "") == "attempt_id_malformed"
    assert code("a") == code(" a\t") == code("a", body=in_body) == code(body=in_body) == "a"
    assert code() == code(body=b'{"vllm_xargs": {}}') == code(body=b'{"vllm_xargs": "attempt_id"}') == ""


def test_an_argument_is_found_however_its_json_is_written() -> None:
    for raw in (
        b'{"vllm_xargs": {"\\u0061ttempt_id": "a"}}',
        b'{"\\u0076llm_xargs": {"attempt_\\u0069d": "\\u0061"}}',
        *(json.dumps(IN_BODY).encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32-be")),
    ):
        found = claims.wanted_of(scope_of(CHAT), raw)
        assert getattr(found, "attempt", None) == "a", raw


def scope_of(route: str, *attempts: str) -> dict[str, Any]:
    headers = [(b"x-attempt-id", attempt.encode("latin-1")) for attempt in attempts]
    return {"method": "POST", "path": route, "headers": headers}


def test_the_configuration_is_the_block_of_a_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "recovery.yaml"
    file.write_text("rollout_checkpointing: {enabled: true, store: here}\n")
    found = config_of(
        {CONFIG: str(file), SET: "rollout_checkpointing.keep_latest_k=3 'rollout_checkpointing.grace_s=5'"}
    )
    assert found.store == str(tmp_path / "here")
    assert (found.keep_latest_k, found.grace_s) == (3, 5)
    assert not config_of({}).enabled


@pytest.mark.parametrize("setting", ["gym.mode=wait", "gym.mod=off", "enabled=true", "codec=pickle"])
def test_b15_a_configuration_that_cannot_be_honoured_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """B15: an unknown mode, an unknown key, no store, a codec of no kind: an error at the start, not a default.

    Where the plug-in is put in, and not where it is made: vLLM goes on without one that could not be made.
    """
    monkeypatch.setenv(SET, f"rollout_checkpointing.{setting}")
    plugin = RecoveryEndpoints()
    with pytest.raises(ConfigError):
        plugin.attach_router(SimpleNamespace(add_middleware=lambda *_, **__: None))
        asyncio.run(plugin.init_state(None, SimpleNamespace(), SimpleNamespace(chat_template=None)))


def test_without_a_configuration_the_server_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONFIG, raising=False)
    monkeypatch.delenv(SET, raising=False)
    plugin = RecoveryEndpoints()
    plugin.attach_router(None)
    asyncio.run(plugin.init_state(None, None, None))
