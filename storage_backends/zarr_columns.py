"""The columns of a segment (docs/format.md, section 9) as flat arrays, and back.

Owns: which array holds what of which column.
Does not know: chunks, files; the rules of a record, which are those of the Arrow segment (arrow_records.py): so both
encodings have one identity by construction.

Invariants:
1. `from_columns(to_columns(arrays))` has the values of `arrays`, bit for bit.
2. What may be null is null by the record's kind, but for logprobs, which `has_logprobs` says, and `wide`, by its range.
3. Ranges that reach here lie one behind the other and inside of their values (zarr_batches.read_columns).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from recovery.errors import Damaged
from storage_backends import arrow_columns
from storage_backends.arrow_records import CHUNK, ENDED, schema_fields
from storage_backends.zarr_arrays import Array

_DIGEST = arrow_columns.DIGEST


def to_columns(arrays: Sequence[pa.Array], types: Sequence[str]) -> dict[str, Array]:
    """The arrays of a batch of at least one record, from the columns that arrow_records.to_arrays makes."""
    kind, call_id, attempt, start, token_ids, logprobs, mask_starts, mask_values, *rest = arrays
    lineage, number, digest, body, *wide = rest
    has_logprobs = arrow_columns.present(logprobs)
    token_at = token_ids.offsets.to_numpy()
    per_token = np.repeat(has_logprobs, np.diff(token_at))
    aligned = np.zeros(per_token.size, "<f4")
    aligned[per_token] = logprobs.values.to_numpy()
    lineage_range, lineage_text = _text(lineage)
    body_range, body_text = _text(body)
    columns = {
        "attempt": attempt.to_numpy(),
        "body": body_text,
        "body_range": body_range,
        "call_id": _sixteens(call_id),
        "digest": _sixteens(digest),
        "has_logprobs": has_logprobs,
        "kind": kind.to_numpy(),
        "lineage": lineage_text,
        "lineage_range": lineage_range,
        "logprobs": aligned,
        "mask_range": _ranges(mask_starts.offsets.to_numpy()),
        "mask_starts": mask_starts.values.to_numpy(),
        "mask_values": mask_values.values.to_numpy(zero_copy_only=False),
        "number": number.fill_null(0).to_numpy(),
        "start": start.to_numpy(),
        "token_ids": token_ids.values.to_numpy(),
        "token_range": _ranges(token_at),
    }
    if types:
        columns["wide_range"], columns["wide"] = _text(wide[0])
    for type_, lists in zip(types, wide[1:], strict=True):
        columns[f"wide_{type_}"] = lists.values.to_numpy(zero_copy_only=False)
        columns[f"wide_{type_}_range"] = _ranges(lists.offsets.to_numpy())
    return columns


def _ranges(positions: Array) -> Array:
    return np.stack([positions[:-1], positions[1:]], axis=1).astype("<u8")


def _sixteens(column: pa.Array) -> Array:
    return np.frombuffer(column.buffers()[1], np.uint8, 16 * len(column)).reshape(-1, 16)


def _text(column: pa.Array) -> tuple[Array, Array]:
    """Ranges of a column of text, and its bytes; a null is an empty range."""
    _, positions, text = column.buffers()
    at = np.frombuffer(positions, "<i4", len(column) + 1)
    values = np.empty(0, np.uint8) if text is None else np.frombuffer(text, np.uint8, int(at[-1]))
    return _ranges(at), values


def from_columns(columns: Mapping[str, Array], types: Sequence[str], what: str) -> pa.RecordBatch:
    """The batch that these arrays are, validated."""
    kind = columns["kind"]
    is_chunk = kind == CHUNK
    token_at, mask_at = _positions(columns["token_range"]), _positions(columns["mask_range"])
    arrays = [
        pa.array(kind),
        _fixed(_DIGEST, columns["call_id"]),
        pa.array(columns["attempt"]),
        pa.array(columns["start"]),
        arrow_columns.lists(pa.array(columns["token_ids"]), token_at),
        arrow_columns.lists(pa.array(columns["logprobs"]), token_at, columns["has_logprobs"]),
        arrow_columns.lists(pa.array(columns["mask_starts"]), mask_at),
        arrow_columns.lists(pa.array(columns["mask_values"]), mask_at),
        _utf8(columns["lineage"], columns["lineage_range"], is_chunk),
        _fixed(pa.uint64(), columns["number"], is_chunk),
        _fixed(_DIGEST, columns["digest"], kind != ENDED),
        _utf8(columns["body"], columns["body_range"], ~is_chunk),
    ]
    if types:
        wide = columns["wide_range"]
        arrays.append(_utf8(columns["wide"], wide, wide[:, 0] != wide[:, 1]))
    for type_ in types:
        values, ranges = pa.array(columns[f"wide_{type_}"]), columns[f"wide_{type_}_range"]
        arrays.append(arrow_columns.lists(values, _positions(ranges)))
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema_fields(types)))
    try:
        batch.validate(full=True)
    except ValueError as error:
        raise Damaged(f"{what} has columns that cannot be read: {error}") from error
    return batch


def _positions(ranges: Array) -> Array:
    return np.append(ranges[:, 0], ranges[-1, 1]).astype(np.int32)


def _bitmap(present: Array | None) -> pa.Buffer | None:
    return None if present is None or present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))


def _fixed(kind: pa.DataType, values: Array, present: Array | None = None) -> pa.Array:
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [_bitmap(present), data])


def _utf8(text: Array, ranges: Array, present: Array) -> pa.Array:
    buffers = [_bitmap(present), pa.py_buffer(_positions(ranges)), pa.py_buffer(np.ascontiguousarray(text))]
    return pa.Array.from_buffers(pa.utf8(), len(ranges), buffers)
