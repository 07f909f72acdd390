"""JSON that others wrote: parsed, and taken apart field by field with its types checked.

Owns: turning any mangled JSON into Damaged that names the field.
Does not know: what the fields mean.

Invariants:
1. Nothing but Damaged is raised, whatever the text is.
2. NaN and infinities are refused, as they are when written; an integer is an int, never a bool or a float.
3. Strings can be encoded as UTF-8. Unknown fields are ignored: a field is looked for, never enumerated.
"""

from __future__ import annotations

import json
import json.scanner
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from recovery.errors import Damaged

T = TypeVar("T")

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def dump(value: Any) -> str:
    """The text of `value`: sorted keys, no white space. Raises ValueError or TypeError for what JSON lacks."""
    return _ENCODER.encode(value)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_scan: Callable[[str, int], tuple[Any, int]] = json.scanner.make_scanner(_DECODER)  # type: ignore[arg-type]

Where = object
"""What a message is about: a text, or something that is made into one when there is a message."""


def parse(text: str, what: Where) -> dict[str, Any]:
    """The object that `text` is."""
    value = _decode(text, what)
    if not isinstance(value, dict):
        raise Damaged(f"{what} is no JSON object")
    return value


def parse_list(text: str, what: Where) -> list[Any]:
    """The list that `text` is."""
    value = _decode(text, what)
    if not isinstance(value, list):
        raise Damaged(f"{what} is no JSON list")
    return value


def _decode(text: str, what: Where) -> Any:
    try:
        with suppress(StopIteration):
            value, end = _scan(text, 0)
            if end == len(text):
                return value
        return _DECODER.decode(text)  # white space around the value, or an error to be named
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{what} is not JSON: {error}") from error


def take(record: dict[str, Any], name: str, kind: type[T], what: Where) -> T:
    """Field `name`, which has to be of exactly this type."""
    value = record.get(name)
    if type(value) is not kind:
        raise Damaged(f"{what}: {name} is {_short(value)}, not {kind.__name__}")
    if kind is str:
        _encodable(str(value), name, what)
    return value  # type: ignore[no-any-return]


def take_number(record: dict[str, Any], name: str, what: Where, *, limit: int = 1 << 63) -> int:
    """Field `name`, an integer in [0, limit)."""
    value = take(record, name, int, what)
    if not 0 <= value < limit:
        raise Damaged(f"{what}: {name} is {_short(value)}, which is out of range")
    return value


def take_stop_reason(record: dict[str, Any], what: Where) -> int | str | None:
    value = record.get("stop_reason")
    if value is None or type(value) is int:
        return value
    return take(record, "stop_reason", str, what)


def _encodable(text: str, name: str, what: Where) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Damaged(f"{what}: {name} is not valid text: {error}") from error


def _short(value: object) -> str:
    return f"{value!r:.60}" if isinstance(value, int | float | str | None) else type(value).__name__
