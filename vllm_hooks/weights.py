"""New weights for a running vLLM engine, from a folder.

Owns: which call of vLLM loads them, and what has to be cleared for them.
Does not know: trainers, versions, holds. (recovery.admission.updates calls it while the rollout is held and drained.)

Invariants:
1. When it returns, every worker serves the folder's weights and nothing that was computed under others is used again.
2. When it raises, which weights are served is not known: the caller counts the engine as torn.
3. A folder that lacks weights is refused before the engine is touched; vLLM itself would only warn.

`docs/decisions/0023-weights-are-reloaded-from-a-folder.md` says which other ways were tried.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from recovery.errors import InputError


async def reload_weights(engine: Any, folder: Path, names: frozenset[str] | None = None) -> None:
    """Load `folder`'s safetensors into a running AsyncLLM in place. Nothing may be executing.

    Args:
        engine: a vLLM AsyncLLM.
        folder: a model folder, in the layout that the engine was started from.
        names: the weights that have to be in it (None: whatever is).

    Raises InputError if the folder is not whole, or what the engine raised.
    """
    found = weight_names(folder)
    missing = sorted((names or frozenset()) - found)
    if missing or not found:
        what = f"{len(missing)} weights are missing, {missing[0]} among them" if missing else "no weights are there"
        raise InputError(f"{folder}: {what}", hint="write the whole folder before it is given to the engine")
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
    if not await engine.reset_prefix_cache():
        raise InputError(
            f"the weights of {folder} are loaded, but the prefix cache of the old ones is in use",
            hint="load weights only while nothing executes, as in `rollout.updates.update`",
        )


def weight_names(folder: Path) -> frozenset[str]:
    """Names of all tensors in the folder's safetensors files, read from their headers."""
    names: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            names.update(json.loads(file.read(size)))
    return frozenset(names - {"__metadata__"})
