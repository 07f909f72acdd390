"""snapshot_inspect.rescore: stored logprobs against those that an engine gives the same tokens (L6)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from recovery.errors import ConfigError
from recovery.log_reading import find_tail, walk_back
from recovery.reading import read_transcripts
from recovery.snapshots import Snapshot, load
from recovery.transcripts import PLACE
from snapshot_inspect import rescore
from snapshot_inspect.call_documents import rescored
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.arrow_segments import ArrowSegmentCodec
from tests.conftest import OnLoop
from tests.engine_runs import PROMPT, ask, capturing, greedy, put_cut

SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "schemas" / "verify.json").read_text())


def test_values_of_another_kind_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="processed_logprobs"):
        record = {"must": {"logprobs.kind": "processed_logprobs"}}
        rescore.rescore(None, None, None, record, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("state", [None, b"", b"7", b"{", b'{"must": {}}'])
def test_a_record_that_is_none_is_none(state: bytes | None) -> None:
    assert rescore.record_of(state) in (None, {"must": {}})


def test_l6_what_was_stored_is_what_the_engine_scores(engine: Any, on_loop: OnLoop[Any], quick_path: Path) -> None:
    """L6: a cut call, a resumed one, one with a grammar, and one that was changed: only that is far apart."""
    from vllm.sampling_params import StructuredOutputsParams

    params = greedy(20, temperature=1.0, seed=2)
    grammar = greedy(9, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="[a-z]{8}"))

    async def scenario() -> None:
        async with capturing(engine, quick_path) as (wrapped, session):
            whole = await ask(wrapped, PROMPT, params, "whole")
            await ask(wrapped, PROMPT, grammar, "grammar")
            await put_cut(session, engine, "cut", params, whole, 0, 7)
            await put_cut(session, engine, "empty", params, whole, 0, 0)
            changed = dataclasses.replace(
                whole,
                logprobs=[[(t, v - 0.5 * (i == 3)) for t, v in row] for i, row in enumerate(whole.logprobs or [])],
            )
            await put_cut(session, engine, "changed", params, changed, 0, 7)
        store = open_store(str(quick_path))
        slot = next(read.slot for read in walk_back(store, find_tail(store)) if not isinstance(read, Exception))
        ledger = load(store, ArrowLedgerCodec(), Snapshot.from_slot(slot)).ledger
        entries = [entry for entry in ledger if entry.n_tokens]
        found = await rescore.rescore_on(engine, entries, read_transcripts(store, ArrowSegmentCodec(), ledger, entries))
        by_name = {one.rollout: one for one in found}
        assert sorted(by_name) == ["changed", "cut", "grammar", "whole"]
        assert by_name["grammar"].largest is None and "grammar" in by_name["grammar"].skipped
        for name, n in (("whole", 20), ("cut", 7)):
            largest = by_name[name].largest
            assert largest is not None and largest < 2e-5 and by_name[name].n_tokens == n
        assert by_name["changed"].largest == pytest.approx(0.5, abs=1e-4) and by_name["changed"].at == 3
        document = rescored(5, found)
        assert [call["rollout"] for call in document["calls"]][0::3] == ["changed", "grammar"]
        assert document["largest"] == by_name["changed"].largest and json.dumps(document, allow_nan=False)
        jsonschema.validate(document, SCHEMA["properties"]["rescored"])
        one = found[0]
        stored = read_transcripts(store, ArrowSegmentCodec(), ledger, entries)[entries[0].call_id]
        places = stored.placed.places.copy()
        places[:, PLACE.names.index("logprob_at")] = -1
        bare = dataclasses.replace(stored.placed, places=places)
        transcript = dataclasses.replace(stored, placed=bare)
        assert np.isnan(transcript.logprobs).all() and len(transcript.logprobs) == one.n_tokens
        (none,) = await rescore.rescore_on(engine, entries[:1], {entries[0].call_id: transcript})
        assert none.largest is None and none.skipped

    on_loop(scenario())
