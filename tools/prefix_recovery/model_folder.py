"""A Hugging Face model folder: how its files are encoded, and how it appears whole or not at all.

Owns: the safetensors encoding, the byte-level tokenizer.json, the temporary folder and the rename.
Does not know: any model's sizes, names or weights.

Invariants:
1. A folder that carries the mark file RECIPE is whole: it was renamed into place after every byte in it was
   synced.
2. A folder that is there is never written to. Whole and of the same recipe, it is returned; otherwise it is an
   error. (An empty one counts as not there.)
3. A temporary folder is locked by the process that fills it; one whose lock is free has lost its process and
   is removed by the next that makes a folder of the same name.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recovery import notes
from recovery.errors import ConfigError

RECIPE = "recipe.json"
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
"""Name: its name in safetensors, bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One tensor to be written; `load` is called once, when its turn comes: one is in memory at a time."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], npt.NDArray[np.float32]]


def encode(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Little-endian bytes of `values` in `dtype`, rounded to nearest, ties to even. NaN is not expected."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, "<f4").view("<u4")
        nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        return bytes(nearest.astype("<u2"))
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def write_safetensors(path: Path, weights: Sequence[Weight], dtype: str) -> None:
    """Writes `weights` in their order: length of the header, the header (JSON, padded to 8), the data."""
    code, itemsize = DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        begin, end = end, end + int(np.prod(weight.shape)) * itemsize
        header[weight.name] = {"dtype": code, "shape": list(weight.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little"))
        file.write(head)
        for weight in weights:
            values = weight.load()
            if values.shape != weight.shape:
                raise ValueError(f"{weight.name} has shape {values.shape}, {weight.shape} was announced")
            file.write(encode(values, dtype))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    *,
    split_digits: bool = False,
    prepend: str | None = None,
) -> dict[str, Any]:
    """A tokenizer.json: byte-level BPE whose ids are the places in `tokens`.

    `special` are those of `tokens` that are never split and that decoding can skip. `prepend` is one of them
    that encoding a text puts before it.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split: dict[str, Any] = byte_level
    if split_digits:
        digits = {"type": "Digits", "individual_digits": True}
        split = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    processor: dict[str, Any] | None = None
    if prepend is not None:
        first = {"SpecialToken": {"id": prepend, "type_id": 0}}
        text, pair = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        known = {prepend: {"id": prepend, "ids": [ids[prepend]], "tokens": [prepend]}}
        processor = {
            "type": "TemplateProcessing",
            "single": [first, text],
            "pair": [first, text, pair],
            "special_tokens": known,
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": processor,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(pair) for pair in merges],
        },
    }


def existing(target: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether `target` is whole and of this recipe; False if nothing is there (invariant 2).

    Raises:
        ConfigError: something else is there.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    hint = "give another folder, or remove this one"
    try:
        made = notes.object_in((target / RECIPE).read_bytes()) or {}
    except OSError:
        made = {}
    files = made.pop("files", None)
    if not isinstance(files, dict):
        raise ConfigError(f"{target} exists and is not a folder made by this command", hint=hint)
    lost = [n for n, size in files.items() if not (target / n).is_file() or (target / n).stat().st_size != size]
    if lost:
        raise ConfigError(f"{target} was whole once; {', '.join(lost)} is gone or was changed", hint=hint)
    if made != dict(recipe):
        differs = sorted(key for key in {*made, *recipe} if made.get(key) != recipe.get(key))
        was, now = ({key: of.get(key) for key in differs} for of in (made, recipe))
        raise ConfigError(f"{target} was made with {was}, now {now} is asked for", hint=hint)
    return True


def make_folder(target: Path, recipe: Mapping[str, Any], fill: Callable[[Path], None]) -> Path:
    """Fills a temporary folder beside `target`, syncs it, and renames it into place; what is there stays.

    Raises:
        ConfigError: something else is at `target`, or it cannot be written there.
    """
    if existing(target, recipe):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _temporary_beside(target.absolute()) as folder:
            fill(folder)
            sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
            write_json(folder / RECIPE, {**recipe, "files": sizes})
            for path in [*folder.iterdir(), folder]:
                sync(path)
            _rename(folder, target, recipe)
            sync(target.absolute().parent)
    except OSError as error:
        hint = "give a folder where you may write and where there is room"
        raise ConfigError(f"cannot make {target}: {error.strerror or error}", hint=hint) from error
    return target


def _rename(folder: Path, target: Path, recipe: Mapping[str, Any]) -> None:
    """Puts `folder` at `target`, unless another process has put the same one there meanwhile."""
    try:
        os.rename(folder, target)  # over an empty folder too, never over a filled one
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        if not (taken and existing(target, recipe)):
            raise


@contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    prefix, suffix = f".{target.name}.", ".tmp"
    for stale in target.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        with _locked(stale) as ours:
            if ours:
                shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=target.parent))
    folder.chmod(0o755)
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder; gives whether it was free."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on the disk when it returns."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
