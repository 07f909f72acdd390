"""vLLM's own OpenAI server with the plug-in, killed with SIGKILL in mid-answer and started again.

One server lives twice, with two API server processes and then with one. The fixture asks it everything in these two
lives; the tests look at what came of it, and at what the same calls give in this process, cut and carried on there.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.openai_client import HEADER
from snapshot_inspect.cli import main as inspect
from tests.conftest import OnLoop
from tests.engine_runs import ask as ask_engine
from tests.engine_runs import capturing, greedy, put_cut
from tests.job_processes import wait_until
from tests.server_clients import (
    CHAT,
    N_TOKENS,
    PARAMETERS,
    REQUESTS,
    STREAMED,
    TEXT,
    Asking,
    Message,
    ask,
    ask_all,
    client_of,
    create_of,
    in_arguments,
)
from tests.server_process import ServerProcess, many_processes, one_process, serving
from vllm_hooks import server_claims as claims
from vllm_hooks.capture import drain
from vllm_hooks.siblings import sibling_ids, sibling_params

FLUSH = 64
ADA, BOB = "key-of-ada", "key-of-bob"
CAPTURED = ("sampled", "samples", "stopped", "prompts")
"""Compared with themselves under another attempt id: they are drawn by the plug-in, which needs one."""


NOT_GENERATING = {
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel", "/ping",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render",
    "/cohere/v2/chat/render", "/v1/chat/completions/derender", "/v1/completions/derender",
    "/scale_elastic_ep", "/is_scaling_elastic_ep", "/fault_tolerance/apply",
}  # fmt: skip

IN_PROCESS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.9, "seed": 5, "logprobs": 0},
    "samples": {"temperature": 1.0, "seed": 9, "n": 2, "presence_penalty": 0.5, "logprobs": 0},
    "json": {"temperature": 0.0, "logprobs": 0},
    "stopped": {
        "temperature": 0.8, "seed": 11, "frequency_penalty": 0.3, "repetition_penalty": 1.05, "min_tokens": 180,
        "stop": list("aei "), "include_stop_str_in_output": True, "logprobs": 0,
    },
}  # fmt: skip
"""The SamplingParams that a caller of the engine writes for the same calls."""


@dataclass
class Lives:
    """What the two lives gave."""

    uncut: dict[str, Message] = field(default_factory=dict)
    carried_on: dict[str, Message] = field(default_factory=dict)
    at_kill: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Calls with the tokens that the server had captured when it was killed, by attempt."""
    seen: dict[str, int] = field(default_factory=dict)
    """Tokens that a streaming client had then."""
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the second life says of each attempt."""
    notes: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="module")
def lives(tiny_model: Path) -> Iterator[Lives]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="prefix-recovery-test-", dir=memory if os.access(memory, os.W_OK | os.X_OK) else None
    ) as name:
        folder, made = Path(name), Lives()
        block = {"enabled": "true", "store": folder / "store", "gym.generation_chunk_flush_tokens": FLUSH}
        settings = [f"rollout_checkpointing.{key}={value}" for key, value in block.items()]
        keys = ["--api-key", ADA, BOB]
        with serving(folder, "first", [*many_processes(tiny_model, 2), *keys], settings) as server:
            captured(server.wait_ready())  # once it answers, the process that captures is up
            first_life(server, made)
            threads = until_killed(server, made)
        with serving(folder, "second", [*one_process(tiny_model), *keys], settings) as server:
            captured(server.wait_ready())
            for thread in threads:
                made.carried_on[thread.name] = thread.whole(server)
                made.known[thread.name] = server.get(f"/v1/recovery/attempts/{thread.name}", ADA)
            second_life(server, made)
            told_to_end(server, folder, made)
        yield made


def first_life(server: ServerProcess, made: Lives) -> None:
    client = client_of(server, ADA)
    made.uncut = ask_all(client, {kind: f"uncut-{kind}" for kind in CAPTURED})
    made.notes["ended"] = ask(client, {**CHAT, "max_tokens": 40}, "ended", stream=True)
    a_client_that_leaves(server, client, made)
    two_connections(server, client, made)
    made.notes["refused"] = refusals(client, server, "first")


def captured(server: ServerProcess) -> int:
    return int(server.get("/v1/recovery", ADA)["tokens_captured"])


def a_client_that_leaves(server: ServerProcess, client: openai.OpenAI, made: Lives) -> None:
    before = captured(server)
    with create_of(client, CHAT)(**in_arguments(CHAT, "leaves"), stream=True) as stream:
        for _, _chunk in zip(range(20), stream, strict=False):
            pass
    wait_until(lambda: server.get("/v1/recovery", ADA)["attempts_connected"] == 0, "the server sees that it left")
    made.notes["left"] = ask(client, CHAT, "leaves", stream=False)
    made.notes["captured_of_leaves"] = captured(server) - before


def two_connections(server: ServerProcess, client: openai.OpenAI, made: Lives) -> None:
    """Both on a message that an earlier one had begun, and while the engine stands still: none of them can end."""
    for attempt in (f"twice-{at}" for at in count()):
        before = captured(server)
        with create_of(client, CHAT)(**CHAT, stream=True, extra_headers={HEADER: attempt}) as stream:
            for _, _chunk in zip(range(20), stream, strict=False):
                pass
        wait_until(lambda: server.get("/v1/recovery", ADA)["attempts_connected"] == 0, "the server sees that it left")
        if server.get(f"/v1/recovery/attempts/{attempt}", ADA)["state"] == "interrupted":
            break  # the engine had not ended it by then
    with standing_still(server):
        first = iter(create_of(client, CHAT)(**CHAT, stream=True, extra_headers={HEADER: attempt}))
        next(first)
        second = Asking(client, CHAT, attempt, stream=True)
        second.start()
        with pytest.raises(openai.APIError) as caught:
            for _ in first:
                pass
    made.notes["taken_over"] = caught.value.code
    made.notes["taking_over"] = second.whole(server)
    made.notes["captured_of_twice"] = captured(server) - before


class standing_still:
    """No engine process of this server runs in the block."""

    def __init__(self, server: ServerProcess) -> None:
        self._pids = server.engine_pids()
        assert self._pids

    def __enter__(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):  # the server may have ended it
                os.kill(pid, signal.SIGCONT)


def refusals(client_of_ada: openai.OpenAI, server: ServerProcess, life: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def refused(name: str, by: openai.OpenAI, request: dict[str, Any], attempt: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(by, request, attempt, stream=False)
        error = caught.value.response.json()["error"]
        found[name] = (caught.value.status_code, error["code"], error["message"])

    short = {**CHAT, "max_tokens": 40}
    patient = client_of(server, ADA, retries=5)
    refused("another key", client_of(server, BOB, retries=5), short, "ended")
    refused("another request", patient, {**short, "temperature": 0.5, "max_tokens": 41}, "ended")
    refused("malformed", patient, short, "white space")
    refused("two names", patient, in_arguments(short, "one"), "other")
    refused("too cold", patient, {**short, "temperature": -3}, f"mistaken-{life}")
    mended = ask(client_of_ada, short, f"mistaken-{life}", stream=False)
    found["mended"] = mended.said() == ask(client_of_ada, short, stream=False).said()
    return found


def until_killed(server: ServerProcess, made: Lives) -> list[Asking]:
    """Clients of every kind in mid-answer, and SIGKILL.

    The engine is stopped first, it is noted what was captured, and then everything is left to settle: what was noted is
    more than what is durable by less than a flush, whatever a busy machine had no time for.
    """
    with standing_still(server):
        threads = []
        for kind, request in REQUESTS.items():
            client = client_of(server, ADA, retries=200)
            threads.append(Asking(client, request, f"cut-{kind}", stream=kind in STREAMED))
            threads[-1].start()
        wait_until(lambda: all_there(server, threads), f"{len(threads)} clients are there")
    streaming = [thread for thread in threads if thread.name.removeprefix("cut-") in STREAMED]
    enough = FLUSH + 16
    wait_until(lambda: all(thread.message.n_tokens >= enough for thread in streaming), f"{enough} tokens each")
    with standing_still(server):
        made.seen = {thread.name: thread.message.n_tokens for thread in streaming}
        for thread in threads:
            made.at_kill[thread.name] = server.get(f"/v1/recovery/attempts/{thread.name}", ADA)["calls"]
        wait_until(lambda: settled(server), "what was captured is stored")
        server.kill()
    return threads


def all_there(server: ServerProcess, threads: list[Asking]) -> bool:
    assert not [thread.error for thread in threads if thread.error is not None]
    return bool(server.get("/v1/recovery", ADA)["attempts_connected"] == len(threads))


def settled(server: ServerProcess) -> bool:
    status = server.get("/v1/recovery", ADA)
    return status["tokens_pending"] < FLUSH and not status["flushing"]


def second_life(server: ServerProcess, made: Lives) -> None:
    client = client_of(server, ADA)
    before, short = captured(server), {**CHAT, "max_tokens": 40}
    made.notes["ended again"] = ask(client, short, "ended", stream=True)
    made.notes["ended whole"] = ask(client, short, "ended", stream=False)
    made.notes["captured_of_ended"] = captured(server) - before
    made.notes["refused after"] = refusals(client, server, "second")
    with server.client() as http:
        answer = http.delete("/v1/recovery/attempts/ended", headers={"Authorization": f"Bearer {BOB}"})
        made.notes["delete by bob"] = answer.status_code
        answer = http.delete("/v1/recovery/attempts/ended", headers={"Authorization": f"Bearer {ADA}"})
        made.notes["delete by ada"] = answer.status_code
        made.notes["without a key"] = http.get("/v1/recovery").status_code
        made.notes["routes"] = http.get("/openapi.json").json()["paths"]
    patient = client_of(server, ADA, retries=50)  # it is refused until the store has let go of it
    made.notes["new"] = ask(patient, {**short, "temperature": 0.5}, "ended", stream=False).n_tokens
    made.notes["status"] = server.get("/v1/recovery", ADA)


def told_to_end(server: ServerProcess, folder: Path, made: Lives) -> None:
    """SIGTERM under two streams whose clients do not leave. One is not captured: vLLM waits for its client."""
    client, long, message = client_of(server, ADA), {**CHAT, "max_tokens": 900}, Message()
    other = iter(create_of(client, long)(**long, stream=True))
    stream = iter(create_of(client, long)(**long, stream=True, extra_headers={HEADER: "told-to-end"}))
    for _ in range(20):
        message.take(next(stream))
    next(other)
    with standing_still(server):  # it will not end them in the meantime
        os.kill(server.process.pid, signal.SIGTERM)
        try:
            for chunk in stream:
                message.take(chunk)
            made.notes["told to end"] = "ended"  # everything was on its way
        except openai.APIError as error:
            made.notes["told to end"] = error.code
        try:
            wait_until(lambda: stored(folder / "store", "told-to-end") >= message.n_tokens, "all of it is stored")
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{server.text[-6000:]}") from error
    made.notes["tokens told"] = message.n_tokens


def stored(store: Path, attempt: str) -> float:
    """Tokens that the next life would begin with."""
    said = io.StringIO()
    with redirect_stdout(said):
        assert inspect(["plan", str(store), "--json"]) == 0
    calls = {call["rollout"]: call["n_tokens"] for call in json.loads(said.getvalue())["calls"]}
    return calls.get(f"attempt-{attempt}-0", math.inf)  # what had ended is not listed


@pytest.mark.parametrize("kind", sorted(set(REQUESTS) - {"unseeded"}))
def test_a_client_sees_one_whole_message_across_a_kill(lives: Lives, kind: str) -> None:
    """B18: text, tokens, logprobs, tool calls and samples are those of a server that was never killed."""
    assert lives.carried_on[f"cut-{kind}"].said() == lives.uncut[kind].said()
    assert lives.carried_on[f"cut-{kind}"].usage == lives.uncut[kind].usage
    ids = {one.partition("-")[2] for one in lives.carried_on[f"cut-{kind}"].ids}
    assert ids == {f"cut-{kind}"}, "the response's id is one, and follows from the attempt"


def test_b18_what_is_drawn_without_a_seed_goes_on_as_it_began(lives: Lives) -> None:
    """The client compares each telling with what it had; there is nothing else to compare with."""
    assert lives.carried_on["cut-unseeded"].finish == {0: "length"}
    assert lives.carried_on["cut-unseeded"].n_tokens == N_TOKENS
    assert lives.carried_on["cut-unseeded"].said() != lives.uncut["unseeded"].said()


def test_a_kill_costs_less_than_a_flush(lives: Lives) -> None:
    """Tokens that the first life had captured when it was killed, and the second one generated again."""
    assert set(lives.at_kill) == {f"cut-{kind}" for kind in REQUESTS}
    for attempt, calls in lives.at_kill.items():
        after = {call["name"]: call for call in lives.known[attempt]["calls"]}
        assert {call["name"] for call in calls} <= set(after)
        for call in calls:
            kept = call["n_tokens"] if call["finish_reason"] else after[call["name"]]["resumed_at"][-1]
            print(f"{call['name']}: {call['n_tokens']} captured, {kept} kept")
            assert call["n_tokens"] - kept < FLUSH
        assert lives.seen.get(attempt, 0) <= max(call["n_tokens"] for call in calls)


def test_a_tool_call_is_told_once(lives: Lives) -> None:
    message = lives.carried_on["cut-tool"]
    assert message.tools == ["weather"]
    assert message.arguments[0].lstrip()[:1] in ("", "{")  # whole JSON it is not: the grammar lets it write white space


def test_b18_the_server_answers_as_the_engine_in_this_process(lives: Lives, engine: Any, on_loop: OnLoop[Any]) -> None:
    """B18: resumed through the server, and uninterrupted in process: the same tokens."""
    prompt = lives.carried_on["cut-whole"].prompt_ids
    assert prompt
    answer = on_loop(ask_engine(engine, prompt, greedy(N_TOKENS), "b18"))
    assert lives.carried_on["cut-whole"].token_ids == {0: answer.token_ids}
    assert lives.carried_on["cut-whole"].text == {0: answer.text}


def test_in_process_and_through_the_server_the_same_comes_of_it(
    lives: Lives, engine: Any, on_loop: OnLoop[Any], quick_path: Path
) -> None:
    """Cut and carried on by RecoverableEngine here, and by the server there: the same tokens, text and ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    def asked(kind: str) -> tuple[Any, Any]:
        fields = {"structured_outputs": StructuredOutputsParams(json=PARAMETERS)} if kind == "json" else {}
        final = RequestOutputKind.FINAL_ONLY  # all samples in one output
        params = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, output_kind=final, **IN_PROCESS[kind], **fields)
        return lives.carried_on[f"cut-{kind}"].prompt_ids or TEXT["prompt"], params

    calls = {}  # each sample is a call of its own, by the name that it has in the store
    for kind in IN_PROCESS:
        prompt, params = asked(kind)
        names = sibling_ids(kind, params.n) if params.n > 1 else [kind]
        calls |= {name: (prompt, sibling_params(params, at)) for at, name in enumerate(names)}

    async def scenario() -> dict[str, Any]:
        async with capturing(engine, quick_path / "uncut", flush=FLUSH) as (captured, _):
            answers = await asyncio.gather(*(ask_engine(captured, *call, name) for name, call in calls.items()))
        cuts = range(30, 30 + 20 * len(calls), 20)
        async with capturing(engine, quick_path / "cut", flush=FLUSH) as (_, session):
            for (name, (_, params)), whole, cut in zip(calls.items(), answers, cuts, strict=True):
                await put_cut(session, engine, name, params, whole, 0, cut)
        async with capturing(engine, quick_path / "cut", flush=FLUSH) as (captured, session):
            streams = {kind: captured.generate(*asked(kind), kind) for kind in IN_PROCESS}
            outputs = await asyncio.gather(*map(drain, streams.values()))
            assert session.counters.tokens_captured == sum(len(one.token_ids) for one in answers) - sum(cuts)
        return dict(zip(streams, outputs, strict=True))

    for kind, output in on_loop(scenario()).items():
        message = lives.carried_on[f"cut-{kind}"]
        assert {one.index: list(one.token_ids) for one in output.outputs} == message.token_ids, kind
        assert {one.index: one.text for one in output.outputs} == message.text, kind
        assert {one.index: one.finish_reason for one in output.outputs} == message.finish, kind
        first = output.outputs[0]
        sampled = [entry[token].logprob for token, entry in zip(first.token_ids, first.logprobs, strict=True)]
        if message.logprobs:
            assert sampled == pytest.approx(message.logprobs, abs=2e-5)
    assert lives.carried_on["cut-greedy"].logprobs
    assert lives.carried_on["cut-stopped"].finish == {0: "stop"}


def test_an_ended_message_is_answered_from_the_store(lives: Lives) -> None:
    wanted = lives.notes["ended"].said()
    assert lives.notes["ended again"].said() == wanted
    assert lives.notes["ended whole"].said() == wanted
    assert lives.notes["captured_of_ended"] == 0


def test_a_client_that_leaves_loses_nothing(lives: Lives) -> None:
    """Every token is generated once, in the two connections together."""
    assert lives.notes["left"].token_ids[0] == lives.uncut["greedy"].token_ids[0]
    assert lives.notes["captured_of_leaves"] == N_TOKENS


def test_of_two_connections_the_newer_is_served(lives: Lives) -> None:
    assert lives.notes["taken_over"] == "attempt_taken_over"
    assert lives.notes["taking_over"].token_ids[0] == lives.uncut["greedy"].token_ids[0]
    assert lives.notes["captured_of_twice"] == N_TOKENS


@pytest.mark.parametrize("when", ["refused", "refused after"])
def test_an_attempt_is_one_request_of_one_key(lives: Lives, when: str) -> None:
    """Refused by name, also by a server that knows the attempt from its store alone; nothing is retried."""
    found = lives.notes[when]
    assert found["another key"][:2] == (403, "attempt_of_another_key")
    assert found["another request"][:2] == (422, "attempt_of_another_request")
    assert "max_tokens, temperature" in found["another request"][2]
    assert found["malformed"][:2] == (400, "attempt_id_malformed")
    assert found["two names"][:2] == (400, "attempt_id_twice")
    assert found["too cold"][0] == 400
    assert found["mended"], "a request that was never served does not keep its attempt id"


def test_an_attempt_is_forgotten_by_its_owner_alone(lives: Lives) -> None:
    assert (lives.notes["delete by bob"], lives.notes["delete by ada"]) == (403, 200)
    assert lives.notes["new"] == 40
    assert lives.notes["without a key"] == 401


def test_a_server_that_is_told_to_end_keeps_everything_whether_its_clients_leave_or_not(lives: Lives) -> None:
    """Less than a flush is stored by a snapshot alone. The fixture has waited until it was."""
    assert lives.notes["told to end"] in ("recovery_stopping", "ended")
    assert lives.notes["tokens told"] > 0


def test_every_route_of_the_server_that_generates_is_known(lives: Lives) -> None:
    """A new one of vLLM is captured, named as not captured, or does not generate."""
    posts = {path for path, methods in lives.notes["routes"].items() if "post" in methods}
    assert posts >= set(claims.CAPTURED)
    assert posts - {*claims.CAPTURED, *claims.GENERATING} <= NOT_GENERATING


def test_what_the_server_says_of_itself(lives: Lives) -> None:
    status = lives.notes["status"]
    assert status["epoch"] == 2
    assert status["failure"] is None and not status["troubles"]
    assert not status["uncaptured"] and not status["restart_only"]
