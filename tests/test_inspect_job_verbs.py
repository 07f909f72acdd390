"""explain, plan, diff, stats, holds: what they say, held against what a restore does and what a test knows itself.

Owns: jobs drawn by hypothesis whose tokens the test keeps for itself.
Does not know: the table of all verbs and situations (test_inspect_screens.py), doctor (test_inspect_doctor.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_recovery.changes import Compared
from recovery import restore, resume
from recovery.errors import FingerprintMismatch
from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from recovery.snapshots import load
from snapshot_inspect import explain, plan
from snapshot_inspect.places import Place, ledger_codec, segment_codec
from snapshot_inspect.survey import choose, position
from storage_backends import open_store
from storage_backends.memory import MemoryStore
from storage_backends.testing.servers import BUCKET, Server
from tests import inspect_stores as stores
from tests.fakes import ManualClock, SeededEntropy
from tests.inspect_stores import made, say
from tests.test_inspect_screens import VALIDATORS, opened_as, run_once

pytest_plugins = ["storage_backends.testing.s3_fixtures"]
STOP = resume.StopRules((2,), 4096)
"""As tests.inspect_stores.Job has them."""


def _document(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> dict[str, Any]:
    ran = run_once(capsys, *argv, "--json")
    assert ran.code == code, ran
    (document,) = ran.documents
    VALIDATORS[argv[0]].validate(document)
    return document


# ---- plan ----------------------------------------------------------------------------------------------------------


def _planned(store: ObjectStore) -> dict[str, Any]:
    codecs = (segment_codec(), ledger_codec())
    tail = position(store).tail
    return plan.plan(Place("s", store, {}), codecs, tail, "auto", plan.Job(stores.MUST, STOP), "job.yaml")


def _verdict(found: resume.ResumePlan) -> str:
    match found:
        case resume.Resume():
            return "reuse"
        case resume.Finish():
            return "finished"
        case resume.Restart():
            return "redo"


def ended_unseen(store: ObjectStore) -> stores.Job:
    """A call whose last token is the end of sequence and whose terminal record was lost; one out of budget."""
    job = stores.Job(store)
    say(job.open("p-1"), 7, 2)
    say(job.open("p-2", sampling={"max_tokens": 2, "temperature": 0.0}), 7, 8)
    job.snapshot()
    return job


@pytest.mark.parametrize(
    "make",
    [stores.several, stores.crashed, stores.carried_on, stores.collected, ended_unseen],
    ids=lambda f: f.__name__,
)
def test_a_plan_is_what_a_restore_then_does(make: Callable[[ObjectStore], Any]) -> None:
    store = made(make)
    before = stores.objects_of(store)
    planned = _planned(store)
    assert stores.objects_of(store) == before
    job = stores.Job(stores.copy_of(store), 9, keep=8)
    done = job.restored
    assert planned["snapshot"] == done.snapshot
    assert len(planned["adoption"]["segments"]) == done.adopted_segments
    assert planned["adoption"]["tokens"] == done.adopted_tokens
    assert {call["call_id"]: (call["verdict"], call["n_tokens"]) for call in planned["calls"]} == {
        call.entry.call_id.hex(): (_verdict(call.plan), len(call.transcript.token_ids)) for call in done.calls
    }
    assert planned["totals"]["tokens_reused"] == done.tokens_reused
    left = {call.entry.call_id.hex(): call.plan for call in done.calls}
    for call in planned["calls"]:
        found = left[call["call_id"]]
        assert call["max_tokens_left"] == (found.max_tokens if isinstance(found, resume.Resume) else None)
        assert call["reason"] == (found.reason if isinstance(found, resume.Restart) else "")
    job.close()


def test_a_plan_of_an_older_snapshot_adopts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_as(monkeypatch, made(stores.crashed))
    newest = _document(capsys, 0, "plan", "s")
    assert newest["snapshot"] == 5 and len(newest["adoption"]["segments"]) == 2 and newest["adoption"]["tokens"] == 3
    older = _document(capsys, 0, "plan", "s", "4")
    assert older["snapshot"] == 4 and older["adoption"]["segments"] == []
    assert {call["rollout"]: call["n_tokens"] for call in older["calls"]} == {"p-1": 6}
    assert older["totals"]["ended"] == 1 and older["totals"]["not_begun"] is None


def test_a_plan_counts_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(stores.several)
    job = plan.Job(stores.MUST, STOP, ["p-1", "p-2", "p-10", "p-11", "p-12"])
    codecs = (segment_codec(), ledger_codec())
    totals = plan.plan(Place("s", store, {}), codecs, position(store).tail, "auto", job, "job.yaml")["totals"]
    assert totals["not_begun"] == 2 and totals["calls_to_make"] == 4, "p-1 and p-10 are open, p-2 has its answer"


def test_a_plan_for_another_job_is_refused_as_a_restore_is() -> None:
    store = made(stores.several)
    other = plan.Job({**stores.MUST, "model.name": "large"}, STOP)
    with pytest.raises(FingerprintMismatch, match=r"model\.name: 'tiny' in the store, 'large' here"):
        plan.plan(Place("s", store, {}), (segment_codec(), ledger_codec()), position(store).tail, "auto", other, "f")


def test_participants_that_are_not_asked_are_named() -> None:
    store = MemoryStore()
    job = stores.Job(store)
    job._states = {**job._states, "trainer": b'{"step": 3}'}
    job.snapshot()
    job.close()
    (note,) = _planned(store)["notes"]
    assert "is not asked (trainer): one may refuse this snapshot" in note
    snapshot = choose(store, position(store), "latest").snapshot
    document = explain.explain(Place("s", store, {}), snapshot, explain.machine_here(), None)
    assert document["notes"] == [note]


@pytest.mark.usefixtures("s3_environment")
def test_every_verb_looks_into_a_bucket(
    moto: Server, fresh_prefix: Callable[[], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    address = f"s3://{BUCKET}/{fresh_prefix()}"
    bucket = open_store(address)
    for key, data in stores.objects_of(made(stores.carried_on)).items():
        bucket.put_new(key, data)
    before = bucket.list("")
    for words in (("explain",), ("plan",), ("diff", "5"), ("stats",), ("holds",), ("report",), ("doctor",)):
        document = _document(capsys, 0, words[0], address, *words[1:])
        assert address in json.dumps(document)
    assert bucket.list("") == before
    assert run_once(capsys, "stats", f"{address}/none").code == 10


# ---- explain -------------------------------------------------------------------------------------------------------

_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.text(max_size=3), st.lists(st.integers(), max_size=2)
)
_FIELDS = st.dictionaries(
    st.sampled_from(["model.config", "tokenizer.behaviour", "job.samples_per_prompt", "x"]), _VALUES
)


@settings(max_examples=25)
@given(_FIELDS, _FIELDS)
def test_explain_decides_as_a_restore_does(stored: dict[str, Any], here: dict[str, Any]) -> None:
    store = MemoryStore()
    stores.Job(store, must=stored).close()
    snapshot = choose(store, position(store), "latest").snapshot
    document = explain.explain(
        Place("s", store, {}), snapshot, explain.Here(here, stores.RECORDED, complete=True, compared=Compared()), "f"
    )
    try:
        restore.check_fingerprint(load(store, ledger_codec(), snapshot), here)
    except FingerprintMismatch as error:
        assert document["restorable"] is False and document["grade"] == "refused"
        assert any(field["effect"] == "refuses" for field in document["fields"]), error
    else:
        assert document["restorable"] is True and document["grade"] == "self_test"
    VALIDATORS["explain"].validate(document)


def test_a_recorded_difference_lowers_the_grade_and_nothing_else() -> None:
    store = made(stores.several)
    snapshot = choose(store, position(store), "latest").snapshot
    here = explain.Here(stores.MUST, {"engine.vllm": "0.33.0"}, complete=True, compared=Compared())
    document = explain.explain(Place("s", store, {}), snapshot, here, "f")
    assert document["restorable"] is True and document["grade"] == "statistical"
    assert [f["effect"] for f in document["fields"]] == ["none", "none", "lowers"]


def test_explain_without_a_job_file_calls_nothing_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_as(monkeypatch, made(stores.several))
    document = _document(capsys, 0, "explain", "s")
    assert document["restorable"] is None and document["grade"] == "unknown"
    assert {f["verdict"] for f in document["fields"]} == {"not_compared"}
    assert "--config FILE" in run_once(capsys, "explain", "s").out


def test_explain_with_a_job_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a run would compare, without an engine: its fields, and the prompts line by line. 15 on a mismatch."""
    from prefix_recovery import job_here
    from prefix_recovery.tiny import make_tiny_llama

    model = make_tiny_llama(tmp_path / "model", dtype="float32")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt_token_ids": [3, 4]}\n')
    config = tmp_path / "job.yaml"
    job_file = {"model": str(model), "prompts": "prompts.jsonl", "output": "out.jsonl"}
    config.write_text(json.dumps({**job_file, "rollout_checkpointing": {"enabled": True, "store": "s"}}))
    here = job_here.job_here(str(config))
    assert here.must["job.samples_per_prompt"] == 1 and set(here.source_digests) == {"a#0"}
    store = MemoryStore()
    job = stores.Job(store, must=here.must)
    say(job.open("a#0", (3, 4), source_digest=here.source_digests["a#0"]), 7, 8)
    job.snapshot()
    job.close()
    opened_as(monkeypatch, store)
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"id": "b", "prompt_token_ids": [5]}\n')
    planned = _document(capsys, 0, "plan", "s", "--config", str(config))
    assert planned["totals"]["not_begun"] == 1 and planned["totals"]["reuse"] == 1
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt_token_ids": [3, 4, 5]}\n')
    document = _document(capsys, 15, "explain", str(config))
    assert document["config"] == str(config), "a store that was found by its job's file is compared with that"
    assert {f["effect"] for f in document["fields"] if f["kind"] == "must"} == {"none"}
    assert document["prompts"]["changed"] == ["a#0"] and document["prompts"]["missing"] == []
    ran = run_once(capsys, "plan", "s", "--config", str(tmp_path / "none.yaml"))
    assert ran.code == 2 and "none.yaml" in ran.err


# ---- diff ----------------------------------------------------------------------------------------------------------

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 5)),
        st.tuples(st.just("say"), st.integers(0, 5), st.integers(3, 90)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("drop"), st.integers(0, 5)),
        st.just(("snapshot",)),
    ),
    max_size=25,
)


def _lived(store: ObjectStore, steps: list[Any]) -> dict[int, dict[str, tuple[list[int], bool]]]:
    """Do the steps; what each snapshot holds, as the test itself kept it: tokens and whether the call ended."""
    job = stores.Job(store, keep=99)
    kept: dict[int, dict[str, tuple[list[int], bool]]] = {2: {}}
    now: dict[str, tuple[list[int], bool]] = {}
    for step in [*steps, ("snapshot",)]:
        if step[0] == "snapshot":
            kept[job.snapshot()] = {name: (list(ids), ended) for name, (ids, ended) in now.items()}
            continue
        name = f"p-{step[1]}"
        if step[0] == "open" and name not in job.calls:
            job.open(name)
            now[name] = ([], False)
        elif step[0] == "say" and name in now and not now[name][1]:
            say(job.calls[name], step[2])
            now[name][0].append(step[2])
        elif step[0] == "end" and name in now and now[name][0] and not now[name][1]:
            job.calls[name].end("stop", None)
            now[name] = (now[name][0], True)
        elif step[0] == "drop" and name in now and now[name][1] and any(name in calls for calls in kept.values()):
            ledger, call_id = job.publication.ledger, job.calls[name].call_id
            if (entry := ledger.get(call_id)) is not None and entry.ended:
                ledger.drop(call_id)
                del now[name]
    job.close()
    return kept


@settings(max_examples=25)
@given(_STEPS, st.data())
def test_diff_says_what_happened(steps: list[Any], data: st.DataObject) -> None:
    from snapshot_inspect import diff
    from snapshot_inspect.calls import read_ledger

    store = MemoryStore()
    kept = _lived(store, steps)
    a, b = sorted((data.draw(st.sampled_from(sorted(kept))), data.draw(st.sampled_from(sorted(kept)))))
    sides = []
    for number in (a, b):
        snapshot = choose(store, position(store), f"{number:012d}").snapshot
        sides.append(diff.Side(Place("s", store, {}), snapshot, read_ledger(store, ledger_codec(), snapshot)))
    document = diff.diff(*sides, 0.0)
    VALIDATORS["diff"].validate(document)
    expected = {}
    for name in {**kept[a], **kept[b]}:
        before, after = kept[a].get(name), kept[b].get(name)
        if before == after:
            continue
        if before is None:
            expected[name] = "added"
        elif after is None:
            expected[name] = "dropped"
        else:
            expected[name] = "ended" if after[1] and not before[1] else "grown"
    assert {row["rollout"]: row["change"] for row in document["calls"]} == expected
    n_a, n_b = (sum(len(ids) for ids, _ in kept[n].values()) for n in (a, b))
    assert document["tokens"]["new"] - document["tokens"]["gone"] == n_b - n_a
    assert (document["a"]["tokens"], document["b"]["tokens"]) == (n_a, n_b)
    assert sum(document["totals"].values()) == len({**kept[a], **kept[b]})


def test_diff_of_two_stores_and_of_what_began_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, make in (("a", stores.several), ("b", stores.carried_on)):
        stores.on_disk(tmp_path / name, stores.objects_of(made(make)))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    document = _document(capsys, 0, "diff", a, b)
    assert (document["a"]["id"], document["b"]["id"]) == (5, 8)
    assert {row["rollout"]: row["change"] for row in document["calls"]} == {
        "p-1": "grown",
        "p-10": "grown",
        "p-3": "added",
    }
    job = stores.Job(stores.on_disk(tmp_path / "b", stores.objects_of(made(stores.carried_on))), 3, keep=8)
    live = job.carry_on()
    say(live["p-10"], 9)
    number = job.snapshot()
    job.close()
    document = _document(capsys, 0, "diff", b, "8", str(number))
    assert [(r["rollout"], r["change"], r["tokens_kept"]) for r in document["calls"]] == [("p-10", "restarted", 0)]
    assert document["tokens"] == {"new": 1, "gone": 2} and document["job"] == []
    assert run_once(capsys, "diff", a, b, "8").code == 2
    assert run_once(capsys, "diff", a, "77").code == 2


def test_diff_names_what_the_jobs_differ_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, must in (("a", stores.MUST), ("b", {**stores.MUST, "model.name": "large"})):
        stores.Job(stores.on_disk(tmp_path / name, stores.objects_of(made(stores.empty))), must=must).close()
    document = _document(capsys, 0, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert document["job"] == [{"field": "model.name", "kind": "must", "a": "tiny", "b": "large"}]


# ---- stats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [stores.several, stores.crashed, stores.carried_on, stores.collected], ids=lambda f: f.__name__
)
def test_stats_counts_every_object_once(
    make: Callable[[ObjectStore], Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    stores.on_disk(folder, {**stores.objects_of(made(make)), "notes.txt": b"mine"})
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    document = _document(capsys, 0, "stats", str(folder))
    assert document["total"] == {"objects": len(sizes), "nbytes": sum(sizes.values())}
    for part in (document["kinds"], document["epochs"], list(document["use"].values())):
        epoch_bound = part is not document["kinds"]
        counted = {
            k: n for k, n in sizes.items() if not epoch_bound or k.split("/")[0] in ("seg", "ledger", "state", "gc")
        }
        assert sum(p["objects"] for p in part) == len(counted)
        assert sum(p["nbytes"] for p in part) == sum(counted.values())
    by_kind = {kind["kind"]: kind["objects"] for kind in document["kinds"]}
    assert by_kind["segments"] == sum(key.startswith("seg/") for key in sizes) and by_kind["foreign"] == 1
    (latest,) = run_once(capsys, "latest", str(folder), "--json").documents
    assert document["tokens"]["tokens"] == latest["counts"]["tokens"]
    assert document["tokens"]["stored_nbytes"] == latest["counts"]["nbytes"]
    (found,) = run_once(capsys, "verify", str(folder), "--json").documents
    assert document["use"]["garbage"]["objects"] == len(found["unreferenced"])
    assert document["use"]["adoptable"]["objects"] == len(found["adoption"]["segments"])


# ---- holds ---------------------------------------------------------------------------------------------------------


def test_holds_says_who_fenced_whom(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    store = made(stores.carried_on)
    SlotLog(store, ManualClock(stores.BEGIN_UTC + 9000), SeededEntropy("other"), "host-b pid 9").claim()
    opened_as(monkeypatch, store)
    document = _document(capsys, 0, "holds", "s")
    assert [(o["epoch"], o["owner"], o["fenced_by"], o["ended"]) for o in document["owners"]] == [
        (1, "host-a pid 1", 2, False),
        (2, "host-a pid 2", 3, True),
        (3, "host-b pid 9", None, False),
    ]
    assert document["may_publish"] == 3
    assert document["owners"][0]["snapshots"] == {"interval": 2, "adoption": 1, "final": 0, "request": 1, "other": 0}
    assert document["owners"][0]["fenced_utc"] == document["owners"][1]["utc"] == "2026-01-01T01:00:00.000Z"
    out = run_once(capsys, "holds", "s").out
    assert "stopped by itself, then fenced by epoch 3" in out and "a store does not know whether a process lives" in out
