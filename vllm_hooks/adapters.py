"""Which adapter a request is for: its name and what its files hold.

Owns: the digest of a LoRA folder, read once for as long as its files look the same.
Does not know: what becomes of a request whose adapter is not known (recovery.resume_table: `lora_path`).

Invariants:
1. Another content is another digest, and so another call: a prefix of one adapter is never carried on under another.
2. Files are read off the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

UNREAD = "lora_path"
"""Name of what is wrong with an adapter that is not a folder here: what it holds is not known."""

_Seen = tuple[tuple[str, int, int], ...]


class Adapters:
    """The adapters that one engine was asked for."""

    def __init__(self) -> None:
        self._digests: dict[tuple[str, _Seen], str] = {}

    async def extra_of(self, lora: Any) -> dict[str, Any]:
        """What is kept of an adapter with the request (`extra`); nothing without one."""
        if lora is None:
            return {}
        digest = await asyncio.to_thread(self._digest, Path(lora.lora_path))
        if digest is None:
            return {"lora_request": lora.lora_name, UNREAD: lora.lora_path}
        return {"lora_request": {"name": lora.lora_name, "digest": digest}}

    def _digest(self, folder: Path) -> str | None:
        if not folder.is_dir():
            return None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
        seen = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
        key = (str(folder), seen)
        if key not in self._digests:
            state = hashlib.sha256()
            for path, (name, stat) in zip(files, stats, strict=True):
                state.update(f"{name}\0{stat.st_size}\0".encode())
                with path.open("rb") as file:
                    state.update(hashlib.file_digest(file, "sha256").digest())
            self._digests[key] = state.hexdigest()[:32]
        return self._digests[key]
