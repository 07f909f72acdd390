"""recovery.gathering: what is gathered from segments in any order is what a call's chunks make in theirs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from recovery.gathering import Gathering, Transcripts
from recovery.layout import segment_stem
from recovery.ledger import Ledger
from recovery.model import Chunk, Record
from recovery.records import Records
from recovery.staging import coordinates_of
from tests.fakes import chunk, name, opened
from tests.plain_codecs import PlainSegments
from tests.test_transcripts import found_in, random_chunks, told


def stored(ledger: Ledger, records: list[Record], flush: int) -> tuple[str, Records]:
    """A segment of these records, which the ledger knows from now on."""
    segment = PlainSegments().encode(records, segment_stem(1, "w0.00000000", flush, "00000000"))
    ledger.describe(segment.info)
    for at in coordinates_of(records, segment.info.key):
        assert not ledger.apply(at)
    return segment.info.key, Records.of(records)


def divided(records: Records, chance: random.Random) -> list[Records]:
    """The same in parts, as a codec may hand them out."""
    cuts = sorted(chance.choices(range(len(records) + 1), k=2))
    return [Records.of(records[first:last]) for first, last in pairwise([0, *cuts, len(records)])]


ROLLOUTS = [f"c{i}" for i in range(7)]


@pytest.mark.parametrize("share", (0.9, 0.2))
@pytest.mark.parametrize("seed", range(30))
def test_gathered_is_what_was_stored(seed: int, share: float) -> None:
    """Of some of the calls: where few are wanted, their tokens are copied out of the segments."""
    chance = random.Random(seed)
    ledger, segments = Ledger(), {}
    calls: dict[str, list[Chunk]] = {}
    rollouts = [f"c{i}" for i in range(chance.choice([1, 3, 12]))]
    for flush in range(1, chance.randrange(2, 7)):
        records: list[Record] = []
        for rollout in chance.sample(rollouts, len(rollouts)):
            if rollout not in calls:
                calls[rollout] = []
                records.append(opened(rollout))
            own = calls[rollout]
            made = random_chunks(chance, rollout, own[-1].stop if own else 0, chance.randrange(3))
            own += made
            records += made
        key, segments_records = stored(ledger, records, flush)
        segments[key] = segments_records
    entries = [entry for entry in ledger if chance.random() < share]
    gathering = Gathering(ledger, entries, columns=True)
    for key in chance.sample(gathering.segments, len(gathering.segments)):
        gathering.take(key, divided(segments[key], chance))
    found = gathering.transcripts()
    assert list(found) == [entry.call_id for entry in entries] and len(found) == len(entries)
    for entry in entries:
        transcript, chunks = found[entry.call_id], calls[entry.identity.rollout]
        assert found_in(transcript) == told(chunks)
        assert transcript.request.rollout == entry.identity.rollout
        assert transcript.request.prompt_token_ids.tolist() == [1, 2, 3]
    ends = [(entry, request.rollout, n, last) for entry, request, n, last in found.ends()]
    assert ends == [
        (entry, entry.identity.rollout, len(tokens), tokens[-1][0] if tokens else None)
        for entry in entries
        for tokens in [told(calls[entry.identity.rollout])]
    ]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_known_is_not_read_again_and_the_rest_is(seed: int) -> None:
    """A ledger is read, grows, calls begin again or end or are new, chunks move to another segment; it is read on."""
    chance = random.Random(seed)
    ledger, segments = Ledger(), {}
    calls: dict[str, list[Chunk]] = {}
    attempts: dict[str, int] = {}

    def flush(number: int) -> None:
        records: list[Record] = []
        for rollout in chance.sample(ROLLOUTS, chance.randrange(1, len(ROLLOUTS))):
            if rollout not in calls or chance.random() < 0.2:
                attempts[rollout] = attempts.get(rollout, -1) + 1
                calls[rollout] = []
                records.append(replace(opened(rollout), attempt=attempts[rollout]))
            own = calls[rollout]
            made = random_chunks(chance, rollout, own[-1].stop if own else 0, chance.randrange(4))
            made = [replace(one, attempt=attempts[rollout]) for one in made]
            own += made
            records += made
        key, columns = stored(ledger, records, number)
        segments[key] = columns

    def gathered(share: float, known: Transcripts | None = None) -> tuple[list[str], Transcripts]:
        gathering = Gathering(
            ledger, [e for e in ledger if chance.random() < share], columns=bool(seed % 3), known=known
        )
        asked = gathering.segments
        for key in chance.sample(asked, len(asked)):
            gathering.take(key, divided(segments[key], chance))
        return asked, gathering.transcripts()

    for number in range(1, chance.randrange(2, 6)):
        flush(number)
    before, known = gathered(chance.choice([1.0, 0.5]))
    new = range(10, 10 + chance.randrange(3))
    for number in new:
        flush(number)
    asked, found = gathered(1.0, known)
    if len(known) == len(ledger) and not new:
        assert not asked and before
    if known and len(known) == len(found):
        of_new = {key for key in segments if int(key.split("/")[3][:8]) >= 10}
        assert set(asked) <= of_new, "nothing that was read before"
    for entry in ledger:
        transcript, chunks = found[entry.call_id], calls[entry.identity.rollout]
        expected = told(chunks)
        if not seed % 3:
            expected = [[*token[:-1], {}] for token in expected]
        assert found_in(transcript) == expected
        assert transcript.request.rollout == entry.identity.rollout
    lasts = [(calls[e.identity.rollout] or [None])[-1] for e in ledger]
    ends = [(0, None) if last is None else (last.stop, int(last.token_ids[-1])) for last in lasts]
    assert [(n, token) for _, _, n, token in found.ends()] == ends
    again, same = gathered(1.0, found)
    assert not again and [call.token_ids.tolist() for call in same.values()] == [
        call.token_ids.tolist() for call in found.values()
    ]


def test_nothing_is_asked_for_when_nothing_is_wanted() -> None:
    gathering = Gathering(Ledger(), [], columns=True)
    assert gathering.segments == [] and gathering.transcripts() == {} == Transcripts.none()
    assert list(Transcripts.none().ends()) == []


@pytest.mark.parametrize("n_wanted", range(1, 9))
def test_no_more_than_four_times_what_is_wanted_is_kept_alive(n_wanted: int) -> None:
    """Of a segment that is mostly wanted nothing is copied; of another one only what is wanted is kept."""
    ledger, n, n_calls = Ledger(), 1000, 8
    top = {"top": np.arange(2 * n, dtype=np.int32).reshape(n, 2)}
    records: list[Record] = [opened(f"c{i}") for i in range(n_calls)]
    records += [chunk(f"c{i}", 0, list(range(n)), columns=top) for i in range(n_calls)]
    key, columns = stored(ledger, records, 1)
    gathering = Gathering(ledger, list(ledger)[:n_wanted], columns=True)
    gathering.take(key, [columns])
    transcripts = gathering.transcripts()
    transcript = transcripts[name("c0")]
    copied = 4 * n_wanted < n_calls
    for mine, theirs in (
        (transcript.token_ids, columns.token_ids),
        (transcript.logprobs, columns.logprobs),
        (transcript.mask, columns.mask),
        (transcript.placed.wide[transcript.chunks[0]]["top"], top["top"]),
    ):
        assert np.shares_memory(mine, theirs) is not copied
    prompt = transcript.request.prompt_token_ids
    assert not copied or prompt.base is None, "a prompt does not keep its segment alive either"
    (held,) = transcript.placed.held
    assert all(other.placed is transcript.placed for other in transcripts.values())
    assert held.token_ids.nbytes <= 4 * n_wanted * 4 * (n + 3)
    assert found_in(transcript) == told([record for record in records[n_calls:][:1] if isinstance(record, Chunk)])
