"""Who writes into a store, as its log says it to people.

Owns: how a process of this machine is named, and the id of this start of its kernel.
Does not know: what is written. Nothing is decided by a name.

Invariant:
1. Two processes that run at the same time have different names, also where machines made from one image share a host's
   name: each start of a kernel has a random id.
"""

from __future__ import annotations

import os
import socket

LENGTH_MAX = 200
_BOOT = "/proc/sys/kernel/random/boot_id"
_DIGITS = 6


def boot_id() -> str:
    """Of this start of the kernel; empty where the system does not tell it."""
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def writer_name(what: str = "") -> str:
    """`host (boot 1a2b3c) pid 4711`, and `what` it does; without the boot where the system does not tell it."""
    boot = f" (boot {found[:_DIGITS]})" if (found := boot_id()) else ""
    return f"{socket.gethostname()}{boot} pid {os.getpid()}{what and f', {what}'}"[:LENGTH_MAX]
