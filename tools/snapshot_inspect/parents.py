"""A folder, or a prefix of a bucket, that many stores lie in: each of them, also those that are broken.

Owns: what counts as a store there, and looking at many at once.
Does not know: what is in a store, how a row is shown.

Invariants:
1. A store is what has a format mark or a first slot. A folder that may not be looked into could be one, and counts;
   what is neither is foreign, and passed over in silence.
2. Names come in order. What is wrong with one store is said of that one, when it is read.
3. Places of other systems than disk and S3 hold no stores below them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from recovery.errors import ConfigError, ObjectMissing, RecoveryError
from recovery.log import slot_key
from recovery.ports import ObjectStore
from recovery.snapshots import FORMAT_KEY
from storage_backends.local import LocalStore
from storage_backends.posix import told

if TYPE_CHECKING:
    from storage_backends.s3 import S3Store

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 8
"""Stores of a bucket that are looked at side by side: each is some round trips."""

_MARKS = (FORMAT_KEY, slot_key(1))
_OF_THE_SYSTEM = "lost+found"


@dataclass(frozen=True, slots=True)
class Below:
    """A store in a parent; `address` is an argument for every verb."""

    name: str
    address: str
    store: ObjectStore


def below(store: ObjectStore) -> list[Below]:
    """The stores right below the root of a place that is no store itself."""
    if isinstance(store, LocalStore):
        return _on_disk(store.root)
    if not hasattr(store, "folders"):
        return []
    from storage_backends.s3 import S3Store

    return _in_bucket(store) if isinstance(store, S3Store) else []


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`work` of each, in order, AT_ONCE at a time."""
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="parent") as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _on_disk(root: str) -> list[Below]:
    with told("list", root), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    paths = [(name, os.path.join(root, name)) for name in names]
    return [Below(name, path, LocalStore(path)) for name, path in paths if _is_marked(path)]


def _is_marked(path: str) -> bool:
    for mark in _MARKS:
        try:
            os.lstat(os.path.join(path, mark))
            return True
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return os.path.basename(path) != _OF_THE_SYSTEM
    return False


def _in_bucket(store: S3Store) -> list[Below]:
    def look(name: str) -> Below | None:
        try:
            inner = store.under(f"{store.prefix}/{name}" if store.prefix else name)
        except ConfigError:
            return None  # no store can have such a name
        return Below(name, inner.url, inner) if _is_marked_in_bucket(inner) else None

    return [found for found in side_by_side(look, store.folders()) if found is not None]


def _is_marked_in_bucket(store: ObjectStore) -> bool:
    for mark in _MARKS:
        try:
            store.get(mark, 0, 1)
            return True
        except ObjectMissing:
            continue
        except RecoveryError:
            return True
    return False
