"""The state of a participant that joined, as it is stored: opaque bytes with their digest (docs/format.md, section 10).

Owns: the JSON around the bytes, and checking it.
Does not know: what the bytes mean, where the JSON lies.

Invariant:
1. What is unpacked is bit for bit what was packed, or Damaged.
"""

from __future__ import annotations

import base64
import binascii
import json

from recovery.codec import canonical_json, sha256_hex
from recovery.errors import Damaged

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
