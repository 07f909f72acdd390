"""From coordinates back to tokens: the checked read path of the core.

Owns: reading segments for a set of calls, each segment once, every byte checked before it is parsed and every chunk
against the digest that the ledger holds.
Does not know: which calls are wanted or why.

Invariants:
1. Nothing unchecked is returned: crc32c of the object, then the chunk's digest as the ledger recorded it. Of chunks
   that no wanted call has, nothing is returned, and no digest is computed.
2. An error names the segment, the call and the token range (gathering.py).
3. That a segment is missing is never concluded from a listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from recovery.errors import CredentialsRefused, Damaged, DigestMismatch, ObjectMissing
from recovery.gathering import Gathering, Transcripts
from recovery.layout import SEGMENTS
from recovery.ledger import Entry, Ledger
from recovery.model import SegmentInfo
from recovery.ports import ObjectStore, SegmentCodec
from recovery.read_ahead import ReadAhead
from recovery.records import Records


def read_segment(store: ObjectStore, codec: SegmentCodec, info: SegmentInfo) -> Records:
    """All records of a segment, checked. Raises ObjectMissing, DigestMismatch or another Damaged."""
    data = store.get(info.key, 0, info.nbytes + 1)
    return codec.decode(data, info)


def read_transcripts(
    store: ObjectStore,
    codec: SegmentCodec,
    ledger: Ledger,
    entries: Iterable[Entry],
    *,
    columns: bool = True,
    known: Transcripts | None = None,
) -> Transcripts:
    """Requests and tokens of `entries`. Raises Damaged (or kin) at the first thing that does not check.

    `columns`: whether wide columns are wanted; they may be many times the size of the rest. `known`: what was read of
    the same ledger before it grew, which is not read again.
    """
    gathering = Gathering(ledger, list(entries), columns=columns, known=known)
    with ReadAhead(store, codec) as ahead:
        return gathered(ahead, ledger, gathering)


def gathered(ahead: ReadAhead, ledger: Ledger, gathering: Gathering) -> Transcripts:
    """What `gathering` gathers, from segments some of which may have been expected."""
    for info, segment in ahead.segments(map(ledger.segment, gathering.segments)):
        gathering.take(info.key, list(segment.records(gathering.wanted(info.key))))
    return gathering.transcripts()


def missing_segments(store: ObjectStore, infos: Mapping[str, SegmentInfo]) -> list[Damaged]:
    """Segments that are absent or have another length, without reading them.

    One listing tells most; one that is late (NFS) or not allowed (S3) proves nothing, so what it does not show is asked
    for by its last byte. Raises CredentialsRefused where that does not tell either.
    """
    try:
        present = {item.key: item.nbytes for item in store.list(SEGMENTS)}
    except CredentialsRefused:
        present = {}
    wrong: list[Damaged] = []
    for key, info in infos.items():
        if present.get(key) == info.nbytes:
            continue
        found = by_last_byte(store, key, info.nbytes)
        if isinstance(found, ObjectMissing):
            wrong.append(ObjectMissing(f"segment {key} is missing"))
        elif found is not None:
            has = f"{present[key]} bytes, not {info.nbytes}" if key in present else found.message
            wrong.append(DigestMismatch(f"segment {key} has {has}"))
    return wrong


def by_last_byte(store: ObjectStore, key: str, nbytes: int) -> Damaged | None:
    """What is wrong with an object that should have `nbytes`, seen without reading or listing it."""
    try:
        found = len(store.get(key, max(0, nbytes - 1), nbytes + 1))
    except ObjectMissing as error:
        return error
    if found == min(1, nbytes):
        return None
    return DigestMismatch(f"{'more' if found else 'fewer'} than {nbytes} bytes")
