"""Who held the store: owners, epochs and who fenced whom, as the log tells it.

Owns: what the log says of each coordinator, and what is said about what it cannot say.
Does not know: whether a process is alive (no store does), the holds on admission inside a process.

Invariants:
1. Only the log is read, and only what it proves is told: who claimed, who published, who was fenced by whom.
2. Slots that cannot be read are named; nothing is inferred across them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recovery.log import Slot
from recovery.ports import ObjectStore
from snapshot_inspect.documents import Document, moment
from snapshot_inspect.places import Place
from snapshot_inspect.render import Screen
from snapshot_inspect.survey import Position, Unreadable, walk
from snapshot_inspect.texts import age_text, count_text

CAUSES = ("interval", "adoption", "final", "request")
NOTES = (
    "flushes between two snapshots leave no entry in the log: `latest` counts them",
    "a store does not know whether a process lives: an owner that is not fenced may be dead, hung or well",
    "holds on admission live in a process's memory and never reach the store: a running job tells them in its metrics "
    "(prefix_recovery_holds_active; prefix-recovery run CONFIG --metrics)",
)


@dataclass(slots=True)
class Owner:
    """One epoch: its slots, oldest first."""

    slots: list[Slot] = field(default_factory=list)

    @property
    def epoch(self) -> int:
        return self.slots[0].epoch

    def snapshots(self) -> Document:
        counts = dict.fromkeys((*CAUSES, "other"), 0)
        for slot in self.slots:
            if slot.kind == "snapshot":
                cause = slot.body.get("cause")
                counts[cause if cause in CAUSES else "other"] += 1
        return counts

    @property
    def ended(self) -> bool:
        """Its last snapshot was its last for good: what comes after one is at most garbage collection.

        One that forgets takes none, and has nothing more to do.
        """
        if any(slot.kind == "forget" for slot in self.slots):
            return True
        last = next((slot for slot in reversed(self.slots) if slot.kind == "snapshot"), None)
        return last is not None and last.body.get("cause") == "final"


def owners_of(store: ObjectStore, at: Position) -> tuple[list[Owner], list[Unreadable]]:
    """Every epoch that can be read, oldest first."""
    owners: dict[int, Owner] = {}
    unreadable: list[Unreadable] = []
    for found in walk(store, at.top, whole=True):
        if isinstance(found, Unreadable):
            unreadable.append(found)
        else:
            owners.setdefault(found.slot.epoch, Owner()).slots.append(found.slot)
    for owner in owners.values():
        owner.slots.reverse()
    return [owners[epoch] for epoch in sorted(owners)], unreadable[::-1]


def holds(place: Place, at: Position, owners: list[Owner], unreadable: list[Unreadable], now: float) -> Document:
    followers = [*owners[1:], None]
    return {
        "store": place.address,
        "tail": at.tail,
        "owners": [_owner(owner, after, now) for owner, after in zip(owners, followers, strict=False)],
        "may_publish": owners[-1].epoch if owners else None,
        "unreadable": [{"seq": item.seq, "reason": item.error.message} for item in unreadable],
        "notes": list(NOTES),
    }


def _owner(owner: Owner, after: Owner | None, now: float) -> Document:
    first, last = owner.slots[0], owner.slots[-1]
    at, until = moment(first.utc, now), moment(last.utc, now)
    return {
        "epoch": owner.epoch,
        "owner": first.owner,
        "claimed": first.seq,
        **at,
        "last_slot": last.seq,
        "last_utc": until["utc"],
        "last_age_s": until["age_s"],
        "snapshots": owner.snapshots(),
        "ended": owner.ended,
        "fenced_by": None if after is None else after.epoch,
        "fenced_utc": None if after is None else moment(after.slots[0].utc, now)["utc"],
    }


# ---- for people ----------------------------------------------------------------------------------------------------


def shown(screen: Screen, document: Document) -> None:
    heads = ("epoch", "owner", "claimed (UTC)", "age", "last log entry", "snapshots", "state")
    screen.rows(heads, [_row(owner) for owner in document["owners"]], frozenset({"epoch"}))
    screen.line()
    facts = []
    if document["may_publish"] is None:
        facts.append(("now", "nobody has claimed this store yet"))
    else:
        facts.append(("now", f"only epoch {document['may_publish']} can publish; a claim of a later one fences it"))
    facts += [("unreadable", item["reason"]) for item in document["unreadable"]]
    facts += [("note", note) for note in document["notes"]]
    screen.facts(facts)


def _row(owner: Document) -> list[str]:
    utc = owner["utc"]
    counts = [f"{n} {cause}" for cause, n in owner["snapshots"].items() if n]
    if owner["fenced_by"] is not None:
        state = f"{'stopped by itself, then ' if owner['ended'] else ''}fenced by epoch {owner['fenced_by']}"
    else:
        state = "stopped by itself" if owner["ended"] else "may publish"
    return [
        str(owner["epoch"]),
        owner["owner"] or "unknown",
        "unknown" if utc is None else f"{utc[:10]} {utc[11:19]}",
        age_text(owner["age_s"]),
        age_text(owner["last_age_s"]),
        ", ".join(counts) or count_text(0, "snapshot"),
        state,
    ]
