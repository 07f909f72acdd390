"""From a configuration to a restored store: which parts are put together, and in which order.

Owns: the choice of codec and store, the real clock and randomness, and the sequence claim, choose, restore.
Does not know: the event loop, capture.

Invariants:
1. The epoch is claimed before anything is read for a decision: from then on the predecessor can publish nothing.
2. What waits in a staging is in the store before a snapshot is chosen: adoption finds it there, as if it had never been
   anywhere else.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from recovery.codec import canonical_json, fingerprint
from recovery.config import CheckpointingConfig
from recovery.errors import Damaged
from recovery.layout import SEGMENTS
from recovery.log import Slot
from recovery.log_reading import find_tail, kept_snapshots
from recovery.origin import refuse_unfinished_import
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec, Staging
from recovery.publication import Publication
from recovery.restore import (
    Choice,
    anything,
    check_fingerprint,
    choose,
    compatibility_record,
    differences,
    restore,
)
from recovery.restored import PassedOver, PassedOverWarning, Restored
from recovery.resume import StopRules
from recovery.salvage import Salvaged, salvage
from recovery.slots import SlotLog
from recovery.snapshots import Snapshot, check_root, load, make_root
from storage_backends import open_store
from storage_backends.arrow_ledger import ArrowLedgerCodec
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.stagings import CheckedStaging
from storage_backends.transfer_queue import QueueRows
from storage_backends.writer_name import LENGTH_MAX, writer_name
from vllm_hooks.watching import Reading, watched


class SystemClock:
    """recovery.ports.Clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def utc(self) -> float:
        return time.time()


class SystemEntropy:
    """recovery.ports.Entropy."""

    def hex(self, nbytes: int) -> str:
        return secrets.token_hex(nbytes)


@dataclass(slots=True)
class Opened:
    """A claimed and restored store with its parts."""

    store: ObjectStore
    segments: SegmentCodec
    clock: SystemClock
    entropy: SystemEntropy
    publication: Publication
    restored: Restored
    states: Mapping[str, bytes]
    fingerprint: str
    changed: list[str]
    """Recorded fields of the engine that are not as they were (recorded_differences)."""
    staging: Staging | None = None


def open_store_for(
    config: CheckpointingConfig,
    must: Mapping[str, Any],
    recorded: Mapping[str, Any],
    stop: StopRules | None,
    *,
    owner: str,
    exactness: str,
    compatible: Callable[[Mapping[str, bytes]], None] = anything,
    reading: Reading | None = None,
    again: bool = False,
) -> Opened:
    """Open (or make) the store of `config`, claim its next epoch and restore. Raises RecoveryError and its kin.

    `compatible` is asked about the states of each snapshot that could be taken; see recovery.restore.choose. Without
    `stop` no call is planned. `again`: the job is running; a staging that does not answer is done without.
    """
    assert config.store is not None
    store = open_store(config.store, create=True, **config.store_options.given())
    if warning := config.store_options.warning(config.store):
        warnings.warn(warning, stacklevel=2)
    clock, entropy = SystemClock(), SystemEntropy()
    make_root(store, entropy)
    segments, ledgers = MixedSegmentCodec(config.codec), ArrowLedgerCodec()
    segments.encode([], "seg/warm")  # the first use of the codec is the slowest, and the first flush must not wait
    owner = (owner or writer_name())[:LENGTH_MAX]
    log = SlotLog(store, clock, entropy, owner, single_writer=config.store_options.exclusive)
    refuse_foreign(store, ledgers, must, config.restore)
    log.claim()
    staging = staging_for(config, store)
    waited = Salvaged() if staging is None else salvage(staging, store, SEGMENTS)
    if waited.error is not None and not again:
        raise waited.error
    restored_from = watched(store, log.tail, reading)
    chosen = choose(restored_from, segments, ledgers, log.tail, config.restore, must, compatible)
    publication = Publication.on_top_of(
        store, segments, ledgers, entropy, log, chosen.loaded, keep_latest_k=config.keep_latest_k
    )
    # What a participant left there stays until it is there again to say what it has now.
    states = {**(chosen.loaded.states if chosen.loaded else {}), "job": compatibility_record(must, recorded)}
    changed = recorded_differences(chosen.loaded.states.get("job", b"{}"), recorded) if chosen.loaded else []
    hexes = fingerprint(must)
    restored = restore(
        publication,
        restored_from,
        segments,
        ledgers,
        chosen,
        choice=config.restore,
        keep_latest_k=config.keep_latest_k,
        stop=stop,
        states=lambda found: states,
        fingerprint_hex=hexes,
        # A self-test compares an engine with itself. With a prefix of another one nothing is promised.
        exactness="statistical" if changed else exactness,
    )
    restored.passed_over += [PassedOver(f"staged {key}", error.message) for key, error in waited.troubles()]
    if told := restored.passed_over_lines():
        warnings.warn("\n".join(told), PassedOverWarning, stacklevel=2)
    return Opened(store, segments, clock, entropy, publication, restored, states, hexes, changed, staging)


def staging_for(config: CheckpointingConfig, store: ObjectStore) -> Staging | None:
    """Where flushes of this store wait; None: in the store itself. Raises ConfigError if what it takes is missing."""
    if config.staging == "store":
        return None
    return CheckedStaging(QueueRows(f"prefix-recovery-{check_root(store)['store_id']}"))


def refuse_foreign(store: ObjectStore, ledgers: LedgerCodec, must: Mapping[str, Any], choice: Choice) -> None:
    """Raise FingerprintMismatch before anything is claimed, if no snapshot of the store belongs to this job.

    A job that was started with the wrong model by mistake must not fence the one that the store belongs to. One that
    was started on an import that was not finished must not begin anew in silence: NothingPublished.
    """
    if choice == "never":
        return
    refuse_unfinished_import(store)
    newest: Slot | None = None
    for slot in kept_snapshots(store, find_tail(store)):
        if slot.body.get("fingerprint") == fingerprint(must):
            return
        newest = newest or slot
    if newest is not None:
        with contextlib.suppress(Damaged):  # then there is nothing to compare with; the restore says what is wrong
            check_fingerprint(load(store, ledgers, Snapshot.from_slot(newest)), must)


def recorded_differences(job_state: bytes, recorded: Mapping[str, Any]) -> list[str]:
    """Fields of the engine that differ from those the snapshot was taken with: they lower what a resume may claim."""
    try:
        stored = json.loads(job_state).get("recorded", {})
    except (ValueError, AttributeError) as error:
        raise Damaged(f"state 'job' is malformed: {error}") from error
    return differences(stored, json.loads(canonical_json(dict(recorded))))
