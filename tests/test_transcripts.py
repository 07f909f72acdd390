"""recovery.transcripts: what is gathered from segments in any order is what a call's chunks make in theirs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from recovery import transcripts
from recovery.layout import segment_stem
from recovery.ledger import Ledger
from recovery.model import Chunk, Opened, PolicyVersion, Record
from recovery.records import Records
from recovery.staging import coordinates_of
from recovery.transcripts import Gathering, Transcript, assemble
from tests.fakes import chunk, name, opened
from tests.plain_codecs import PlainSegments


def same(one: Transcript, other: Transcript) -> bool:
    arrays = all(
        getattr(one, field).tobytes() == getattr(other, field).tobytes() for field in ("token_ids", "logprobs", "mask")
    )
    runs = [
        {
            key: [(run.start, run.values.dtype, run.values.tobytes()) for run in each.columns[key]]
            for key in each.columns
        }
        for each in (one, other)
    ]
    return arrays and one.version_spans == other.version_spans and runs[0] == runs[1]


@pytest.mark.parametrize("seed", range(40))
def test_gathered_is_assembled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "SLAB_TOKENS", 16)
    chance = random.Random(seed)
    ledger, calls, segments = Ledger(), {}, {}
    rollouts = [f"c{i}" for i in range(chance.choice([1, 3, 12]))]
    for flush in range(1, chance.randrange(2, 7)):
        records: list[Record] = []
        for rollout in chance.sample(rollouts, len(rollouts)):
            if rollout not in calls:
                calls[rollout] = []
                records.append(opened(rollout))
            for _ in range(chance.randrange(3)):
                n = chance.randrange(1, 9)
                mask = [chance.random() < 0.8 or flush % 2 > 0 for _ in range(n)]
                made = chunk(
                    rollout,
                    calls[rollout][-1].stop if calls[rollout] else 0,
                    [chance.randrange(9) for _ in range(n)],
                    version=PolicyVersion("a", chance.randrange(2)),
                    mask=np.array(mask, np.bool_),
                    columns={"top": np.arange(2 * n).reshape(n, 2)} if chance.random() < 0.3 else {},
                    **({"logprobs": None} if chance.random() < 0.3 else {}),
                )
                calls[rollout].append(made)
                records.append(made)
        segment = PlainSegments().encode(records, segment_stem(1, "w0.00000000", flush, "00000000"))
        ledger.describe(segment.info)
        for at in coordinates_of(records, segment.info.key):
            assert not ledger.apply(at)
        segments[segment.info.key] = Records.of(records)
    entries = [entry for entry in ledger if chance.random() < 0.8]
    gathering = Gathering(ledger, entries, columns=True)
    for key in chance.sample(gathering.segments, len(gathering.segments)):
        gathering.take(key, segments[key])
    found = gathering.transcripts()
    assert list(found) == [entry.call_id for entry in entries]
    for entry in entries:
        wanted = assemble(found[entry.call_id].request, calls[entry.identity.rollout])
        assert same(found[entry.call_id], wanted)
        assert found[entry.call_id].request.rollout == entry.identity.rollout
        joined = [token for made in calls[entry.identity.rollout] for token in made.token_ids.tolist()]
        assert found[entry.call_id].token_ids.tolist() == joined


def test_nothing_is_asked_for_when_nothing_is_wanted() -> None:
    gathering = Gathering(Ledger(), [], columns=True)
    assert gathering.segments == [] and gathering.transcripts() == {}


def test_an_assembled_call_without_chunks_is_empty() -> None:
    record = opened("a")
    assert isinstance(record, Opened)
    found = assemble(record.request, [])
    assert (len(found.token_ids), len(found.logprobs), found.version_spans, found.columns) == (0, 0, (), {})


def test_keeping_one_transcript_does_not_keep_all() -> None:
    """Calls of many tokens have memory of their own; small neighbours share some."""
    ledger = Ledger()
    records: list[Record] = []
    for rollout in ("a", "b", "c"):
        records += [opened(rollout), chunk(rollout, 0, [1] * transcripts.SLAB_TOKENS)]
    segment = PlainSegments().encode(records, segment_stem(1, "w0.00000000", 1, "00000000"))
    ledger.describe(segment.info)
    for at in coordinates_of(records, segment.info.key):
        ledger.apply(at)
    gathering = Gathering(ledger, list(ledger), columns=False)
    gathering.take(segment.info.key, Records.of(records))
    first = gathering.transcripts()[name("a")]
    assert first.token_ids.base is not None and first.token_ids.base.nbytes == 4 * transcripts.SLAB_TOKENS
    assert isinstance(records[1], Chunk) and first.token_ids.tobytes() == records[1].token_ids.tobytes()
