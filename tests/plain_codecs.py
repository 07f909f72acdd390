"""Segment and ledger codecs in plain JSON, written from recovery.ports and docs/format.md alone.

Owns: a second implementation of both codecs, without Arrow: the core is tested against its ports, and fast.
Does not know: storage_backends.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood
from recovery.ledger_columns import LedgerRows, Names
from recovery.model import (
    BatchInfo,
    CallId,
    Chunk,
    Ended,
    Identity,
    LedgerRow,
    Opened,
    PolicyVersion,
    Record,
    RecordRef,
    Request,
    Restarted,
    Resumed,
    SegmentInfo,
)
from recovery.ports import EncodedSegment, SegmentPart
from recovery.records import Records


def _pack(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpack(text: str, dtype: Any) -> Any:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)


def _record_as_json(record: Record) -> dict[str, Any]:
    shared = {"call": record.call_id.hex(), "attempt": record.attempt}
    match record:
        case Opened(request=request):
            fields = {
                name: getattr(request, name)
                for name in ("rollout", "turn", "restart_only", "source_digest", "sampling", "extra")
            }
            return {**shared, "kind": "opened", "prompt": _pack(request.prompt_token_ids), **fields}
        case Chunk():
            return {
                **shared,
                "kind": "chunk",
                "start": record.start,
                "tokens": _pack(record.token_ids),
                "logprobs": None if record.logprobs is None else _pack(record.logprobs),
                "mask": _pack(record.mask),
                "version": [record.version.lineage, record.version.number],
                "wide": {name: [v.dtype.name, v.shape, _pack(v)] for name, v in record.columns.items()},
            }
        case Ended():
            return {
                **shared,
                "kind": "ended",
                "n": record.n_tokens,
                "reason": record.finish_reason,
                "stop": record.stop_reason,
            }


def _record_from_json(value: dict[str, Any]) -> Record:
    call_id, attempt = CallId(bytes.fromhex(value["call"])), value["attempt"]
    if value["kind"] == "opened":
        request = Request(
            rollout=value["rollout"],
            turn=value["turn"],
            prompt_token_ids=_unpack(value["prompt"], np.int32),
            sampling=value["sampling"],
            restart_only=value["restart_only"],
            source_digest=value["source_digest"],
            extra=value["extra"],
        )
        return Opened(call_id=call_id, attempt=attempt, request=request)
    if value["kind"] == "ended":
        return Ended(
            call_id=call_id,
            attempt=attempt,
            n_tokens=value["n"],
            finish_reason=value["reason"],
            stop_reason=value["stop"],
        )
    return Chunk(
        call_id=call_id,
        attempt=attempt,
        start=value["start"],
        token_ids=_unpack(value["tokens"], np.int32),
        logprobs=None if value["logprobs"] is None else _unpack(value["logprobs"], np.float32),
        mask=_unpack(value["mask"], np.bool_),
        version=PolicyVersion(*value["version"]),
        columns={name: _unpack(text, dtype).reshape(shape) for name, (dtype, shape, text) in value["wide"].items()},
    )


class PlainSegments:
    """recovery.ports.SegmentCodec; the sum is zlib's crc32, which the core never looks into."""

    suffix = "json"

    def encode(self, records: Sequence[Record], key_stem: str) -> EncodedSegment:
        data = json.dumps([_record_as_json(record) for record in records]).encode()
        crc = zlib.crc32(data)
        return EncodedSegment(data, self._info(f"{key_stem}-{crc:08x}.{self.suffix}", data, len(records)))

    def describe(self, key: str, data: bytes) -> SegmentInfo:
        if f"{zlib.crc32(data):08x}" != key.removesuffix(".json").rpartition("-")[2]:
            raise DigestMismatch(f"{key} does not have the sum in its name")
        return self._info(key, data, len(json.loads(data)))

    def _info(self, key: str, data: bytes, n: int) -> SegmentInfo:
        crc = zlib.crc32(data)
        return SegmentInfo(key=key, nbytes=len(data), crc32c=crc, batches=(BatchInfo(0, len(data), crc, n),))

    def decode(self, data: bytes, info: SegmentInfo | None) -> Records:
        if info is not None and (len(data) != info.nbytes or zlib.crc32(data) != info.crc32c):
            raise DigestMismatch(f"{info.key} is not what was written")
        return Records.of([_record_from_json(value) for value in json.loads(data)])

    def parts(self, data: bytes, info: SegmentInfo | None) -> Sequence[SegmentPart]:
        """One record at a time, each with its digest."""

        def part(record: Record) -> SegmentPart:
            return SegmentPart(1, lambda: lambda wanted: Records.of([record]))

        return [part(record) for record in self.decode(data, info)]

    def decode_batch(self, data: bytes, info: SegmentInfo, batch: int) -> Records:
        return self.decode(data, info)


def _row_as_json(row: LedgerRow, names: Names) -> dict[str, Any]:
    who = row.identity
    return {
        "call": row.call_id.hex(),
        "attempt": row.attempt,
        "state": row.state,
        "n": row.n_tokens,
        "kept": row.kept,
        "chunks": [
            [
                names.known(c.at.segment),
                c.at.index,
                c.start,
                c.n_tokens,
                c.digest.hex(),
                c.version.lineage,
                c.version.number,
            ]
            for c in row.chunks
        ],
        "identity": None
        if who is None
        else [
            who.rollout,
            who.turn,
            who.request_digest.hex(),
            who.source_digest,
            who.restart_only,
            who.opened.segment,
            who.opened.index,
            who.model_call,
            who.parent.hex(),
        ],
        "ended": row.ended,
        "history": None
        if row.history is None
        else [
            ["resume", e.at, e.snapshot, e.exactness]
            if isinstance(e, Resumed)
            else ["restart", e.at, e.snapshot, e.reason]
            for e in row.history
        ],
    }


def _add_row(rows: LedgerRows, value: dict[str, Any]) -> None:
    who, end, events = value["identity"], value["ended"], value["history"]
    identity = who and Identity(
        rollout=who[0],
        turn=who[1],
        request_digest=bytes.fromhex(who[2]),
        source_digest=who[3],
        restart_only=who[4],
        opened=RecordRef(who[5], who[6]),
        model_call=who[7],
        parent=CallId(bytes.fromhex(who[8])),
    )
    made = [(Resumed if kind == "resume" else Restarted)(*rest) for kind, *rest in events or ()]
    rows.add(
        CallId(bytes.fromhex(value["call"])), value["attempt"], value["state"], value["n"], value["kept"],
        len(value["chunks"]), identity, end and (end[0], end[1]), None if events is None else tuple(made),
    )  # fmt: skip
    for segment, index, start, n, digest, lineage, number in value["chunks"]:
        version = rows.names.version_number(PolicyVersion(lineage, number))
        rows.packed += struct.pack("<5I16s", segment, index, start, n, version, bytes.fromhex(digest))


class PlainLedgers:
    """recovery.ports.LedgerCodec."""

    suffix = "json"

    def encode(self, header: Mapping[str, Any], rows: LedgerRows) -> bytes:
        for names in ("key", "number"):
            told = [segment[names] for segment in header["segments"]]
            assert len(set(told)) == len(told), "a segment is described twice"
        return json.dumps({"header": header, "rows": [_row_as_json(row, rows.names) for row in rows]}).encode()

    def decode(self, data: bytes, names: Names) -> tuple[dict[str, Any], LedgerRows]:
        try:
            value = json.loads(data)
            header = value["header"]
        except (ValueError, KeyError) as error:
            raise Damaged(f"a ledger object is not JSON: {error}") from error
        if header["version"] != 1 or header["requires"]:
            raise FormatNotUnderstood(f"a ledger of version {header['version']} requires {header['requires']}")
        rows = LedgerRows(names)
        for row in value["rows"]:
            _add_row(rows, row)
        return header, rows
