"""How much a rollout may own at a time, and what asking it for a batch can come to.

Owns: E, P, the batch, the cap, checked together; the answers that are no lease; the errors of the owner itself.
Does not know: how the bounds are kept (ownership.py).

Invariants (numbers are those of docs/admission.md):
1. (A14) Limits under which a batch could never be put together, or a group would wait for a slot, cannot be made.
"""

from __future__ import annotations

from dataclasses import dataclass

from recovery.admission.holds import Hold
from recovery.errors import ConfigError


def whole(name: str, value: object) -> int:
    """`value`. Raises ConfigError for what is no whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: found {value!r}; accepted: a whole number")
    return value


ABORTS_MAX = 8
"""A group whose execution is cancelled so often (nobody having asked for it) is a failure: it would go on for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """(A14) E, P, the groups of a train batch and the explicit cap of the buffer."""

    executing: int
    slots: int
    batch_groups: int
    buffer_max: int | None = None

    def __post_init__(self) -> None:
        if self.executing < 1 or self.batch_groups < 1:
            raise ValueError("at least one whole group executes, and a batch has at least one")
        if self.slots < self.executing:
            raise ValueError(f"{self.slots} slots for {self.executing} executing groups: one would wait for a slot")
        if min(self.slots, self.buffer_max or self.slots) < self.batch_groups:
            raise ValueError(f"a batch of {self.batch_groups} groups could never be put together")


@dataclass(frozen=True, slots=True)
class Waiting:
    """No lease yet, and why. `holds`: those that keep it from being issued, with their owners, reasons and times."""

    reason: str
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class Exhausted:
    """No lease any more: the source is at its end and everything was leased and settled."""


class NewerThanCurrent(Exception):
    """(A54, M33) A finished group is newer than the current version. It is kept until `reconcile`."""


class CannotClose(Exception):
    """Something has to be settled by its owner first."""


class TerminalPending(Exception):
    """(A50) Executions were asked to stop and have not proven that they did. They are still owned; close again."""


class CancelledTooOften(Exception):
    """A group's execution ended in a cancellation that nobody asked for, again and again."""


class VersionNotServed(Exception):
    """What engines report is too old as soon as it is drawn, again and again."""
