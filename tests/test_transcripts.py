"""recovery.transcripts: what chunks make when they are put together is what each of their tokens was."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from recovery.model import Chunk, PolicyVersion
from recovery.transcripts import Transcript, assemble
from tests.fakes import chunk, request


def random_chunks(chance: random.Random, rollout: str, start: int, n_chunks: int) -> list[Chunk]:
    """Chunks of one call that follow each other, of every kind that there is."""
    made = []
    for _ in range(n_chunks):
        n = chance.randrange(1, 9)
        made.append(
            chunk(
                rollout,
                start,
                [chance.randrange(9) for _ in range(n)],
                version=PolicyVersion("a", chance.randrange(2)),
                mask=np.array([chance.random() < 0.8 for _ in range(n)], np.bool_),
                columns={"top": np.arange(2 * n).reshape(n, 2)} if chance.random() < 0.3 else {},
                **({"logprobs": None} if chance.random() < 0.3 else {}),
            )
        )
        start += n
    return made


def told(chunks: Sequence[Chunk]) -> list[Any]:
    """Each token of some chunks by itself."""
    tokens = []
    for one in chunks:
        for at, token in enumerate(one.token_ids.tolist()):
            logprob = None if one.logprobs is None else one.logprobs[at].item()
            wide = {name: (values.dtype.name, values[at].tolist()) for name, values in one.columns.items()}
            tokens.append([token, logprob, bool(one.mask[at]), one.version, wide])
    return tokens


def found_in(transcript: Transcript) -> list[Any]:
    """The same of a transcript."""
    n = len(transcript.token_ids)
    versions = [version for start, end, version in transcript.version_spans for _ in range(start, end)]
    wide: list[dict[str, Any]] = [{} for _ in range(n)]
    for name, runs in transcript.columns.items():
        for run in runs:
            for at, row in zip(range(run.start, run.stop), run.values.tolist(), strict=True):
                assert name not in wide[at]
                wide[at][name] = (run.values.dtype.name, row)
    logprobs = [None if np.isnan(logprob) else logprob for logprob in transcript.logprobs.tolist()]
    assert (transcript.token_ids.dtype, transcript.logprobs.dtype, transcript.mask.dtype) == (
        np.int32, np.float32, np.bool_,
    )  # fmt: skip
    columns = (transcript.token_ids.tolist(), logprobs, transcript.mask.tolist(), versions, wide)
    return [list(token) for token in zip(*columns, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_as_it_was_in_its_chunk(seed: int) -> None:
    chance = random.Random(seed)
    chunks = random_chunks(chance, "a", 0, chance.randrange(6))
    transcript = assemble(request("a"), chunks)
    assert found_in(transcript) == told(chunks)
    spans = transcript.version_spans
    assert all(one[1] == other[0] and one[2] != other[2] for one, other in pairwise(spans))


def test_an_assembled_call_without_chunks_is_empty() -> None:
    found = assemble(request("a"), [])
    assert (len(found.token_ids), len(found.logprobs), found.version_spans, found.columns) == (0, 0, (), {})
    assert found.token_ids.dtype == np.int32


def test_nothing_is_copied_before_it_is_asked_for_and_of_one_chunk_nothing_at_all() -> None:
    (one,) = random_chunks(random.Random(7), "a", 0, 1)
    transcript = assemble(request("a"), [one])
    assert "token_ids" not in vars(transcript)
    assert transcript.token_ids is transcript.token_ids
    assert np.shares_memory(transcript.token_ids, one.token_ids) and np.shares_memory(transcript.mask, one.mask)
