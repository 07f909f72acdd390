"""The root folder of a local store: found, or made durably.

Owns: what is said when a path is no store's folder, and making one.
Does not know: what a store holds (a folder without a format mark is opened all the same), other storage systems.

Invariants:
1. Only `create` makes folders, and each made folder's name is on disk before the store is handed out.
2. Nothing there is NoStore, naming the command that makes one; a link to nothing names the link and its target.
3. What cannot be a folder (a file, a refused permission) is said as such, not as "no store".
"""

from __future__ import annotations

import os
from contextlib import suppress

from recovery.errors import ConfigError, NoStore
from storage_backends.local import LocalStore
from storage_backends.posix import told

_MAKE = "check the path; `prefix-recovery run CONFIG` makes a store"


def open_local(path: str, *, create: bool) -> LocalStore:
    """The store in folder `path`; with `create`, made if it is missing and swept of what crashes left."""
    if create:
        _make(path)
    _find(path)
    store = LocalStore(path)
    if create:
        store.sweep_temporaries()
    return store


def _find(path: str) -> None:
    with told("open", path):
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise NoStore(f"there is no store at {path}: {_why_missing(path)}", hint=_MAKE) from None
        except NotADirectoryError:
            raise NoStore(f"there is no store at {path}: {_what_file(path)}", hint=_MAKE) from None


def _make(path: str) -> None:
    """The folder `path` and those above it, each name on disk (as far as this call made it)."""
    missing = []
    at = os.path.abspath(path)
    while not os.path.isdir(at) and os.path.dirname(at) != at:
        missing.append(at)
        at = os.path.dirname(at)
    for folder in reversed(missing):
        with told("make", folder):
            try:
                os.mkdir(folder)
            except FileExistsError:
                if not os.path.isdir(folder):
                    raise _in_the_way(path, folder) from None
            with suppress(PermissionError):  # one may be allowed to make a folder where one may not read
                _sync(os.path.dirname(folder))


def _in_the_way(path: str, folder: str) -> ConfigError:
    what = f"no store can be made at {path}"
    if os.path.islink(folder):
        return ConfigError(f"{what}: {_why_missing(folder)}", hint="remove the link, or make the folder it points to")
    return ConfigError(f"{what}: {_what_file(folder)}", hint="name another folder")


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _why_missing(path: str) -> str:
    """Which component is not there: the first that is missing, or a link that leads nowhere."""
    at = os.path.abspath(path)
    while True:
        if os.path.islink(at):
            return f"{at} is a symbolic link to {os.readlink(at)}, which does not exist"
        above = os.path.dirname(at)
        if above == at or os.path.exists(above):
            return f"{at} does not exist"
        at = above


def _what_file(path: str) -> str:
    at = os.path.abspath(path)
    while not os.path.lexists(at) and os.path.dirname(at) != at:
        at = os.path.dirname(at)
    return f"{at} is a file, not a folder"
