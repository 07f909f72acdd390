"""A job as a process group of its own that a test can watch, signal and kill.

Owns: starting `prefix-recovery run`, reading what it has counted and said, and ending everything it started.
Does not know: which job, what is expected of it. `prefix_recovery.interrupted` is the simpler form for plain kills.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefix_recovery.interrupted import RunFigures
from prefix_recovery.processes import Identity, descendants
from prefix_recovery.tally import read_tally
from storage_backends import open_store
from tests.job_files import Saved, saved_in

COMMAND = ("-m", "prefix_recovery")
_DEADLINE_S = 240.0
"""For anything that a job does, its start among it: ten times what a busy machine took."""


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = _DEADLINE_S) -> None:
    """Look again and again until it holds. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s} s still not: {what}")
        time.sleep(0.01)


def engine_core_of(pid: int) -> Identity:
    """The one engine process below `pid`: other children come and go."""
    (found,) = (child for child in descendants(pid) if is_engine(child.pid))
    return found


def is_engine(pid: int) -> bool:
    """Whether it is an engine's process: it calls itself so, or it is one that was spawned and could not rename itself.

    setproctitle finds its argv by the first variable of its environment, and does nothing, unsaid, if that was changed
    before; which one is the first is random in what Ray starts.
    """
    name = name_of(pid)
    return name.startswith("VLLM::Engine") or (not name.startswith("VLLM") and b"--multiprocessing-fork" in _argv(pid))


def _argv(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def name_of(pid: int) -> str:
    """What the process calls itself, empty if there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


class JobProcess:
    """One started process of a job, the leader of its group. `passes_over`: its test is about what cannot be used."""

    def __init__(
        self,
        config: Path,
        name: str,
        *arguments: str,
        program: Sequence[str] = COMMAND,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        python: Path = Path(sys.executable),
        passes_over: bool = False,
    ) -> None:
        self.log = config.with_name(f"{name}.log")
        self.tally = config.with_name(f"{name}.tally")
        self.began = time.monotonic()
        self.killed = False
        self.passes_over = passes_over
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(python), *program, "run", str(config), "--tally", str(self.tally), *arguments],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
                cwd=cwd,
            )

    @property
    def text(self) -> str:
        """What it has said so far, wrapped lines joined."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def decoded(self) -> int:
        """Tokens that its engine has delivered."""
        try:
            return int(read_tally(self.tally)[1].sum())
        except (OSError, ValueError):
            return 0

    def descendants(self) -> list[Identity]:
        return descendants(self.process.pid)

    def engine_core(self) -> Identity:
        """Its engine's process."""
        return engine_core_of(self.process.pid)

    def after(self, n_tokens: int) -> JobProcess:
        """Wait until that many tokens are decoded. Raises AssertionError if the process ends before."""
        try:
            wait_until(lambda: self.decoded >= n_tokens or self.process.poll() is not None, f"{n_tokens} tokens")
        except TimeoutError as error:
            raise AssertionError(f"{error}; {self.decoded} were decoded:\n{self.text[-4000:]}") from None
        assert self.process.poll() is None, f"it ended before {n_tokens} tokens:\n{self.text[-4000:]}"
        return self

    def stop_decoding(self) -> None:
        """Stop its engine where it is (SIGSTOP); its client goes on. The test has time to look, and to kill."""
        os.kill(self.engine_core().pid, signal.SIGSTOP)

    def decode_again(self) -> None:
        """Wake it."""
        os.kill(self.engine_core().pid, signal.SIGCONT)

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)
        self.killed |= number == signal.SIGKILL

    def kill_group(self) -> None:
        """SIGKILL to the client and everything that it started, and wait for the client."""
        self.signal_group(signal.SIGKILL)
        self.process.wait()

    def wait(self, timeout_s: float = _DEADLINE_S) -> int:
        """The exit code. Raises AssertionError with its log if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end within {timeout_s} s:\n{self.text[-4000:]}") from None

    def counts(self) -> npt.NDArray[np.int64] | None:
        """See tally.py; None if it died before it counted anything."""
        return read_tally(self.tally) if self.tally.exists() and self.tally.stat().st_size else None

    def figures(self) -> RunFigures:
        """Once it has ended."""
        return RunFigures(self.process.wait(), self.killed, time.monotonic() - self.began, self.counts())


def something(saved: Saved, counts: npt.NDArray[np.int64]) -> bool:
    """There are tokens of a call that has not ended: a run after a kill has something to resume."""
    return bool(saved.in_mid_decode)


def kill_at_rest(
    job: JobProcess, holds: Callable[[Saved, npt.NDArray[np.int64]], bool], what: str, url: str, **options: object
) -> Saved:
    """Stop its engine for good, and kill the job in a moment at which it stands still and `holds` of its store and of
    its counts. Gives what is in the store then.

    However slow a disk or this process is, nothing has changed between the look and the kill.
    """
    job.stop_decoding()
    store = open_store(url, **options)
    found: list[Saved] = []

    def stands() -> bool:
        os.kill(job.process.pid, signal.SIGSTOP)
        state = os.waitid(os.P_PID, job.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert state is not None and state.si_code == os.CLD_STOPPED, f"it ended by itself:\n{job.text[-4000:]}"
        counts = job.counts()
        assert counts is not None
        found[:] = [saved_in(store)]
        if holds(found[0], counts):
            return True
        os.kill(job.process.pid, signal.SIGCONT)
        return False

    try:
        wait_until(stands, what)
    except TimeoutError as error:
        raise AssertionError(f"{error}:\n{job.text[-4000:]}") from None
    job.kill_group()
    return found[0]


@contextmanager
def running(config: Path, name: str, *arguments: str, **options: object) -> Iterator[JobProcess]:
    """A job process that is killed with its group at the end of the block, if it still runs.

    What goes wrong in the block carries the job's log: it is the only witness.
    """
    job = JobProcess(config, name, *arguments, **options)  # type: ignore[arg-type]
    try:
        yield job
        used = "passed over " not in job.text.replace("passed over staged", "")  # a queue may lose what waits in it
        assert job.passes_over or used, f"{name} did not use what was stored"
    except Exception as error:
        error.add_note(f"the log of {name}:\n{job.text[-8000:]}")
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def run(config: Path, name: str, *arguments: str, **options: object) -> JobProcess:
    """A job process from start to end."""
    with running(config, name, *arguments, **options) as job:
        job.wait()
    return job
