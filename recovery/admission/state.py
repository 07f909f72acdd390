"""A rollout's part of a snapshot: cursor, replay set, finished groups, versions, and which rollouts it covers.

Owns: the states `rollout` and `group-N` (docs/format.md, section 10), and taking them up again.
Does not know: when a snapshot is taken, the store, prefixes (the ledger has them).

Invariants (numbers are those of docs/admission.md):
1. One step: everything is of one moment, at which admission and lease issue were closed (A15).
2. Every group before the cursor is in the replay set, or acknowledged with its rollout; a finished one has its samples
   too (M34) if they are JSON, and is generated again if they are not, which is told once.
3. A trainer at rollout R may take it up if the rollouts up to R are settled in it, and none above R is forgotten; and
   if its checkpoint is of the line that led to this state, not of a branch that the trainer went back from.
4. What is taken up is checked whole before anything is replaced.
5. (V9) Every process-life is a lineage of its own: versions that an earlier one published after its last snapshot are
   known to nobody but the tokens that were sampled under them, and these must not pass for new ones of the same number.
6. A finished group comes back with the version of its admission, and only for the very draw that it was made in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from recovery.admission.attempts import Phase, Record
from recovery.admission.limits import whole
from recovery.admission.ownership import Ownership
from recovery.admission.preparation import covers
from recovery.admission.replay import ReplaySource
from recovery.admission.samples import Sample, from_json, to_json
from recovery.admission.versions import PolicyVersions
from recovery.codec import canonical_json
from recovery.errors import ConfigError, Damaged, FingerprintMismatch
from recovery.model import PolicyVersion

SCHEMA = 1
NAME = "rollout"
_FINISHED = (Phase.PUBLISHED, Phase.LEASED, Phase.RETAINED)


class RolloutState:
    """Encodes and takes up the state of one rollout."""

    def __init__(self, ownership: Ownership, source: ReplaySource, warn: Callable[[str], None]) -> None:
        self._own = ownership
        self._warn = warn
        self._source = source
        self.taken_up = False
        self._told = False
        self._finished: dict[tuple[int, int], tuple[PolicyVersion | None, tuple[Sample, ...]]] = {}

    # ---- out ---------------------------------------------------------------------------------------------------

    def states(self) -> dict[str, bytes]:
        """By name. `group-N` does not change while the group waits, so it is encoded and written once."""
        groups = self.finished()
        state = {
            "schema": SCHEMA,
            "source": self._source.to_json(),
            "versions": self._own.versions.to_json(),
            "rollouts": {"newest": self._own.leases.newest, "covered": covers(self._own)},
            "finished": sorted(int(name.removeprefix("group-")) for name in groups),
        }
        return {NAME: canonical_json(state), **groups}

    def finished(self) -> dict[str, bytes]:
        """The states of the finished groups. Cheap for those that were in it before: call it when one has finished."""
        for record in self._own.attempts:
            if record.phase in _FINISHED and record.samples and record.encoded is None:
                try:
                    record.encoded = _group(record)
                except (TypeError, ValueError) as error:
                    record.encoded = b""
                    self._tell(record, error)  # invariant 2
        return {f"group-{one.attempt.group_index}": one.encoded for one in self._own.attempts if one.encoded}

    def _tell(self, record: Record, error: Exception) -> None:
        if not self._told:
            self._told = True
            self._warn(
                f"no snapshot keeps the finished group {record.attempt.reservation_id!r}, nor others like it: {error}; "
                "after a restart they are generated again (let row, extra, text and a finite reward be JSON)"
            )

    # ---- in ----------------------------------------------------------------------------------------------------

    def restore(self, states: Mapping[str, bytes], *, rollout: int, version: PolicyVersion | int, lineage: str) -> None:
        """Take up a snapshot's states, for a trainer at its checkpoint after `rollout`, with weights of `version`.

        `lineage` names the trainer's branch from here on: a name that was never used, e.g. with the store's epoch in
        it. Raises FingerprintMismatch or Damaged, and NotOutstanding after the first reservation; nothing changed then.
        """
        self._source.check_untouched()
        check_fits(states, whole("rollout", rollout), version)
        number = whole("version", version.number if isinstance(version, PolicyVersion) else version)
        if not isinstance(lineage, str):
            raise ConfigError(f"lineage: found {lineage!r}; accepted: a name that was never used")
        if NAME not in states:
            before = self._own.versions.current.lineage
            fresh = PolicyVersions(PolicyVersion(before, number))
            if lineage != before:  # a name that no life has used yet may be the one that a rollout is made with
                fresh.fork(lineage, number)
            self._own.leases.newest = rollout
            self._own.versions.take_over(fresh)
            self.taken_up = True
            return
        state = _parsed(states, NAME)
        try:
            versions = PolicyVersions.from_json(state["versions"])
            finished = [(f"group-{int(group)}", int(group)) for group in state["finished"]]
        except (KeyError, TypeError, ValueError) as error:
            raise Damaged(f"the state {NAME!r} is malformed: {error!r}") from error
        groups = dict(_finished(_parsed(states, name), group) for name, group in finished)
        if number > versions.current.number:
            versions.publish(PolicyVersion(versions.current.lineage, number))
        versions.fork(lineage, number, rollout)
        self._source.restore(state["source"], rollout)
        self._finished = groups
        self._own.versions.take_over(versions)
        self._own.leases.newest = rollout
        self.taken_up = True

    def take_finished(self, record: Record) -> tuple[Sample, ...] | None:
        """The stored samples of a group that is being begun, its version put back; None if it must be generated."""
        found = self._finished.pop((record.attempt.group_index, record.attempt.draw), None)
        if found is None:
            return None
        record.version = found[0]
        return found[1]


def check_fits(states: Mapping[str, bytes], rollout: int, version: PolicyVersion | int = 0) -> None:
    """Raise FingerprintMismatch unless a trainer at its checkpoint `rollout` may take up these states.

    `version` is the one that the checkpoint was saved with: its lineage says which process-life wrote it. Of a
    checkpoint that has the number only, no more is taken than what can be of one branch.

    RecoverySession.open takes it (with rollout and version bound) as `compatible`: a snapshot that does not fit is
    passed over.
    """
    if NAME not in states:
        if rollout:
            raise FingerprintMismatch(
                f"the trainer is at rollout {rollout}, and the snapshot has no rollout in it",
                hint="use the store that the trainer's run was made with; if this is the one, that run left out "
                "session.participants.add(rollout.participant), and the trainer has to begin anew",
            )
        return
    state = _parsed(states, NAME)
    try:
        newest, covered = int(state["rollouts"]["newest"]), int(state["rollouts"]["covered"])
        saved = int(state["source"]["saved"])
        versions = PolicyVersions.from_json(state["versions"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"the state {NAME!r} is malformed: {error!r}") from error
    _check_line(versions, rollout, version)
    if rollout > covered:
        raise FingerprintMismatch(
            f"the trainer is at rollout {rollout}; the snapshot knows what was trained up to {covered} of {newest}",
            hint="take a snapshot before each checkpoint of the trainer, or start the trainer from an older one",
        )
    if rollout < saved:
        raise FingerprintMismatch(
            f"the trainer is at rollout {rollout}; what was trained up to {saved} is forgotten here",
            hint="start the trainer from its newer checkpoint, or restore an older snapshot",
        )


def _check_line(versions: PolicyVersions, rollout: int, version: PolicyVersion | int) -> None:
    """Raise FingerprintMismatch unless the checkpoint is of the line that led to these versions."""
    if not rollout:
        return  # nothing was trained: that is on every line
    line, here = dict(versions.line()), versions.current.lineage
    if not isinstance(version, PolicyVersion):
        last = list(line.values())[-1]
        if last is not None and rollout > last:
            raise FingerprintMismatch(
                f"the trainer's checkpoint says rollout {rollout} without its lineage; the trainer went back to "
                f"rollout {last} once, so that there may be two of that number",
                hint="pass version=PolicyVersion(lineage, number) as Trainer.save was given it; where the checkpoint "
                f"does not hold it and was certainly written by the newest run, its lineage is {here!r}",
            )
        return
    if version.lineage not in line:
        raise FingerprintMismatch(
            f"the trainer's checkpoint (rollout {rollout}) is of lineage {version.lineage!r}, which did not lead to "
            f"this snapshot of {here!r}",
            hint=f"start the trainer from a checkpoint of {' or '.join(map(repr, line))}, or restore an older snapshot",
        )
    last = line[version.lineage]
    if last is not None and rollout > last:
        raise FingerprintMismatch(
            f"the trainer's checkpoint (rollout {rollout} of lineage {version.lineage!r}) is of a branch that was left:"
            f" this snapshot is of {here!r}, for which the trainer went back to rollout {last}",
            hint=f"start the trainer from its newest checkpoint of {here!r}, or from one up to rollout {last}, or "
            "restore an older snapshot",
        )


def _group(record: Record) -> bytes:
    """Raises TypeError or ValueError for samples that are not JSON."""
    version = record.version
    samples = [to_json(sample) for sample in record.samples]
    return canonical_json(
        {
            "draw": record.attempt.draw,
            "version": None if version is None else [version.lineage, version.number],
            "samples": samples,
        }
    )


def _finished(value: Any, group: int) -> tuple[tuple[int, int], tuple[PolicyVersion | None, tuple[Sample, ...]]]:
    try:
        version = None if value["version"] is None else PolicyVersion(*value["version"])
        samples = tuple(from_json(sample) for sample in value["samples"])
        return (group, int(value["draw"])), (version, samples)
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"the state 'group-{group}' is malformed: {error!r}") from error


def _parsed(states: Mapping[str, bytes], name: str) -> Any:
    if name not in states:
        raise Damaged(f"the snapshot has no state {name!r}")
    try:
        return json.loads(states[name])
    except ValueError as error:
        raise Damaged(f"the state {name!r} is not JSON: {error}") from error
