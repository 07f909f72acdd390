"""What the front end tells our parts inside the engine about one request, in its `extra_args`.

Owns: the key, the name of the noise that draws.py makes, and how a mark is put there and read.
Does not know: what is made of it.

Invariants:
1. A caller's own `extra_args` are kept.
2. A mark holds only what JSON and msgpack carry.
3. What is not marked costs one look at its `extra_args` when it joins a batch, and nothing after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEY = "prefix_recovery"

SCHEME = "position-1"
"""Names the noise of draws.py: another function is another name, and no call goes on under another one."""


def mark(params: Any, **facts: Any) -> None:
    """Add facts to the mark of a SamplingParams that is ours to change."""
    extra = dict(params.extra_args or {})
    extra[KEY] = {**extra.get(KEY, {}), **facts}
    params.extra_args = extra


def mark_of(params: Any) -> Mapping[str, Any]:
    """The mark of a request; empty for most."""
    extra = params.extra_args
    found: Mapping[str, Any] = extra.get(KEY, {}) if extra else {}
    return found


def marked(added: Iterable[Any]) -> list[Any]:
    """Of the rows that joined a batch (index, params, prompt ids, output ids) those that have a mark."""
    return [row for row in added if (extra := row[1].extra_args) and KEY in extra]
