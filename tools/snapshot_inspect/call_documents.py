"""Calls as the JSON documents of docs/schemas/: rows, one call whole, and the lines of an export for people.

Owns: every field about a call.
Does not know: how a call was read, the form of numbers (arrays.py), files, terminals.

Invariants:
1. A document validates against its schema; fields are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from recovery.ledger import Entry
from recovery.lineage import NO_PARENT
from recovery.model import ENDED, BoolArray, Restarted, Restore, Resumed
from recovery.transcripts import Transcript
from snapshot_inspect.arrays import columns, floats
from snapshot_inspect.calls import Call
from snapshot_inspect.documents import Document
from snapshot_inspect.places import Place
from snapshot_inspect.rescore import Rescored

Texts = tuple[str, str]
"""Prompt and generated text, if a tokenizer was given."""


def call_row(entry: Entry, snapshot_id: int) -> Document:
    n_segments = len({entry.identity.opened.segment, *(chunk.at.segment for chunk in entry.chunks)})
    sizes = {"n_chunks": len(entry.chunks), "n_segments": n_segments}
    return {**_call(entry, snapshot_id), **sizes, "history": _history(entry.history)}


def cat(place: Place, call: Call, texts: Texts | None) -> Document:
    chunks = [
        {
            "start": chunk.start,
            "stop": chunk.stop,
            "segment": chunk.at.segment,
            "index": chunk.at.index,
            "digest": chunk.digest.hex(),
        }
        for chunk in call.entry.chunks
    ]
    whole = line(call.entry, call.snapshot, call.transcript, texts)
    return {"store": place.address, **whole, "chunks": chunks}


def line(entry: Entry, snapshot_id: int, transcript: Transcript, texts: Texts | None) -> Document:
    """Everything that is stored of a call, but for where it is stored."""
    request = transcript.request
    prompt_text, text = texts if texts is not None else (None, None)
    return {
        **_call(entry, snapshot_id),
        "source_digest": entry.identity.source_digest,
        "request_digest": entry.identity.request_digest.hex(),
        "prompt_token_ids": request.prompt_token_ids.tolist(),
        "sampling": dict(request.sampling),
        "extra": dict(request.extra),
        "token_ids": transcript.token_ids.tolist(),
        "logprobs": floats(transcript.logprobs.tolist()),
        "mask_spans": spans(transcript.mask),
        "version_spans": [
            [start, end, version.lineage, version.number] for start, end, version in transcript.version_spans
        ],
        "columns": columns(transcript.columns),
        "history": _history(entry.history),
        "prompt_text": prompt_text,
        "text": text,
    }


def _call(entry: Entry, snapshot_id: int) -> Document:
    finish_reason, stop_reason = entry.ended if entry.ended is not None else (None, None)
    return {
        "snapshot": snapshot_id,
        "call_id": entry.call_id.hex(),
        "rollout": entry.identity.rollout,
        "turn": entry.identity.turn,
        "model_call": entry.identity.model_call,
        "parent": None if entry.identity.parent == NO_PARENT else entry.identity.parent.hex(),
        "attempt": entry.attempt,
        "state": "ended" if entry.state == ENDED else "open",
        "n_tokens": entry.n_tokens,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "restart_only": entry.identity.restart_only,
    }


def _history(history: Iterable[Restore]) -> list[Document]:
    return [_restore(item) for item in history]


def _restore(item: Restore) -> Document:
    match item:
        case Resumed():
            return {"kind": "resume", "at": item.at, "snapshot": item.snapshot, "exactness": item.exactness}
        case Restarted():
            return {"kind": "restart", "at": item.at, "snapshot": item.snapshot, "reason": item.reason}


def spans(mask: BoolArray) -> list[tuple[int, int, bool]]:
    """(start, end, value) of the runs of a mask."""
    bounds = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(mask)]
    return [(start, end, bool(mask[start])) for start, end in pairwise(bounds) if start < end]


def rescored(snapshot_id: int, found: Sequence[Rescored]) -> Document:
    """Largest differences, the largest first; calls that were left out at the end."""
    order = sorted(found, key=lambda one: (one.largest is None, -(one.largest or 0.0), one.rollout))
    largest = max((one.largest for one in found if one.largest is not None), default=None)
    return {"snapshot": snapshot_id, "largest": largest, "calls": [asdict(one) for one in order]}
