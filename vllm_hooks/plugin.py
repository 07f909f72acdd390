"""What runs in every process that loads vLLM: engine processes do not outlive the process that made them.

Owns: the entry point of the group `vllm.general_plugins`.
Does not know: sessions, stores. It registers nothing and changes nothing of vLLM.

Invariant:
1. Only a child process of multiprocessing is touched, and only on Linux: it asks the kernel to be killed when its
   parent dies. SIGKILL of a client otherwise leaves its engine alive for minutes, with its memory.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM in the client, each engine core and each worker."""
    parent = multiprocessing.parent_process()
    if parent is None or not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent.pid:
        # The parent died before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)
