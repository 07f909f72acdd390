"""From an address to a store, or to the stores of a folder.

Owns: opening for reading, what is said when there is no store, what lies in a store's folder and is no object, the
choice of codecs.
Does not know: what is in a store, which folders of a parent are stores (parents.py).

Invariants:
1. Nothing is created, also not a folder.
2. A message names the address as it was typed.
3. Codecs, and Arrow with them, are loaded when they are first asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from recovery.config_forms import URL
from recovery.errors import Damaged, NoStore, RecoveryError
from recovery.ports import LedgerCodec, ObjectStore, SegmentCodec
from recovery.snapshots import FORMAT_KEY, check_root
from snapshot_inspect.parents import Below, below
from snapshot_inspect.texts import filled
from storage_backends import open_store
from storage_backends.keys import TEMPORARY, is_key
from storage_backends.local import LocalStore
from storage_backends.posix import told

CONFIGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Place:
    """A store whose format mark was read and understood."""

    address: str
    store: ObjectStore
    mark: dict[str, Any]


@contextmanager
def naming(address: str, kind: type[RecoveryError] = RecoveryError) -> Iterator[None]:
    """What errors (of this kind) inside say about a STORE is about the one at `address`, not that of the command."""
    try:
        yield
    except kind as error:
        error.hint = filled(error.hint, "STORE", address)
        raise


def is_config(address: str) -> bool:
    """Whether an address is that of a job's file, which names its store."""
    return address.endswith(CONFIGS) and os.path.isfile(address)


def open_any(address: str) -> ObjectStore:
    """What lies at `address`, a store or not yet one; of a job's config, where that has its store, with its options.

    Raises NoStore for a folder that is not there.
    """
    url, options = store_at(address)
    if url == address and address.endswith(CONFIGS) and not URL.match(address) and not os.path.lexists(address):
        raise NoStore(f"there is no file {address}", hint="give a job's config, or a store's folder or address")
    try:
        return open_store(url, **options)
    except NoStore as error:
        if os.path.isfile(address):
            error.hint = "give the store's own folder or address, or the config of its job"
        raise


def store_at(address: str) -> tuple[str, dict[str, Any]]:
    """Address and options of the store that is meant: by a job's config its own, else what was typed."""
    if not is_config(address):
        return address, {}
    from recovery.config import load_config

    block = load_config(address).rollout_checkpointing
    if block.store is None:
        raise NoStore(f"{address} names no store", hint="give the store's folder or address")
    return block.store, block.store_options.given()


def open_place(address: str) -> Place:
    """The store at `address`. Raises NoStore, FormatNotUnderstood, or what the storage system says."""
    store = open_any(address)
    try:
        return Place(address, store, _mark(store, address))
    except NoStore as error:
        found = below(store)
        if not found:
            hint = _job_in(address) or error.hint
            raise NoStore(f"there is no store at {address}: it has no {FORMAT_KEY}", hint=hint) from None
        names = ", ".join(item.name for item in found[:3]) + (", …" if len(found) > 3 else "")
        raise NoStore(
            f"{address} is no store, but a folder with {len(found)} of them ({names})",
            hint="list them: snapshot-inspect list STORE",
        ) from None


def _job_in(address: str) -> str:
    """A hint for a folder that has no store but what may be the config of its job."""
    if not os.path.isdir(address):
        return ""
    found = sorted(name for name in os.listdir(address) if name.endswith((".yaml", ".yml")))
    return f"give the job's config: {os.path.join(address, found[0])}" if found else ""


def open_folder(address: str) -> list[Below]:
    """Every store right below `address`; empty if it is a store itself. Raises NoStore."""
    store = open_any(address)
    try:
        _mark(store, address)
        return []
    except NoStore as error:
        found = below(store)
        if not found:
            message = f"there is no store at {address}: neither it nor a folder right below it has a {FORMAT_KEY}"
            raise NoStore(message, hint=error.hint) from None
        return found


def place_below(item: Below) -> Place:
    """The store of a parent."""
    return Place(item.address, item.store, _mark(item.store, item.address))


def _mark(store: ObjectStore, address: str) -> dict[str, Any]:
    try:
        return check_root(store)
    except Damaged as error:
        hint = f"it is written once and never changed: put {FORMAT_KEY} back from a copy of the store"
        raise Damaged(f"{address}: {error.message}", hint=hint) from error


def local_root(store: ObjectStore) -> str:
    """The folder of a local store; empty for other systems."""
    return store.root if isinstance(store, LocalStore) else ""


@dataclass(frozen=True, slots=True)
class Strangers:
    """What a local store's folder holds beside objects."""

    names: list[str]
    unfinished: int


def strangers(store: ObjectStore) -> Strangers:
    """Files whose names cannot be keys, links, and the number of unfinished files; nothing for other systems."""
    root = local_root(store)
    if not root:
        return Strangers([], 0)
    names, unfinished = [], 0
    with told("list", root):
        for path, mode in _files(root):
            if path.startswith(TEMPORARY + "/"):
                unfinished += 1
            elif not is_key(path) or not stat.S_ISREG(mode):
                names.append(path)
    return Strangers(sorted(names), unfinished)


GLANCE = 1000


def glance(store: ObjectStore) -> tuple[list[str], bool]:
    """Some names that lie in a place, whatever they are of, and whether those are all: a folder may hold millions."""
    root = local_root(store)
    if not root:
        return store.glance() if hasattr(store, "glance") else ([item.key for item in store.list("")], True)
    names: list[str] = []
    todo = [root]
    n = 0
    with told("list", root):
        while todo:
            folder = todo.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    n += 1
                    if n > GLANCE:
                        return sorted(names), False
                    if entry.is_dir(follow_symlinks=False):
                        todo.append(entry.path)
                    else:
                        names.append(os.path.relpath(entry.path, root))
    return sorted(names), True


def in_the_way(store: ObjectStore, key: str) -> str:
    """What kind of thing has the name of `key` in a local store and is no object; empty if nothing does."""
    root = local_root(store)
    if not root:
        return ""
    path = os.path.join(root, key)
    with told("look at", path):
        try:
            mode = os.lstat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return ""
    if stat.S_ISREG(mode):
        return ""
    return "a folder" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "a special file"


def _files(root: str) -> Iterator[tuple[str, int]]:
    """Everything below `root` that is no folder, as (path from there, mode); what vanishes meanwhile is left out."""
    for folder, folders, files in os.walk(root):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in (*files, *links):
            path = os.path.join(folder, name)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            yield os.path.relpath(path, root), mode


@cache
def segment_codec() -> SegmentCodec:
    from storage_backends.codecs import MixedSegmentCodec

    return MixedSegmentCodec()


@cache
def ledger_codec() -> LedgerCodec:
    from storage_backends.arrow_ledger import ArrowLedgerCodec

    return ArrowLedgerCodec()
