"""What a caller asks for, as it can be kept with the call and be its identity: plain JSON values, or refused by name.

Owns: which values are the same in JSON (a numpy number, an enum's value, a set in order), and what is told of the rest.
Does not know: engines, which field means what, digests (codec.py).

Invariants:
1. What is accepted is itself after any round trip through JSON text, by any reader: equal values in every process give
   one identity, and what was asked for is read back as it was.
2. Nothing is guessed: what JSON has no exact word for is an InputError that names its dotted field.
3. A request is looked at before anything is done for it: one that is refused changes nothing, and its call is still
   there for the one that is mended.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from recovery.errors import InputError
from recovery.model import Int32Array, Request

DEPTH_MAX = 100
"""Objects and lists within each other. Readers of JSON walk them on their stack, and it may be nearly full."""

_JSON = "it is kept with the call as JSON: finite numbers (here of 64 bits), text, lists, objects with text keys"
_INT32 = np.iinfo(np.int32)

Path = tuple[object, ...]


def plain(value: Any, path: Path) -> Any:
    """`value` as JSON has it. Raises InputError naming `path` and what is below it."""
    if value is None or value is True or value is False:
        return value
    match value:
        case enum.Enum():
            return plain(value.value, path)
        case str():
            return _text(value, path)
        case np.generic():
            return _scalar(value, path)
        case int():
            if not -(1 << 63) <= value < 1 << 64:
                raise _refused(path, f"an integer of {value.bit_length()} bits")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise _refused(path, str(float(value)))
            return float(value)
        case bytes() | bytearray() | memoryview():
            raise _refused(path, type(value).__name__)
    if len(path) > DEPTH_MAX:
        raise _refused(path, f"more than {DEPTH_MAX} levels deep")
    match value:
        case Mapping():
            return _object(value.items(), path)
        case np.ndarray():
            return plain(value.tolist(), path) if value.ndim else plain(value[()], path)
        case set() | frozenset():
            return _in_order([plain(item, (*path, "?")) for item in value])
        case Sequence():
            return [plain(item, (*path, number)) for number, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = [one.name for one in dataclasses.fields(value) if not one.name.startswith("_")]
        return _object([(name, getattr(value, name)) for name in named], path)
    if isinstance(names := getattr(type(value), "__struct_fields__", None), tuple):
        return _object([(name, getattr(value, name)) for name in names], path)
    raise _refused(path, f"a {type(value).__name__}")


def checked(request: Request) -> Request:
    """The same request, of plain values. Raises InputError for one that nobody could find again."""
    for name in ("rollout", "source_digest", "restart_only"):
        if not isinstance(value := getattr(request, name), str):
            raise InputError(f"the {name} of a request is {value!r:.80}", hint="give it a text")
        _text(value, (name,))
    sampling = plain(request.sampling, ("sampling",))
    extra = plain(request.extra, ("extra",))
    ids = prompt_ids(request.prompt_token_ids)
    return dataclasses.replace(request, sampling=sampling, extra=extra, prompt_token_ids=ids)


def prompt_ids(values: Any, field: str = "prompt_token_ids") -> Int32Array:
    """A prompt's ids. Raises InputError for what would become other ids, or none."""
    try:
        found = np.asarray(values)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        found = np.empty((0, 0))
    if found.dtype == np.int32 and found.ndim == 1:
        return found
    if found.ndim == 1 and not len(found):
        return np.zeros(0, np.int32)
    if found.ndim == 1 and found.dtype.kind in "iu" and _INT32.min <= found.min() and found.max() <= _INT32.max:
        return found.astype(np.int32)
    wrong = next((at for at, value in enumerate(values) if not _is_id(value)), None) if found.ndim == 1 else None
    where = field if wrong is None else f"{field}.{wrong}"
    what = f"{type(values).__name__} of {found.dtype}" if wrong is None else f"{values[wrong]!r:.80}"
    raise InputError(f"{where} is {what}", hint="give a list of token ids, integers of 32 bits")


def _is_id(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and _INT32.min <= value <= _INT32.max


def _text(value: str, path: Path) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refused(path, f"{value!r:.80}, which holds half of a surrogate pair and is no text") from None
    return str.__str__(value)


def _scalar(value: np.generic, path: Path) -> Any:
    if isinstance(value, np.longdouble) and np.isfinite(value) and np.longdouble(float(value)) != value:
        raise _refused(path, f"{value!r:.80}, which has more digits than a double")
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return plain(float(value) if isinstance(value, np.floating) else value.item(), path)
    raise _refused(path, f"a numpy {type(value).__name__}")


def _object(items: Any, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in items:
        plain_key = key.value if isinstance(key, enum.Enum) else key
        if not isinstance(plain_key, str | int | np.integer) or isinstance(plain_key, bool):
            raise _refused(path, f"an object with the key {key!r:.80}")
        name = _text(plain_key, (*path, "?")) if isinstance(plain_key, str) else str(int(plain_key))
        if name in found:
            raise _refused(path, f"an object whose key {name!r:.80} comes twice, as text and as a number")
        found[name] = plain(item, (*path, name))
    return found


def _in_order(items: list[Any]) -> list[Any]:
    """Of a set. The order of its items is another in every process."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _refused(path: Path, what: str) -> InputError:
    named = [str(part) for part in path]
    shown = ".".join(named if len(named) <= 8 else [*named[:7], "…"]).encode("utf-8", "replace").decode()
    return InputError(f"{shown} is {what}", hint=f"mend the field, ask again: {_JSON}")
