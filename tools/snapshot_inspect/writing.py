"""What the verbs that write to a store have in common: how it is opened, who they are in its log, what is said of it.

Owns: opening for writing, the words about a job that runs meanwhile.
Does not know: what is written.

Invariant:
1. A store that is written to is tried for atomic create first, as a run tries it.
"""

from __future__ import annotations

from recovery.ports import ObjectStore
from recovery.slots import SlotLog
from snapshot_inspect.places import store_at
from storage_backends import open_store
from storage_backends.writer_name import writer_name

WILL_FENCE = "with --apply a job that runs on this store is fenced: it stops with exit code 11"
HAS_FENCED = "a job that ran on this store is fenced; run it again, and it goes on from what is there"


def open_for_writing(address: str) -> tuple[ObjectStore, bool]:
    """The store, and whether one writer alone was asked for. Its mark was read before: nothing is made here."""
    url, options = store_at(address)
    return open_store(url, create=True, **options), bool(options.get("exclusive"))


def log_of(store: ObjectStore, verb: str, *, single_writer: bool = False) -> SlotLog:
    """A place in the log, not yet claimed, for `verb`."""
    from vllm_hooks.opening import SystemClock, SystemEntropy

    return SlotLog(store, SystemClock(), SystemEntropy(), writer_name(verb), single_writer=single_writer)
