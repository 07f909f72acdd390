"""The records that a ledger refers to, read batch by batch.

Owns: which bytes of a segment are read for some of its records, and what is wrong with each record that cannot be had.
Does not know: what becomes of a record, which snapshot wants it.

Invariants:
1. Nothing unchecked is returned: the crc32c of its batch, the codec's own checks, then the digest that the ledger has.
2. In memory are at most one segment of WHOLE_BYTES_MAX as it is stored and one batch of it decoded, whatever the size
   of the store; what is returned is a copy and keeps nothing else alive.
3. A batch that is damaged costs its own records, and no others of its segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from recovery.errors import Damaged, DigestMismatch, FormatNotUnderstood, ObjectMissing
from recovery.layout import segment_position
from recovery.ledger import Ledger
from recovery.model import Chunk, Opened, Record, SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from snapshot_inspect.lineages import Use
from snapshot_inspect.segments import is_right, name_of
from storage_backends.sums import check_bytes

WHOLE_BYTES_MAX = 64 << 20
"""A segment up to this size is read in one go, a larger one batch by batch."""

Live = Opened | Chunk
Wrong = Damaged | FormatNotUnderstood


def in_order(ledger: Ledger, keys: Iterable[str]) -> list[SegmentInfo]:
    """Segments by epoch, worker incarnation and flush: the order in which each call's records were written."""
    infos = [ledger.segment(key) for key in keys]
    return sorted(infos, key=lambda info: (segment_position(info.key) is None, segment_position(info.key)))


def live_records(
    store: ObjectStore, codec: SegmentCodec, info: SegmentInfo, uses: Sequence[Use], *, strict: bool = False
) -> Iterator[tuple[Use, Live | Wrong]]:
    """Each use of a segment, in the order of its records, with the record or with what is wrong.

    `uses` are in that order. With `strict` a segment that is read whole has to have its own sum, too. Raises only what
    the store says of itself: it cannot be reached, it may not be read.
    """
    whole: bytes | None = None
    if info.nbytes <= WHOLE_BYTES_MAX:
        try:
            whole = store.get(info.key, 0, info.nbytes + 1)
            if strict:
                check_bytes(whole, nbytes=info.nbytes, crc32c=info.crc32c, what=f"segment {info.key}")
        except Damaged as error:
            yield from ((use, _about(info, use, error)) for use in uses)
            return
    at = first = 0
    for number, batch in enumerate(info.batches):
        begin, first = first, first + batch.n_records
        mine = []
        while at < len(uses) and uses[at].index < first:
            mine.append(uses[at])
            at += 1
        if not mine:
            continue
        stop = batch.offset + batch.length
        try:
            data = whole[batch.offset : stop] if whole is not None else store.get(info.key, batch.offset, stop)
            records = codec.decode_batch(data, info, number)
        except (Damaged, FormatNotUnderstood) as error:
            yield from ((use, _about(info, use, error)) for use in mine)
            continue
        yield from ((use, _checked(info, records, begin, use)) for use in mine)
    for use in uses[at:]:
        reason = f"it has {first} records and should hold this as record {use.index}"
        yield use, _about(info, use, DigestMismatch(f"{info.key}: {reason}"))


def _checked(info: SegmentInfo, records: Sequence[Record], begin: int, use: Use) -> Live | Wrong:
    record = records[use.index - begin]
    if isinstance(record, Opened | Chunk) and is_right(record, use):
        return _copied(record)
    return DigestMismatch(f"segment {info.key}: record {use.index} is not {name_of(use)}")


def _copied(record: Live) -> Live:
    """The record without the batch that its arrays are views of."""
    if isinstance(record, Opened):
        request = record.request
        kept = dataclasses.replace(request, prompt_token_ids=request.prompt_token_ids.copy())
        return dataclasses.replace(record, request=kept)
    return dataclasses.replace(
        record,
        token_ids=record.token_ids.copy(),
        logprobs=None if record.logprobs is None else record.logprobs.copy(),
        mask=record.mask.copy(),
        columns={name: values.copy() for name, values in record.columns.items()},
    )


def _about(info: SegmentInfo, use: Use, error: Wrong) -> Wrong:
    """The error with the segment, the call and the tokens that it costs."""
    if isinstance(error, ObjectMissing):
        return ObjectMissing(f"segment {info.key} is missing: {name_of(use)}", hint=error.hint)
    named = error.message if info.key in error.message else f"segment {info.key}: {error.message}"
    return type(error)(f"{named}: {name_of(use)}", hint=error.hint)
