"""The state of a participant that joined, as it is stored: opaque bytes with their digest (docs/format.md, section 10).

Owns: the JSON around the bytes, and checking it; for those whose own bytes are a JSON object, reading that.
Does not know: what is in it, where it lies.

Invariants:
1. What is unpacked is bit for bit what was packed, or Damaged.
2. What a participant is handed and cannot read is told by the participant's name, whatever bytes it is.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from recovery.codec import canonical_json, sha256_hex
from recovery.errors import Damaged, FormatNotUnderstood

SCHEMA = 1


def packed(blob: bytes) -> bytes:
    """As a state."""
    text = base64.b64encode(blob).decode("ascii")
    return canonical_json({"schema": SCHEMA, "nbytes": len(blob), "sha256": sha256_hex(blob), "blob": text})


def unpacked(state: bytes, name: str) -> bytes:
    """The bytes of the state `name`. Raises Damaged."""
    try:
        found = json.loads(state)
        schema, nbytes, digest, text = (found[key] for key in ("schema", "nbytes", "sha256", "blob"))
        blob = base64.b64decode(text, validate=True)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise Damaged(f"state {name!r} is malformed: {error!r:.200}") from error
    if schema != SCHEMA:
        raise Damaged(f"state {name!r} has schema {schema!r}; this version reads {SCHEMA}")
    if len(blob) != nbytes or sha256_hex(blob) != digest:
        raise Damaged(f"state {name!r} does not have the recorded length and sha256")
    return blob


BEGIN_ANEW = "let it begin without a state, from its first call: what ended comes from the store again"


def object_of(state: bytes, who: str, hint: str = BEGIN_ANEW) -> dict[str, Any]:
    """The JSON object that somebody's state is, of a schema that this version reads. Raises as `check_schema`."""
    try:
        found = json.loads(state)
    except (ValueError, TypeError, RecursionError) as error:
        raise Damaged(f"the state of {who} is no JSON: {error!r:.200}", hint=hint) from error
    check_schema(found, who, hint)
    assert isinstance(found, dict)
    return found


def check_schema(state: object, who: str, hint: str = BEGIN_ANEW) -> None:
    """Raise Damaged for what is no object with a schema, FormatNotUnderstood for another schema."""
    if not isinstance(state, Mapping) or type(schema := state.get("schema")) is not int:
        raise Damaged(f"the state of {who} is no object with a `schema`: {state!r:.80}", hint=hint)
    if schema != SCHEMA:
        raise FormatNotUnderstood(
            f"the state of {who} has schema {schema}; this version reads {SCHEMA}",
            hint=f"go on with the version that wrote it, or {hint}",
        )
