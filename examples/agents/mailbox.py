"""A tool that changes something: a mailbox in an SQLite file, whose every action is done once, whatever crashes.

Owns: the messages, and the log of the actions that were done, in one file.
Does not know: agents, models, snapshots of anything else. It is a participant (recovery.ports.Participant).

Invariants:
1. An action and its line in the log are one transaction: either both are there or neither is.
2. An action asked for again under its key is not done again; it is answered from the log. Another action under that key
   is refused.
3. Between `prepare` and `commit` no action begins or ends.
4. A mailbox that is ahead of the snapshot stays: whoever asked for what it did will ask again. One that is behind (a
   new disk) is put back. One that went another way is not touched.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recovery.errors import Damaged, InputError

_TABLES = """
CREATE TABLE IF NOT EXISTS messages (id INTEGER PRIMARY KEY, folder TEXT NOT NULL, sender TEXT, text TEXT);
CREATE TABLE IF NOT EXISTS log (
    n INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, name TEXT NOT NULL, arguments TEXT NOT NULL, result TEXT NOT NULL
);
"""

_LOG = "SELECT n, key, name, arguments, result FROM log ORDER BY n"
_MAGIC = b"SQLite format 3\0"
_LOOK = "look whether it is the mailbox's own: snapshot-inspect verify; an older snapshot may be asked for by its id"

Step = Callable[[str], None]


class AnotherAction(Exception):
    """A key was used for one action and now comes with another: the agent went another way than the mailbox knows."""


class WentAnotherWay(InputError):
    """The mailbox has done what the snapshot knows nothing of, and the snapshot what the mailbox knows nothing of."""


class Mailbox:
    """`step` is told what is about to happen, for tests that end the process there."""

    def __init__(self, path: Path, *, name: str = "mailbox", step: Step = lambda what: None) -> None:
        self.name = name
        self._path = path
        self._step = step
        self._still = threading.Lock()
        with self._opened() as database:
            database.executescript(_TABLES)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """One connection for one use: what is done comes from any thread."""
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            database.execute("PRAGMA synchronous = FULL")
            yield database
        finally:
            database.close()

    # ---- the tool ------------------------------------------------------------------------------------------------

    def do(self, key: str, name: str, arguments: Mapping[str, Any]) -> Any:
        """Do one action, once for each key. Blocks while a snapshot is prepared. Raises AnotherAction."""
        asked = json.dumps(arguments, sort_keys=True)
        with self._still, self._opened() as database:
            self._step(f"begin {key}")
            database.execute("BEGIN IMMEDIATE")
            known = database.execute("SELECT name, arguments, result FROM log WHERE key = ?", (key,)).fetchone()
            if known is not None:
                database.execute("ROLLBACK")
                if known[:2] != (name, asked):
                    raise AnotherAction(f"{key}: {name} {asked} is asked for, {known[0]} {known[1]} was done")
                return json.loads(known[2])
            result = _ACTIONS[name](database, **arguments)
            self._step(f"done {key}")
            row = (key, name, asked, json.dumps(result))
            database.execute("INSERT INTO log (key, name, arguments, result) VALUES (?, ?, ?, ?)", row)
            database.execute("COMMIT")
            self._step(f"committed {key}")
            return result

    def contents(self) -> dict[str, list[Any]]:
        """Everything there is, in order."""
        with self._opened() as database:
            return {
                "messages": database.execute("SELECT * FROM messages ORDER BY id").fetchall(),
                "log": database.execute(_LOG).fetchall(),
            }

    # ---- the participant -----------------------------------------------------------------------------------------

    def prepare(self) -> bytes:
        self._still.acquire()
        try:
            self._step("prepare mailbox")
            with self._opened() as database:
                return bytes(database.serialize())
        except BaseException:
            self._still.release()
            raise

    def commit(self, published: bool) -> None:
        self._step("commit mailbox")
        self._still.release()

    def restore(self, state: bytes, rewound: bool) -> None:
        """Raises WentAnotherWay, and Damaged for what is no mailbox; nothing is changed then."""
        self._step("restore mailbox")
        saved = sqlite3.connect(":memory:")
        try:
            theirs = self._log_of(saved, state)
            with self._opened() as database:
                ours = database.execute(_LOG).fetchall()
                ahead = ours[: len(theirs)] == theirs
                if ahead and not (rewound and len(ours) > len(theirs)):
                    return
                if not rewound and theirs[: len(ours)] != ours:
                    raise WentAnotherWay(
                        f"{self._path} has {len(ours)} actions, and the snapshot {len(theirs)} others",
                        hint="it is another job's, or an older snapshot goes with it; moved away, it is made as the "
                        "snapshot has it",
                    )
                saved.backup(database)
        finally:
            saved.close()

    def _log_of(self, saved: sqlite3.Connection, state: bytes) -> list[tuple[Any, ...]]:
        if not state.startswith(_MAGIC):
            raise Damaged(f"the state of {self.name} is no mailbox: {state[:20]!r}", hint=_LOOK)
        try:
            saved.deserialize(state)
            theirs = saved.execute(_LOG).fetchall()
            saved.execute("SELECT id, folder, sender, text FROM messages").fetchall()
            ((sound,),) = saved.execute("PRAGMA integrity_check(1)").fetchall()
        except (sqlite3.Error, TypeError, ValueError, OverflowError) as error:
            raise Damaged(f"the state of {self.name} is no mailbox: {error!r:.200}", hint=_LOOK) from error
        if sound != "ok":
            raise Damaged(f"the state of {self.name} is no whole mailbox: {sound:.200}", hint=_LOOK)
        return theirs


def _send(database: sqlite3.Connection, sender: str, text: str) -> int:
    found = database.execute("INSERT INTO messages (folder, sender, text) VALUES ('inbox', ?, ?)", (sender, text))
    return int(found.lastrowid or 0)


def _move(database: sqlite3.Connection, number: int, folder: str) -> int:
    return database.execute("UPDATE messages SET folder = ? WHERE id = ?", (folder, number)).rowcount


def _append(database: sqlite3.Connection, number: int, text: str) -> int:
    """Twice is not the same as once."""
    return database.execute("UPDATE messages SET text = text || ? WHERE id = ?", (text, number)).rowcount


_ACTIONS: Mapping[str, Callable[..., Any]] = {"send": _send, "move": _move, "append": _append}
