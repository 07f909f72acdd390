"""A small job on disk: its folder, prompts and config, for the tests that run jobs.

Owns: how a job of the tiny model is written down and how its rows are compared.
Does not know: pytest, engines in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prefix_recovery.interrupted import Comparison, compare, read_rows
from prefix_recovery.processes import Identity
from recovery.errors import ObjectMissing
from recovery.model import Chunk, Ended, Opened, Record
from recovery.ports import ObjectStore
from storage_backends.arrow_segments import ArrowSegmentCodec
from tests.engine_runs import prompts as token_prompts

ENGINE = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 192 << 20}
FLUSH = 64
"""Tokens per flush: several times what the tiny model decodes while a busy disk stores a segment."""


def lines(
    n: int, *, least: int = 60, step: int = 9, seed: int = 0, sampling: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Prompt lines of different lengths; the k-th asks for `least` + `step` * k tokens."""
    return [
        {"id": f"p-{k}", "prompt_token_ids": ids, "sampling": {"max_tokens": least + step * k, **(sampling or {})}}
        for k, ids in enumerate(token_prompts(n, seed=seed))
    ]


def write_lines(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> None:
    """JSON lines; a text is written as it is."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_job(folder: Path, model: Path, rows: Iterable[Mapping[str, Any] | str], **fields: Any) -> Path:
    """A job in `folder`: prompts.jsonl, results.jsonl, store. Returns its config.

    `block` is merged into rollout_checkpointing, `flush` are its tokens per flush, other fields are the job's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "prompts.jsonl", rows)
    checkpointing = {
        "enabled": True,
        "store": "store",
        "snapshot_interval_s": 1,
        "gym": {"mode": "prefix_recovery", "generation_chunk_flush_tokens": fields.pop("flush", FLUSH)},
        **fields.pop("block", {}),
    }
    job = {
        "model": str(model),
        "engine": ENGINE,
        "prompts": "prompts.jsonl",
        "output": "results.jsonl",
        "sampling": {"temperature": 0, "ignore_eos": True},
        "max_concurrent_calls": 8,
        "rollout_checkpointing": checkpointing,
        **fields,
    }
    config = folder / "job.yaml"
    config.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return config


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_rows(folder / "results.jsonl")


def assert_whole(rows: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> None:
    """Every row of the reference is there once, with the same tokens, text and reasons, and the same logprobs."""
    found = compare(rows, reference)
    assert found == Comparison(0, 0, 0, found.largest_logprob_gap), found
    assert len(rows) == len(reference)
    assert found.largest_logprob_gap <= 2e-5


@dataclass(frozen=True, slots=True)
class Saved:
    """What the segments of a store hold, published or not: tokens by name of the call, and the names of those that end.

    That a segment is there says less: a cut may come before any token, and what a flush carried may have ended.
    """

    tokens: Mapping[str, int]
    ended: frozenset[str]

    @property
    def in_mid_decode(self) -> set[str]:
        return {name for name, n_tokens in self.tokens.items() if n_tokens} - self.ended


def saved_in(store: ObjectStore) -> Saved:
    """Reads every segment, with nothing of a ledger."""
    codec = ArrowSegmentCodec()
    records: list[Record] = []
    for item in store.list("seg/"):
        try:
            data = store.get(item.key)
        except ObjectMissing:  # collected since it was listed: what it holds is elsewhere
            continue
        records += codec.decode(data, codec.describe(item.key, data))
    names = {record.call_id: record.request.rollout for record in records if isinstance(record, Opened)}
    tokens: dict[str, int] = dict.fromkeys(names.values(), 0)
    for record in records:
        if isinstance(record, Chunk) and record.call_id in names:
            name = names[record.call_id]
            tokens[name] = max(tokens[name], record.start + len(record.token_ids))
    ended = {record.call_id for record in records if isinstance(record, Ended)}
    return Saved(tokens, frozenset(name for call_id, name in names.items() if call_id in ended))


def lock_of(folder: Path) -> dict[str, Any]:
    """What a run has noted beside its output."""
    found: dict[str, Any] = json.loads((folder / "results.jsonl.lock").read_text() or "{}")
    return found


def noted_children(folder: Path) -> list[Identity]:
    """The processes that a run has noted as its own."""
    try:
        found = [Identity.from_json(item) for item in lock_of(folder).get("children", [])]
    except (OSError, ValueError):  # not there yet, or being written
        return []
    return [item for item in found if item is not None]
