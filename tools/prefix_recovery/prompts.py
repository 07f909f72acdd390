"""The prompts file: JSON lines in, samples to run out, malformed lines named and kept apart.

Owns: what a prompt line may contain, how it becomes a sample's text or ids and sampling fields, and what identifies it.
Does not know: the engine, the tokenizer, results.

Invariants:
1. A malformed line costs that line, never the file; its error names file and line (unless `strict`: the first stops).
2. Ids are unique in a file. A sample is (id, sample_index); its name, used as request id, is unique and reversible.
3. The order of the lines has no influence on which result belongs to which prompt.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recovery.errors import ConfigError, InputError

_KINDS = ("prompt", "messages", "prompt_token_ids")
_KNOWN = frozenset({"id", "sampling", *_KINDS})
MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line. `kind` is prompt (text), messages (chat) or prompt_token_ids; `value` what it holds."""

    id: str
    line: int
    kind: str
    value: Any
    sampling: Mapping[str, Any]
    digest: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One result to be made."""

    prompt: Prompt
    index: int

    @property
    def name(self) -> str:
        """The request id: `<id>#<sample_index>`."""
        return f"{self.prompt.id}#{self.index}"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line, or a request, that has no result; `id` is empty if the line has none."""

    line: int
    id: str
    error: str


def source_digest(prompt: Prompt, sampling: Mapping[str, Any]) -> str:
    """Identifies a prompt line together with the job's own sampling: 32 hexadecimal letters."""
    job = json.dumps(dict(sampling), sort_keys=True, default=str).encode()
    return hashlib.sha256(prompt.digest.encode() + job).hexdigest()[:32]


@dataclass(slots=True)
class PromptFile:
    """What was read: usable prompts in file order, and the others."""

    path: Path
    prompts: list[Prompt] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)

    def samples(self, per_prompt: int) -> Iterator[Sample]:
        for prompt in self.prompts:
            for index in range(per_prompt):
                yield Sample(prompt, index)


def read_prompts(path: str | Path, *, strict: bool = False) -> PromptFile:
    """Read a JSONL file of prompts.

    Raises:
        ConfigError: there is no such file, it cannot be read, or all its lines are blank.
        InputError: with `strict`, for the first malformed line.
    """
    file = PromptFile(Path(path))
    seen: dict[str, int] = {}
    if os.path.exists(file.path) and not os.path.isfile(file.path):  # Path raises for names that are too long
        raise ConfigError(f"the prompts file {file.path} is not a file", hint="check `prompts` in the config")
    try:
        stream = file.path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"cannot read the prompts file {file.path}: {error.strerror}", hint="check `prompts` in the config"
        ) from error
    with stream:
        for number, raw in enumerate(stream, 1):
            if not raw.removeprefix(codecs.BOM_UTF8).strip():
                continue
            try:
                prompt = _parse(raw, number)
                if prompt.id in seen:
                    raise ValueError(f"the id {prompt.id!r} was used in line {seen[prompt.id]} already")
                seen[prompt.id] = number
                file.prompts.append(prompt)
            except ValueError as error:
                bad = BadLine(number, _id_of(raw), str(error))
                if strict:
                    raise InputError(f"{file.path} line {number}: {error}", hint="mend the line, run again") from error
                file.bad.append(bad)
    if not file.prompts and not file.bad:
        raise ConfigError(
            f"the prompts file {file.path} is empty", hint='one JSON object a line: {"id": "a", "prompt": "…"}'
        )
    return file


def _parse(raw: bytes, number: int) -> Prompt:
    if len(raw) > MAX_LINE_BYTES:
        raise ValueError(f"the line has {len(raw)} bytes; at most {MAX_LINE_BYTES} are allowed")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        row = json.loads(text)
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    except json.JSONDecodeError as error:  # its own words count lines within the line
        raise ValueError(f"the line is not JSON: {error.msg.lower()} at character {error.pos + 1}") from error
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError("the line is not a JSON object")
    unknown = sorted(set(row) - _KNOWN)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_KNOWN))}")
    kinds = [kind for kind in _KINDS if row.get(kind) is not None]
    if len(kinds) != 1:
        found = "none" if not kinds else " and ".join(kinds)
        raise ValueError(f"exactly one of {', '.join(_KINDS)} is needed, found {found}")
    value = row[kinds[0]]
    _check_value(kinds[0], value)
    sampling = row.get("sampling") or {}
    if not isinstance(sampling, dict):
        raise ValueError("`sampling` is not an object of sampling fields")
    _encodable(json.dumps(sampling, ensure_ascii=False))
    if sampling.get("n", 1) != 1:
        raise ValueError("`sampling.n` is not how samples are counted; use samples_per_prompt in the config")
    name = _name(row)
    content = json.dumps([kinds[0], value, sampling], sort_keys=True, ensure_ascii=True).encode()
    return Prompt(name, number, kinds[0], value, sampling, hashlib.sha256(content).hexdigest()[:32])


def _name(row: Mapping[str, Any]) -> str:
    name = row.get("id")
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError("`id` is missing; every line needs one of its own (a string or an integer)")
    try:
        str(name).encode()
    except UnicodeEncodeError as error:
        raise ValueError("`id` holds half of a surrogate pair, which is not text") from error
    return str(name)


def _check_value(kind: str, value: Any) -> None:
    if kind == "prompt_token_ids":
        if not isinstance(value, list) or not value:
            raise ValueError("`prompt_token_ids` is not a list of token ids")
        if any(isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < 1 << 31 for t in value):
            raise ValueError("`prompt_token_ids` holds something that is not a token id")
    elif kind == "prompt":
        if not isinstance(value, str):
            raise ValueError("`prompt` is not a text")
        if not value:
            raise ValueError("`prompt` is empty")
        _encodable(value)
    elif not isinstance(value, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        raise ValueError("`messages` is not a list of objects with a role")
    else:
        _encodable(json.dumps(value, ensure_ascii=False))


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("the text holds half of a surrogate pair, which no tokenizer takes") from error


def _id_of(raw: bytes) -> str:
    """The id of a malformed line, as far as it can be told."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return ""
    name = row.get("id") if isinstance(row, dict) else None
    return str(name) if isinstance(name, str | int) and not isinstance(name, bool) else ""
