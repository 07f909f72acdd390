"""Who writes into a store, as its log says it to people.

Owns: how a process of this machine is named.
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


def writer_name(what: str = "") -> str:
    """`host (boot 1a2b3c) pid 4711`, and `what` it does; without the boot where the system does not tell it."""
    try:
        with open(_BOOT, encoding="ascii") as file:
            boot = f" (boot {file.read(_DIGITS)})"
    except OSError:
        boot = ""
    return f"{socket.gethostname()}{boot} pid {os.getpid()}{what and f', {what}'}"[:LENGTH_MAX]
