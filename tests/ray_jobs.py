"""A job of two workers on Ray, and its processes: for the tests that kill them.

Owns: finding the coordinator, the workers and their engines below a job.
Does not know: pytest, what is killed when.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prefix_recovery.processes import Identity, descendants
from recovery.log_reading import Read, find_tail, walk_back
from recovery.ports import ObjectStore
from tests.job_processes import JobProcess, is_engine, name_of

WAIT_S = 500.0
"""Five processes import vLLM at the start: on a machine with much else to do that takes minutes."""
SIP_S = 0.05
COORDINATOR, WORKER = "ray::Coordinato", "ray::EngineWor"


def called(job: JobProcess, kind: str) -> list[Identity]:
    """Processes of the job of one kind, the oldest first. An actor that Ray starts again has its name at once."""
    found = [child for child in job.descendants() if name_of(child.pid).startswith(kind)]
    return sorted(found, key=lambda one: one.started)


def engines(job: JobProcess) -> dict[Identity, Identity]:
    """The engine of each worker that has one."""
    return {
        worker: engine for worker in called(job, WORKER) for engine in descendants(worker.pid) if is_engine(engine.pid)
    }


def until(job: JobProcess, holds: Callable[[], bool], what: str) -> None:
    """Wait while the job runs. Raises AssertionError with its log if it ends, or if it takes WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert job.process.poll() is None, f"the job ended before: {what}\n{job.text[-4000:]}"
        assert time.monotonic() < deadline, f"after {WAIT_S} s still not: {what}\n{job.text[-4000:]}"
        time.sleep(0.02)


def until_said(job: JobProcess, *texts: str, after: int = 0) -> None:
    """Wait until all of it is in the log, behind its first `after` characters."""
    until(job, lambda: all(text in job.text[after:] for text in texts), f"it says {texts}")


def decoded_more(job: JobProcess, n_tokens: int) -> None:
    """Wait for so many tokens more."""
    until(job, lambda goal=job.decoded + n_tokens: job.decoded >= goal, f"{n_tokens} tokens more")  # type: ignore[misc]


def kill(one: Identity) -> None:
    """SIGKILL, and wait until it is gone."""
    os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while one.alive():
        assert time.monotonic() < deadline, f"{one} outlives SIGKILL"
        time.sleep(0.01)


def assert_fenced(store: ObjectStore) -> None:
    """In the order of the log no epoch is below an earlier one: who was replaced has published nothing since."""
    slots = [read.slot for read in walk_back(store, find_tail(store)) if isinstance(read, Read)]
    epochs = [slot.epoch for slot in reversed(slots)]
    assert epochs == sorted(epochs), epochs


@contextmanager
def standing(job: JobProcess) -> Iterator[None]:
    """The engines that there are decode nothing meanwhile (SIGSTOP): whatever takes long, the job is not over then."""
    stopped = list(engines(job).values())
    for one in stopped:
        os.kill(one.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for one in stopped:
            if one.alive():
                os.kill(one.pid, signal.SIGCONT)


@contextmanager
def sipping(job: JobProcess) -> Iterator[None]:
    """The engines that there are decode in a quarter of the time: calls go on, and a long wait does not use them up.

    A job whose last call ended ends as well, and its engines with it, whatever the test is waiting for.
    """
    sipped, over = list(engines(job).values()), threading.Event()

    def signalled(number: signal.Signals) -> None:
        for one in sipped:
            with suppress(ProcessLookupError):
                if one.alive():
                    os.kill(one.pid, number)

    def sip() -> None:
        while not over.wait(SIP_S):
            signalled(signal.SIGSTOP)
            over.wait(3 * SIP_S)
            signalled(signal.SIGCONT)

    thread = threading.Thread(target=sip, name="sipping")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signalled(signal.SIGCONT)


def kill_everything(job: JobProcess) -> None:
    """SIGKILL to the driver and to all that it has started: Ray's own processes, actors, engines."""
    everybody = job.descendants()
    job.kill_group()
    for one in everybody:
        with suppress(ProcessLookupError):
            if one.alive():
                os.kill(one.pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while any(one.alive() for one in everybody):
        assert time.monotonic() < deadline, "the job's processes outlive SIGKILL"
        time.sleep(0.01)
