"""What runs in every process that loads vLLM: engine processes do not outlive the process that made them.

Owns: the entry point of the group `vllm.general_plugins`.
Does not know: sessions, stores. It registers nothing and changes nothing of vLLM.

Invariants:
1. Only a child process of multiprocessing is touched, and only on Linux: it looks for its parent a few times a second
   and kills itself when that is gone. SIGKILL of a client otherwise leaves its engine alive for minutes, with its
   memory.
2. Forked and spawned children are treated alike. In a forked one vLLM does not call its plug-ins again, because it
   inherits that they were loaded.

Not the kernel's parent-death signal: that comes when the thread ends which made the child, and an engine may well be
made in a thread that ends long before its process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

_LOOK_EVERY_S = 0.25

_forks = 0
"""The process that forks, as the child sees it: its parent may be gone before it can ask."""


def register() -> None:
    """Called by vLLM in the client, each engine core and each worker."""
    if not sys.platform.startswith("linux"):
        return
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        _follow(parent.pid)


def _before_fork() -> None:
    global _forks
    _forks = os.getpid()


def _after_fork() -> None:
    """In every forked child: only those that multiprocessing made are ours to touch."""
    caller = sys._getframe(1).f_globals.get("__name__")
    if caller == "multiprocessing.popen_fork":
        _follow(_forks)


def _follow(parent: int) -> None:
    if os.getppid() != parent and Path(f"/proc/{parent}").exists():
        return  # a fork server stands between the two; it ends with its client
    threading.Thread(target=_end_with, args=(parent,), name="parent-watch", daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)
