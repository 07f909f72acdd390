"""The trainer's own checkpoints: whole folders that are there or not, each with the anchor that ties it to a snapshot.

Owns: their names, the order of writes that makes one durable, which one is the newest, what an anchor says.
Does not know: torch (the caller writes the files), the store of snapshots.

Invariants:
1. A folder of the final name is whole: it was written under another name, synced file by file, and then renamed.
2. (A42) `rollout` and `saved_as` of the anchor are what a restore is asked for: a snapshot fits if it covers that
   rollout, has forgotten none above it, and is of the same branch.
3. The one before is kept until the newest is durable.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefix_recovery.model_folder import sync
from recovery.model import PolicyVersion

ANCHOR = "anchor.json"
_PREFIX, _WRITING = "rollout-", ".writing-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """`rollout`: what was trained up to it is in the weights. `version`, `lineage`: of these weights.

    `trained`: one entry for each sample that was trained on, in order. `lives`: processes that led here.
    """

    rollout: int = 0
    version: int = 0
    lineage: str = ""
    lives: int = 0
    trained: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def saved_as(self) -> PolicyVersion | int:
        """What it was saved with; the number only where an older checkpoint says no more."""
        return PolicyVersion(self.lineage, self.version) if self.lineage else self.version


class Checkpoints:
    """The checkpoints in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_WRITING}*"):
            shutil.rmtree(left)

    def newest(self) -> tuple[Path | None, Anchor]:
        """The folder and its anchor; None and an empty anchor if there is none yet."""
        whole = self._whole()
        if not whole:
            return None, Anchor()
        return whole[-1], Anchor(**json.loads((whole[-1] / ANCHOR).read_text(encoding="utf-8")))

    def save(self, anchor: Anchor, write: Callable[[Path], None], before_rename: Callable[[], None]) -> Path:
        """Durable when it returns. `write` fills a folder."""
        target = self._folder / f"{_PREFIX}{anchor.rollout:08d}"
        writing = self._folder / f"{_WRITING}{anchor.rollout:08d}"
        writing.mkdir()
        write(writing)
        (writing / ANCHOR).write_text(json.dumps(asdict(anchor)), encoding="utf-8")
        for path in (*writing.iterdir(), writing):
            sync(path)
        before_rename()
        writing.rename(target)
        sync(self._folder)
        for old in self._whole()[:-2]:
            shutil.rmtree(old.rename(old.with_name(f"{_WRITING}old")))
        return target

    def _whole(self) -> list[Path]:
        return sorted(self._folder.glob(f"{_PREFIX}*"))
