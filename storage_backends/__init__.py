"""Where bytes lie: `open_store(url)`, the one switch between storage systems.

Owns: how a store's address is read, and what is said when there is no store at it.
Does not know: what is kept in a store, how an object is encoded (arrow_segments.py, arrow_ledger.py).

Invariants:
1. Nothing else in the project looks at a store's address to choose code by it.
2. A plain path is taken literally (but for a leading `~/`); only a `file://` address is percent-decoded.
3. An address is never half understood: what is not supported is refused by name.
4. Importing this package loads no storage system and no Arrow.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from recovery.errors import ConfigError

if TYPE_CHECKING:
    from recovery.ports import ObjectStore

__all__ = ["open_store"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_LOST_SLASH = re.compile(r"(file|memory|s3|s3a|gs|gcs|az|abfs|abfss|hdfs|http|https):", re.IGNORECASE)
_SUPPORTED = "stores lie in a folder (a path, or file:///a/path), in a bucket (s3://bucket/prefix), or in memory://name"
_FIRST_IMPORT = "make a store of it first: snapshot-inspect import FILE STORE"


def open_store(url: str | os.PathLike[str], *, create: bool = False, **options: Any) -> ObjectStore:
    """The store at `url`: a path or `file://` on this machine, `s3://bucket/prefix`, `memory://name` in this process.

    A portable file (archive.py) at a path is a store that can only be read. With `create` a missing local folder is
    made, and what crashed writers left unfinished is swept; a bucket, which is never made, is tried for atomic create.
    Without `create` a folder that is not there is NoStore, and nothing is sent to a bucket before the first verb.
    `options` are those of a store on S3 (s3_options.S3Options, docs/s3.md).
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise ConfigError(f"{text!r} is no address of a store", hint=_SUPPORTED)
    match = _SCHEME.match(text)
    if match is None:
        if isinstance(url, str) and (lost := _LOST_SLASH.match(text)):
            hint = f"write {lost[1]}://… for an address, or ./{text} for a folder of that name; {_SUPPORTED}"
            raise ConfigError(f"{text!r} is neither an address nor clearly a path", hint=hint)
        _refuse_options(text, options)
        return _local(os.path.expanduser(text) if text == "~" or text.startswith("~/") else text, create)
    scheme, rest = match[1].lower(), match[2]
    if scheme == "s3":
        return _s3(text, create, options)
    _refuse_options(text, options)
    if scheme == "file":
        return _local(_path_of(text, rest), create)
    if scheme == "memory":
        return _memory(text, rest)
    raise ConfigError(f"{text}: stores on {scheme}:// are not supported", hint=_SUPPORTED)


def _refuse_options(url: str, options: dict[str, Any]) -> None:
    if options:
        raise ConfigError(
            f"{url}: there is no option {next(iter(options))!r}", hint="only stores on s3:// have options"
        )


def _path_of(url: str, rest: str) -> str:
    """The path of a `file://` address, as `pathlib.Path.as_uri` writes it."""
    from urllib.parse import unquote

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{url}: {host!r} is read as a machine's name", hint="write file:///absolute/path")
    return os.fsdecode(unquote("/" + path, errors="surrogateescape").encode("utf-8", "surrogateescape"))


def _local(path: str, create: bool) -> ObjectStore:
    from storage_backends.archive import ArchiveStore, is_archive
    from storage_backends.roots import open_local

    if not is_archive(path):
        return open_local(path, create=create)
    if create:
        raise ConfigError(f"{path} is a portable file, not a store that can be written", hint=_FIRST_IMPORT)
    return ArchiveStore(path)


def _s3(url: str, create: bool, options: dict[str, Any]) -> ObjectStore:
    try:
        from storage_backends.s3 import open_s3
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{url}: a store on S3 needs {error.name}, which is not installed",
            hint="pip install 'prefix-recovery[s3]'",
        ) from error
    return open_s3(url, create=create, **options)


def _memory(url: str, name: str) -> ObjectStore:
    from storage_backends.memory import named

    if not name:
        raise ConfigError(f"{url}: a store in memory needs a name", hint="write memory://name")
    return named(name)
