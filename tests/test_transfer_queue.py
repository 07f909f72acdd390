"""storage_backends.transfer_queue with a real TransferQueue on a real Ray: the contract of stagings, what the package
does that the adapter is built against, and deaths: of a writer, of the queue.

One Ray and one queue for the file; the test that kills the queue leaves none, and whoever comes after starts another.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefix_recovery.processes import descendants
from recovery.calls import CallTable
from recovery.config import CheckpointingConfig
from recovery.errors import ConfigError, StoreUnavailable
from recovery.model import Chunk
from recovery.salvage import salvage
from recovery.snapshots import make_root
from recovery.staging import Stager
from storage_backends import open_store
from storage_backends.codecs import MixedSegmentCodec
from storage_backends.stagings import CheckedStaging
from storage_backends.testing.stagings import StagingConformance
from storage_backends.transfer_queue import FIELD, QueueRows, start_queue
from tests.fakes import V0, SeededEntropy, name, request
from tests.job_processes import name_of
from tests.queued_lives import kill_a_worker, kill_the_coordinator, one_after_another, played
from tests.ray_jobs import kill
from vllm_hooks.opening import staging_for

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parent.parent
STARTS_S = 600.0
"""Three processes import torch at the start of a queue: on a machine with much else to do that takes minutes."""

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def a_ray() -> Iterator[Any]:
    import ray

    folder = tempfile.mkdtemp(prefix="tq-", dir="/tmp")
    ray.init(
        num_cpus=2, include_dashboard=False, _temp_dir=folder, logging_level="ERROR", log_to_driver=False, namespace="t"
    )
    try:
        yield ray
    finally:
        import transfer_queue

        transfer_queue.close()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def queue(a_ray: Any) -> Any:
    """The package, with a queue that is up."""
    import transfer_queue

    start_queue(STARTS_S)
    return transfer_queue


def fresh() -> QueueRows:
    return QueueRows(f"test-{next(_NUMBERS)}-{uuid.uuid4().hex[:8]}", answer_s=60.0)


class _Nothing:
    def there(self) -> bool:
        return True


def test_a_queue_that_finds_no_room_is_an_error_that_says_so_and_leaves_nothing(a_ray: Any) -> None:
    """First in the file, since it needs a Ray without a queue: the tests after it show that nothing took its room."""
    import transfer_queue

    transfer_queue.close()
    taken = a_ray.remote(num_cpus=2)(_Nothing).remote()
    a_ray.get(taken.there.remote())
    try:
        with pytest.raises(ConfigError, match="cannot be started on this Ray") as caught:
            start_queue(2.0)
        assert "CPUs" in caught.value.hint
    finally:
        a_ray.kill(taken)


@pytest.mark.usefixtures("queue")
class TestTransferQueue(StagingConformance):
    def make_rows(self) -> QueueRows:
        return fresh()


def row(data: bytes) -> dict[str, Any]:
    import torch

    return {FIELD: torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def test_what_the_package_does_with_keys_is_what_the_adapter_is_made_for(queue: Any) -> None:
    """The facts in the adapter's docstring. One that changes is worth a look at the adapter."""
    part = f"facts-{uuid.uuid4().hex[:8]}"
    queue.kv_put("a", part, row(b"first"), {"n": 1})
    queue.kv_put("a", part, row(b"second"), {"n": 2})
    assert queue.kv_list(part) == {part: {"a": {"n": 2}}}, "overwritten in silence"
    assert len(queue.kv_batch_get(["a", "never"], part, FIELD)[FIELD]) == 1, "fewer rows than keys, in silence"
    with pytest.raises(ValueError, match="not found"):
        queue.kv_batch_get("never", part, FIELD)
    queue.kv_put("ghost", part, None, {"n": 3})
    assert queue.kv_list(part)[part].keys() == {"a", "ghost"}, "listed, and without a row"
    with pytest.raises(ValueError, match="not ready"):
        queue.kv_batch_get("ghost", part, FIELD)
    with pytest.raises(ValueError, match="not ready"):
        queue.kv_batch_get(["a", "ghost"], part, FIELD)
    queue.kv_clear(["never", "ghost"], part)
    assert queue.kv_list(part)[part].keys() == {"a"}


def test_a_queue_that_is_there_is_used(queue: Any) -> None:
    assert start_queue() is False


def test_two_stores_do_not_see_each_others(queue: Any) -> None:
    one, other = fresh(), fresh()
    one.put("k", b"mine")
    assert other.keys() == [] and other.get("k") is None and one.get("k") == b"mine"


@pytest.mark.usefixtures("queue")
def test_w1_a_killed_workers_tokens_are_salvaged_from_the_queue(tmp_path: Path, rng: random.Random) -> None:
    lost, twice = played(tmp_path, rng, kill_a_worker, staging="transfer_queue")
    assert lost.n_waiting > 0 and not lost.error
    assert 0 <= twice < 2 * 8, "less than a flush of each of its two calls"


@pytest.mark.usefixtures("queue")
def test_the_next_coordinator_finds_what_waits_in_the_queue(tmp_path: Path, rng: random.Random) -> None:
    played(tmp_path, rng, kill_the_coordinator, staging="transfer_queue")


@pytest.mark.usefixtures("queue")
def test_everything_dies_but_the_queue_and_the_next_run_has_what_waited(tmp_path: Path, rng: random.Random) -> None:
    assert played(tmp_path, rng, one_after_another, staging="transfer_queue") > 0


@pytest.mark.usefixtures("queue")
def test_w1_what_a_process_staged_outlives_its_sigkill(tmp_path: Path, a_ray: Any) -> None:
    folder = str(tmp_path / "store")
    store = open_store(folder, create=True)
    make_root(store, SeededEntropy("root"))
    address = a_ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "tests.staging_writer", address, folder, "3"]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        try:
            assert writer.stdout is not None
            said = writer.stdout.readline()  # of a process that died: nothing
            assert said == "waiting\n", log.read_text()[-4000:]
        finally:
            writer.kill()
            writer.wait()
    assert store.list("seg/") == [], "it had stored nothing"
    staging = staging_for(CheckpointingConfig(enabled=True, store=folder, staging="transfer_queue"), store)
    assert staging is not None
    found = salvage(staging, store, "seg/")
    assert (found.segments, found.unreadable, found.error) == (3, [], None)
    codec = MixedSegmentCodec("arrow")
    records = [record for item in store.list("seg/") for record in codec.decode(store.get(item.key), None)]
    assert [r.token_ids.tolist() for r in records if isinstance(r, Chunk)] == [[0], [1], [2]]
    assert list(staging.staged("seg/")) == []


def end_process(kind: str) -> None:
    """SIGKILL to an actor of this process's Ray; on return it is gone. (`ray.kill` returns while it still answers.)"""
    (one,) = (child for child in descendants(os.getpid()) if name_of(child.pid).startswith(kind))
    kill(one)


def test_a_queue_whose_unit_and_then_its_controller_die_costs_no_token(queue: Any, tmp_path: Path) -> None:
    """The package's own answers are ten minutes, and none at all: the adapter's deadline is what counts."""
    store, codec = open_store(str(tmp_path / "store"), create=True), MixedSegmentCodec("arrow")
    table = CallTable()
    call = table.open(request("r"), name("r"), 0)

    def stager(rows: QueueRows, worker: str) -> Stager:
        return Stager(store, codec, SeededEntropy(worker), epoch=1, worker=worker, staging=CheckedStaging(rows))

    def flush(one: Stager, token: int) -> None:
        call.append([token], None, V0)
        assert one.flush(table.freeze(), periodic=True).result(300) is None

    partition = f"dies-{uuid.uuid4().hex[:8]}"
    one = stager(QueueRows(partition, answer_s=60.0), "w0")
    flush(one, 0)
    assert one.counters.waited == 1 and store.list("seg/") == []
    one._staging._rows._answer_s = 2.0  # type: ignore[union-attr]
    try:
        end_process("ray::SimpleStor")
        flush(one, 1)
        assert isinstance(one.counters.staging_error, StoreUnavailable)
        impatient = QueueRows(partition, answer_s=60.0)
        assert impatient.keys(), "its keys are still listed"
        impatient._answer_s = 2.0
        found = salvage(CheckedStaging(impatient), open_store("memory://nothing-of-it"), "seg/")
        assert found.segments == 0 and (found.error is not None or found.unreadable), "and their rows are lost"

        end_process("ray::TransferQu")
        with pytest.raises(StoreUnavailable, match="no answer within"):
            impatient.keys()
        one.published()
        flush(one, 2)
        assert one.counters.staging_failures == 2, "what is no longer wanted could not be dropped: it is left alone"
        with pytest.raises(StoreUnavailable, match="has no TransferQueue"):
            QueueRows(partition).keys()
    finally:
        one.close(wait=True)
        queue.close()
    records = [record for item in store.list("seg/") for record in codec.decode(store.get(item.key), None)]
    assert [token for r in records if isinstance(r, Chunk) for token in r.token_ids.tolist()] == [0, 1, 2]


def test_without_a_ray_it_says_what_to_do(a_ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a_ray, "is_initialized", lambda: False)
    with pytest.raises(StoreUnavailable, match=r"not connected to a Ray.*ray\.init"):
        fresh().keys()
