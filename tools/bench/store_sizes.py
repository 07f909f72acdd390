"""What tokens and logprobs cost in bytes, per column and beside other ways to write them.

Owns: the same records in every format, and the size of each.
Does not know: where the tokens are from.

Raw is 4 bytes for a token id and 4 for a float32 logprob. All formats are lossless; what each holds beside ids and
logprobs (masks, versions, digests, positions, ids of calls) is included, for that is what has to be stored.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from bench.report import Report, nbytes_text
from recovery import codec
from recovery.model import Chunk, Float32Array, Int32Array, PolicyVersion, Record
from recovery.records import Records
from storage_backends import arrow_file
from storage_backends.arrow_records import schema_fields, to_arrays
from storage_backends.arrow_segments import RECORDS_PER_BATCH
from storage_backends.codecs import segment_codec

RAW_NBYTES = 8
_CALL = 2048
"""Tokens of a call, where the calls are not given."""


def measure(
    report: Report, token_ids: Int32Array, logprobs: Float32Array, lengths: Sequence[int], what: str, bounded: int
) -> None:
    """`lengths`: chunks of so many tokens, one table row each; the bound holds for `bounded`."""
    n = len(token_ids)
    report.title(f"size of {n:,} tokens ({what}); raw is {RAW_NBYTES} bytes a token")
    rows: list[list[object]] = []
    for length in lengths:
        records = _records(token_ids, logprobs, length)
        for name in ("arrow", "zarr"):
            made = segment_codec("arrow" if name == "arrow" else "zarr").encode(records, "seg/x")
            share = len(made.data) / (RAW_NBYTES * n)
            report.figure("size", f"{what}: {name}, chunks of {length}", len(made.data) / n)
            rows.append(
                [
                    f"this project, {name}, chunks of {length}",
                    f"{len(made.data) / n:.3f}",
                    f"{share:.3f}",
                    nbytes_text(len(made.data)),
                ]
            )
            if name == "arrow" and length == bounded:
                report.bound(f"size over raw, Arrow, chunks of {length}, {what}", share, 0.6)
    calls = list(_calls(token_ids, logprobs))
    for name, write in OTHERS.items():
        nbytes = len(write(calls))
        report.figure("size", f"{what}: {name}", nbytes / n)
        rows.append(_row(name, nbytes, n))
    report.table(("format", "bytes a token", "of raw", "total"), rows)
    columns = _columns(_records(token_ids, logprobs, bounded))
    report.figure("size", f"{what}: columns of arrow, chunks of {bounded}", {k: v / n for k, v in columns.items()})
    report.note(f"columns of the Arrow segment with chunks of {bounded}, each written alone:")
    report.table(("column", "bytes a token"), [[name, f"{nbytes / n:.4f}"] for name, nbytes in columns.items()])


def _row(name: str, nbytes: int, n_tokens: int) -> list[object]:
    per_token = nbytes / n_tokens
    return [name, f"{per_token:.3f}", f"{per_token / RAW_NBYTES:.3f}", nbytes_text(nbytes)]


def _calls(token_ids: Int32Array, logprobs: Float32Array) -> Iterator[tuple[Int32Array, Float32Array]]:
    for first in range(0, len(token_ids), _CALL):
        yield token_ids[first : first + _CALL], logprobs[first : first + _CALL]


def _records(token_ids: Int32Array, logprobs: Float32Array, length: int) -> Records:
    """Chunks as flushes leave them: of every call that is live one after the other, again and again."""
    calls = list(_calls(token_ids, logprobs))
    records: list[Record] = []
    for start in range(0, _CALL, length):
        for number, (ids, lps) in enumerate(calls):
            part = slice(start, min(start + length, len(ids)))
            if part.start < part.stop:
                records.append(
                    Chunk(
                        call_id=codec.call_id(f"rollout-{number:06d}", 0, bytes(16)),
                        attempt=0,
                        start=start,
                        token_ids=ids[part],
                        logprobs=lps[part],
                        mask=np.ones(part.stop - part.start, np.bool_),
                        version=PolicyVersion("a", 7),
                    )
                )
    return Records.of(records)


def _columns(records: Records) -> dict[str, int]:
    """Bytes of each column, as a file of its own would have them in its batches."""
    parts = [
        slice(first, min(first + RECORDS_PER_BATCH, len(records)))
        for first in range(0, len(records), RECORDS_PER_BATCH)
    ]
    batches = [to_arrays(records, part, ()) for part in parts]
    found = {}
    for number, field in enumerate(schema_fields(())):
        schema = pa.schema([field])
        data, frames = arrow_file.write(
            schema, (pa.RecordBatch.from_arrays([b[number]], schema=schema) for b in batches)
        )
        found[field.name] = sum(_body(data, frame) for frame in frames.batches)
    return found


def _body(data: bytes, frame: arrow_file.Frame) -> int:
    return pa.ipc.read_message(pa.py_buffer(data).slice(frame.offset, frame.length)).body.size


Calls = Sequence[tuple[Int32Array, Float32Array]]


def _raw(calls: Calls) -> bytes:
    return b"".join(values.tobytes() for call in calls for values in call)


def _json_lines(calls: Calls) -> bytes:
    lines = (json.dumps({"token_ids": ids.tolist(), "logprobs": lps.tolist()}) for ids, lps in calls)
    return "\n".join(lines).encode()


def _pickle_lists(calls: Calls) -> bytes:
    return pickle.dumps([(ids.tolist(), lps.tolist()) for ids, lps in calls])


def _torch(calls: Calls) -> bytes:
    import torch

    sink = io.BytesIO()
    torch.save([tuple(torch.from_numpy(np.array(values)) for values in call) for call in calls], sink)
    return sink.getvalue()


def _parquet(calls: Calls, **options: Any) -> bytes:
    table = pa.table({"token_ids": [ids for ids, _ in calls], "logprobs": [lps for _, lps in calls]})
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, **options)
    return bytes(sink.getvalue())


OTHERS: dict[str, Callable[[Calls], bytes]] = {
    "raw arrays": _raw,
    "pickle of numpy arrays": lambda calls: pickle.dumps(list(calls)),
    "pickle of lists": _pickle_lists,
    "torch.save of tensors": _torch,
    "JSON lines": _json_lines,
    "Parquet (snappy)": _parquet,
    "Parquet (zstd)": lambda calls: _parquet(calls, compression="zstd"),
}
