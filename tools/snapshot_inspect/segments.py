"""One segment read whole and compared with everything that ledgers say about it.

Owns: the checks of a segment's bytes and records.
Does not know: which snapshots need it, in which order segments are read.

Invariants:
1. Length and crc32c come first, of the object and of each batch; then the records; then each use of a record.
2. A segment that cannot be read affects every use; a record that is not the right one affects its own use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from recovery.codec import call_id, chunk_digest, request_digest
from recovery.errors import Damaged, FormatNotUnderstood
from recovery.model import Chunk, Opened, Record, SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from snapshot_inspect.findings import MALFORMED, MISMATCH, Affected, Problem, joined
from snapshot_inspect.lineages import Use
from storage_backends.sums import crc32c


@dataclass(slots=True)
class Checked:
    """What was found in one segment."""

    problems: list[Problem] = field(default_factory=list)
    requests: int = 0
    chunks: int = 0
    tokens: int = 0


def affected(uses: Iterable[Use]) -> tuple[Affected, ...]:
    """The calls that need these records, and which of their tokens."""
    return joined(
        Affected(
            use.identity.rollout,
            use.call_id.hex(),
            None if use.chunk is None else use.chunk.start,
            None if use.chunk is None else use.chunk.stop,
        )
        for use in uses
    )


def check_segment(store: ObjectStore, codec: SegmentCodec, info: SegmentInfo, uses: list[Use]) -> Checked:
    """Read a segment and check every use of it. Raises only what the store says of itself (it cannot be reached …)."""
    checked = Checked()
    try:
        data = store.get(info.key, 0, info.nbytes + 1)
        records = codec.decode(data, info)
    except (Damaged, FormatNotUnderstood) as error:
        checked.problems.append(Problem.of(info.key, error, affected(uses)))
        return checked
    first = 0
    for number, batch in enumerate(info.batches):
        if crc32c(data[batch.offset : batch.offset + batch.length]) != batch.crc32c:
            message = f"{info.key}: batch {number} does not have the crc32c that the ledger states"
            hurt = affected(use for use in uses if first <= use.index < first + batch.n_records)
            checked.problems.append(Problem(info.key, MISMATCH, message, affected=hurt))
        first += batch.n_records
    for use in uses:
        if reason := _wrong(records, use):
            checked.problems.append(Problem(info.key, reason[0], f"{info.key}: {reason[1]}", affected=affected([use])))
        elif use.chunk is None:
            checked.requests += 1
        else:
            checked.chunks += 1
            checked.tokens += use.chunk.n_tokens
    return checked


def _wrong(records: Sequence[Record], use: Use) -> tuple[str, str] | None:
    if use.index >= len(records):
        return MALFORMED, f"it has {len(records)} records and should hold {name_of(use)} as record {use.index}"
    return None if is_right(records[use.index], use) else (MISMATCH, f"record {use.index} is not {name_of(use)}")


def is_right(record: Record, use: Use) -> bool:
    """Whether this is the record that the ledger means, down to its digest."""
    return _is_request(record, use) if use.chunk is None else _is_chunk(record, use)


def name_of(use: Use) -> str:
    whose = f"call {use.call_id.hex()} ({use.identity.rollout})"
    return (
        f"the request of {whose}" if use.chunk is None else f"tokens {use.chunk.start} to {use.chunk.stop} of {whose}"
    )


def _is_request(record: Record, use: Use) -> bool:
    if not isinstance(record, Opened) or record.call_id != use.call_id:
        return False
    request, identity = record.request, use.identity
    digest = request_digest(request)
    return (
        digest == identity.request_digest
        and (request.rollout, request.turn) == (identity.rollout, identity.turn)
        and call_id(request.rollout, request.turn, digest) == use.call_id
    )


def _is_chunk(record: Record, use: Use) -> bool:
    ref = use.chunk
    return (
        ref is not None
        and isinstance(record, Chunk)
        and (record.call_id, record.start, record.stop) == (use.call_id, ref.start, ref.stop)
        and record.version == ref.version
        and chunk_digest(record) == ref.digest
    )
