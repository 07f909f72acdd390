"""A snapshot as JSON lines, one call a line: for people and their scripts.

Owns: which calls are read together, and how lines get into a file.
Does not know: what is in a line (call_documents.py), which snapshot is wanted.

Invariants:
1. Calls come in the order of `calls`, as in every table; every token of a line was read through every check.
2. In memory are the tokens of one pass (TOKENS_PER_PASS, or one call if that has more) and what live_records.py holds.
   A segment whose calls belong to several passes is read in each of them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

from recovery.ledger import Entry, Ledger
from recovery.model import CallId, Chunk, Opened
from recovery.ports import ObjectStore, SegmentCodec
from recovery.snapshots import Loaded
from recovery.transcripts import Transcript, assemble
from snapshot_inspect import call_documents
from snapshot_inspect.calls import in_order as calls_in_order
from snapshot_inspect.documents import Document
from snapshot_inspect.lineages import uses_of
from snapshot_inspect.live_records import in_order, live_records
from snapshot_inspect.progress import Progress
from snapshot_inspect.tokenizer import Texts
from storage_backends.posix import told, write_all

TOKENS_PER_PASS, CALLS_PER_PASS = 1 << 20, 1 << 12
_BUFFER_BYTES = 1 << 20


def lines(
    store: ObjectStore, codec: SegmentCodec, loaded: Loaded, texts: Texts | None, progress: Progress
) -> Iterator[Document]:
    """One document a call. Raises Damaged, naming segment, call and tokens, at the first thing that does not check."""
    ledger, counts = loaded.ledger, loaded.ledger.counts()
    share = counts.nbytes / max(1, counts.tokens + counts.calls)
    with progress:
        progress.begin(counts.calls, counts.nbytes)
        for part in _passes(ledger):
            for entry, transcript in _transcripts(store, codec, ledger, part):
                yield call_documents.line(entry, loaded.snapshot.id, transcript, _said(texts, transcript))
                progress.advance(round(share * (entry.n_tokens + 1)))


def _passes(ledger: Ledger) -> Iterator[list[Entry]]:
    part: list[Entry] = []
    n_tokens = 0
    for entry in calls_in_order(ledger):
        if part and (n_tokens + entry.n_tokens > TOKENS_PER_PASS or len(part) == CALLS_PER_PASS):
            yield part
            part, n_tokens = [], 0
        part.append(entry)
        n_tokens += entry.n_tokens
    if part:
        yield part


def _transcripts(
    store: ObjectStore, codec: SegmentCodec, ledger: Ledger, part: list[Entry]
) -> Iterator[tuple[Entry, Transcript]]:
    uses = uses_of(part)
    requests: dict[CallId, Opened] = {}
    chunks: dict[CallId, list[Chunk]] = defaultdict(list)
    for info in in_order(ledger, uses):
        for use, record in live_records(store, codec, info, uses[info.key]):
            match record:
                case Opened():
                    requests[use.call_id] = record
                case Chunk():
                    chunks[use.call_id].append(record)
                case _:
                    raise record
    for entry in part:
        mine = sorted(chunks.pop(entry.call_id, []), key=lambda chunk: chunk.start)
        yield entry, assemble(requests.pop(entry.call_id).request, mine)


def _said(texts: Texts | None, transcript: Transcript) -> tuple[str, str] | None:
    if texts is None:
        return None
    return texts.text(transcript.request.prompt_token_ids.tolist()), texts.text(transcript.token_ids.tolist())


def write(fd: int, path: str, texts: Iterable[str]) -> tuple[int, str]:
    """Write each text as a line. Returns length and sha256 of all."""
    digest, nbytes = hashlib.sha256(), 0
    buffer = bytearray()

    def flush() -> None:
        nonlocal nbytes
        with told("write", path):
            write_all(fd, bytes(buffer))
        digest.update(buffer)
        nbytes += len(buffer)
        buffer.clear()

    for text in texts:
        buffer += text.encode("utf-8", "backslashreplace") + b"\n"
        if len(buffer) >= _BUFFER_BYTES:
            flush()
    flush()
    return nbytes, digest.hexdigest()
