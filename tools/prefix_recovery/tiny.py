"""A tiny random Llama with a tokenizer of its own, for tests that need a shape and not a language.

Owns: its sizes, its weights (a function of the seed), its 512 tokens and its chat template.
Does not know: how a folder becomes whole (model_folder.py), which tests use it.

Invariants:
1. It is hard: untied, several layers, a wide initializer, so that every position matters and greedy decoding
   wanders. (With the usual initializer and tied embeddings it repeats one token for ever, and every resume test
   passes.)
2. The same arguments give the same bytes, with every version of numpy (RandomState's stream is frozen).
3. Every byte has a token, so that any text can be encoded, and any ids decode to bytes. "hello" is also spelled
   by the ids of "hel" and "lo": encoding what was decoded may give other ids.
4. Encoding a text puts <bos> before it, and so does the chat template.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefix_recovery.model_folder import (
    DTYPES,
    Weight,
    byte_level_bpe,
    make_folder,
    write_json,
    write_safetensors,
)
from recovery.errors import ConfigError

RECIPE_VERSION = 1
SPECIAL = ("<bos>", "<eos>", "<pad>")
BOS_ID, EOS_ID, PAD_ID = range(3)
HEAD_DIM = 32
"""Attention on a CPU needs a multiple of 32."""

_FIRST_MERGES = (("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo"))
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def make_tiny_llama(
    target: Path,
    *,
    seed: int = 0,
    vocab: int = 512,
    layers: int = 4,
    heads: int = 2,
    intermediate: int = 128,
    max_position: int = 4096,
    initializer_range: float = 0.2,
    dtype: str = "float32",
) -> Path:
    """Makes the folder `target` if it is not there, and returns it. The width is `heads` times 32.

    Raises:
        ConfigError: unknown dtype; a vocabulary that cannot be filled; something else is at `target`.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known", hint=f"use one of {', '.join(DTYPES)}")
    sizes = {"vocab": vocab, "layers": layers, "heads": heads, "intermediate": intermediate}
    recipe = {
        "model": "tiny-llama",
        "recipe": RECIPE_VERSION,
        "seed": seed,
        **sizes,
        "max_position": max_position,
        "initializer_range": initializer_range,
        "dtype": dtype,
    }
    tokens, merges = tokens_and_merges(vocab)
    width = heads * HEAD_DIM

    def fill(folder: Path) -> None:
        ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
        write_json(folder / "config.json", _config(recipe, width) | ids)
        write_json(folder / "generation_config.json", ids)
        tokenizer = byte_level_bpe(tokens, merges, SPECIAL, prepend=SPECIAL[BOS_ID])
        write_json(folder / "tokenizer.json", tokenizer)
        write_json(folder / "tokenizer_config.json", _tokenizer_config(max_position))
        shapes = _shapes(vocab=vocab, layers=layers, intermediate=intermediate, width=width)
        random = np.random.RandomState(seed)
        weights = [
            Weight(name=name, shape=shape, load=partial(_draw, random, shape, initializer_range))
            for name, shape in shapes.items()
        ]
        write_safetensors(folder / "model.safetensors", weights, dtype)

    return make_folder(target, recipe, fill)


def byte_tokens() -> list[str]:
    """The letter that stands for each of the 256 bytes in a byte-level BPE; printable ones are themselves."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokens_and_merges(vocab: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`vocab` tokens: the special ones, one for each byte, and as many merges as there is room for."""
    singles = [*SPECIAL, *byte_tokens()]
    room = vocab - len(singles)
    merges = list(islice(_merges(), max(room, 0)))
    if room < len(_FIRST_MERGES) or len(merges) < room:
        least, most = len(singles) + len(_FIRST_MERGES), len(singles) + sum(1 for _ in _merges())
        raise ConfigError(f"a vocabulary of {vocab} cannot be made", hint=f"use {least} to {most}")
    return [*singles, *(left + right for left, right in merges)], merges


def _merges() -> Iterator[tuple[str, str]]:
    yield from _FIRST_MERGES
    space = byte_tokens()[ord(" ")]
    pairs = [(space, letter) for letter in _LETTERS]
    pairs += [(left, right) for left in _LETTERS for right in _LETTERS]
    yield from (pair for pair in pairs if pair not in _FIRST_MERGES)


def _draw(random: np.random.RandomState, shape: tuple[int, ...], scale: float) -> npt.NDArray[np.float32]:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return (random.standard_normal(shape) * scale).astype(np.float32)


def _shapes(*, vocab: int, layers: int, intermediate: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}.mlp.{name}_proj.weight": (intermediate, width) for name in ("gate", "up")}
        shapes[f"{prefix}.mlp.down_proj.weight"] = (width, intermediate)
        shapes |= {f"{prefix}.{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (width,), "lm_head.weight": (vocab, width)}


def _config(recipe: dict[str, Any], width: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": recipe["initializer_range"],
        "intermediate_size": recipe["intermediate"],
        "max_position_embeddings": recipe["max_position"],
        "mlp_bias": False,
        "num_attention_heads": recipe["heads"],
        "num_hidden_layers": recipe["layers"],
        "num_key_value_heads": recipe["heads"],
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": recipe["dtype"],
        "use_cache": True,
        "vocab_size": recipe["vocab"],
    }


def _tokenizer_config(max_position: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "bos_token": SPECIAL[BOS_ID],
        "eos_token": SPECIAL[EOS_ID],
        "pad_token": SPECIAL[PAD_ID],
        "chat_template": _TEMPLATE,
    }
