"""examples/openai_client.py: one stream out of many connections, against a server that breaks them where it is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import openai_client
from examples.openai_client import HEADER, Diverged, Unfinished, stream_whole

BROKEN = httpx.RemoteProtocolError("peer closed connection")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        openai_client, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None)
    )


def chunk(index: int = 0, finish: str | None = None, **delta: Any) -> Any:
    said = {"role": None, "content": None, "tool_calls": None, **delta}
    return SimpleNamespace(choices=[SimpleNamespace(index=index, delta=SimpleNamespace(**said), finish_reason=finish)])


def tool(arguments: str, name: str | None = None, id: str | None = None) -> Any:
    return [SimpleNamespace(index=0, id=id, function=SimpleNamespace(name=name, arguments=arguments))]


def server(*tellings: list[Any]) -> Any:
    """Each connection gets the next telling, and breaks behind it; the last one ends."""
    left = list(tellings)

    def create(**request: Any) -> Iterator[Any]:
        assert request["extra_headers"][HEADER] == "a" and request["stream"]
        telling = left.pop(0)
        yield from telling
        if left:
            raise BROKEN

    return create


def text_of(chunks: Iterator[Any], name: str = "content") -> str:
    return "".join(getattr(choice.delta, name, None) or "" for one in chunks for choice in one.choices)


@given(data=st.data(), text=st.text(min_size=1, max_size=12))
def test_however_it_breaks_the_caller_has_every_character_once(data: Any, text: str) -> None:
    """Also where two tellings are cut into pieces differently."""

    def telling(upto: int) -> list[Any]:
        cuts = sorted(data.draw(st.sets(st.integers(0, upto), max_size=4)) | {0, upto})
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        return [chunk(role="assistant", content="")] + [chunk(content=piece) for piece in pieces]

    breaks = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    tellings = [telling(upto) for upto in breaks] + [[*telling(len(text)), chunk(finish="stop")]]
    given_out = list(stream_whole(server(*tellings), "a"))
    assert text_of(iter(given_out)) == text
    assert text_of(iter(given_out), "role") == "assistant"
    assert [choice.finish_reason for one in given_out for choice in one.choices if choice.finish_reason] == ["stop"]


@given(data=st.data(), n=st.integers(1, 12), noise=st.floats(0, 1e-6))
def test_b5_each_token_has_its_logprob_once(data: Any, n: int, noise: float) -> None:
    """B5: also of a piece that the caller has in part, of text that is held back, and with other last digits."""

    def telling(upto: int, number: int) -> list[Any]:
        cuts = sorted(data.draw(st.sets(st.integers(0, upto), max_size=4)) | {0, upto})
        made = []
        for start, end in itertools.pairwise(cuts):
            one = chunk(content="x" * (end - start) if data.draw(st.booleans()) else "")
            values = [(at, at / 8 + noise * number) for at in range(start, end)]
            one.choices[0].logprobs = SimpleNamespace(content=values, refusal=None)
            made.append(one)
        return made

    breaks = data.draw(st.lists(st.integers(0, n), max_size=4))
    tellings = [telling(upto, number) for number, upto in enumerate(breaks)]
    chunks = stream_whole(server(*tellings, [*telling(n, 9), chunk(finish="stop")]), "a")
    told = [one.choices[0].logprobs.content for one in chunks if not one.choices[0].finish_reason]
    assert [at for values in told for at, _ in values] == list(range(n))


def test_a_tool_call_has_its_name_and_first_id_once() -> None:
    first = [chunk(tool_calls=tool("", "weather", "one")), chunk(tool_calls=tool('{"ci'))]
    again = [
        chunk(tool_calls=tool("", "weather", "two")),
        chunk(tool_calls=tool('{"city": 1}')),
        chunk(finish="tool_calls"),
    ]
    calls = [call for one in stream_whole(server(first, again), "a") for call in one.choices[0].delta.tool_calls or ()]
    assert [call.id for call in calls if call.id] == ["one"]
    assert "".join(call.function.name or "" for call in calls) == "weather"
    assert "".join(call.function.arguments for call in calls) == '{"city": 1}'


def test_another_telling_is_an_error_and_no_seam() -> None:
    broken = server([chunk(content="The sky")], [chunk(content="The sea")])
    with pytest.raises(Diverged, match="The sky"):
        list(stream_whole(broken, "a"))


def test_a_stream_that_ends_without_its_last_chunk_is_asked_for_again() -> None:
    half, whole = [chunk(0, content="x")], [chunk(0, "stop", content="x"), chunk(1, "stop", content="y")]

    def create(n: int, **_: Any) -> Iterator[Any]:
        yield from half if not asked else whole
        asked.append(n)

    asked: list[int] = []
    assert text_of(stream_whole(create, "a", n=2)) == "xy"
    assert asked == [2, 2]


def test_patience_ends_also_with_streams_that_end_in_good_order() -> None:
    def create(**request: Any) -> Iterator[Any]:
        yield chunk(content="and then")

    chunks = stream_whole(create, "a", patience_s=5)
    assert next(chunks).choices[0].delta.content == "and then"
    with pytest.raises(Unfinished, match="0 of 1"):
        list(chunks)


def test_patience_ends() -> None:
    def create(**_: Any) -> Iterator[Any]:
        raise BROKEN
        yield

    with pytest.raises(httpx.RemoteProtocolError):
        list(stream_whole(create, "a", patience_s=5))


def _told(code: object) -> openai.APIError:
    """An error that came as an event of a stream."""
    request = httpx.Request("POST", "http://server/v1/chat/completions")
    return openai.APIError("ended", request, body={"message": "ended", "code": code})


@pytest.mark.parametrize("code", [500, "500", 503])
def test_an_engine_that_ends_in_mid_stream_is_a_broken_connection(code: object) -> None:
    """vLLM tells it as an event of the stream."""
    asked: list[int] = []

    def create(**_: Any) -> Iterator[Any]:
        asked.append(1)
        yield chunk(content="x")
        if len(asked) == 1:
            raise _told(code)
        yield chunk(content="y", finish="stop")

    assert text_of(stream_whole(create, "a")) == "xy" and len(asked) == 2


@pytest.mark.parametrize("code", ["attempt_taken_over", 400, None])
def test_what_the_server_refuses_in_mid_stream_is_final(code: object) -> None:
    def create(**_: Any) -> Iterator[Any]:
        yield chunk(content="x")
        raise _told(code)

    with pytest.raises(openai.APIError):
        list(stream_whole(create, "a"))
