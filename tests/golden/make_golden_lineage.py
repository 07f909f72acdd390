"""Writes the golden store of model calls that led to one another (`call-lineage`, docs/format.md, section 8).

    python -m tests.golden.make_golden_lineage FOLDER      makes FOLDER, FOLDER.sha256 and expected-lineage.json

Like all golden stores it is written once and never again; a folder that is there is refused.

Owns: a small job of two lives in which calls have parents, and objects of the ledger with and without them.
Does not know: any reader, any encoding.
"""

from __future__ import annotations

import sys
from pathlib import Path

from recovery.ports import ObjectStore
from storage_backends.memory import MemoryStore
from tests.golden.make_golden import A1, EOS, Life, as_text, expectation, files_of, write_store


def golden_lineage(store: ObjectStore) -> Life:
    life = Life(store, _first_life(store))
    life.say(("a", 2), [40, 41], version=A1)
    life.say(("a", 1), [EOS])
    life.end(("a", 1), "stop", None)
    life.snapshot("final")
    life.close()
    return life


def _first_life(store: ObjectStore) -> Life:
    life = Life(store)
    root = life.open("a")
    life.say(root, [7, 8, 9])
    life.snapshot()  # no call has a lineage: an object that requires nothing
    parent = life.live[root].call_id().hex()
    first = life.open("a", 1, prompt=(1, 5, 6, 7, 8), extra={"lineage": {"call": 0, "parent": parent}})
    life.say(first, [10, 11])
    life.say(root, [EOS])
    life.end(root, "stop", None)
    life.open("b", extra={"lineage": {"call": (1 << 32) - 1, "parent": None}, "draws": {"scheme": "s", "seed": 5}})
    life.snapshot()  # with children, and a changed call that has none
    second = life.open("a", 2, extra={"lineage": {"call": 1, "parent": life.live[first].call_id().hex()}})
    life.say(second, [12])
    life.snapshot("request")
    life.say(first, [13])  # the crash: one flush that no snapshot names
    life.flush()
    life.close()
    return life


def main(folder: Path) -> None:
    store = MemoryStore()
    life = golden_lineage(store)
    write_store(folder, files_of(store))
    (folder.parent / "expected-lineage.json").write_text(as_text(expectation(life, store, whole=None)) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
