"""How many objects a store has (case F3): very many small pieces in few objects.

Owns: a run of many short flushes, and the count.
Does not know: what is in the objects.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from bench.corpus import Corpus
from bench.jobs import Job
from bench.report import Report, nbytes_text
from recovery.model import Float32Array
from recovery.ports import ObjectStore

TOKENS = 4


def measure(
    report: Report,
    corpus: Corpus,
    logprobs: Float32Array,
    *,
    calls: int,
    chunks: int,
    store: ObjectStore,
    rng: np.random.Generator,
) -> None:
    """Each chunk of each call comes with a snapshot of its own: the most objects that there can be."""
    report.title(f"objects (F3): {calls:,} requests of {chunks} chunks, a snapshot after each")
    job = Job(store)
    job.open(corpus.spans(rng, calls, TOKENS))
    most = 0
    for _ in range(chunks):
        for number, ids in enumerate(corpus.spans(rng, calls, TOKENS)):
            job.append(number, ids, logprobs[:TOKENS])
        most = max(most, job.snapshot().traffic.n_objects)
    job.gives_back()
    job.close()
    listed = store.list("")
    kinds = Counter(item.key.partition("/")[0] for item in listed)
    report.figure("objects", "in the store", {"total": len(listed), "chunks": calls * chunks, "kinds": dict(kinds)})
    report.figure("objects", "most of one snapshot", most)
    report.bound("objects of one snapshot (F3)", most, 7)
    report.bound("objects in the store for each snapshot (F3)", len(listed) / chunks, 7)
    rows = [[kind, f"{count:,}"] for kind, count in sorted(kinds.items())]
    total = f"{len(listed):,} ({nbytes_text(sum(item.nbytes for item in listed))})"
    report.table(("objects", ""), [*rows, ["together", total], ["one for each chunk would be", f"{calls * chunks:,}"]])
