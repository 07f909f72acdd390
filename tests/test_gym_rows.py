"""recovery.gym_rows against NeMo Gym's own staging core: its digests, its golden vectors, its linearisation.

Owns: that it accepts rows of ours as they are, puts trajectories together from them, and that rows come back as
records.
Does not know: stores but for one that is read. The library is fetched, not installed (gym_wheel.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery import codec
from recovery import gym_digests as digests
from recovery.errors import Damaged, InputError
from recovery.gym_rows import Row, StagedCall, records_of, rows_of
from recovery.lineage import NO_PARENT, Lineage
from recovery.model import Array, CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
from recovery.transcripts import assemble
from tests import gym_wheel
from tests.test_trajectory import World, live, two_turns


@pytest.fixture(scope="module")
def gym() -> ModuleType:
    return gym_wheel.staging()


def staged(
    prompt: list[int],
    answers: list[tuple[list[int], PolicyVersion, Mapping[str, Array]]],
    *,
    parent: CallId = NO_PARENT,
    number: int = 0,
    ended: tuple[str, int | str | None] | None = ("stop", 7),
) -> StagedCall:
    """A call whose chunks are `answers`."""
    request = Request(
        rollout="r/é", turn=1, prompt_token_ids=np.asarray(prompt, np.int32), source_digest="ab",
        sampling={"temperature": 0.7, "stop": ["x"]}, extra=Lineage(number, parent).as_extra(),
    )  # fmt: skip
    call_id, at, chunks = codec.call_of(request), 0, []
    for ids, version, columns in answers:
        chunks.append(
            Chunk(
                call_id=call_id,
                attempt=0,
                start=at,
                token_ids=np.asarray(ids, np.int32),
                logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 3,
                mask=np.ones(len(ids), np.bool_),
                version=version,
                columns=columns,
            )
        )
        at += len(ids)
    return StagedCall(call_id, assemble(request, chunks), ended)


A3, A4, B1 = PolicyVersion("a", 3), PolicyVersion("a", 4), PolicyVersion("b", 1)


def experts(n: int) -> dict[str, Array]:
    return {"routed_experts": np.arange(n * 4, dtype=np.int16).reshape(n, 4), "rank": np.arange(n, dtype=np.int32)}


def trajectory() -> list[StagedCall]:
    """Two calls of which the second goes on from the first, under three versions; a third with a prompt made anew."""
    first = staged([1, 2, 3], [([10, 11], A3, experts(2)), ([12], A3, {})])
    second = staged([1, 2, 3, 10, 11, 12, 4], [([13], A3, {}), ([14, 15], A4, {}), ([16], B1, experts(1))],
                    parent=first.call_id, number=1, ended=("length", None))  # fmt: skip
    third = staged([1, 2, 9], [([20], B1, {})], parent=second.call_id, number=2, ended=None)
    return [first, second, third]


def normal(records: list[Record]) -> list[Any]:
    """Comparable, and chunks of one version and the same columns joined."""
    found: list[Any] = []
    for record in records:
        match record:
            case Opened():
                found.append(who(record.call_id, record.request))
            case Chunk():
                columns = {name: (values.dtype, values.tolist()) for name, values in record.columns.items()}
                for at, token in enumerate(record.token_ids.tolist()):
                    assert record.logprobs is not None
                    row = {name: (kind, values[at]) for name, (kind, values) in columns.items()}
                    found.append((record.call_id, record.start + at, token, record.logprobs[at], record.version, row))
            case Ended():
                found.append(record)
    return found


def who(call_id: CallId, request: Request) -> tuple[Any, ...]:
    digest, extra = codec.request_digest(request), dict(request.extra)
    return call_id, digest, request.rollout, request.turn, request.source_digest, extra


def records_of_calls(calls: list[StagedCall]) -> list[Any]:
    """What `normal` should find, from the transcripts."""
    found: list[Any] = []
    for call in calls:
        t = call.transcript
        found.append(who(call.call_id, t.request))
        versions = {at: version for begin, end, version in t.version_spans for at in range(begin, end)}
        for at, token in enumerate(t.token_ids.tolist()):
            row = {
                name: (run.values.dtype, run.values.tolist()[at - run.start])
                for name, runs in t.columns.items()
                for run in runs
                if run.start <= at < run.stop
            }
            found.append((call.call_id, at, token, t.logprobs[at], versions[at], row))
        if call.ended is not None:
            n = len(t.token_ids)
            found.append(Ended(call_id=call.call_id, attempt=0, n_tokens=n, finish_reason=call.ended[0],
                               stop_reason=call.ended[1]))  # fmt: skip
    return found


# ---- that library takes them -------------------------------------------------------------------------------------


def test_the_librarys_golden_vectors_are_ours(gym: ModuleType) -> None:
    gym.assert_golden_vectors()
    vectors = gym.load_golden_vectors()
    assert digests.extras_digest(vectors["extras"]) == vectors["extras_digest"]
    assert digests.row_digest(vectors["staged_call"]) == vectors["staged_call_digest"]
    assert (digests.SCHEMA_VERSION, digests.DIGEST_VERSION, digests.EXTRAS_VERSION) == (
        gym.STAGING_SCHEMA_VERSION, gym.STAGING_DIGEST_VERSION, gym.EXTRAS_DIGEST_VERSION,
    )  # fmt: skip


EXTRAS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=9)


@settings(deadline=None)
@given(extras=st.none() | st.dictionaries(st.text(max_size=5), EXTRAS, max_size=3), ids=IDS)
def test_sums_of_anything_are_the_librarys(extras: Any, ids: list[int]) -> None:
    gym = gym_wheel.staging()
    assert digests.extras_digest(extras) == gym.compute_extras_digest(extras)
    assert digests.prefix_digest(ids) == gym.hash_token_ids(ids)
    for parent in (None, "0" * 64):
        assert digests.chain_digest(parent, ids) == gym.compute_chain_hash(parent, ids)


def receipt(gym: ModuleType, rows: list[Row], terminal: str) -> Any:
    """What that library's gate would have written down of these rows."""
    fields = set(gym.CallRecord.model_fields)
    manifest = [
        gym.CallRecord(
            **{name: value for name, value in row.items() if name in fields},
            staging_key=gym.staging_key(row["rollout_id"], row["model_call_id"]),
            response_id=f"resp-{row['model_call_id']}",
        )
        for row in rows
    ]
    return gym.RolloutReceipt(
        rollout_id=rows[0]["rollout_id"], manifest=manifest, terminal_model_call_id=terminal,
        terminal_selection="declared", capture_poisoned=False,
    )  # fmt: skip


def test_the_library_takes_our_rows_and_puts_the_trajectory_together(gym: ModuleType) -> None:
    calls = trajectory()
    rows = rows_of(calls)
    snapshots = [gym.StagedCallSnapshot(**row) for row in rows]  # checks every sum
    assert [row["parent_call_id"] is None for row in rows] == [True, False, False, False, True]
    last = rows[3]["model_call_id"]
    line = gym.verify_and_linearize(receipt(gym, rows, last), snapshots)
    assert line.token_ids == [1, 2, 3, 10, 11, 12, 4, 13, 14, 15, 16]
    assert line.token_mask == [0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1]
    assert line.logprobs[3:6] == calls[0].transcript.logprobs.tolist() and line.logprobs[6] == 0.0
    assert [(s.start, s.end, s.weight_version) for s in line.weight_version_spans] == [
        (0, 6, 3), (6, 8, 3), (8, 10, 4), (10, 11, 1),
    ]  # fmt: skip
    other = gym.verify_and_linearize(receipt(gym, rows, rows[4]["model_call_id"]), snapshots)
    assert other.token_ids == [1, 2, 9, 20]


def test_the_librarys_own_rows_become_records(gym: ModuleType) -> None:
    """Made by its functions alone, without anything of ours in them."""
    rows, chain, tokens = [], None, []
    for number, (prompt, answer) in enumerate((([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]))):
        logprobs = [-0.5] * len(answer)
        ids, mask, lps = gym.build_staging_delta(
            prompt_token_ids=prompt, generated_token_ids=answer, generated_log_probs=logprobs, prev_len=len(tokens)
        )
        chain = gym.compute_chain_hash(chain, ids)
        row = {
            "rollout_id": "g", "model_call_id": f"c.{number}", "parent_call_id": "c.0" if number else None,
            "mode": "token_in" if number else "text", "prev_len": len(tokens), "delta_len": len(ids),
            "cum_len": len(tokens) + len(ids), "weight_version": 5 + number, "token_ids_delta": ids,
            "token_mask_delta": mask, "generation_log_probs_delta": lps, "chain_hash": chain,
            "cumulative_hash": gym.hash_token_ids([*tokens, *ids]), "extras_digest": gym.compute_extras_digest(None),
            "schema_version": 2, "digest_version": 2, "extras_digest_version": 1,
        }  # fmt: skip
        tokens += ids
        record = gym.StagedCallRecord(**row, digest=gym.compute_staging_digest(**row))
        rows.append(json.loads(record.model_dump_json()))
    first, one, second, two = records_of(rows, lineage="b")
    assert isinstance(first, Opened) and isinstance(second, Opened)
    assert isinstance(one, Chunk) and isinstance(two, Chunk)
    assert second.request.prompt_token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (one.token_ids.tolist(), one.version) == ([3, 4], PolicyVersion("b", 5))
    assert (two.token_ids.tolist(), two.version) == ([6], PolicyVersion("b", 6))
    assert second.request.extra["lineage"]["parent"] == first.call_id.hex()


# ---- and back ------------------------------------------------------------------------------------------------------


def test_rows_of_calls_are_those_calls_again() -> None:
    calls = trajectory()
    rows = json.loads(json.dumps(rows_of(calls)))
    assert normal(records_of(rows)) == records_of_calls(calls)


def test_calls_of_a_store_are_rows_and_records(tmp_path: Path, gym: ModuleType) -> None:
    """What a trajectory on a session left."""
    world = World(tmp_path, "prefix_recovery")
    live(world, two_turns)
    entries = sorted(world.session.stored.entries(), key=lambda e: (e.identity.turn, e.identity.model_call))
    transcripts = world.session.stored.read([entry.call_id for entry in entries])
    calls = [StagedCall(entry.call_id, transcripts[entry.call_id], entry.ended) for entry in entries]
    rows = rows_of(calls)
    snapshots = [gym.StagedCallSnapshot(**row) for row in rows]
    line = gym.verify_and_linearize(receipt(gym, rows, rows[-1]["model_call_id"]), snapshots)
    last = calls[-1].transcript
    assert line.token_ids == [*last.request.prompt_token_ids.tolist(), *last.token_ids.tolist()]
    assert len(line.model_call_ids) == 3 and normal(records_of(rows)) == records_of_calls(calls)


# ---- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout_id", "other"), ("model_call_id", "x"), ("parent_call_id", "x"), ("mode", "else"), ("prev_len", 1),
        ("delta_len", 0), ("cum_len", 1 << 40), ("weight_version", 9), ("token_ids_delta", [1]),
        ("token_ids_delta", "text"), ("generation_log_probs_delta", [0.5]), ("extras", {}), ("extras", {"a": ()}),
        ("extras_digest", "0" * 64), ("chain_hash", "0" * 64), ("cumulative_hash", "0" * 64), ("digest", "0" * 64),
        ("schema_version", 3), ("weight_version", True), ("chain_hash", "zz"),
    ],
)  # fmt: skip
def test_a_row_that_was_changed_is_damage(row: int, field: str, value: Any) -> None:
    rows = rows_of(trajectory())
    rows[row] = {**rows[row], field: value}
    with pytest.raises(Damaged, match="row "):
        records_of(rows)


def test_rows_without_their_parent_or_twice_are_damage() -> None:
    rows = rows_of(trajectory())
    for wrong in (rows[1:], [*rows, rows[0]], [rows[0], *rows[2:]]):
        with pytest.raises(Damaged):
            records_of(wrong)


def test_what_a_row_cannot_say_is_refused_by_name() -> None:
    call = staged([1], [([2, 3], A3, {})])
    chunk = Chunk(
        call_id=call.call_id, attempt=0, start=0, token_ids=np.array([2, 3], np.int32), logprobs=None,
        mask=np.ones(2, np.bool_), version=A3,
    )  # fmt: skip
    masked = Chunk(
        call_id=call.call_id, attempt=0, start=0, token_ids=np.array([2, 3], np.int32),
        logprobs=np.zeros(2, np.float32), mask=np.array([True, False]), version=A3,
    )  # fmt: skip
    for chunks, why in (([], "it has no token"), ([chunk], "has a logprob"), ([masked], "not trained on")):
        with pytest.raises(InputError, match=why):
            rows_of([StagedCall(call.call_id, assemble(call.transcript.request, chunks))])
