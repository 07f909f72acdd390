"""A process whose flushes wait in the TransferQueue of a Ray, until somebody kills it: `ADDRESS STORE N_FLUSHES`.

It says `waiting` when all of them wait, and does nothing more.
"""

from __future__ import annotations

import sys
import threading

import ray

from recovery.calls import CallTable
from recovery.config import CheckpointingConfig
from recovery.staging import Stager
from storage_backends import open_store
from storage_backends.codecs import MixedSegmentCodec
from tests.fakes import V0, SeededEntropy, name, request
from vllm_hooks.opening import staging_for


def main(address: str, folder: str, n_flushes: int) -> None:
    ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    config = CheckpointingConfig(enabled=True, store=folder, staging="transfer_queue")
    store = open_store(folder)
    parts = (store, MixedSegmentCodec("arrow"), SeededEntropy("w"))
    stager = Stager(*parts, epoch=1, worker="w0", staging=staging_for(config, store))
    table = CallTable()
    call = table.open(request("r"), name("r"), 0)
    for token in range(n_flushes):
        call.append([token], None, V0)
        assert stager.flush(table.freeze(), periodic=True).result() is None
    assert stager.counters.waited == n_flushes, stager.counters
    print("waiting", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
