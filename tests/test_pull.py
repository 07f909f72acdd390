"""vllm_hooks.pull against a front end that grows by hand: what is read at any moments is what was generated, once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recovery.calls import CallTable, LiveCall
from recovery.errors import CaptureDisagrees
from recovery.model import PolicyVersion, Request
from tests.fakes import name
from vllm_hooks.pull import POLL_S_MAX, Polling, Pulled, PullReader, tokens_per_poll

VERSION = PolicyVersion("a", 0)


class FrontEnd:
    """One request of an engine, as far as it is read (its logprobs: vLLM's flat container)."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.flat = SimpleNamespace(start_indices=[], logprobs=[])
        state = SimpleNamespace(
            detokenizer=SimpleNamespace(output_token_ids=self.ids),
            logprobs_processor=SimpleNamespace(logprobs=self.flat),
        )
        self.output_processor = SimpleNamespace(request_states={"in": state}, external_req_ids={"r": ["in"]})

    def grow(self, ids: list[int]) -> None:
        self.flat.start_indices.extend(range(len(self.ids), len(self.ids) + len(ids)))
        self.flat.logprobs.extend(-float(token) for token in ids)
        self.ids.extend(ids)


def call_of(prefix: list[int]) -> LiveCall:
    request = Request(rollout="r", prompt_token_ids=np.arange(3, dtype=np.int32), sampling={})
    spans = [(0, len(prefix), VERSION)] if prefix else []
    return CallTable().carry_on(request, name("r"), 1, prefix, [-float(token) for token in prefix], spans)


def take(call: LiveCall, ids: list[int], logprobs: list[float], columns: Any = None) -> None:
    if ids:
        call.append(ids, logprobs, VERSION, columns)


TOKENS = st.lists(st.integers(0, 99), max_size=5)


@given(prefix=TOKENS, steps=st.lists(st.tuples(TOKENS, st.booleans()), max_size=8), last=TOKENS)
def test_what_is_read_and_the_rest_are_the_call(
    prefix: list[int], steps: list[tuple[list[int], bool]], last: list[int]
) -> None:
    front, call = FrontEnd(), call_of(prefix)
    polling = Polling(lambda *taken: take(*taken), 256)
    pulled = Pulled(call, PullReader(front), "r", None)
    polling._pulled[call.call_id] = pulled
    for ids, read in steps:
        front.grow(ids)
        if read:
            before = len(call.transcript_ids)
            assert polling.read_all() == len(prefix) + len(front.ids) - before
            assert call.transcript_ids.tolist() == prefix + front.ids
    front.grow(last)
    take(call, *pulled.rest(front.ids, front.flat))
    assert call.transcript_ids.tolist() == prefix + front.ids
    assert call.transcript_logprobs.tolist() == [-float(token) for token in prefix + front.ids]


def test_tokens_other_than_those_that_were_read_stop_the_job() -> None:
    front, call = FrontEnd(), call_of([7])
    pulled = Pulled(call, PullReader(front), "r", None)
    front.grow([1, 2])
    take(call, *pulled.read())
    for delivered in ([1, 3, 4], [1]):
        with pytest.raises(CaptureDisagrees, match="are not those that the engine delivered"):
            pulled.rest(delivered, front.flat)


def test_a_request_that_is_not_running_gives_nothing() -> None:
    front, call = FrontEnd(), call_of([])
    front.grow([1])
    front.output_processor.external_req_ids = {}
    assert Pulled(call, PullReader(front), "r", None).read().token_ids == []


@pytest.mark.parametrize(("flush", "tokens"), [(0, 8), (1, 1), (16, 1), (64, 2), (256, 8), (10_000, 8)])
def test_a_flush_is_many_looks(flush: int, tokens: int) -> None:
    assert tokens_per_poll(flush) == tokens


def test_looks_come_as_often_as_tokens_do() -> None:
    """A call that gains nothing is looked at ever more rarely, one that gains much ever more often."""

    async def run() -> None:
        front, call = FrontEnd(), call_of([])
        polling = Polling(lambda *taken: take(*taken), 256)
        polling.add(Pulled(call, PullReader(front), "r", None))
        for _ in range(40):
            polling._poll()
        assert polling._every_s == POLL_S_MAX
        for _ in range(3):
            front.grow(list(range(30)))
            polling._poll()
        assert polling._every_s == POLL_S_MAX / 8
        front.grow(list(range(8)))
        polling._poll()
        assert polling._every_s == POLL_S_MAX / 8, "as many as wanted"
        polling.close()

    asyncio.run(run())
