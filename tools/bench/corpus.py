"""Tokens to measure with: real ids of natural text, and logprobs as a model's sampler leaves them.

Owns: which texts of this machine are taken, how they become ids, and the model of logprobs.
Does not know: what is measured with them.

Invariants:
1. The ids are those of SmolLM2's own tokenizer over texts that people wrote: the language reference, docstrings of the
   standard library, descriptions of installed distributions. The same installation gives the same ids.
2. Everything drawn comes from the generator that is passed in.

The model of logprobs: a token is sampled among CANDIDATES logits, which are rounded to bfloat16 as an engine that runs
in bfloat16 gives them, and its logprob is their log-softmax in float32. How peaked a distribution is varies from token
to token (log-normally); SHARPNESS was chosen so that about a fifth of the logprobs are exactly 0, under half above
-0.01, and their mean is near -0.7, which is what the study behind the store's format assumed of real ones.
"""

from __future__ import annotations

import ast
import hashlib
import json
import pydoc_data.topics
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from prefix_recovery.gguf import Gguf
from prefix_recovery.smollm2 import check_source, find_gguf, tokenizer
from recovery.model import Float32Array, Int32Array

CANDIDATES = 64
SHARPNESS = (2.7, 1.5)
"""Mean and deviation of the logarithm of a token's scale of logits."""

_BLOCK = 1 << 15


@dataclass(frozen=True, slots=True)
class Corpus:
    """All ids one after the other, and where they are from, for the report."""

    token_ids: Int32Array
    n_characters: int
    sha256: str

    def __len__(self) -> int:
        return len(self.token_ids)

    def spans(self, rng: np.random.Generator, n: int, length: int) -> list[Int32Array]:
        """`n` stretches of natural text, from places drawn at random."""
        at = rng.integers(0, len(self.token_ids) - length, n)
        return [self.token_ids[first : first + length] for first in at]


def natural_texts() -> Iterator[str]:
    """Texts in a fixed order, without licences: those say the same again and again."""
    yield from (text for _, text in sorted(pydoc_data.topics.topics.items()))
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes))
        yield "\n\n".join(text for text in found if text)
    distributions = {dist.metadata["Name"].lower(): dist for dist in metadata.distributions()}
    for _, dist in sorted(distributions.items()):
        text = dist.read_text("METADATA") or ""
        yield text.partition("\n\n")[2]


def load_corpus(n_characters: int | None = None) -> Corpus:
    """Tokenize the texts, or about the first `n_characters` of them."""
    from tokenizers import Tokenizer

    source = find_gguf()
    check_source(source)
    encode = Tokenizer.from_str(json.dumps(tokenizer(Gguf(source).metadata)))
    texts, total = [], 0
    for text in natural_texts():
        if n_characters is not None and total >= n_characters:
            break
        texts.append(text)
        total += len(text)
    ids = np.concatenate([np.asarray(one.ids, np.int32) for one in encode.encode_batch(texts)])
    return Corpus(ids, total, hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest())


def model_logprobs(rng: np.random.Generator, n: int) -> Float32Array:
    """`n` logprobs as described above."""
    parts = [_block(rng, min(_BLOCK, n - at)) for at in range(0, n, _BLOCK)]
    return np.concatenate([np.empty(0, np.float32), *parts])


def _block(rng: np.random.Generator, n: int) -> Float32Array:
    scale = np.exp(rng.normal(*SHARPNESS, (n, 1))).astype(np.float32)
    logits = _bfloat16(rng.standard_normal((n, CANDIDATES), np.float32) * scale)
    noise = rng.gumbel(size=(n, CANDIDATES)).astype(np.float32)
    picked = np.argmax(logits + noise, axis=1)  # a draw from the softmax of the logits
    logits -= logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits).sum(axis=1, dtype=np.float32))
    return np.minimum(logits[np.arange(n), picked] - total, np.float32(0))


def _bfloat16(values: Float32Array) -> Float32Array:
    """Rounded to the nearest bfloat16, ties to even, still as float32."""
    bits = values.view(np.uint32)
    rounded: Float32Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return rounded
