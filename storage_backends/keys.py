"""What a key may be.

Owns: the grammar of keys and of prefixes of keys, and its limits.
Does not know: which keys the core uses, where an object of a key lies.

Invariants:
1. A key is one or more components of [a-z0-9._-] between slashes; no component is `.` or `..`.
2. A key is at most KEY_BYTES_MAX long and a component COMPONENT_BYTES_MAX: what every storage system can hold.
3. No key begins with the component `.tmp`: there a local store keeps what is not finished.
4. What is no key is refused before any storage system sees it.
"""

from __future__ import annotations

import re

from recovery.errors import ConfigError

KEY_BYTES_MAX = 1024
"""S3's limit."""

COMPONENT_BYTES_MAX = 255
"""NAME_MAX of Linux file systems."""

TEMPORARY = ".tmp"

_NAME = re.compile(r"[a-z0-9._-]+")


def is_component(name: str) -> bool:
    """Whether `name` may be one component of a key."""
    if len(name) > COMPONENT_BYTES_MAX or name in (".", ".."):
        return False
    return _NAME.fullmatch(name) is not None


def is_key(key: str) -> bool:
    if not 0 < len(key) <= KEY_BYTES_MAX:
        return False
    parts = key.split("/")
    return parts[0] != TEMPORARY and all(map(is_component, parts))


def check_key(key: str) -> list[str]:
    """The components of `key`. Raises ConfigError for what is no key."""
    if not isinstance(key, str) or not is_key(key):
        raise ConfigError(f"{key!r:.200} is no key of a store", hint="keys are [a-z0-9._-]+ between slashes")
    return key.split("/")


def check_prefix(prefix: str) -> str:
    """The folder that holds every key beginning with `prefix`. Raises ConfigError if no key can begin so."""
    folder, _, last = prefix.rpartition("/")
    complete = folder.split("/") if "/" in prefix else []
    if not all(map(is_component, complete)) or (last and not _NAME.fullmatch(last)):
        raise ConfigError(f"{prefix!r:.200} begins no key of a store", hint="keys are [a-z0-9._-]+ between slashes")
    return folder


def check_range(start: int, end: int | None) -> None:
    """Raises ValueError unless 0 <= start <= end: a range is never counted from the end of an object."""
    if start < 0 or (end is not None and end < start):
        raise ValueError(f"[{start}, {end}) is no range of bytes")
