"""Calls as the token-capture rows of NeMo Gym (staging schema 2), and such rows as records that can be staged.

Owns: which row a call is, where in a row what it has no column for goes, and checking rows that come from elsewhere.
Does not know: stores, that library; its sums are gym_digests.py's.

Invariants:
1. A row holds what its call adds to the tokens of its parent: the rest of the prompt (mask 0, logprob 0.0), then what
   was generated. A call is the child of its parent only if its prompt begins with all of that one's tokens; else it is
   a root.
2. What a row cannot say is refused by name, never left out: tokens without a logprob, or that are not trained on.
3. A call of several policy versions is a row for each, one the child of the other, the later ones without a prompt.
4. Records made of rows that were made of a call are that call's: id, tokens, versions, wide columns, end.
5. Rows are taken only if every sum in them is right and each one extends its parent.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from recovery import codec
from recovery import gym_digests as digests
from recovery.errors import Damaged, InputError
from recovery.lineage import NO_PARENT, lineage_of
from recovery.model import Array, CallId, Chunk, Ended, Opened, PolicyVersion, Record, Request
from recovery.transcripts import Transcript

Row = dict[str, Any]

OURS = "prefix_recovery"
"""Key of a row's `extras` for what has no place of its own there."""

_FIELDS = {
    "schema_version": int, "digest_version": int, "extras_digest_version": int, "rollout_id": str, "model_call_id": str,
    "mode": str, "prev_len": int, "delta_len": int, "cum_len": int, "weight_version": int, "digest": str,
    "token_ids_delta": list, "token_mask_delta": list, "generation_log_probs_delta": list, "extras_digest": str,
    "chain_hash": str, "cumulative_hash": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StagedCall:
    """A call as a store has it; `ended` is (finish reason, stop reason), None while it is open."""

    call_id: CallId
    transcript: Transcript
    ended: tuple[str, int | str | None] | None = None


# ---- calls to rows -----------------------------------------------------------------------------------------------


def rows_of(calls: Iterable[StagedCall]) -> list[Row]:
    """The rows of calls; a parent comes before its children. Raises InputError for a call that cannot be rows."""
    rows: list[Row] = []
    chains: dict[CallId, tuple[str, list[int], str]] = {}
    for call in calls:
        own = _rows_of_one(call, chains.get(lineage_of(call.transcript.request.extra).parent))
        rows += own
        tokens = [*call.transcript.request.prompt_token_ids.tolist(), *call.transcript.token_ids.tolist()]
        chains[call.call_id] = (own[-1]["model_call_id"], tokens, own[-1]["chain_hash"])
    return rows


def _rows_of_one(call: StagedCall, parent: tuple[str, list[int], str] | None) -> list[Row]:
    transcript, name = call.transcript, call.call_id.hex()
    prompt = transcript.request.prompt_token_ids.tolist()
    _check(call)
    if parent is not None and prompt[: len(parent[1])] != parent[1]:
        parent = None  # invariant 1: the prompt was made anew, and does not go on from that answer
    at, before, chain = (parent[0], parent[1], parent[2]) if parent else (None, [], None)
    rows: list[Row] = []
    for number, (start, end, version) in enumerate(transcript.version_spans):
        carry = prompt[len(before) :] if not number else []
        ids = transcript.token_ids[start:end].tolist()
        delta = [*carry, *ids]
        chain = digests.chain_digest(chain, delta)
        extras = {OURS: _beside(call, start, version) if not number else {"start": start, "lineage": version.lineage}}
        row = {
            "schema_version": digests.SCHEMA_VERSION,
            "digest_version": digests.DIGEST_VERSION,
            "extras_digest_version": digests.EXTRAS_VERSION,
            "rollout_id": transcript.request.rollout,
            "model_call_id": name if not number else f"{name}.{number}",
            "parent_call_id": at,
            "mode": "text" if at is None else "token_in",
            "prev_len": len(before),
            "delta_len": len(delta),
            "cum_len": len(before) + len(delta),
            "weight_version": version.number,
            "token_ids_delta": delta,
            "token_mask_delta": [0.0] * len(carry) + [1.0] * len(ids),
            "generation_log_probs_delta": [0.0] * len(carry) + transcript.logprobs[start:end].tolist(),
            "extras": extras,
            "extras_digest": digests.extras_digest(extras),
            "chain_hash": chain,
            "cumulative_hash": digests.prefix_digest([*before, *delta]),
        }
        rows.append({**row, "digest": digests.row_digest(row)})
        at, before = rows[-1]["model_call_id"], [*before, *delta]
    return rows


def _check(call: StagedCall) -> None:
    transcript = call.transcript
    what = f"call {call.call_id.hex()} of rollout {transcript.request.rollout!r} cannot be a row"
    if not len(transcript.token_ids):
        raise InputError(f"{what}: it has no token", hint="leave it out")
    if not np.isfinite(transcript.logprobs).all():
        raise InputError(f"{what}: not each of its tokens has a logprob", hint="leave it out")
    if not transcript.mask.all():
        raise InputError(f"{what}: some of its tokens are not trained on", hint="leave it out")


def _beside(call: StagedCall, start: int, version: PolicyVersion) -> dict[str, Any]:
    request = call.transcript.request
    return {
        "start": start,
        "lineage": version.lineage,
        "turn": request.turn,
        "n_prompt": len(request.prompt_token_ids),
        "sampling": dict(request.sampling),
        "extra": dict(request.extra),
        "restart_only": request.restart_only,
        "source_digest": request.source_digest,
        "ended": None if call.ended is None else list(call.ended),
        "columns": [
            [name, run.start, run.values.dtype.name, list(run.values.shape), _packed(run.values)]
            for name, runs in sorted(call.transcript.columns.items())
            for run in runs
        ],
    }


def _packed(values: Array) -> str:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii")


# ---- rows to records -------------------------------------------------------------------------------------------------


def records_of(rows: Iterable[Mapping[str, Any]], *, lineage: str = "a") -> list[Record]:
    """What rows hold, as records in an order in which they can be staged; a parent comes before its children.

    `lineage`: that of the policy, for rows that were not made here. Raises Damaged for rows that do not check.
    """
    records: list[Record] = []
    tokens: dict[str, list[int]] = {}
    chains: dict[str, str] = {}
    opened: dict[str, CallId] = {}
    whole: dict[CallId, _Being] = {}
    for row in rows:
        name = _check_row(row, tokens, chains)
        ours = (row.get("extras") or {}).get(OURS)
        first, dot, number = name.partition(".")
        if ours is not None and dot and number.isdigit():
            call_id = opened.get(first)
            if call_id is None:
                raise Damaged(f"row {name!r:.100} goes on from {first!r:.100}, which is not among the rows before it")
        else:
            call_id = _open(row, ours, tokens[name], whole, opened)
            opened[name] = call_id
        being = whole[call_id]
        being.extend(row, ours["lineage"] if ours else lineage)
    for being in whole.values():
        records += being.records()
    return records


def _check_row(row: Mapping[str, Any], tokens: dict[str, list[int]], chains: dict[str, str]) -> str:
    """The row's name, its tokens and chain noted under it."""
    name = row.get("model_call_id")
    what = f"row {name!r:.100}"
    for field, kind in _FIELDS.items():
        if type(row.get(field)) is not kind:
            raise Damaged(f"{what}: {field} is no {kind.__name__}")
    if (row["schema_version"], row["digest_version"], row["extras_digest_version"]) != (2, 2, 1):
        raise Damaged(f"{what}: is of another version than schema 2")
    ids, mask, logprobs = (row[f"{field}_delta"] for field in ("token_ids", "token_mask", "generation_log_probs"))
    alike = len(ids) == len(mask) == len(logprobs) == row["delta_len"] > 0
    if not alike or row["cum_len"] != row["prev_len"] + row["delta_len"]:
        raise Damaged(f"{what}: its lengths do not fit each other")
    if not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
        raise Damaged(f"{what}: a token id is out of range")
    if not all(type(one) is float for one in (*mask, *logprobs)) or sorted(mask) != mask or not {*mask} <= {0.0, 1.0}:
        raise Damaged(f"{what}: its mask is not prompt, then answer")
    try:
        extras, own = digests.extras_digest(row.get("extras")), digests.row_digest(row)
    except (TypeError, ValueError, OverflowError, KeyError) as error:
        raise Damaged(f"{what}: {error!r:.200}") from error
    parent = row["parent_call_id"]
    before = [] if parent is None else tokens.get(parent)
    if before is None or len(before) != row["prev_len"] or (parent is None) != (row["mode"] == "text"):
        raise Damaged(f"{what}: it does not go on where its parent {parent!r:.100} ends")
    chain = digests.chain_digest(None if parent is None else chains[parent], ids)
    whole = [*before, *ids]
    sums = {
        "extras_digest": extras,
        "digest": own,
        "chain_hash": chain,
        "cumulative_hash": digests.prefix_digest(whole),
    }
    if wrong := [field for field, value in sums.items() if row[field] != value]:
        raise Damaged(f"{what}: {wrong[0]} is not that of what the row holds")
    if row["model_call_id"] in tokens:
        raise Damaged(f"{what} is there twice")
    tokens[row["model_call_id"]], chains[row["model_call_id"]] = whole, chain
    return str(row["model_call_id"])


@dataclass(slots=True)
class _Being:
    """A call whose rows are being read."""

    call_id: CallId
    request: Request
    ended: tuple[str, int | str | None] | None
    columns: Sequence[tuple[str, int, Array]]
    chunks: list[Chunk]

    def extend(self, row: Mapping[str, Any], lineage: str) -> None:
        n_carried = row["token_mask_delta"].count(0.0)
        ids = np.asarray(row["token_ids_delta"][n_carried:], np.int32)
        if not len(ids):
            return
        start = self.chunks[-1].stop if self.chunks else 0
        for at, stop in self._alike(start, start + len(ids)):
            own = slice(at - start, stop - start)
            logprobs = np.asarray(row["generation_log_probs_delta"][n_carried:], np.float32)[own]
            self.chunks.append(
                Chunk(
                    call_id=self.call_id,
                    attempt=0,
                    start=at,
                    token_ids=ids[own],
                    logprobs=logprobs,
                    mask=np.ones(stop - at, np.bool_),
                    version=PolicyVersion(lineage, row["weight_version"]),
                    columns={
                        name: values[at - begin : stop - begin]
                        for name, begin, values in self.columns
                        if begin <= at and stop <= begin + len(values)
                    },
                )
            )

    def _alike(self, start: int, stop: int) -> list[tuple[int, int]]:
        """In stretches of which each has the same columns from end to end."""
        ends = {at for _, begin, values in self.columns for at in (begin, begin + len(values)) if start < at < stop}
        bounds = [start, *sorted(ends), stop]
        return list(pairwise(bounds))

    def records(self) -> list[Record]:
        end: list[Record] = []
        if self.ended is not None:
            n = self.chunks[-1].stop if self.chunks else 0
            reason, stop = self.ended
            end = [Ended(call_id=self.call_id, attempt=0, n_tokens=n, finish_reason=reason, stop_reason=stop)]
        return [Opened(call_id=self.call_id, attempt=0, request=self.request), *self.chunks, *end]


def _open(
    row: Mapping[str, Any],
    ours: Mapping[str, Any] | None,
    tokens: Sequence[int],
    whole: dict[CallId, _Being],
    opened: Mapping[str, CallId],
) -> CallId:
    """The call that begins with this row."""
    name = row["model_call_id"]
    n_prompt = len(tokens) - sum(1 for one in row["token_mask_delta"] if one)
    prompt = np.asarray(tokens[:n_prompt], np.int32)
    try:
        if ours is None:
            parent = opened.get(str(row["parent_call_id"]), NO_PARENT)
            extra = {"lineage": {"call": 0, "parent": None if parent == NO_PARENT else parent.hex()}, "row": name}
            request = Request(rollout=row["rollout_id"], prompt_token_ids=prompt, extra=extra)
            ended, columns = None, []
        else:
            request = Request(
                rollout=row["rollout_id"], turn=ours["turn"], prompt_token_ids=prompt, sampling=ours["sampling"],
                extra=ours["extra"], restart_only=ours["restart_only"], source_digest=ours["source_digest"],
            )  # fmt: skip
            ended = None if ours["ended"] is None else (ours["ended"][0], ours["ended"][1])
            columns = [(n, start, _values(*rest)) for n, start, *rest in ours["columns"]]
        call_id = codec.call_of(request)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"row {name!r:.100}: what it carries of a call is malformed: {error!r:.200}") from error
    if ours is not None and call_id.hex() != name:
        raise Damaged(f"row {name!r:.100} holds call {call_id.hex()}")
    whole[call_id] = _Being(call_id, request, ended, columns, [])
    return call_id


def _values(dtype: str, shape: Sequence[int], text: str) -> Array:
    little = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype).newbyteorder("<")).reshape(shape)
    return little.astype(little.dtype.newbyteorder("="), copy=False)
