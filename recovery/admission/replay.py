"""The source behind a rollout: a cursor over rows, and every group that is not trained for good.

Owns: the cursor, which groups are requeued, outstanding and acknowledged, and the replay-set rule.
Does not know: where rows lie (rows.py), slots, leases, who generates.

Invariants (numbers are those of docs/admission.md):
1. (A6) Requeued groups come before new ones, in order of `group_index`; a row that cannot be made does not move the
   cursor.
2. (A7) Every verb checks all of its input first: one that raises has changed nothing.
3. (A42) At rollout R the state is requeued, outstanding and acknowledged above R, each group once; up to R it is
   forgotten. Nothing is acknowledged at or below the last R, and R does not go back.
4. (A67) A group keeps its index and ids through every requeue; only its `draw` grows, and with it the request ids
   (V18).
5. (A43) A state is taken up only by the same rows in the same order: every mismatch is named before anything is
   replaced.
6. A group that was trained and is replayed is drawn anew; one that was outstanding goes on under its old request ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from recovery.admission.attempts import Attempt
from recovery.admission.limits import whole
from recovery.admission.samples import Sample
from recovery.admission.settlement import Why
from recovery.errors import ConfigError, Damaged, FingerprintMismatch

SCHEMA = 1


class Rows(Protocol):
    """The caller's data, post-processed. `size` is None as long as the end has not been seen."""

    @property
    def size(self) -> int | None: ...

    def row(self, index: int) -> Mapping[str, Any] | None:
        """Row `index`, with an `id`; None beyond the end. Raises InputError for one that is malformed."""

    def digest(self, n: int) -> str:
        """Of the first n rows."""


class NotOutstanding(Exception):
    """A program error: the attempt is not one that is outstanding at this source."""


@dataclass(frozen=True, slots=True)
class _Draws:
    """How often a group was generated in vain: in all, for age, by a cancellation."""

    draw: int = 0
    stale: int = 0
    aborted: int = 0

    def after(self, why: Why) -> _Draws:
        return _Draws(self.draw + 1, self.stale + (why is Why.STALE), self.aborted + (why is Why.ABORTED))


class ReplaySource:
    """A Source (settlement.py): `epochs` times through the rows, each in its own order if there is a `shuffle_seed`."""

    def __init__(
        self, rows: Rows, *, samples_per_prompt: int, epochs: int = 1, shuffle_seed: int | None = None
    ) -> None:
        if whole("samples_per_prompt", samples_per_prompt) < 1 or whole("epochs", epochs) < 1:
            raise ConfigError("samples_per_prompt and epochs are at least 1")
        if rows.size is None and (epochs > 1 or shuffle_seed is not None):
            raise ConfigError(
                "rows of unknown number cannot be shuffled or gone through twice", hint="give a list or a file"
            )
        self._rows = rows
        self._n = samples_per_prompt
        self._epochs = epochs
        self._seed = shuffle_seed
        self._order: tuple[int, list[int]] = (-1, [])
        self._frontier = 0
        self._requeued: dict[int, _Draws] = {}
        self._outstanding: dict[int, tuple[Attempt, _Draws]] = {}
        self._acknowledged: dict[int, tuple[int, _Draws]] = {}
        self.saved = 0

    # ---- the port ----------------------------------------------------------------------------------------------

    def reserve(self, k: int) -> list[Attempt]:
        """Exactly k attempts; none if there are fewer."""
        wanted = sorted(self._requeued)[:k]
        fresh = range(self._frontier, self._frontier + k - len(wanted))
        attempts = [self._make(group, self._requeued.get(group, _Draws())) for group in (*wanted, *fresh)]
        found = [attempt for attempt in attempts if attempt is not None]
        if len(found) < k:
            return []
        for attempt in found:
            draws = self._requeued.pop(attempt.group_index, _Draws())
            self._outstanding[attempt.group_index] = (attempt, draws)
        self._frontier += len(fresh)
        return found

    def requeue(self, attempts: Sequence[Attempt], why: Why) -> None:
        for group, draws in self._check(attempts):
            del self._outstanding[group]
            self._requeued[group] = draws.after(why)

    def acknowledge(self, attempts: Sequence[Attempt], rollout: int) -> None:
        if rollout <= self.saved:
            raise NotOutstanding(f"rollout {rollout} is in the trainer's checkpoint {self.saved} already")
        for group, draws in self._check(attempts):
            del self._outstanding[group]
            self._acknowledged[group] = (rollout, draws)

    def _check(self, attempts: Sequence[Attempt]) -> list[tuple[int, _Draws]]:
        found: dict[int, _Draws] = {}
        for attempt in attempts:
            known = self._outstanding.get(attempt.group_index)
            if known is None or known[0] is not attempt or attempt.group_index in found:
                raise NotOutstanding(f"{attempt.reservation_id!r} is not outstanding as this attempt")
            found[attempt.group_index] = known[1]
        return list(found.items())

    # ---- rows --------------------------------------------------------------------------------------------------

    def _make(self, group: int, draws: _Draws) -> Attempt | None:
        epoch, offset = self._place(group)
        no_more = epoch >= self._epochs or self._rows.size == 0
        row = None if no_more else self._rows.row(self._index(epoch, offset))
        if row is None:
            return None
        row_id = str(row["id"])
        name = self._name(row_id, epoch)
        drawn = f".{draws.draw}" if draws.draw else ""
        samples = tuple(
            Sample(row_id=row_id, group_index=group, sample_index=i, request_id=f"{name}/{i}{drawn}", row=dict(row))
            for i in range(self._n)
        )
        return Attempt(
            reservation_id=name,
            group_index=group,
            samples=samples,
            draw=draws.draw,
            stale=draws.stale,
            aborted=draws.aborted,
        )

    def spent(self, request_ids: Collection[str]) -> list[str]:
        """(V18) Those that name a sample of a group before the cursor, but of no draw that may still be trained.

        What names no such group is not this source's, or not drawn yet, and is left alone. So is a later draw than the
        one to be replayed: a life that died made it after its last snapshot, and its name may be used again.
        """
        named: dict[str, list[tuple[str, int]]] = {}
        for one in request_ids:
            name, _, drawn = one.rpartition("/")
            index, _, draw = drawn.partition(".")
            if index.isdigit() and (draw or "0").isdigit():
                named.setdefault(name, []).append((one, int(draw or 0)))
        found = []
        for group in range(self._frontier if named else 0):
            epoch, offset = self._place(group)
            row = self._rows.row(self._index(epoch, offset))
            outstanding = self._outstanding.get(group)
            due = outstanding[1] if outstanding is not None else self._requeued.get(group)
            for request_id, drawn_as in named.pop(self._name(str(row["id"]), epoch) if row is not None else "", ()):
                if due is None or drawn_as < due.draw:
                    found.append(request_id)
        return found

    def _name(self, row_id: str, epoch: int) -> str:
        """Of a group; its requests begin with it. No two groups have one, whatever their rows are called."""
        alike = self._epochs > 1 and row_id.rpartition("@")[2].isdigit() and "@" in row_id
        return f"{row_id}@{epoch}" if epoch or alike else row_id

    def _place(self, group: int) -> tuple[int, int]:
        return _place(group, self._rows.size)

    def _index(self, epoch: int, offset: int) -> int:
        if self._seed is None:
            return offset
        if self._order[0] != epoch:
            assert self._rows.size is not None

            def rank(index: int) -> bytes:
                return hashlib.sha256(f"{self._seed} {epoch} {index}".encode()).digest()

            self._order = (epoch, sorted(range(self._rows.size), key=rank))
        return self._order[1][offset] if self._order[1] else offset  # beyond the end of no rows

    # ---- state -------------------------------------------------------------------------------------------------

    def checkpoint_saved(self, rollout: int) -> None:
        """The trainer's checkpoint of that rollout is durable: what it has trained never comes back."""
        if rollout < self.saved:
            raise NotOutstanding(f"the trainer's checkpoint {self.saved} is newer than {rollout}")
        self.saved = rollout
        self._acknowledged = {g: (r, d) for g, (r, d) in self._acknowledged.items() if r > rollout}

    def to_json(self) -> dict[str, Any]:
        """Everything a restore needs, whatever rollout the trainer comes back at."""
        epoch, offset = self._place(self._frontier)
        seen = min(self._frontier, self._rows.size) if self._rows.size is not None else self._frontier
        if self._seed is not None and self._rows.size:
            seen = self._rows.size
        return {
            "schema": SCHEMA,
            "size": self._rows.size,
            "digest": {"rows": seen, "sha256": self._rows.digest(seen)},
            "shuffle_seed": self._seed,
            "epochs": self._epochs,
            "samples_per_prompt": self._n,
            "cursor": {
                "epoch": epoch,
                "offset": offset,
                "group_frontier": self._frontier,
                "sample_frontier": self._frontier * self._n,
            },
            "requeued": [[g, d.draw, d.stale, d.aborted] for g, d in sorted(self._requeued.items())],
            "outstanding": [[g, d.draw, d.stale, d.aborted] for g, (_, d) in sorted(self._outstanding.items())],
            "acknowledged": [
                [g, d.draw, d.stale, d.aborted, rollout] for g, (rollout, d) in sorted(self._acknowledged.items())
            ],
            "saved": self.saved,
        }

    def restore(self, state: Mapping[str, Any], rollout: int) -> None:
        """Take up a state at the trainer's checkpoint `rollout`. Raises FingerprintMismatch or Damaged.

        Only on a source of which nothing was reserved yet (A44).
        """
        self.check_untouched()
        try:
            self._check_state(state, rollout)
            requeued = {int(g): _Draws(*d) for g, *d in (*state["requeued"], *state["outstanding"])}
            acknowledged = {int(g): (int(d[3]), _Draws(*d[:3])) for g, *d in state["acknowledged"]}
            frontier, saved = int(state["cursor"]["group_frontier"]), int(state["saved"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise Damaged(f"the state of the data source is malformed: {error!r}") from error
        groups = [*(g for g, *_ in state["requeued"]), *(g for g, *_ in state["outstanding"]), *acknowledged]
        if len(set(groups)) != len(groups) or not all(0 <= group < frontier for group in groups):
            raise Damaged("the state of the data source names a group twice, or one that its cursor has not reached")
        for group, (when, draws) in acknowledged.items():
            if when > rollout:
                requeued[group] = replace(draws, draw=draws.draw + 1)
        self._frontier, self._requeued, self.saved = frontier, requeued, max(saved, rollout)

    def check_untouched(self) -> None:
        """(A44) Raise NotOutstanding if anything was reserved."""
        if self._frontier:
            raise NotOutstanding("a state is taken up before the first reservation, not after it: restore, then start")

    def _check_state(self, state: Mapping[str, Any], rollout: int) -> None:
        present = {
            "schema": SCHEMA,
            "size": self._rows.size,
            "shuffle_seed": self._seed,
            "epochs": self._epochs,
            "samples_per_prompt": self._n,
        }
        wrong = [
            f"{name}: {state[name]!r} in the snapshot, {value!r} here"
            for name, value in present.items()
            if state[name] != value and not (name == "size" and None in (state[name], value))
        ]
        cursor, digest, size = state["cursor"], state["digest"], state["size"]
        if not wrong and self._rows.digest(int(digest["rows"])) != digest["sha256"]:
            wrong.append(f"one of the first {digest['rows']} rows, or their post-processing, is another")
        if not wrong and size is not None and self._rows.size is None and self._rows.row(size) is not None:
            wrong.append(f"size: {size} in the snapshot, more rows here")
        if wrong:
            raise FingerprintMismatch(
                f"the snapshot belongs to another data set: {'; '.join(wrong)}",
                hint="use the data and the settings that the store was made with, or give this job its own store",
            )
        epoch, offset = _place(int(cursor["group_frontier"]), size)  # as it was known then
        if (cursor["epoch"], cursor["offset"], cursor["sample_frontier"]) != (
            epoch,
            offset,
            cursor["group_frontier"] * self._n,
        ):
            raise Damaged(f"the cursor of the data source contradicts itself: {cursor}")
        if rollout < state["saved"]:
            raise FingerprintMismatch(f"rollout {rollout} is older than {state['saved']}, up to which all is forgotten")


def _place(group: int, size: int | None) -> tuple[int, int]:
    """Its epoch and offset there, among so many rows; all in one epoch while their number is not known."""
    return divmod(group, size) if size else (0, group)
